"""What the tests of offloading share: tensors of every layout, and their way back."""

import contextlib
import errno
import os
import sys
import tempfile

import pytest
import torch

from remat._offload.offload import Fetched, in_file, in_host_memory, origin_of


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
STORES = {"host": in_host_memory, "file": in_file}


def bits(tensor):
    """The bytes of the elements of a tensor, in the order of its indices."""
    tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same_bits(actual, expected):
    assert (actual.dtype, actual.device) == (expected.dtype, expected.device)
    assert (actual.shape, actual.stride()) == (expected.shape, expected.stride())
    assert actual.storage_offset() == 0
    assert torch.equal(bits(actual), bits(expected))


def fetched(xs, store=in_file):
    """Store tensors, to be taken back."""
    return Fetched([store(x) for x in xs], [origin_of(x) for x in xs])


def back(stored, tensor):
    return Fetched([stored], [origin_of(tensor)]).take(0)


def strided(shape, stride):
    return torch.randn(200).as_strided(shape, stride, 3)


def conjugate(*shape):
    return torch.randn(shape, dtype=torch.complex64).conj()


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
    "conjugate": (conjugate(4, 3).t(), 12),
    "conjugate expanded": (conjugate(3).expand(2, 3), 3),
    "conjugate windows": (conjugate(5).unfold(0, 2, 1), 8),
    "negative": (conjugate(3).imag, 3),
}


# --- Systems, and what a process has open of files --------------------------------


def failing(code, text=None):
    """A call to the system that fails."""

    def call(*_args, **_options):
        raise OSError(code, text or os.strerror(code))

    return call


def without_tmpfile(monkeypatch):
    """As on a file system that has no O_TMPFILE."""
    monkeypatch.setattr(tempfile, "_O_TMPFILE_WORKS", False, raising=False)


def without_dev_fd(monkeypatch):
    """As where /proc is not mounted, or on Windows."""
    stat, missing = os.stat, failing(errno.ENOENT)

    def limited(path, *args, **kwargs):
        is_descriptor = str(path).startswith("/dev/fd/")
        return (missing if is_descriptor else stat)(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", limited)


SYSTEMS = {
    "as it is": lambda _: None,
    "no O_TMPFILE": without_tmpfile,
    "no /dev/fd": without_dev_fd,
}


def opened():
    """How many deleted files this process has open, and how many mapped."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps") as maps:
        lines = [line for line in maps if "(deleted)" in line]
    return sum("(deleted)" in name for name in names), len(lines)


@contextlib.contextmanager
def leaving_nothing_open():
    before = opened() if sys.platform == "linux" else None
    yield
    assert before is None or opened() == before
