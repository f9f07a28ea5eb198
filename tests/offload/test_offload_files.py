"""Files of offloaded tensors: none is left, and none that has no room is mapped."""

import contextlib
import ctypes
import errno
import gc
import os
import re
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from support.offloading import (
    ON_LINUX,
    SYSTEMS,
    assert_same_bits,
    back,
    failing,
    fetched,
    leaving_nothing_open,
    opened,
    without_dev_fd,
)
from support.processes import (
    called,
    in_two_processes,
    needs_gloo,
    one_batch,
    replicated,
    sharded,
    train,
)
from support.tables import rows
from support.zoo import plainly

from remat import OffloadError, RematError, policies, remat
from remat._offload import offload as _offload
from remat._offload.offload import in_file
from remat.testing import assert_same


# --- No file is left --------------------------------------------------------------


@rows("system", SYSTEMS)
def test_a_file_has_no_name_while_it_is_in_use(system, folder, sizes, monkeypatch):
    system(monkeypatch)
    xs = [torch.randn(1000, k + 1).t() for k in range(3)]
    stored = [in_file(x) for x in xs]
    assert os.listdir(folder) == []
    assert sizes == [4000, 8000, 12000]
    for x, s in zip(xs, stored, strict=True):
        assert_same_bits(back(s, x), x)


@pytest.fixture
def no_collection():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@ON_LINUX
@pytest.mark.usefixtures("no_collection", "folder")
@pytest.mark.parametrize("system", ["as it is", "no O_TMPFILE", "no /dev/fd"])
def test_a_file_goes_with_its_tensor_by_reference_counting(system, monkeypatch):
    SYSTEMS[system](monkeypatch)
    before = opened()
    stored = [in_file(torch.randn(3000)) for _ in range(20)]
    descriptors = 20 if system == "no /dev/fd" else 0
    assert opened() == (before[0] + descriptors, before[1] + 20)
    views = [s[1:] for s in stored]
    del stored
    assert opened() == (before[0] + descriptors, before[1] + 20)
    del views
    assert opened() == before


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


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_no_file_is_left_however_a_process_ends_and_forks_share_them(folder):
    done = run(FORKS)
    assert done.stdout == "".join(f"{code} True []\n" for code in ENDS.values())
    assert done.returncode == -signal.SIGKILL


# --- No room ----------------------------------------------------------------------


def test_a_full_disk_is_an_error_that_says_what_to_do(folder, monkeypatch):
    monkeypatch.setattr(_offload, "_write", failing(errno.ENOSPC))
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
for chunk in (2**19, 2**21):
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


def test_a_folder_that_is_not_there_is_an_error(tmp_path, monkeypatch):
    missing = tmp_path / "missing"
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(missing))
    message = r"missing', where an unknown number of bytes is free \(No such file"
    with pytest.raises(OffloadError, match=message):
        in_file(torch.ones(3))
    missing.mkdir()
    assert torch.equal(in_file(torch.ones(3)), torch.ones(3))


def test_no_folder_at_all_is_an_error(monkeypatch):
    nowhere = failing(errno.ENOENT, "No usable temporary directory found")
    monkeypatch.delenv("REMAT_OFFLOAD_DIR", raising=False)
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    with pytest.raises(OffloadError, match=r"in a temporary folder, .*\(No usable"):
        in_file(torch.ones(3))


def test_a_mapping_that_fails_is_an_error(folder, monkeypatch):
    without_dev_fd(monkeypatch)
    monkeypatch.setattr(_offload.mmap, "mmap", failing(errno.ENOMEM))
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
    for folder in (str(tmp_path), ""):
        monkeypatch.setenv("REMAT_OFFLOAD_DIR", folder)
        in_file(torch.ones(3))
    assert used == [tempfile.gettempdir(), str(tmp_path), tempfile.gettempdir()]


# --- Memory and threads -----------------------------------------------------------


MEGABYTE = 2**20


def anonymous_bytes():
    # What other tests freed is given back first: the next tensor would take it.
    ctypes.CDLL(None).malloc_trim(0)
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


def test_threads_store_at_the_same_time(folder):
    start = Barrier(4)

    def work(k):
        start.wait(timeout=60)
        generator = torch.Generator().manual_seed(k)
        xs = [torch.randn(50, 70, generator=generator).t() for _ in range(30)]
        files = fetched(xs)
        for j, x in enumerate(xs):
            assert_same_bits(files.take(j), x)
        return len(xs)

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(work, range(4), timeout=120)) == 120


# --- Ranks ---


ON_DISK = policies.dots_saveable.but_offload(to="disk")


def offloading(fn):
    return remat(fn, policy=ON_DISK)


def offloaded():
    """The files that are mapped into this process: folders, and how often."""
    maps = Path("/proc/self/maps").read_text()
    return re.findall(r"/ranks/(\d+)/\S* \(deleted\)", maps)


def in_own_folder(folder, rank):
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["REMAT_OFFLOAD_DIR"] = f"{folder}/$LOCAL_RANK"


def train_both(folder, rank):
    """Train plain and offloading; say which files there are after a forward."""
    in_own_folder(folder, rank)
    results = []
    for make in replicated(called), sharded(called):
        models = []
        for wrap in plainly, offloading:
            torch.manual_seed(0)
            models.append(make(wrap))
            results.append(train(models[-1], rank)[0])
        out = models[-1](torch.ones(4, 4)).sum()
        results.append(offloaded())
        out.backward()
        results.append(offloaded())
    return results


def folders(tmp_path):
    ranks = [tmp_path / "ranks" / str(rank) for rank in range(2)]
    for folder in ranks:
        folder.mkdir(parents=True)
    return ranks


@ON_LINUX
@needs_gloo
@pytest.mark.slow
def test_each_rank_offloads_to_its_own_folder(tmp_path):
    ranks = folders(tmp_path)
    both = in_two_processes(tmp_path, train_both, str(tmp_path / "ranks"))
    for rank, results in enumerate(both):
        for want, got, held, after in (results[:4], results[4:]):
            assert_same(got, want)
            assert len(held) >= 3  # a product of each block
            assert {*held} == {str(rank)}
            assert after == []
        assert [*ranks[rank].iterdir()] == []


def die(folder, rank):
    """Be killed in the middle of a step, with residuals on disk."""
    in_own_folder(folder, rank)
    model = replicated(called)(offloading)
    one_batch(model, rank, 0)
    out = model(torch.ones(4, 4)).sum()
    held = len(offloaded())
    Path(folder, f"held by {rank}").write_text(str(held))
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    out.backward()


@ON_LINUX
@needs_gloo
@pytest.mark.slow
def test_a_rank_that_is_killed_leaves_nothing_behind(tmp_path):
    ranks = folders(tmp_path)
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        in_two_processes(tmp_path, die, str(tmp_path / "ranks"))
    for rank, folder in enumerate(ranks):
        assert int((tmp_path / "ranks" / f"held by {rank}").read_text()) >= 3
        assert [*folder.iterdir()] == []
