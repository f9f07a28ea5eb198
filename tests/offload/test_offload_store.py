"""Offloading: what is stored elsewhere comes back bit for bit, and leaves nothing.

Where there is no accelerator, a stand-in takes the place of its streams: what is sent
to one is done only when it is waited for, so that a wait that is missing shows.
"""

import contextlib
import errno
import gc
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import weakref
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat import OffloadError, RematError
from remat._offload import bytes as _bytes, offload as _offload
from remat._offload.offload import (
    Fetched,
    Origin,
    in_file,
    in_host_memory,
    origin_of,
)
from remat._torch import is_shared, snapshot, undisturbed


MEGABYTE = 2**20
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
ON_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of its own for the files, which has to be empty in the end."""
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(tmp_path))
    yield tmp_path
    assert os.listdir(tmp_path) == []


@pytest.fixture
def sizes(monkeypatch):
    """The size of each file at the time it is mapped."""
    found, mapped = [], _offload._mapped

    def noting(file, nbytes):
        found.append(os.fstat(file.fileno()).st_size)
        return mapped(file, nbytes)

    monkeypatch.setattr(_offload, "_mapped", noting)
    return found


def bits(tensor):
    """The bytes of the elements of a tensor, in the order of its indices."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same_bits(actual, expected):
    assert (actual.dtype, actual.device) == (expected.dtype, expected.device)
    assert (actual.shape, actual.stride()) == (expected.shape, expected.stride())
    assert actual.storage_offset() == 0
    assert torch.equal(bits(actual), bits(expected))


def back(stored, tensor):
    return Fetched([stored], [origin_of(tensor)]).take(0)


def random_bits(dtype, *shape):
    size = torch.empty(0, dtype=dtype).element_size()
    data = torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8)
    return data % 2 == 1 if dtype is torch.bool else data.view(dtype)


# --- Bit for bit ---


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


def strided(shape, stride):
    return torch.randn(200).as_strided(shape, stride, 3)


# A tensor, and how many elements of it have to be stored.
LAYOUTS = {
    "contiguous": (torch.randn(4, 5), 20),
    "offset": (torch.randn(9)[2:], 7),
    "transposed": (torch.randn(2, 3, 4).permute(2, 0, 1), 24),
    "channels last": (
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        120,
    ),
    "one of three": (torch.randn(4, 6).chunk(3, 1)[1], 8),
    "every other row": (torch.randn(8, 3)[::2], 12),
    "transposed with gaps": (torch.randn(8, 9)[::2, ::3].t(), 12),
    "a diagonal": (torch.randn(5, 5).diagonal(), 5),
    "expanded": (torch.randn(3, 1).expand(2, 3, 7), 3),
    "expanded with gaps": (torch.randn(9)[::3, None].expand(3, 5), 3),
    "a scalar expanded": (torch.randn(()).expand(4, 4), 1),
    "windows": (torch.randn(9).unfold(0, 3, 1), 9),
    "windows with gaps": (torch.randn(18)[::2].unfold(0, 3, 2), 17),
    "overlapping": (strided((3, 4), (2, 3)), 14),
    "of size one": (strided((1, 4, 1), (77, 1, 0)), 4),
    "of size one with gaps": (strided((1, 4, 1), (77, 5, 9)), 4),
    "no dimension": (torch.randn(()), 1),
    "empty": (torch.randn(0), 0),
    "empty in one dimension": (torch.randn(3, 0, 2).transpose(0, 2), 0),
    "empty and expanded": (torch.randn(1, 0).expand(4, 0), 0),
    "conjugate": (torch.randn(3, 4, dtype=torch.complex64).t().conj(), 12),
    "conjugate expanded": (torch.randn(3, dtype=torch.cfloat).conj().expand(2, 3), 3),
    "conjugate windows": (torch.randn(5, dtype=torch.cfloat).conj().unfold(0, 2, 1), 8),
    "negative": (torch.randn(3, dtype=torch.complex64).conj().imag, 3),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_comes_back_with_its_strides_and_is_stored_without_gaps(
    layout, folder, sizes
):
    x, count = LAYOUTS[layout]
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


def test_what_the_system_does_not_write_at_once_is_written_in_the_end(folder):
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


def test_what_is_stored_requires_no_gradient_and_counts_no_change(folder):
    x = torch.randn(4, requires_grad=True)
    for t in (x, x.sin(), torch.nn.Parameter(torch.randn(3))):
        with torch.enable_grad():
            stored = in_file(t)
            fetched = back(stored, t)
        assert not stored.requires_grad
        assert not fetched.requires_grad
        assert stored._version == fetched._version == 0
        assert_same_bits(fetched, t.detach())


def test_what_is_stored_is_no_longer_bound_to_the_tensor(folder):
    x = torch.randn(4)
    before, stored = x.clone(), in_file(x)
    x.mul_(2)
    assert torch.equal(stored, before)


def test_a_copy_on_write_is_not_made_for_storing(folder):
    x = torch.randn(6)
    copy = snapshot(x)
    assert_same_bits(in_file(copy), x)
    assert is_shared(copy)


def test_a_file_may_be_saved_for_backward(folder):
    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.origin = origin_of(x)
            ctx.save_for_backward(in_file(x))
            return x.sin()

        @staticmethod
        def backward(ctx, g):
            return g * Fetched(ctx.saved_tensors, [ctx.origin]).take(0).cos()

    x = torch.randn(3, 4).t().requires_grad_()
    Sine.apply(x).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())


