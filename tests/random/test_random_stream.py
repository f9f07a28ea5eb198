"""The stream of a key is torch's, bit for bit, however it is asked for."""

import functools
import shutil

import pytest
import torch
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat.random import _ops, _philox
from remat.testing import count_ops, peak_bytes


FLOATS = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
WIDTHS = [8, 16, 32, 64]
LAST = 2**64 - 1
HAS_COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
NO_COMPILER = pytest.mark.skipif(not HAS_COMPILER, reason="inductor compiles C++")
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=NO_COMPILER)]


def keys(*rows):
    return torch.tensor(rows, dtype=torch.uint64)


def key(seed=42, offset=0):
    return keys(seed, offset)


MANY = keys([42, 0], [0, 0], [LAST, LAST], [7, 2**32 - 2], [2**63, 2**63], [1, LAST])

# Every draw, as a function of keys and a number of values.
DRAWS = {
    **{f"uniform {d}": functools.partial(_ops.uniform, dtype=d) for d in FLOATS},
    **{f"normal {d}": functools.partial(_ops.normal, dtype=d) for d in FLOATS},
    **{f"bits {w}": functools.partial(_ops.bits, width=w) for w in WIDTHS},
    "split": lambda k, n: _ops.split(k, n).movedim(0, -2).flatten(-2),
}
each_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


@pytest.fixture(params=["integers", "tensors", "small chunks"])
def way(request, monkeypatch):
    """The three ways to the same blocks."""
    few, chunk = {
        "integers": (10**9, _philox.CHUNK),
        "tensors": (0, _philox.CHUNK),
        "small chunks": (0, (7, 13)),
    }[request.param]
    monkeypatch.setattr(_philox, "FEW", few)
    monkeypatch.setattr(_philox, "CHUNK", chunk)


# --- Known answers ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "cipher_key", "want"),
    [
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            "243f6a88 85a308d3 13198a2e 03707344",
            "a4093822 299f31d0",
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_the_cipher_gives_the_answers_published_with_random123(
    counter, cipher_key, want
):
    words = [[int(w, 16) for w in text.split()] for text in (counter, cipher_key, want)]
    assert list(_philox.philox(*words[:2])) == words[2]


def test_the_cipher_takes_a_word_in_every_128_bits():
    counters = [(1, 2, 3, 4), (LAST >> 32, 0, LAST >> 32, 9)]
    packed = [a | b << 128 for a, b in zip(*counters, strict=True)]
    lanes = 1 | 1 << 128
    got = _philox.philox(packed, (5 * lanes, 6 * lanes), lanes)
    first, second = (_philox.philox(c, (5, 6)) for c in counters)
    assert got == tuple(a | b << 128 for a, b in zip(first, second, strict=True))


@pytest.mark.usefixtures("way")
def test_keys_are_those_of_torch():
    assert _ops.split(key(), 3).tolist() == [
        [8643895580192075859, 6287785766076502189],
        [6033254488940945703, 8380643633896839790],
        [12143778050234647077, 14270118698559565209],
    ]
    assert _ops.fold_in(key(), 7).tolist() == [7527850912803292081, 3344896577480189866]


@pytest.mark.usefixtures("way")
def test_words_are_those_of_torch():
    want = "9ceaf053 77f5493b 12bf50ad 5742b3d7 fcdb2127 53ba6cfd 838f5a6e 744e06fb"
    words = [int(w, 16) for w in want.split()]
    assert _ops.bits(key(), 8, 32).tolist() == words
    assert _ops.bits(key(), 8, 16).tolist() == [w & 0xFFFF for w in words]
    assert _ops.bits(key(), 8, 8).tolist() == [w & 0xFF for w in words]
    pairs = [a << 32 | b for a, b in zip(words[::2], words[1::2], strict=True)]
    assert [w % 2**64 for w in _ops.bits(key(), 4, 64).tolist()] == pairs


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (
            torch.float32,
            "0.9177295565604164 0.9581486582756042 0.7473247647285461",
        ),
        (torch.float16, "0.04052734375 0.15380859375 0.08447265625 0.47998046875"),
        (torch.bfloat16, "0.32421875 0.23046875 0.67578125 0.83984375"),
        (
            torch.float64,
            "0.34183667592359457 0.9785982803638217 0.8477970729176431",
        ),
    ],
)
def test_uniform_numbers_are_those_of_torch(dtype, want):
    numbers = torch.tensor([float(x) for x in want.split()], dtype=torch.float64)
    got = _ops.uniform(key(), len(numbers), dtype)
    assert got.dtype == dtype
    assert torch.equal(got, numbers.to(dtype))


