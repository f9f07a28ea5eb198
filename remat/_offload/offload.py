"""Offloads residuals to host memory or to a file, and brings them back.

Invariant: what comes back has the shape, strides and bits of what went. A file has no
name, so that none is left behind even if the process is killed. It is written before it
is mapped, so that a full disk is an error and not a signal.
Rejected: a folder that is removed at exit: after a SIGKILL nobody removes it. Python's
own `mmap` where there is a choice: it keeps a file descriptor for each residual. And
`contiguous`: a matrix product may add up in another order for a transposed matrix.
"""

import ctypes
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import IO, Any, NamedTuple, Self

import torch
from torch import Tensor

from remat._base.errors import OffloadError
from remat._base.tensors import describe_meta, taken_apart
from remat._base.types import TENSORS
from remat._torch.graphs import wait_for
from remat._torch.modes import undisturbed
from remat._torch.tensors import is_shared


def room(nbytes: int, device: torch.device) -> Tensor:
    """Return uninitialized bytes."""
    return torch.empty(nbytes, dtype=torch.uint8, device=device)


def typed(data: Tensor, like: Tensor, stride: Sequence[int] | None = None) -> Tensor:
    """Return bytes as a tensor of the shape and dtype of another tensor."""
    out = torch.empty(0, dtype=like.dtype, device=data.device)
    stride = like.stride() if stride is None else stride
    return out.set_(data.untyped_storage(), 0, like.shape, stride)