# --- What is not moved ---


STORES = {"host": in_host_memory, "file": in_file}


def test_what_is_on_the_host_stays_where_it_is():
    x = torch.randn(3, 4)[:, 1:].requires_grad_()
    assert in_host_memory(x) is x


@pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
def test_what_has_no_data_stays_as_it_is(store, monkeypatch):
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
@pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_moved_is_refused(case, store):
    make, message = REFUSED[case]
    x = make()
    with pytest.raises(OffloadError, match=message):
        store(x)


def test_a_tensor_of_a_level_of_torch_func_is_refused():
    def fn(x):
        in_file(x)
        return x.sum()

    with pytest.raises(OffloadError, match=r"float32\[3\] .* cannot be offloaded"):
        grad(fn)(torch.ones(3))


# --- No file is left ---


def without_tmpfile(monkeypatch):
    """As on a file system that has no O_TMPFILE."""
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False, raising=False)


def without_dev_fd(monkeypatch):
    """As where /proc is not mounted, or on Windows."""
    stat = os.stat

    def failing(path, *args, **kwargs):
        if str(path).startswith("/dev/fd/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", failing)


def without_fallocate(monkeypatch):
    """As on macOS."""
    monkeypatch.setattr(_offload, "_CHUNK", 1000)
    monkeypatch.delattr(os, "posix_fallocate", raising=False)