@pytest.mark.usefixtures("way")
def test_normal_numbers_are_those_of_torch_to_rounding():
    want = torch.tensor([-0.9701898694, 0.1940188855, -1.2356212139, 1.9239265919])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        torch.testing.assert_close(_ops.normal(key(), 4, dtype), want.to(dtype))
    exact = [
        *(0.886497505901441, 0.4393560694379269),
        *(-0.15660962291201724, -0.013718678830210487),
    ]
    got = _ops.normal(key(), 4, torch.float64)
    torch.testing.assert_close(got, torch.tensor(exact, dtype=torch.float64))


# --- One stream -------------------------------------------------------------------


@pytest.mark.usefixtures("way")
@each_draw
def test_fewer_numbers_are_the_first_of_more(draw):
    more = draw(key(3, 2**32 - 5), 300)
    for n in range(1, 301):
        got = draw(key(3, 2**32 - 5), n)
        assert torch.equal(got, more[: got.numel()]), n


@each_draw
def test_chunks_and_the_change_from_integers_leave_no_seam(draw):
    more = draw(key(9), 4 * 140_000)
    few, (low, high) = 4 * _philox.FEW, _philox.CHUNK
    for edge in (few // 4, few // 2, few, 2 * low, 4 * low, 4 * high):
        for n in (edge - 1, edge, edge + 1):
            got = draw(key(9), n)
            assert torch.equal(got, more[: got.numel()]), n


@each_draw
def test_numbers_do_not_depend_on_the_threads(draw):
    one = draw(key(5), 200_001)
    try:
        for threads in (2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(draw(key(5), 200_001), one)
    finally:
        torch.set_num_threads(1)


@pytest.mark.usefixtures("way")
@each_draw
@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 33])
def test_a_batch_of_keys_draws_what_each_key_draws(draw, n):
    each = torch.stack([draw(k, n) for k in MANY])
    assert torch.equal(draw(MANY, n), each)
    assert torch.equal(draw(MANY.view(2, 3, 2), n), each.view(2, 3, -1))
    assert torch.equal(vmap(lambda k: draw(k, n), randomness="error")(MANY), each)


@pytest.mark.usefixtures("way")
def test_more_keys_than_fit_a_chunk_draw_what_each_draws():
    many = _ops.split(key(), 41)
    for n in (1, 2, 5, 50):
        each = torch.stack([_ops.normal(k, n, torch.float32) for k in many])
        assert torch.equal(_ops.normal(many, n, torch.float32), each)


@pytest.mark.usefixtures("way")
def test_offsets_wrap_around():
    for seed in (0, 1, 2**32, 2**63, LAST):
        whole = _ops.bits(key(seed, LAST - 1), 16, 32)
        assert torch.equal(whole[4:], _ops.bits(key(seed, LAST), 12, 32))
        assert torch.equal(whole[8:], _ops.bits(key(seed, 0), 8, 32))
        low = _ops.bits(key(seed, 2**32 - 1), 8, 32)
        assert torch.equal(low[4:], _ops.bits(key(seed, 2**32), 4, 32))


@pytest.mark.usefixtures("way")
def test_a_draw_of_nothing_is_empty():
    none = MANY[:0]
    assert _ops.uniform(key(), 0, torch.float32).shape == (0,)
    assert _ops.normal(none, 3, torch.float64).shape == (0, 3)
    assert _ops.split(none, 2).shape == (2, 0, 2)
    assert _ops.split(key(), 0).shape == (0, 2)
    assert _ops.fold_in(none, 5).shape == (0, 2)


def test_keys_may_be_views():
    apart = torch.zeros(6, 2, 2, dtype=torch.uint64)
    apart[:, :, 1] = MANY
    view, row = apart[:, :, 1], MANY[2].expand(3, 2)
    for few in (view, row):
        assert not few.is_contiguous()
        same = few.contiguous()
        assert torch.equal(_ops.bits(few, 9, 32), _ops.bits(same, 9, 32))
        assert torch.equal(_ops.split(few, 3), _ops.split(same, 3))
        assert torch.equal(_ops.fold_in(few, 3), _ops.fold_in(same, 3))


