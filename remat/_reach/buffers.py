"""Buffers of numbers: one definition, and how a recompute finds what one held.

A call notes the bytes. Those of a buffer that was passed are put back for a recompute.
Of one that something holds they are up to 64 KiB, and if the forward itself changed
them. Of a larger one that it left alone, and that code names, a checksum is kept, or
one copy for all calls that found the same: one that differs at the recompute is an
error. Above 4 MiB nothing is noted of it.

Invariant: what is here leads to the buffer and to its bytes, and to nothing else.
Rejected: to hold the bytes of all. A table of 4 MiB that each block of a model reads
would be held by each call. To watch what no code names: it may be a log. A checksum
for each call: to take it costs ten times as much as to compare. To look once for many
calls: nothing tells whether an array was written to.
"""

import array
import ctypes
import math
import weakref
import zlib
from collections.abc import Callable, Iterable
from itertools import chain, repeat
from operator import is_
from typing import Any, NamedTuple, TypeAlias, cast

from remat._base.errors import MutationError
from remat._reach.objects import by_class


class Limits(NamedTuple):
    """Up to how many bytes a buffer is put back, and a change is noticed."""

    copied: float
    watched: float


PASSED = Limits(math.inf, math.inf)
HELD = Limits(2**16, 2**22)
UNNAMED = Limits(2**16, 2**16)  # held by something, and no code names it
# A buffer, how its author would write it, where that is known, and what holds it.
HeldBuffer: TypeAlias = tuple[Any, str, Limits]
Pieces: TypeAlias = list[bytearray]  # what one held, in pieces that calls share
_PIECE = 2**14  # bytes


@by_class
def is_buffer(kind: type) -> bool:
    """Say whether instances hold numbers that change in place, and maybe attributes."""
    is_masked = any(cls.__name__ == "MaskedArray" for cls in kind.__mro__)
    return not is_masked and any(map(is_bare_buffer, kind.__mro__))


@by_class
def is_bare_buffer(kind: type) -> bool:
    """Say whether instances of a class are numbers that change in place."""
    if kind in (bytearray, array.array, memoryview):
        return True
    if kind.__module__ == "mmap":
        return kind.__name__ == "mmap"
    if kind.__name__ in _ARRAYS and str(kind.__module__).startswith("numpy"):
        return True
    return kind.__base__ in _OF_C and _has_numbers(kind)


_ARRAYS = {"matrix", "memmap", "ndarray", "recarray"}
_SCALAR: Any = ctypes.c_int.__base__
_OF_C = {_SCALAR, ctypes.Array, ctypes.Structure, ctypes.Union}


def _has_numbers(kind: Any) -> bool:
    """Say whether a class of `ctypes` holds numbers, and no pointer."""
    if issubclass(kind, _SCALAR):
        return kind._type_ in "?bBcdfgGhHiIlLqQu"
    if issubclass(kind, ctypes.Array):
        return _has_numbers(kind._type_)
    if issubclass(kind, (ctypes.Structure, ctypes.Union)):
        return all(_has_numbers(of) for _, of, *_ in getattr(kind, "_fields_", ()))
    return False


def has_objects(buffer: Any) -> bool:
    """Say whether an array holds objects, which are no numbers."""
    return hasattr(buffer, "dtype") and buffer.dtype.hasobject


class Buffer:
    """A buffer of numbers, and what it held at a call.

    Attributes:
        value: the buffer.
        name: how its author would write it, where that is known.
    """

    __slots__ = (
        *("__weakref__", "_before", "_held", "_is_known", "_is_left", "_limits"),
        *("_sum", "name", "value"),
    )

    def __init__(self, value: Any, memory: Any, name: str, limits: Limits) -> None:
        self.value, self._sum, self.name, self._limits = value, 0, name, limits
        self._is_left = False  # alone by the forward, and only watched
        # What another call found is shared: blocks of a model read the same table.
        last = _LAST.get(id(value))
        last = last if last is not None and last.value is value else None
        self._before = None if last is None else weakref.ref(last)
        known = None if last is None else last._held
        self._held: Pieces | None = _pieces(memory, known or [])
        self._is_known = known is not None and _are_shared(self._held, known)
        _LAST[id(value)] = self

    def memory(self) -> Any:
        """Return what it holds now, as `memory_of` does."""
        return memory_of(self.value, self._limits.watched)

    def forward_done(self) -> None:
        """Keep no more than a checksum of what is large and was left alone.

        Two calls that have the same share the bytes, and so do others.
        """
        held = self._held
        if held is None or sum(map(len, held)) <= self._limits.copied:
            return
        memory = self.memory()
        if memory is None or not _is_same(held, memory):
            return
        self._is_left = True
        if self._is_known:
            return
        self._sum, self._held = zlib.crc32(memory), None
        before = None if self._before is None else self._before()
        if before is not None and before._is_left and before._sum == self._sum:
            self._held = before._held = held

    def exchange(self, undo: list[Callable[[], object]]) -> bool:
        """Put the bytes of the call back, and say whether the buffer holds them now.

        What puts back those of just before is added to `undo`.
        """
        value, then, memory = self.value, self._held, self.memory()
        if memory is None:
            return False
        if then is None:
            return zlib.crc32(memory) == self._sum
        if self._is_left:
            return _is_same(then, memory)
        now = _pieces(memory, then)
        del memory  # as long as it is there a bytearray keeps its length
        undo.append(lambda: _hold(value, now))
        return _hold(value, then)