def with_useless_fallocate(monkeypatch):
    """As on some network file systems."""

    def failing(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(_offload, "_CHUNK", 1000)
    monkeypatch.setattr(os, "posix_fallocate", failing, raising=False)


SYSTEMS = {
    "as it is": lambda _: None,
    "no O_TMPFILE": without_tmpfile,
    "no /dev/fd": without_dev_fd,
    "no fallocate": without_fallocate,
    "useless fallocate": with_useless_fallocate,
}


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_file_has_no_name_while_it_is_in_use(system, folder, sizes, monkeypatch):
    SYSTEMS[system](monkeypatch)
    xs = [torch.randn(1000, k + 1).t() for k in range(3)]
    stored = [in_file(x) for x in xs]
    assert os.listdir(folder) == []
    assert sizes == [4000, 8000, 12000]
    for x, s in zip(xs, stored, strict=True):
        assert_same_bits(back(s, x), x)


def opened():
    """What this process has open and mapped, of files that were deleted."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "(deleted)" in line]
    return sum("(deleted)" in name for name in names), len(lines)


@ON_LINUX
@pytest.mark.parametrize("system", ["as it is", "no O_TMPFILE", "no /dev/fd"])
def test_a_file_goes_with_its_tensor_by_reference_counting(system, folder, monkeypatch):
    SYSTEMS[system](monkeypatch)
    gc.collect()
    gc.disable()
    try:
        before = opened()
        stored = [in_file(torch.randn(3000)) for _ in range(20)]
        descriptors = 20 if system == "no /dev/fd" else 0
        assert opened() == (before[0] + descriptors, before[1] + 20)
        views = [s[1:] for s in stored]
        del stored
        assert opened() == (before[0] + descriptors, before[1] + 20)
        del views
        assert opened() == before
    finally:
        gc.enable()


SCRIPT = """
import os, signal, sys, torch
from remat._offload.offload import in_file
torch.set_num_threads(1)  # a fork inherits no pool of threads
x = torch.arange(100_000.)
stored = [in_file(x + k) for k in range(3)]
"""


def run(script, *args, **options):
    """Run a script after `SCRIPT`, and return what became of it."""
    command = [*args, sys.executable, "-c", SCRIPT + script]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **options
    )


ENDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": -9,
    "pass": 0,
    "os._exit(3)": 3,
    "raise KeyError": 1,
    "in_file(torch.eye(3).to_sparse())": 1,
}
FORKS = f"""
for end in {[*ENDS]}:
    child = os.fork()
    more = in_file(x + 7)
    good = all(torch.equal(s, x + k) for k, s in enumerate(stored))
    assert good and torch.equal(more, x + 7)
    if not child:
        exec(end)
        sys.exit()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    good = all(torch.equal(s, x + k) for k, s in enumerate(stored))
    print(code, good, os.listdir(os.environ["REMAT_OFFLOAD_DIR"]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_no_file_is_left_however_a_process_ends_and_forks_share_them(folder):
    done = run(FORKS)
    assert done.stdout == "".join(f"{code} True []\n" for code in ENDS.values())
    assert done.returncode == -signal.SIGKILL


# --- No room ---


@contextlib.contextmanager
def leaving_nothing_open():
    before = opened() if sys.platform == "linux" else None
    yield
    assert before is None or opened() == before


def test_a_full_disk_is_an_error_that_says_what_to_do(folder, monkeypatch):
    def full(_fd, start, nbytes):
        assert (start, nbytes) == (0, 40_000)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(_offload, "_write", None)
    monkeypatch.setattr(_offload, "_CHUNK", 2**13)
    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    x = torch.randn(1000, 10).t()
    before = x.clone()
    refused = pytest.raises(OffloadError, match=r"float32\[10, 1000\] could not be")
    with leaving_nothing_open(), refused as caught:
        in_file(x)
    message = str(caught.value)
    assert f"40,000 bytes are wanted in {str(folder)!r}, where " in message
    assert re.search(r"where [\d,]+ are free \(No space left on device\)\.", message)
    assert message.endswith(
        "Set the environment variable REMAT_OFFLOAD_DIR to a folder with more room, "
        "or offload less."
    )
    assert isinstance(caught.value, RematError)
    assert isinstance(caught.value.__cause__, OSError)
    assert torch.equal(x, before)


LIMITED = """
from remat import OffloadError
from remat._offload import offload as _offload
before = len(os.listdir("/proc/self/fd"))
for chunk in (2**19, 2**21):  # room is taken before, or by writing
    _offload._CHUNK = chunk
    for _ in range(2):
        try:
            stored.append(in_file(torch.ones(2**19)))
        except OffloadError as error:
            print(error)
    print(len(os.listdir("/proc/self/fd")) == before)
    print(os.listdir(os.environ["REMAT_OFFLOAD_DIR"]))
print(all(torch.equal(s, x + k) for k, s in enumerate(stored)), len(stored))
print(in_file(torch.ones(2**17)).sum().item())
"""


def assert_refused_each_time(done, reason, folder):
    wanted = rf"2,097,152 bytes are wanted in {str(folder)!r}, where [\d,]+ are free "
    error = rf"remat: float32\[524288\] .*{wanted}\({reason}\).*\n"
    each = rf"({error}){{2}}True\n\[\]\n"
    assert re.fullmatch(rf"({each}){{2}}True 3\n131072.0\n", done.stdout)
    assert done.returncode == 0


@ON_LINUX
def test_a_file_that_may_not_grow_is_an_error(folder):
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (2**20,) * 2)"
    assert_refused_each_time(run(f"{limit}\n{LIMITED}"), "File too large", folder)


@ON_LINUX
def test_a_disk_that_is_full_is_an_error(tmp_path):
    """In a file system of two megabytes, which only the process itself sees."""
    inside = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c")
    mount = f"mount -t tmpfs -o size=2m none {tmp_path}"
    with contextlib.suppress(OSError):
        if not subprocess.run([*inside, mount], capture_output=True).returncode:
            environment = {**os.environ, "REMAT_OFFLOAD_DIR": str(tmp_path)}
            shell = (*inside, f'{mount} && exec "$@"', "sh")
            done = run(LIMITED, *shell, env=environment)
            assert_refused_each_time(done, "No space left on device", tmp_path)
            return
    pytest.skip("no file system may be mounted here")


def test_room_for_what_is_quickly_written_is_not_taken_before(folder, monkeypatch):
    monkeypatch.setattr(os, "posix_fallocate", None, raising=False)
    assert torch.equal(in_file(torch.ones(3)), torch.ones(3))
    monkeypatch.setattr(_offload, "_CHUNK", 11)
    with pytest.raises(TypeError, match="not callable"):
        in_file(torch.ones(3))


def test_a_folder_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    missing = tmp_path / "missing"
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(missing))
    message = r"missing', where an unknown number of bytes is free \(No such file"
    with pytest.raises(OffloadError, match=message):
        in_file(torch.ones(3))
    missing.mkdir()
    assert torch.equal(in_file(torch.ones(3)), torch.ones(3))


def test_no_folder_at_all_is_an_error(monkeypatch):
    def failing():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.delenv("REMAT_OFFLOAD_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", failing)
    with pytest.raises(OffloadError, match=r"in a temporary folder, .*\(No usable"):
        in_file(torch.ones(3))


def test_a_mapping_that_fails_is_an_error(folder, monkeypatch):
    def failing(*_args, **_options):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    without_dev_fd(monkeypatch)
    monkeypatch.setattr(_offload.mmap, "mmap", failing)
    refused = pytest.raises(OffloadError, match=r"\(Cannot allocate memory\)")
    with leaving_nothing_open(), refused:
        in_file(torch.ones(3))


def test_the_folder_is_where_temporary_files_go_unless_it_is_set(tmp_path, monkeypatch):
    used, temporary_file = [], tempfile.TemporaryFile

    def noting(**options):
        used.append(options["dir"])
        return temporary_file(**options)

    monkeypatch.setattr(tempfile, "TemporaryFile", noting)
    monkeypatch.delenv("REMAT_OFFLOAD_DIR", raising=False)
    in_file(torch.ones(3))
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(tmp_path))
    in_file(torch.ones(3))
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", "")
    in_file(torch.ones(3))
    assert used == [tempfile.gettempdir(), str(tmp_path), tempfile.gettempdir()]