def test_a_draw_does_not_change_its_key():
    k = MANY.clone()
    for draw in DRAWS.values():
        draw(k, 2_000)
    assert torch.equal(k, MANY)


# --- Ranges -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_numbers_are_low_bits_and_never_one(dtype):
    precision = {torch.float64: 53, torch.float32: 24, torch.float16: 11}.get(dtype, 8)
    u = _ops.uniform(key(), 200_000, dtype)
    words = _ops.bits(key(), 200_000, 64 if precision == 53 else 32)
    multiple = u.double() * 2.0**precision
    assert torch.equal(multiple.long(), words & (1 << precision) - 1)
    assert u.min() >= 0
    assert u.max() < 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_number_of_a_short_dtype_is_not_rounded_to_one(dtype):
    u = _ops.uniform(key(), 200_000, dtype)
    precision = 11 if dtype == torch.float16 else 8
    assert u.max() == 1 - 2.0**-precision
    assert u.min() == 0


@pytest.mark.parametrize("word", [0, -1])
def test_normal_numbers_are_finite_for_any_block(word):
    words = torch.full((64,), word)
    for dtype in FLOATS:
        reading = _philox.NORMAL[dtype]
        assert reading.read(words.clone()).isfinite().all()


def test_draws_look_like_their_distributions():
    n = 400_000
    for dtype in (torch.float32, torch.float64):
        u, z = _ops.uniform(key(1), n, dtype), _ops.normal(key(2), n, dtype)
        assert abs(u.mean() - 0.5) < 5 * (1 / 12 / n) ** 0.5
        assert abs(z.mean()) < 5 * (1 / n) ** 0.5
        assert abs(z.var() - 1) < 5 * (2 / n) ** 0.5
        steps = torch.arange(1, n + 1) / n
        cdf = 0.5 * (1 + torch.erf(z.sort().values / 2**0.5))
        # 1.95 / sqrt(n) is the distance of Kolmogorov and Smirnov at one in a thousand.
        assert (u.sort().values - steps).abs().max() < 1.95 / n**0.5
        assert (cdf - steps).abs().max() < 1.95 / n**0.5
        assert abs((z[::2] * z[1::2]).mean()) < 5 * (2 / n) ** 0.5


# --- Folding in -------------------------------------------------------------------


@pytest.mark.usefixtures("way")
def test_folding_in_is_taking_that_key_of_a_split():
    assert torch.equal(
        _ops.split(MANY, 9), torch.stack([_ops.fold_in(MANY, i) for i in range(9)])
    )


@pytest.mark.usefixtures("way")
def test_any_word_can_be_folded_in():
    for value in (2**32, 2**63 - 1, 2**63, LAST):
        want = [
            _ops.split(key(s, (o + value) % 2**64), 1)[0].tolist()
            for s, o in MANY.tolist()
        ]
        assert _ops.fold_in(MANY, value).tolist() == want
        word = torch.tensor(value, dtype=torch.uint64)
        assert _ops.fold_in(MANY, word).tolist() == want


@pytest.mark.parametrize(
    "dtype",
    [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint64],
)
@pytest.mark.usefixtures("way")
def test_a_tensor_of_integers_folds_in_each(dtype):
    values = torch.tensor([0, 3, 100], dtype=dtype)
    want = torch.stack([_ops.fold_in(key(), v) for v in (0, 3, 100)])
    assert torch.equal(_ops.fold_in(key(), values), want)
    assert torch.equal(_ops.fold_in(key(), values[1]), want[1])
    table = _ops.fold_in(MANY[:, None], values)
    assert table.shape == (6, 3, 2)
    assert torch.equal(table[0], want)
    assert torch.equal(table[:, 2], _ops.fold_in(MANY, 100))


def test_negative_integers_in_tensors_are_read_modulo_a_word():
    got = _ops.fold_in(key(), torch.tensor([-1, -7], dtype=torch.int16))
    want = torch.stack([_ops.fold_in(key(), v) for v in (LAST, LAST - 6)])
    assert torch.equal(got, want)


@pytest.mark.parametrize("value", [-1, 2**64])
def test_integers_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match=rf"from 0 to 2\*\*64 - 1, got {value}"):
        _ops.fold_in(key(), value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64])
def test_tensors_of_other_numbers_are_refused(dtype):
    with pytest.raises(TypeError, match=f"integers, got a tensor of {dtype}"):
        _ops.fold_in(key(), torch.ones(2, dtype=dtype))


