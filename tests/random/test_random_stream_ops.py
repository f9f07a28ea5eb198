"""Draws as operations of torch: in modes, transforms, graphs and native kernels."""

import shutil

import pytest
import torch
from support.draws import FLOATS, LAST, MANY, ONE, RAW_DRAWS, raw
from support.tables import rows
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat.random import _ops, _philox
from remat.testing import assert_same, count_ops


HAS_COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
GRID = MANY.view(2, 3, 2)
BATCHES = {"one": ONE, "batch": MANY.view(3, 2, 2)}
every_draw = rows("draw", RAW_DRAWS)

# By the name of the operation: what calls it, and with what besides keys.
OPERATIONS = {
    "split": (_ops.split, (3,)),
    "fold_in": (_ops.fold_in, (7,)),
    "bits": (_ops.bits, (5, 16)),
    "uniform": (_ops.uniform, (5, torch.bfloat16)),
    "normal": (_ops.normal, (5, torch.float64)),
}


@rows("data", BATCHES)
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.filterwarnings("default")
def test_the_operations_keep_what_torch_asks_of_them(data, name):
    op = getattr(torch.ops.remat, name).default
    results = torch.library.opcheck(op, (data, *OPERATIONS[name][1]))
    assert set(results.values()) == {"SUCCESS"}


@every_draw
def test_dispatched_draws_are_those_that_are_not(draw):
    want = draw(MANY, 9)
    with count_ops() as ops:
        assert torch.equal(draw(MANY, 9), want)
    assert [name for name in ops if name.startswith("remat::")]
    assert ops["mul"] == ops["bitwise_and_"] == 0


# --- Traces -----------------------------------------------------------------------


def operations_in(graph):
    nodes = [n for n in graph.graph.nodes if n.op == "call_function"]
    return [getattr(n.target, "overloadpacket", n.target) for n in nodes]


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_trace_holds_one_operation_for_each_draw(name):
    call, args = OPERATIONS[name]
    draw = lambda k: call(k, *args)
    graph = make_fx(draw)(ONE)
    ours = [op for op in operations_in(graph) if str(op).startswith("remat.")]
    assert ours == [getattr(torch.ops.remat, name)]
    assert torch.equal(graph(raw(7, 0)), draw(raw(7, 0)))


def test_a_trace_of_numbers_that_are_folded_in_splits_once():
    draw = lambda k, n: _ops.fold_in(k, n)
    numbers = torch.tensor([7, -2])
    graph = make_fx(draw)(ONE, numbers)
    ours = [op for op in operations_in(graph) if str(op).startswith("remat.")]
    assert ours == [torch.ops.remat.split]
    assert torch.equal(graph(raw(7, 0), numbers + 1), draw(raw(7, 0), numbers + 1))


def test_a_trace_of_a_batch_holds_one_draw():
    draw = vmap(vmap(lambda k: _ops.uniform(k, 4, torch.float32)))
    graph = make_fx(draw)(GRID)
    called = operations_in(graph)
    assert called.count(torch.ops.remat.uniform) == 1
    assert len(called) <= 3
    other = _ops.split(ONE, 6).view(2, 3, 2)
    assert torch.equal(graph(other), draw(other))


@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(not HAS_COMPILER, reason="inductor compiles C++")
def test_compiled_draws_are_those_of_eager():
    def draw(k):
        first, second = _ops.split(k, 2).unbind(0)
        second = _ops.fold_in(second, 3)
        u = _ops.uniform(first, 20, torch.float32)
        return u, _ops.normal(second, 20, torch.float64), _ops.bits(k, 5, 64)

    torch._dynamo.reset()
    compiled = torch.compile(draw, fullgraph=True)
    for k in (ONE, raw(43, 0)):
        assert_same(compiled(k), draw(k))
    batched = torch.compile(vmap(draw), fullgraph=True)
    assert_same(batched(MANY), vmap(draw)(MANY))


# --- vmap and derivatives ---------------------------------------------------------


def test_vmap_folds_in_keys_values_or_both():
    fold_in, values = _ops.fold_in, torch.arange(6)
    pairs = torch.stack([fold_in(k, i) for i, k in enumerate(MANY)])
    table = fold_in(MANY[:, None], values)
    assert torch.equal(vmap(fold_in)(MANY, values), pairs)
    assert torch.equal(vmap(fold_in, (0, None))(MANY, values), table)
    assert torch.equal(vmap(fold_in, (None, 0))(MANY, values), table.transpose(0, 1))
    assert torch.equal(vmap(fold_in)(MANY, values.expand(6, 6)), table)
    halves = torch.stack([fold_in(MANY[:3], 0), fold_in(MANY[3:], 1)])
    assert torch.equal(vmap(fold_in)(GRID, values[:2]), halves)
    assert torch.equal(vmap(lambda k: fold_in(k, 2))(MANY), fold_in(MANY, 2))


# --- Modes and settings -----------------------------------------------------------


def test_shapes_and_dtypes_are_known_without_data():
    k, values = MANY.to("meta"), torch.zeros(4, dtype=int, device="meta")
    assert _ops.split(k, 3).shape == (3, 6, 2)
    assert _ops.fold_in(k, 3).shape == (6, 2)
    assert _ops.fold_in(k[:, None], values).shape == (6, 4, 2)
    assert _ops.bits(k, 5, 8).dtype == torch.int64
    for dtype in FLOATS:
        for draw in (_ops.uniform, _ops.normal):
            out = draw(k, 5, dtype)
            assert (out.shape, out.dtype, out.device.type) == ((6, 5), dtype, "meta")