def packed(tensor: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return the bytes of a tensor without gaps, and its strides in these.

    If its elements overlap, the whole range that they reach over is taken.
    """
    dense = _unexpanded(tensor.detach()).resolve_conj().resolve_neg()
    if _has_gaps(dense.shape, dense.stride()):
        dense = dense.clone()
    size, stride = dense.element_size(), dense.expand(tensor.shape).stride()
    nbytes, start = extent(dense.shape, stride) * size, dense.storage_offset() * size
    data = room(0, dense.device)
    return data.set_(dense.untyped_storage(), start, (nbytes,), (1,)), stride


def respaced(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Return a tensor with these strides, copied if it had others."""
    if tensor.stride() == stride:
        return tensor
    nbytes = extent(tensor.shape, stride) * tensor.element_size()
    out = typed(room(nbytes, tensor.device), tensor, stride)
    _unexpanded(out).copy_(_unexpanded(tensor))
    return out


def _unexpanded(tensor: Tensor) -> Tensor:
    """Return a tensor without the elements that `expand` repeats."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    shape = [size if stride else min(size, 1) for size, stride in sizes]
    return tensor.as_strided(shape, tensor.stride())


def extent(shape: Sequence[int], stride: Iterable[int]) -> int:
    """Return how many elements of its storage a tensor reaches over."""
    if 0 in shape:
        return 0
    pairs = zip(shape, stride, strict=True)
    return 1 + sum((n - 1) * distance for n, distance in pairs)


def _has_gaps(shape: Sequence[int], stride: Iterable[int]) -> bool:
    """Say whether a tensor leaves gaps in the range that its elements reach over.

    False if elements may overlap, other than by `expand`.
    """
    if 0 in shape:
        return False
    reach, count = 0, 1
    for distance, n in sorted(zip(stride, shape, strict=True)):
        if distance and n > 1:
            if distance <= reach:
                return False
            reach += distance * (n - 1)
            count *= n
    return reach + 1 > count


_CPU = torch.device("cpu")


class Origin(NamedTuple):
    """Where a tensor was, and its strides. An offloaded tensor has no gaps."""

    device: torch.device
    stride: tuple[int, ...]


def origin_of(tensor: Tensor) -> Origin:
    """Return what `Fetched` needs to give a tensor back."""
    with undisturbed():
        return Origin(tensor.device, tensor.stride())


# --- Away ---


def in_host_memory(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned host memory. A tensor on the host stays as it is.

    The copy runs while the device computes: only `Fetched` may read it before the
    device is synchronized. If memory cannot be pinned, it is in pageable memory.
    """
    with undisturbed():
        if not _has_data(tensor) or tensor.is_cpu:
            return tensor
        wait_for(tensor)  # a collective may yet write to it
        data, stride = packed(tensor)
        lane = _lane_of(tensor.device)
        host = data.cpu() if lane is None else lane.away(data)
        return typed(host, tensor, stride)


def in_file(tensor: Tensor) -> Tensor:
    """Write a tensor to a file without a name, and map the file into memory.

    The file is in the folder `REMAT_OFFLOAD_DIR`, or where Python puts temporary files,
    and is freed with the tensor. If the folder is on a disk, the kernel may write pages
    out and drop them when memory is short.

    Example:
        >>> x = torch.linspace(0, 1, 6).view(2, 3).t()
        >>> away = in_file(x)
        >>> fetched = Fetched([away], [origin_of(x)])
        >>> torch.equal(fetched.take(0), x), fetched.take(0).stride()
        (True, (1, 3))
    """
    with undisturbed():
        if not _has_data(tensor):
            return tensor
        wait_for(tensor)
        data, stride = packed(tensor)
        if not data.numel():
            return typed(data.cpu(), tensor, stride)
        folder = os.path.expandvars(os.environ.get("REMAT_OFFLOAD_DIR", ""))
        try:
            folder = folder or tempfile.gettempdir()
            return typed(_written(data, folder), tensor, stride)
        except OSError as error:
            what = describe_meta(tensor.dtype, tensor.shape)
            raise _no_room(what, data.numel(), folder, error) from error


def _has_data(tensor: Tensor) -> bool:
    """Say whether a tensor has data; an OffloadError if it is not plain and strided."""
    storage = None
    with suppress(RuntimeError, NotImplementedError):
        storage = tensor.untyped_storage()
    if storage is not None and storage.device.type == "meta":
        return False
    what = describe_meta(tensor.dtype, tensor.shape)
    # One that is sparse, or of a level of torch.func, has no storage.
    if storage is None or type(tensor) not in TENSORS or tensor.is_quantized:
        names = {"kind": type(tensor).__qualname__, "layout": tensor.layout}
        raise OffloadError(_NOT_PLAIN.format(what=what, **names))
    count = extent(tensor.shape, tensor.stride())
    end = (tensor.storage_offset() + count) * tensor.element_size()
    if count and end > storage.nbytes():
        raise OffloadError(_FREED.format(what=what))
    return True


class Away:
    """A tensor that is away, a wrapper of one too, and what is needed to give it back.

    `move` is one of the two above.
    """

    __slots__ = ("__weakref__", "origin", "stored", "wrap")

    def __init__(self, tensor: Tensor, move: Callable[[Tensor], Tensor]) -> None:
        inner, self.wrap = taken_apart(tensor)
        self.origin = origin_of(inner)
        self.stored = move(inner)


# --- Back ---


class _Arriving(NamedTuple):
    data: Tensor
    event: torch.Event


class Fetched:
    """Gives offloaded tensors back, each just before it is used.

    While one is used, the next one is copied on a stream of its own; at most one copy
    is held. A tensor that was never moved is returned itself, and so is a mapped file,
    which the kernel is told to read meanwhile: neither may be written to.
    """

    def __init__(self, stored: Sequence[Tensor], origins: Sequence[Origin]) -> None:
        self._stored = stored
        self._origins = origins
        self._next: tuple[int, _Arriving | None] = -1, None
        with undisturbed():
            self._prefetch(0)

    @classmethod
    def of(cls, aways: Sequence[Away]) -> Self:
        """Return what gives tensors back, each without what wraps it."""
        return cls([away.stored for away in aways], [away.origin for away in aways])

    def take(self, k: int) -> Tensor:
        """Return tensor `k`: a new copy each time, if a copy is needed."""
        (device, stride), stored = self._origins[k], self._stored[k]
        with undisturbed():
            index, arriving = self._next
            if index != k:
                arriving = self._sent_back(k)
            self._prefetch(k + 1)
            if arriving is not None:
                data, event = arriving
                stream = torch.accelerator.current_stream(data.device)
                stream.wait_event(event)  # the computation waits for the copy
                data.record_stream(stream)
                stored = typed(data, stored)
            elif stored.device != device:
                data, dense = packed(stored)
                stored = typed(data.to(device), stored, dense)
            return respaced(stored, stride)

    def _prefetch(self, k: int) -> None:
        self._next = -1, None  # a copy that nobody took is freed first
        if k < len(self._stored):
            self._next = k, self._sent_back(k)

    def _sent_back(self, k: int) -> _Arriving | None:
        """Start to copy tensor `k`, if the computation need not wait for it."""
        stored, (device, _) = self._stored[k], self._origins[k]
        lane = None if stored.device == device else _lane_of(device)
        if lane is not None:
            return lane.back(packed(stored)[0])
        _read_ahead(stored.untyped_storage())
        return None


# --- Streams ---


class _Lane:
    """The copies between a device and the host, both ways on one stream of their own.

    So a tensor has arrived before it is sent back.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def away(self, data: Tensor) -> Tensor:
        host = _pinned(data.numel())
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            # Unless memory is pinned, the host could see such a copy half done.
            host.copy_(data, non_blocking=host.is_pinned())
        # The caller may free it before the copy has ended.
        data.record_stream(self._stream)
        return host

    def back(self, host: Tensor) -> _Arriving:
        with self._stream:
            data = room(host.numel(), self._device)
            data.copy_(host, non_blocking=True)
            return _Arriving(data, self._stream.record_event())


_LANES: dict[torch.device, _Lane | None] = {}


def _lane_of(device: torch.device) -> _Lane | None:
    """Return the lane of a device; None if it has no second stream."""
    if device not in _LANES:
        lane = None
        with suppress(RuntimeError):
            lane = _Lane(device)
        # Two threads must get the same one: the order of copies depends on it.
        _LANES.setdefault(device, lane)
    return _LANES[device]


def _pinned(nbytes: int) -> Tensor:
    """Return bytes in host memory, pinned if that is possible."""
    with suppress(RuntimeError):
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return room(nbytes, _CPU)


# --- Files ---


_CHUNK = 2**26  # bytes


def _written(data: Tensor, folder: str) -> Tensor:
    """Return bytes as a mapped file that has no name and just their size."""
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for piece in data.split(_CHUNK):
            _write(file, piece.cpu())
        return _mapped(file, data.numel())


def _write(file: IO[bytes], piece: Tensor) -> None:
    # Asking a copy-on-write tensor for its address would make its copy.
    piece = piece.clone() if is_shared(piece) else piece
    memory = (ctypes.c_char * piece.numel()).from_address(piece.data_ptr())
    rest = memoryview(memory)
    while rest:
        rest = rest[file.write(rest) :]


def _mapped(file: IO[bytes], nbytes: int) -> Tensor:
    """Return the bytes of a file, which may be closed afterwards."""
    path = f"/dev/fd/{file.fileno()}"
    with suppress(OSError, RuntimeError):
        if os.path.samestat(os.stat(path), os.fstat(file.fileno())):
            from_file: Any = torch.UntypedStorage.from_file
            return room(0, _CPU).set_(from_file(path, shared=True, nbytes=nbytes))
    return torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)


_LIBC: Any = ctypes.CDLL(None) if hasattr(mmap, "MADV_WILLNEED") else None


def _read_ahead(storage: torch.UntypedStorage) -> None:
    """Have the kernel read the dropped pages of a mapped file, without waiting."""
    if _LIBC is not None and storage.device.type == "cpu" and storage.is_shared():
        start, nbytes = map(ctypes.c_size_t, (storage.data_ptr(), storage.nbytes()))
        # Only advice: if it fails, reading is slower.
        _LIBC.madvise(start, nbytes, mmap.MADV_WILLNEED)


# --- Errors ---


def _no_room(what: str, nbytes: int, folder: str, error: OSError) -> OffloadError:
    free = "an unknown number of bytes is"
    with suppress(OSError):
        free = f"{shutil.disk_usage(folder).free:,} are"
    where = repr(folder) if folder else "a temporary folder"
    names = {"what": what, "nbytes": f"{nbytes:,}", "folder": where, "free": free}
    return OffloadError(_NO_ROOM.format(reason=error.strerror or error, **names))


_NO_ROOM = (
    "remat: {what} could not be offloaded to disk: {nbytes} bytes are wanted in "
    "{folder}, where {free} free ({reason}). Set the environment variable "
    "REMAT_OFFLOAD_DIR to a folder with more room, or offload less."
)
_NOT_PLAIN = (
    "remat: a {kind}, {what} of layout {layout}, cannot be offloaded: only plain "
    "strided tensors can. Have the policy save it or recompute it."
)
_FREED = (
    "remat: {what} cannot be offloaded: its memory was freed, by `resize_(0)` of its "
    "storage for instance. Have the policy recompute it."
)