# --- Memory ---


def anonymous_bytes():
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


@ON_LINUX
def test_a_file_takes_no_memory_of_the_process(folder):
    x = torch.ones(64 * MEGABYTE, dtype=torch.uint8)
    start = anonymous_bytes()
    copy = x.clone()
    assert anonymous_bytes() - start > 48 * MEGABYTE
    del copy
    start = anonymous_bytes()
    stored = in_file(x)
    assert anonymous_bytes() - start < 16 * MEGABYTE
    assert stored.sum() == 64 * MEGABYTE
    assert anonymous_bytes() - start < 16 * MEGABYTE


# --- Threads ---


def test_threads_store_at_the_same_time(folder):
    start = Barrier(4)

    def work(k):
        start.wait(timeout=60)
        generator = torch.Generator().manual_seed(k)
        xs = [torch.randn(50, 70, generator=generator).t() for _ in range(30)]
        stored = [in_file(x) for x in xs]
        fetched = Fetched(stored, [origin_of(x) for x in xs])
        for j, x in enumerate(xs):
            assert_same_bits(fetched.take(j), x)
        return len(xs)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4), timeout=120)) == 120


# --- What the user has set ---


class Zeros(TorchDispatchMode):
    """Spoils what every operation returns."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.zero_() if isinstance(out, torch.Tensor) else out


class Refuses(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"seen: {func.__name__}")


@contextlib.contextmanager
def restored(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


SETTINGS = {
    "a dispatch mode": Zeros,
    "a function mode": Refuses,
    "fake tensors": FakeTensorMode,
    # Back to None: setting what `get_default_device` returns would leave a mode.
    "a default device": lambda: restored(
        lambda: None, torch.set_default_device, "meta"
    ),
    "a default dtype": lambda: restored(
        torch.get_default_dtype, torch.set_default_dtype, torch.float64
    ),
    "deterministic": deterministic,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_and_modes_change_nothing(setting, folder):
    xs = [
        torch.randn(3, 4).t().requires_grad_(),
        torch.randn(8, 9)[::2, ::3],
        torch.randn(3, dtype=torch.cfloat).conj(),
        torch.randn(5).half(),
        torch.randn(0),
    ]
    origins = [origin_of(x) for x in xs]
    with SETTINGS[setting]():
        stored = [in_file(x) for x in xs]
        fetched = Fetched(stored, origins)
        taken = [fetched.take(k) for k in range(len(xs))]
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


def test_nothing_is_recorded_where_nothing_disturbs():
    x = torch.randn(3, requires_grad=True)
    with undisturbed():
        y = x * 2
        x.mul_(3)
    assert not y.requires_grad
    assert x._version == 0
    assert (x * 2).requires_grad


# --- Back, in any order ---


def test_they_come_back_in_any_order_and_more_than_once(folder):
    xs = [torch.randn(k + 2, 3).t()[::2] for k in range(4)]
    fetched = Fetched([in_file(x) for x in xs], [origin_of(x) for x in xs])
    for k in (0, 1, 1, 3, 2, 0, 0, 3):
        assert_same_bits(fetched.take(k), xs[k])


def test_a_mapped_file_is_given_as_it_is(folder):
    x = torch.randn(4, 5).t()
    stored = in_file(x)
    assert back(stored, x) is stored


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
    fetched = Fetched([*stored, xs[0]], [origin_of(x) for x in (*xs, xs[0])])
    for k in range(4):
        assert advised == want[: k + 1]
        fetched.take(k)


def test_there_may_be_nothing_to_fetch():
    with pytest.raises(IndexError, match="index out of range"):
        Fetched([], []).take(0)


# --- Streams, with a stand-in ---


class Event:
    def __init__(self, stream, position):
        self.stream, self.position = stream, position


entered = []


class Stream:
    """Does what it is sent only once somebody waits for it."""

    def __init__(self, device=None):
        self.device, self.sent, self.done = device, [], 0

    def send(self, job):
        self.sent.append(job)

    def run(self, position):
        while self.done < position:
            job, self.sent[self.done] = self.sent[self.done], None
            self.done += 1
            job()

    def wait_event(self, event):
        self.send(lambda: event.stream.run(event.position))
        if self.is_computing:  # which does everything at once
            self.run(len(self.sent))

    def wait_stream(self, other):
        assert other.is_computing
        log.append("wait")

    def record_event(self):
        return Event(self, len(self.sent))

    def __enter__(self):
        entered.append(self)

    def __exit__(self, *_):
        entered.pop()

    is_computing = False


log = []


class Accelerator(TorchDispatchMode):
    """Sends the copies that are made in a stream to that stream."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and entered:
            (stream,) = entered
            to, source = args[0].detach(), args[1].detach()
            stream.send(lambda: torch.ops.aten.copy_(to, source))
            log.append("copy")
            return args[0]
        return func(*args, **(kwargs or {}))