def noting(names):
    def hook(self, func, types, args=(), kwargs=None):
        names.append(str(func))
        return func(*args, **(kwargs or {}))

    return {"__torch_function__": hook, "__torch_dispatch__": hook}


@pytest.mark.parametrize("mode", [TorchFunctionMode, TorchDispatchMode])
def test_a_mode_sees_one_operation(mode):
    names = []
    want = _ops.uniform(ONE, 3_000, torch.float32)
    with type("Noting", (mode,), noting(names))():
        got = _ops.uniform(ONE, 3_000, torch.float32)
    assert torch.equal(got, want)
    (name,) = names
    assert name.startswith("remat.uniform")


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_does_not_move_a_draw(device):
    want = _ops.normal(ONE, 3_000, torch.float32)
    with torch.device(device):
        assert torch.equal(_ops.normal(ONE, 3_000, torch.float32), want)
        assert _ops.split(ONE, 2).device.type == "cpu"


@every_draw
def test_autocast_and_inference_mode_do_not_change_a_draw(draw):
    for n in (9, 3_000):
        want = draw(MANY, n)
        with torch.autocast("cpu"), torch.inference_mode():
            assert torch.equal(draw(MANY, n), want)


# --- torch's kernels draw the stream where they agree with ours, and only there ---


class Agreeing:
    """As `torch.func._random`, with kernels that count their calls."""

    def __init__(self):
        self.calls = []

    def split(self, k, num):
        self.calls.append("split")
        return _philox.split(k.reshape(-1, 2), num).view(num, *k.shape)

    def uniform_(self, k, out):
        self.calls.append("uniform_")
        self._fill(k, out, _philox.UNIFORM)

    def normal_(self, k, out):
        self.calls.append("normal_")
        self._fill(k, out, _philox.NORMAL)

    @staticmethod
    def _fill(k, out, readings):
        # What torch's kernels ask of a batch of keys.
        assert k.ndim == 1 or k.ndim == out.ndim + 1
        assert k.is_contiguous()
        assert out.numel()
        reading = readings[out.dtype]
        rows = k.reshape(-1, 2)
        out.copy_(_philox.draw(rows, out.shape[-1], out.dtype, reading).view(out.shape))


@pytest.fixture
def native(monkeypatch):
    """Put a module in the place of `torch.func._random`, as if it had CPU kernels."""

    def put(module):
        monkeypatch.setattr(_ops, "native_random", lambda _device: module)
        _ops._native.cache_clear()
        return module

    yield put
    _ops._native.cache_clear()


def everything():
    return [
        _ops.split(MANY.view(2, 3, 2), 4),
        _ops.split(ONE, 2),
        _ops.fold_in(MANY, LAST),
        _ops.fold_in(MANY, torch.arange(6)),
        *[_ops.uniform(MANY.view(2, 3, 2), 5, d) for d in FLOATS],
        *[_ops.uniform(ONE, 700, d) for d in FLOATS],
        _ops.normal(MANY, 5, torch.float32),
        vmap(lambda k: _ops.uniform(k, 3, torch.float32))(MANY),
    ]


def test_kernels_of_torch_are_used_where_they_agree(native):
    want = everything()
    fake = native(Agreeing())
    _ops.split(ONE, 1)
    tested = len(fake.calls)
    assert_same(everything(), want)
    later = fake.calls[tested:]
    assert later.count("split") == 3
    assert later.count("uniform_") == 9
    assert "normal_" not in later  # on the CPU it is ours
    assert _ops._native.cache_info().misses == 1


def test_kernels_of_torch_are_given_what_they_take(native):
    apart = MANY[::2]
    u = _ops.uniform(MANY, 2, torch.float32)
    fake = native(Agreeing())
    assert torch.equal(_ops.split(apart, 3)[0], _ops.fold_in(apart, 0))
    assert torch.equal(_ops.uniform(apart, 2, torch.float32), u[::2])
    assert _ops.uniform(MANY, 0, torch.float32).shape == (6, 0)
    assert _ops.split(MANY, 0).shape == (0, 6, 2)
    assert {"split", "uniform_"} <= {*fake.calls}
    assert _ops._native.cache_info().misses == 1


class Shifted(Agreeing):
    def split(self, k, num):
        return super().split(k, num + 1)[1:]


class Raises(Agreeing):
    def uniform_(self, k, out):
        raise RuntimeError("not implemented")


class Changed(Agreeing):
    def uniform_(self, k, out, low):
        """Take an argument more than it did."""


class Rounded(Agreeing):
    def uniform_(self, k, out):
        super().uniform_(k, out)
        out.mul_(1 - 2.0**-20)


class Gaussian(Agreeing):
    def normal_(self, k, out):
        super().normal_(k, out)
        out.mul_(2)


@pytest.mark.parametrize(
    "module", [Shifted(), Raises(), Changed(), Rounded(), Gaussian(), None, object()]
)
def test_kernels_of_torch_that_disagree_are_not_used(native, module):
    want = everything()
    native(module)
    assert_same(everything(), want)
    assert _ops._native(torch.device("cpu")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", RAW_DRAWS)
def test_a_gpu_draws_the_same_numbers(name):
    draw = RAW_DRAWS[name]
    got, want = draw(MANY.cuda(), 3_000).cpu(), draw(MANY, 3_000)
    if "normal" in name:
        torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    else:
        assert torch.equal(got, want)