@pytest.mark.parametrize("name", ["uniform", "normal"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_draws_of_other_dtypes_are_refused(name, dtype):
    with pytest.raises(TypeError, match=rf"`{name}` draws float64.*got dtype={dtype}"):
        getattr(_ops, name)(key(), 3, dtype)


# --- Operations of torch ----------------------------------------------------------


@pytest.mark.parametrize("data", [key(), MANY.view(3, 2, 2)], ids=["one", "batch"])
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("split", (3,)),
        ("fold_in", (7,)),
        ("fold_in_tensor", (torch.tensor([7, -2]),)),
        ("bits", (5, 16)),
        ("uniform", (5, torch.bfloat16)),
        ("normal", (5, torch.float64)),
    ],
)
@pytest.mark.filterwarnings("default")
def test_the_operations_keep_what_torch_asks_of_them(data, name, args):
    op = getattr(torch.ops.remat, name).default
    results = torch.library.opcheck(op, (data, *args))
    assert set(results.values()) == {"SUCCESS"}


@each_draw
def test_dispatched_draws_are_those_that_are_not(draw):
    want = draw(MANY, 9)
    with count_ops() as ops:
        assert torch.equal(draw(MANY, 9), want)
    assert [name for name in ops if name.startswith("remat::")]
    assert ops["mul"] == ops["bitwise_and_"] == 0


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda k: _ops.split(k, 3), "split"),
        (lambda k: _ops.fold_in(k, 3), "fold_in"),
        (lambda k: _ops.fold_in(k, torch.arange(2)), "fold_in_tensor"),
        (lambda k: _ops.uniform(k, 3, torch.float32), "uniform"),
        (lambda k: _ops.normal(k, 3, torch.float32), "normal"),
        (lambda k: _ops.bits(k, 3, 8), "bits"),
    ],
)
def test_a_trace_holds_one_operation_for_each_draw(draw, name):
    graph = make_fx(draw)(key())
    calls = [
        n.target.overloadpacket
        for n in graph.graph.nodes
        if n.op == "call_function" and n.target.namespace == "remat"
    ]
    assert calls == [getattr(torch.ops.remat, name)]
    assert torch.equal(graph(key(7)), draw(key(7)))


def test_a_trace_of_a_batch_holds_one_draw():
    def draw(k):
        return vmap(vmap(lambda k: _ops.uniform(k, 4, torch.float32)))(k)

    graph = make_fx(draw)(MANY.view(2, 3, 2))
    names = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
    assert names.count("remat.uniform.default") == 1
    assert len(names) <= 3
    other = _ops.split(key(), 6).view(2, 3, 2)
    assert torch.equal(graph(other), draw(other))


@each_draw
def test_nested_vmap_draws_what_loops_draw(draw):
    grid = MANY.view(2, 3, 2)
    each = torch.stack([torch.stack([draw(k, 5) for k in row]) for row in grid])

    def draw_error(k):
        return draw(k, 5)

    inner = vmap(draw_error, randomness="error")
    assert torch.equal(vmap(inner, randomness="error")(grid), each)
    columns = vmap(vmap(draw_error), in_dims=1, out_dims=1)
    assert torch.equal(columns(grid), each)


def test_a_key_that_is_not_batched_draws_once():
    def scaled(x, k):
        return x * _ops.uniform(k, 3, torch.float32)

    x = torch.arange(4.0)
    want = x[:, None] * _ops.uniform(key(), 3, torch.float32)
    got = vmap(scaled, in_dims=(0, None), randomness="error")(x, key())
    assert torch.equal(got, want)
    closed = vmap(lambda x: scaled(x, key()), randomness="error")(x)
    assert torch.equal(closed, want)