DEVICE = torch.device("cuda", 0)


@pytest.fixture
def lane(monkeypatch):
    """Have the CPU stand in for a device; return the stream of its copies."""
    computing = Stream()
    computing.is_computing = True
    log.clear()
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: computing)
    monkeypatch.setattr(
        torch.Tensor,
        "record_stream",
        lambda _, stream: log.append("keep" if stream.is_computing else "kept"),
    )
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(_offload, "undisturbed", contextlib.nullcontext)
    monkeypatch.setattr(_offload, "_LANES", {})
    cpu = torch.device("cpu")
    for module in (_offload, _bytes):
        monkeypatch.setattr(module, "room", lambda n, _: nothing(n))
    monkeypatch.setattr(_offload, "_pinned", nothing)
    lane = _offload._LANES[cpu] = _offload._lane_of(DEVICE)
    with Accelerator():
        yield lane._stream


def nothing(nbytes):
    """Memory that holds nothing of use."""
    return torch.full((nbytes,), 111, dtype=torch.uint8)


def origins_of(xs):
    return [Origin(DEVICE, x.stride()) for x in xs]


def test_a_copy_to_the_host_waits_for_the_computation_and_keeps_its_source(lane):
    x = torch.randn(3, 4).t()
    stored = in_host_memory(x)
    assert log == ["wait", "copy", "kept"]
    assert (stored.shape, stored.stride()) == (x.shape, x.stride())
    assert lane.done == 0
    assert not torch.equal(stored, x)
    lane.run(1)
    assert torch.equal(stored, x)