# The last that was noted of each buffer, by identity.
_LAST: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()


def buffers_of(values: Iterable[HeldBuffer]) -> list[Buffer]:
    """Note what buffers hold now, but for those that are closed or too large."""
    each: dict[int, HeldBuffer] = {}
    for noted in values:
        each.setdefault(id(noted[0]), noted)  # those that were passed come first
    found = ((b, memory_of(b, of.watched), name, of) for b, name, of in each.values())
    return [Buffer(*one) for one in found if one[1] is not None]


def memory_of(buffer: Any, most: float = math.inf) -> Any:
    """Return the memory of a buffer, or a copy if that is in parts.

    None if the buffer is closed, or too large to be read.
    """
    try:
        view = memoryview(buffer)
    except ValueError:  # it is closed, or of numbers that Python does not know
        if not hasattr(buffer, "dtype") or buffer.nbytes > most:
            return None
        return buffer.tobytes()
    if view.nbytes > most:
        return None
    return view if view.c_contiguous else view.tobytes()


def _pieces(memory: Any, known: Pieces) -> Pieces:
    """Return what memory holds. Pieces that are as they were known are shared."""
    view = memoryview(memory)
    each: Iterable[Any] = [view]
    if view.nbytes > _PIECE:
        view = view.cast("B")
        each = (view[k : k + _PIECE] for k in range(0, view.nbytes, _PIECE))
    pairs = zip(each, chain(known, repeat(None)), strict=False)
    # The comparison is at the speed of C, whatever the format.
    return [
        k if k is not None and bytearray.__eq__(k, m) else bytearray(m)
        for m, k in pairs
    ]


def _is_same(held: Pieces, memory: Any) -> bool:
    return _are_shared(_pieces(memory, held), held)


def _are_shared(now: Pieces, held: Pieces) -> bool:
    return len(now) == len(held) and all(map(is_, now, held))


def _hold(buffer: Any, held: Pieces) -> bool:
    """Have a buffer of numbers hold this, in place; say whether it does."""
    memory = memory_of(buffer)
    if memory is not None and _is_same(held, memory):
        return True
    del memory
    try:
        _write(buffer, bytearray().join(held))
    except (BufferError, NotImplementedError, TypeError, ValueError):
        return False  # as it is not to be written
    return True


def _write(buffer: Any, held: bytearray) -> None:
    if hasattr(buffer, "dtype"):  # of NumPy
        base = next(cls for cls in type(buffer).__mro__ if cls.__name__ == "ndarray")
        then = base(buffer.shape, buffer.dtype, held)
        base.__setitem__(buffer, ..., then)
    elif isinstance(buffer, bytearray):
        bytearray.__setitem__(buffer, slice(None), held)
    elif isinstance(buffer, array.array):
        array.array.__delitem__(buffer, slice(None))
        array.array.frombytes(buffer, held)
    elif isinstance(buffer, memoryview):
        if buffer.ndim == 1:
            buffer[:] = memoryview(held).cast(cast("Any", buffer.format))
        else:
            buffer.cast("B")[:] = held
    elif hasattr(buffer, "flush"):  # a mapped file
        buffer[:] = held
    else:
        ctypes.memmove(ctypes.addressof(buffer), bytes(held), len(held))


def changed(buffer: Buffer, label: str) -> MutationError:
    """Return the error that a buffer of numbers is not what it was at the call."""
    kind = type(buffer.value).__name__
    name = buffer.name or kind
    return MutationError(_CHANGED.format(name=name, kind=kind, label=label))


_CHANGED = (
    "remat: `{name}` was changed between the forward and the backward of {label}, "
    "and the recompute may read it. The numbers of `{kind}` are put back up to 64 KiB, "
    "if it can be written to. Change a copy, or change it after the backward, or pass "
    "what is needed of it as a tensor."
)