def test_vmap_folds_in_keys_values_or_both():
    values = torch.arange(6)
    pairs = torch.stack([_ops.fold_in(k, i) for i, k in enumerate(MANY)])
    table = _ops.fold_in(MANY[:, None], values)
    assert torch.equal(vmap(_ops.fold_in)(MANY, values), pairs)
    assert torch.equal(vmap(_ops.fold_in, (0, None))(MANY, values), table)
    assert torch.equal(
        vmap(_ops.fold_in, (None, 0))(MANY, values), table.transpose(0, 1)
    )
    rows = vmap(_ops.fold_in)(MANY.view(2, 3, 2), values[:2])
    assert torch.equal(
        rows, torch.stack([_ops.fold_in(MANY[3 * i : 3 * i + 3], i) for i in (0, 1)])
    )
    both = vmap(_ops.fold_in)(MANY, values.expand(6, 6))
    assert torch.equal(both, table)
    with_int = vmap(lambda k: _ops.fold_in(k, 2))(MANY)
    assert torch.equal(with_int, _ops.fold_in(MANY, 2))


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_draws_are_those_of_eager(backend):
    def draw(k):
        first, second = _ops.split(k, 2).unbind(0)
        second = _ops.fold_in(second, 3)
        u = _ops.uniform(first, 20, torch.float32)
        return u, _ops.normal(second, 20, torch.float64), _ops.bits(k, 5, 64)

    torch._dynamo.reset()
    compiled = torch.compile(draw, fullgraph=True, backend=backend)
    for seed in (42, 43):
        for got, want in zip(compiled(key(seed)), draw(key(seed)), strict=True):
            assert torch.equal(got, want)
    batched = torch.compile(vmap(draw), fullgraph=True, backend=backend)
    for got, want in zip(batched(MANY), vmap(draw)(MANY), strict=True):
        assert torch.equal(got, want)


@pytest.mark.filterwarnings("default")
def test_a_compiled_draw_of_a_dynamic_size_is_one_graph():
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    @functools.partial(torch.compile, fullgraph=True, dynamic=True, backend=backend)
    def draw(k, x):
        return x + _ops.uniform(k, x.shape[0], torch.float32)

    torch._dynamo.reset()
    for n in (5, 6, 7):
        want = _ops.uniform(key(), n, torch.float32)
        assert torch.equal(draw(key(), torch.zeros(n)), want)
    assert len(graphs) == 1


def test_shapes_and_dtypes_are_known_without_data():
    k = MANY.to("meta")
    assert _ops.split(k, 3).shape == (3, 6, 2)
    assert _ops.fold_in(k, 3).shape == (6, 2)
    assert _ops.fold_in(k[:, None], torch.zeros(4, dtype=int, device="meta")).shape == (
        6,
        4,
        2,
    )
    assert _ops.bits(k, 5, 8).dtype == torch.int64
    for dtype in FLOATS:
        for draw in (_ops.uniform, _ops.normal):
            out = draw(k, 5, dtype)
            assert (out.shape, out.dtype, out.device.type) == ((6, 5), dtype, "meta")


class Names(TorchFunctionMode):
    def __init__(self):
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Names, Ops])
def test_a_mode_sees_one_operation(mode):
    k = key()
    want = _ops.uniform(k, 3_000, torch.float32)
    watching = mode()
    with watching:
        got = _ops.uniform(k, 3_000, torch.float32)
    assert torch.equal(got, want)
    (name,) = watching.names
    assert name.startswith("remat.uniform")


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_default_device_does_not_move_a_draw(device):
    want = _ops.normal(key(), 3_000, torch.float32)
    k = key()
    with torch.device(device):
        assert torch.equal(_ops.normal(k, 3_000, torch.float32), want)
        assert _ops.split(k, 2).device.type == "cpu"


@each_draw
def test_autocast_and_inference_mode_do_not_change_a_draw(draw):
    for n in (9, 3_000):
        want = draw(MANY, n)
        with torch.autocast("cpu"), torch.inference_mode():
            assert torch.equal(draw(MANY, n), want)


@pytest.mark.parametrize("n", [4, 3_000])
def test_a_draw_is_a_constant_of_derivatives(n):
    def loss(x, k):
        return (x.sin() * _ops.normal(k, n, torch.float32)).sum()

    x, z = torch.zeros(n), _ops.normal(key(), n, torch.float32)
    assert torch.equal(torch.func.grad(loss)(x, key()), z)
    assert torch.equal(
        torch.func.jvp(lambda x: loss(x, key()), (x,), (x + 1,))[1], z.sum()
    )
    twice = torch.func.grad(lambda x: torch.func.grad(loss)(x, key()).sum())
    assert torch.equal(twice(x), -x * z)
    each = vmap(torch.func.grad(loss), (None, 0), randomness="error")(x, MANY)
    assert torch.equal(each, _ops.normal(MANY, n, torch.float32))


def test_a_draw_leaves_global_streams_alone():
    state = torch.get_rng_state()
    for draw in DRAWS.values():
        draw(MANY, 500)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("draw", [_ops.uniform, _ops.normal])
