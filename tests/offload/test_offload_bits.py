"""What is stored elsewhere comes back bit for bit, whatever the user has set."""

import contextlib
import functools
import mmap
import tempfile

import pytest
import torch
from support.offloading import (
    LAYOUTS,
    STORES,
    assert_same_bits,
    back,
    conjugate,
    fetched,
)
from support.tables import rows
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat import OffloadError
from remat._offload import offload as _offload
from remat._offload.offload import Fetched, in_file, in_host_memory, origin_of


stores = rows("store", STORES)


# --- Bit for bit ------------------------------------------------------------------


def random_bits(dtype, *shape):
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return data % 2 == 1 if dtype is torch.bool else data.view(dtype)


DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64"),
    *("complex128", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz"),
    *("float8_e5m2fnuz", "float8_e8m0fnu"),
)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back_bit_for_bit(name, folder, sizes):
    x = random_bits(getattr(torch, name), 5, 6)
    for t in (x, x.t(), x[1:, 2:], x[::2, 1::3]):
        stored = in_file(t)
        assert stored.data_ptr() != t.data_ptr()
        assert_same_bits(back(stored, t), t)
    size = x.element_size()
    assert sizes == [30 * size, 30 * size, 16 * size, 6 * size]


@rows("x, count", LAYOUTS)
def test_every_layout_comes_back_with_its_strides_and_is_stored_without_gaps(
    x, count, folder, sizes
):
    stored = in_file(x)
    assert stored.shape == x.shape
    assert stored.device.type == "cpu"
    assert not stored.is_conj()
    assert not stored.is_neg()
    assert stored.untyped_storage().nbytes() == count * x.element_size()
    assert sizes == [count * x.element_size()] * bool(count)
    assert_same_bits(back(stored, x), x)


def test_a_file_is_written_in_pieces(monkeypatch, folder, sizes):
    monkeypatch.setattr(_offload, "_CHUNK", 7)
    x = torch.randn(100)
    assert_same_bits(in_file(x), x)
    assert sizes == [400]


def test_a_file_is_written_whole_by_a_system_that_writes_little_at_once(folder):
    class Slow:
        def __init__(self, file):
            self._file = file

        def write(self, data):
            return self._file.write(data[:5])

    x = torch.randint(0, 256, (23,), dtype=torch.uint8)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        _offload._write(Slow(file), x)
        file.seek(0)
        assert file.read() == bytes(x.tolist())


OF_GRAPHS = {
    "a leaf": lambda x: x,
    "a result": torch.sin,
    "a parameter": lambda x: torch.nn.Parameter(x.detach()),
}


@rows("make", OF_GRAPHS)
def test_a_stored_tensor_requires_no_gradient_and_counts_no_change(make, folder):
    x = make(torch.randn(4, requires_grad=True))
    with torch.enable_grad():
        stored = in_file(x)
        taken = back(stored, x)
    assert not stored.requires_grad
    assert not taken.requires_grad
    assert stored._version == taken._version == 0
    assert_same_bits(taken, x.detach())


# --- Back, in any order -----------------------------------------------------------


def test_files_come_back_in_any_order_and_more_than_once(folder):
    xs = [torch.randn(k + 2, 3).t()[::2] for k in range(4)]
    stored = fetched(xs)
    for k in (0, 1, 1, 3, 2, 0, 0, 3):
        assert_same_bits(stored.take(k), xs[k])


@pytest.mark.skipif(_offload._LIBC is None, reason="no madvise")
def test_the_next_file_is_read_while_one_is_used(folder, monkeypatch):
    advised, advise = [], _offload._LIBC.madvise

    class Libc:
        @staticmethod
        def madvise(start, nbytes, advice):
            assert advise(start, nbytes, advice) == 0
            advised.append((start.value, nbytes.value, advice))

    monkeypatch.setattr(_offload, "_LIBC", Libc)
    xs = [torch.randn(k + 1, 1000) for k in range(3)]
    stored = [in_file(x) for x in xs]
    want = [(s.data_ptr(), s.nbytes, mmap.MADV_WILLNEED) for s in stored]
    files = Fetched([*stored, xs[0]], [origin_of(x) for x in (*xs, xs[0])])
    for k in range(4):
        assert advised == want[: k + 1]
        files.take(k)