def test_what_comes_back_has_been_waited_for(lane):
    xs = [torch.randn(3, k + 2).t() for k in range(4)]
    xs[2] = torch.randn(8, 9)[::2, ::3]
    stored = [in_host_memory(x) for x in xs]
    fetched = Fetched(stored, origins_of(xs))
    for k, x in enumerate(xs):
        assert_same_bits(fetched.take(k), x)
    assert log.count("copy") == 2 * 4
    assert log.count("kept") == log.count("keep") == 4


def test_the_next_one_is_on_its_way_while_one_is_used(lane):
    xs = [torch.randn(5) for _ in range(3)]
    stored = [in_host_memory(x) for x in xs]
    log.clear()
    fetched = Fetched(stored, origins_of(xs))
    assert (log, lane.done) == (["copy"], 0)
    assert_same_bits(fetched.take(0), xs[0])
    assert log == ["copy", "copy", "keep"]
    assert (lane.done, len(lane.sent)) == (4, 5)
    assert_same_bits(fetched.take(1), xs[1])
    assert_same_bits(fetched.take(2), xs[2])
    assert log.count("copy") == 3
    assert lane.done == len(lane.sent) == 6


def test_another_order_is_right_too_at_the_cost_of_copies(lane):
    xs = [torch.randn(5) for _ in range(4)]
    stored = [in_host_memory(x) for x in xs]
    log.clear()
    fetched = Fetched(stored, origins_of(xs))
    for k in (2, 0, 1, 3, 3):
        assert_same_bits(fetched.take(k), xs[k])
    # One for each taken, and those on their way that were not taken: 0, 3 and 2.
    assert log.count("copy") == 5 + 3


def test_no_more_than_the_next_one_is_held(lane, monkeypatch):
    alive, back_of = weakref.WeakSet(), _offload._Lane.back

    def noting(self, host):
        arriving = back_of(self, host)
        alive.add(arriving.data)
        return arriving

    monkeypatch.setattr(_offload._Lane, "back", noting)
    xs = [torch.randn(5) for _ in range(6)]
    fetched = Fetched([in_host_memory(x) for x in xs], origins_of(xs))
    for k in (0, 1, 2, 4, 1, 5):
        taken = fetched.take(k)
        lane.run(len(lane.sent))
        assert len(alive) <= 1
        assert_same_bits(taken, xs[k])
    assert len(alive) == 0


def test_what_need_not_come_back_does_not_stop_the_copies(lane):
    xs = [torch.randn(5) for _ in range(3)]
    stored = [in_host_memory(x) for x in xs]
    origins = origins_of(xs)
    origins[1] = origin_of(xs[1])
    lane.run(3)
    log.clear()
    fetched = Fetched(stored, origins)
    fetched.take(0)
    assert fetched.take(1) is stored[1]
    assert log.count("copy") == 2
    assert_same_bits(fetched.take(2), xs[2])
    assert log.count("copy") == 2


def test_a_file_comes_back_to_a_device(lane, folder):
    xs = [torch.randn(3, 4).t(), torch.randn(8, 9)[::2, ::3]]
    fetched = Fetched([in_file(x) for x in xs], origins_of(xs))
    for k, x in enumerate(xs):
        assert_same_bits(fetched.take(k), x)
    assert log.count("copy") == log.count("keep") == 2