def test_a_draw_holds_little_more_than_its_result(draw):
    n, k = 2**20, key()
    draw(k, n, torch.float32)
    extra = peak_bytes(lambda: draw(k, n, torch.float32)) / (4 * n) - 1
    # 48 bytes for each block of a chunk, which is 3/16 of them, and 48 for logarithms.
    assert extra < (0.57 if draw is _ops.uniform else 1.13)
    more = peak_bytes(lambda: draw(k, 16 * n, torch.float32)) / (64 * n) - 1
    assert more <= extra / 3


# --- torch's own kernels ----------------------------------------------------------


class Fake:
    """As `torch.func._random`, with kernels that count their calls."""

    def __init__(self, error=0):
        self.calls = []
        self._error = error

    def split(self, k, num):
        self.calls.append("split")
        return _philox.split(k.reshape(-1, 2), num + self._error)[self._error :].view(
            num, *k.shape
        )

    def uniform_(self, k, out):
        self.calls.append("uniform_")
        self._check(k, out)
        reading = _philox.UNIFORM[out.dtype]
        rows = k.reshape(-1, 2)
        out.copy_(_philox.draw(rows, out.shape[-1], out.dtype, reading).view(out.shape))

    def normal_(self, k, out):
        self.calls.append("normal_")
        self._check(k, out)
        reading = _philox.NORMAL[out.dtype]
        rows = k.reshape(-1, 2)
        out.copy_(_philox.draw(rows, out.shape[-1], out.dtype, reading).view(out.shape))

    @staticmethod
    def _check(k, out):
        # What torch's kernels ask of a batch of keys.
        assert k.ndim == 1 or k.ndim == out.ndim + 1
        assert k.is_contiguous()
        assert out.numel()


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
        _ops.split(key(), 2),
        _ops.fold_in(MANY, LAST),
        _ops.fold_in(MANY, torch.arange(6)),
        *[_ops.uniform(MANY.view(2, 3, 2), 5, d) for d in FLOATS],
        *[_ops.uniform(key(), 700, d) for d in FLOATS],
        _ops.normal(MANY, 5, torch.float32),
        vmap(lambda k: _ops.uniform(k, 3, torch.float32))(MANY),
    ]


def assert_equal(got, want):
    assert [torch.equal(a, b) for a, b in zip(got, want, strict=True)] == [True] * 14


def test_kernels_of_torch_are_used_where_they_agree(native):
    want = everything()
    fake = native(Fake())
    _ops.split(key(), 1)
    tested = len(fake.calls)
    assert_equal(everything(), want)
    later = fake.calls[tested:]
    assert later.count("split") == 3
    assert later.count("uniform_") == 9
    assert "normal_" not in later  # on the CPU it is ours
    apart = MANY[::2]
    assert torch.equal(_ops.split(apart, 3)[0], _ops.fold_in(apart, 0))
    assert _ops.uniform(MANY, 0, torch.float32).shape == (6, 0)
    assert _ops.split(MANY, 0).shape == (0, 6, 2)
    u = _ops.uniform(MANY, 2, torch.float32)
    assert torch.equal(_ops.uniform(apart, 2, torch.float32), u[::2])
    assert _ops._native.cache_info().misses == 1


class Raises(Fake):
    def uniform_(self, k, out):
        raise RuntimeError("not implemented")


class Changed(Fake):
    def uniform_(self, k, out, low):
        """Take an argument more than it did."""


class Rounded(Fake):
    def uniform_(self, k, out):
        super().uniform_(k, out)
        out.mul_(1 - 2.0**-20)


class Gaussian(Fake):
    def normal_(self, k, out):
        super().normal_(k, out)
        out.mul_(2)


@pytest.mark.parametrize(
    "module",
    [Fake(error=1), Raises(), Changed(), Rounded(), Gaussian(), None, object()],
)
def test_kernels_of_torch_that_disagree_are_not_used(native, module):
    want = everything()
    native(module)
    assert_equal(everything(), want)
    assert _ops._native(torch.device("cpu")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_draws_the_same_numbers():
    gpu = MANY.cuda()
    for name, draw in DRAWS.items():
        got, want = draw(gpu, 3_000).cpu(), draw(MANY, 3_000)
        if name.startswith("normal"):
            torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
        else:
            assert torch.equal(got, want), name