# --- What is not moved ------------------------------------------------------------


def test_a_tensor_on_the_host_stays_where_it_is():
    x = torch.randn(3, 4)[:, 1:].requires_grad_()
    assert in_host_memory(x) is x


@stores
def test_a_tensor_without_data_stays_as_it_is(store, monkeypatch):
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", "/nowhere")
    x = torch.empty(3, 4, device="meta")
    assert store(x) is x
    with FakeTensorMode() as mode:
        x = torch.randn(3, 4, device="cpu")
        fake = mode.from_tensor(torch.randn(3))
        assert store(x) is x
    assert store(fake) is fake
    assert back(fake, fake) is not None


class Subclass(torch.Tensor):
    pass


def freed():
    x = torch.randn(4, 5)
    x.untyped_storage().resize_(0)
    return x


REFUSED = {
    "a sparse tensor": (
        lambda: torch.eye(3).to_sparse(),
        r"Tensor, float32\[3, 3\] of layout torch.sparse_coo, cannot be offloaded",
    ),
    "a sparse matrix": (
        lambda: torch.eye(3).to_sparse_csr(),
        "layout torch.sparse_csr",
    ),
    "a subclass": (
        lambda: torch.randn(2).as_subclass(Subclass),
        r"a Subclass, float32\[2\] .* only plain strided tensors can\. Have the policy",
    ),
    "a quantized tensor": (
        lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        "cannot be offloaded",
    ),
    "a freed tensor": (freed, r"float32\[4, 5\] cannot be offloaded: its memory was"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*quantize:UserWarning")
@stores
@rows("make, message", REFUSED)
def test_a_tensor_that_cannot_be_moved_is_refused(make, message, store):
    x = make()
    with pytest.raises(OffloadError, match=message):
        store(x)


def test_a_tensor_of_a_level_of_torch_func_is_refused():
    with pytest.raises(OffloadError, match=r"float32\[3\] .* cannot be offloaded"):
        grad(lambda x: in_file(x).sum())(torch.ones(3))


# --- What the user has set --------------------------------------------------------


class Zeros(TorchDispatchMode):
    """Spoils what every operation returns."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.zero_() if isinstance(out, torch.Tensor) else out


class Refuses(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"seen: {func.__name__}")


@contextlib.contextmanager
def set_to(put, value, before):
    put(value)
    try:
        yield
    finally:
        put(before)


SETTINGS = {
    "a dispatch mode": Zeros,
    "a function mode": Refuses,
    "fake tensors": FakeTensorMode,
    # Back to None: setting what `get_default_device` returns would leave a mode.
    "a default device": lambda: set_to(torch.set_default_device, "meta", None),
    "a default dtype": lambda: set_to(
        torch.set_default_dtype, torch.float64, torch.float32
    ),
    "deterministic": lambda: set_to(torch.use_deterministic_algorithms, True, False),
    "no_grad": torch.no_grad,
    "autocast": functools.partial(torch.autocast, "cpu"),
}


@rows("setting", SETTINGS)
def test_settings_and_modes_change_nothing(setting, folder):
    xs = [
        torch.randn(3, 4).t().requires_grad_(),
        torch.randn(8, 9)[::2, ::3],
        conjugate(3),
        torch.randn(5).half(),
        torch.randn(0),
    ]
    origins = [origin_of(x) for x in xs]
    with setting():
        stored = [in_file(x) for x in xs]
        files = Fetched(stored, origins)
        taken = [files.take(k) for k in range(len(xs))]
    for x, s, t in zip(xs, stored, taken, strict=True):
        assert type(s) is type(t) is torch.Tensor
        assert not t.requires_grad
        assert_same_bits(t, x.detach())


def test_a_transform_around_does_not_see_it(folder):
    held = torch.randn(8, 9)[::2, ::3]
    taken = []

    def fn(x):
        taken.append(back(in_file(held), held))
        return x.sin().sum()

    x = torch.randn(2, 3)
    grad(fn)(x)
    vmap(fn)(x)
    vmap(grad(fn))(x)
    jvp(fn, (x,), (x,))
    graph = make_fx(fn)(x)
    assert [n.op for n in graph.graph.nodes].count("call_function") == 2
    assert len(taken) == 5
    for t in taken:
        assert type(t) is torch.Tensor
        assert_same_bits(t, held)