def test_a_device_without_streams_is_copied_from_and_to_all_the_same(monkeypatch):
    def failing(_):
        raise RuntimeError("no streams")

    monkeypatch.setattr(torch, "Stream", failing)
    monkeypatch.setattr(_offload, "_LANES", {})
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    monkeypatch.setattr(torch.Tensor, "cpu", torch.Tensor.clone)
    x = torch.randn(8, 9)[::2, ::3]
    stored = in_host_memory(x)
    assert list(_offload._LANES.items()) == [(x.device, None)]
    assert stored.stride() == (3, 1)
    assert_same_bits(back(stored, x), x)


def test_threads_share_the_lane_of_a_device(monkeypatch):
    """Else a copy back could overtake the copy away."""
    start = Barrier(8)

    class Slow(Stream):
        def __init__(self, device):
            start.wait(timeout=60)
            super().__init__(device)

    monkeypatch.setattr(torch, "Stream", Slow)
    monkeypatch.setattr(_offload, "_LANES", {})
    with ThreadPoolExecutor(8) as pool:
        lanes = [*pool.map(_offload._lane_of, [DEVICE] * 8, timeout=120)]
    assert len({id(lane) for lane in lanes}) == 1


@pytest.mark.skipif(torch.accelerator.is_available(), reason="memory can be pinned")
def test_memory_of_the_host_is_plain_where_none_can_be_pinned():
    memory = _offload._pinned(100)
    assert (memory.numel(), memory.dtype) == (100, torch.uint8)
    assert not memory.is_pinned()


# --- Streams, for real ---


def on_cuda(*shape):
    return torch.randn(shape, device="cuda")


@ON_CUDA
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("store", STORES.values(), ids=STORES.keys())
def test_every_layout_comes_back_to_cuda(layout, store, folder):
    x, count = LAYOUTS[layout]
    x = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
    _bytes._unexpanded(x).copy_(_bytes._unexpanded(LAYOUTS[layout][0]).resolve_neg())
    stored = store(x)
    assert stored.device.type == "cpu"
    assert stored.untyped_storage().nbytes() == count * x.element_size()
    fetched = back(stored, x)
    assert_same_bits(fetched, x)
    assert count == 0 or stored.is_pinned() == (store is in_host_memory)


@ON_CUDA
def test_memory_freed_at_once_is_not_used_before_it_is_copied():
    """A device that is busy: the copies are late, and the memory is asked for."""
    wanted, stored, origins = [], [], []
    weights = on_cuda(4096, 4096)
    for k in range(20):
        for _ in range(5):
            weights = weights @ weights
            weights = weights / weights.norm()
        x = torch.full((2**22,), float(k), device="cuda")
        wanted.append(float(k))
        stored.append(in_host_memory(x))
        origins.append(origin_of(x))
        del x
        torch.full((2**22,), -1.0, device="cuda")
    fetched = Fetched(stored, origins)
    for k, value in enumerate(wanted):
        taken = fetched.take(k)
        for _ in range(5):
            weights = weights @ weights
            weights = weights / weights.norm()
        assert bool((taken == value).all())
        del taken
        torch.full((2**22,), -2.0, device="cuda")


@ON_CUDA
def test_what_was_offloaded_is_not_on_the_device():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    xs = [on_cuda(2**20) for _ in range(8)]
    origins = [origin_of(x) for x in xs]
    stored = [in_host_memory(x) for x in xs]
    del xs
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() == before
    fetched = Fetched(stored, origins)
    torch.cuda.reset_peak_memory_stats()
    for k in range(8):
        fetched.take(k).sin_()
        torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 3 * 2**22


@ON_CUDA
def test_the_copies_run_on_a_stream_of_their_own():
    x = on_cuda(2**20)
    stored = in_host_memory(x)
    lane = _offload._lane_of(x.device)
    assert lane._stream != torch.accelerator.current_stream(x.device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        taken = Fetched([stored], [origin_of(x)]).take(0)
        total = taken.double().sum()
    side.synchronize()
    assert total == x.double().sum()
