"""What holds numbers and is no holder: buffers, large containers, iterators.

The bytes of a buffer of numbers are put back for a recompute: of one that was passed at
any size, of one that something holds up to 4 MiB, or 64 KiB if no code names it. Calls
between which it did not change share them. A large container is only compared, and of
an iterator nothing is known: a recompute that would read it in another state gets an
error.

Invariant: what is here leads to the buffer and to its bytes, and to nothing else.
Rejected: to look once for many calls. Nothing tells whether an array was written to. To
copy the iterators that can be, but for counts: which ones these are nobody remembers.
"""

import array
import ast
import ctypes
import itertools
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import length_hint
from typing import Any, TypeAlias, cast

from torch import Tensor
from typing_extensions import override

from remat._base.errors import MutationError, RecomputeError
from remat._base.tensors import versions_of
from remat._reach.holders import container_kind
from remat._reach.objects import by_class


# Up to how many bytes are put back: of what was passed, of what something holds, and of
# that if no code names it. It may be a log.
PASSED, HELD, UNNAMED = math.inf, 2**22, 2**16
# A buffer, how its author would write it, where that is known, and this limit.
HeldBuffer: TypeAlias = tuple[Any, str, float]


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

    __slots__ = "__weakref__", "_held", "_most", "name", "value"

    def __init__(self, value: Any, memory: Any, name: str, most: float) -> None:
        self.value, self.name, self._most = value, name, most
        # What another call found is shared: blocks of a model read the same table.
        last = _LAST.get(id(value))
        known = last._held if last is not None and last.value is value else ()
        self._held = _pieces(memory, known)
        _LAST[id(value)] = self

    def memory(self) -> Any:
        """Return what it holds now, as `_memory_of` does."""
        return _memory_of(self.value, self._most)

    def exchange(self, undo: list[Callable[[], object]]) -> bool:
        """Put the bytes of the call back, and say whether the buffer holds them now.

        What puts back those of just before is added to `undo`.
        """
        memory = self.memory()
        if memory is None:
            return False
        now = _pieces(memory, self._held)
        del memory  # as long as it is there a bytearray keeps its length
        undo.append(lambda: _hold(self.value, now))
        return _hold(self.value, self._held)


# The last that was noted of each buffer, by identity.
_LAST: weakref.WeakValueDictionary[int, Buffer] = weakref.WeakValueDictionary()


def buffers_of(values: Iterable[HeldBuffer]) -> list[Buffer]:
    """Note what buffers hold now, but for those that are closed or too large."""
    each: dict[int, HeldBuffer] = {}
    for noted in values:
        each.setdefault(id(noted[0]), noted)  # those that were passed come first
    found = ((b, _memory_of(b, most), name, most) for b, name, most in each.values())
    return [Buffer(*one) for one in found if one[1] is not None]


def _memory_of(buffer: Any, most: float = math.inf) -> Any:
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


def _pieces(memory: Any, known: Sequence[bytearray]) -> list[bytearray]:
    """Return what memory holds. Pieces that are as they were known are shared."""
    view = memoryview(memory)
    each: Iterable[Any] = [view]
    if view.nbytes > _PIECE:
        view = view.cast("B")
        each = (view[k : k + _PIECE] for k in range(0, view.nbytes, _PIECE))
    pairs = zip(each, itertools.chain(known, itertools.repeat(None)), strict=False)
    # The comparison is at the speed of C, whatever the format.
    return [
        k if k is not None and bytearray.__eq__(k, m) is True else bytearray(m)
        for m, k in pairs
    ]


_PIECE = 2**14  # bytes


def _hold(buffer: Any, held: list[bytearray]) -> bool:
    """Have a buffer of numbers hold this, in place; say whether it does."""
    memory = _memory_of(buffer)
    if memory is not None:
        now = _pieces(memory, held)
        if len(now) == len(held) and all(map(operator.is_, now, held)):
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
    """Return the error that a buffer of numbers cannot be what it was at the call."""
    kind = type(buffer.value).__name__
    name = buffer.name or kind
    return MutationError(_CHANGED.format(name=name, kind=kind, label=label))


class Iterated:
    """An iterator that a call reached."""

    __slots__ = "_count", "_instead"

    def __init__(self, value: Any, name: str) -> None:
        # Objects get their numbers from a count. Python 3.14 cannot copy it.
        self._count = _next_and_step(value) if type(value) is itertools.count else ()
        # These give the same each time, or nothing.
        is_endless = type(value) is itertools.repeat and length_hint(value, -1) < 0
        is_at_end = type(value) is types.GeneratorType and value.gi_frame is None
        self._instead = value if is_endless or is_at_end else _UsedUp(value, name)

    def again(self) -> Any:
        """Return what a recompute finds in its place."""
        return itertools.count(*self._count) if self._count else self._instead


def _next_and_step(value: Any) -> Sequence[Any]:
    """Return what a count gives next, and its step if that is not 1; () if unknown."""
    try:
        found = ast.literal_eval(repr(value).removeprefix("count"))
    except (SyntaxError, ValueError):
        return ()
    return found if isinstance(found, tuple) else (found,)


class _UsedUp:
    """In place of an iterator: an error where that is read, and else like it.

    A cursor of a database, or a reader of a file, has other methods, too. Such a one is
    held. Any other may hold a graph.
    """

    __slots__ = ("_kind", "_name", "_value")

    def __init__(self, value: Any, name: str) -> None:
        self._kind, self._name = type(value), name
        names = {name for cls in self._kind.__mro__ for name in cls.__dict__}
        more = names.difference(dir(types.GeneratorType))
        has_methods = any(not name.startswith("_") for name in more)
        self._value = value if has_methods else None

    @property
    @override
    def __class__(self) -> Any:  # pyrefly: ignore[bad-override]
        return self._kind

    def __iter__(self) -> Any:
        return self

    __copy__ = __iter__

    def __next__(self, *_: Any) -> Any:
        text = _SPENT.format(kind=self._kind.__name__, name=self._name)
        raise RecomputeError(text)

    send = throw = __next__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._value, name)


class Large:
    """A container of many numbers, words and tensors: not copied, only compared."""

    __slots__ = ("_name", "_versions", "keys", "kind", "value", "values")

    def __init__(self, value: Any, name: str) -> None:
        kind = container_kind(type(value))
        assert kind is not None
        self.value, self.kind, self._name = value, kind, name
        self.keys, self.values = kind.held(value)
        self._versions = _versions(self.values)

    def now(self) -> tuple[str, list[Any], list[Any]]:
        """Return its name, its keys and its values."""
        return f"`{self._name}`", *self.kind.held(self.value)

    def has_grown(self) -> bool:
        """Say whether something was added to its end since."""
        keys, values = self.kind.held(self.value)
        added = len(values) - len(self.values)
        is_same = added >= 0 and all(map(operator.is_, values, self.values))
        is_same = is_same and all(map(operator.is_, keys, self.keys))
        is_set = isinstance(self.value, (set, frozenset))
        if (
            not is_same
            or (added and is_set)
            or _versions(self.values) != self._versions
        ):
            count = f"{len(values):,}"
            raise RecomputeError(_LARGE.format(name=self._name, count=count))
        return added > 0


def _versions(values: Iterable[Any]) -> list[int | None]:
    return versions_of([v for v in values if isinstance(v, Tensor)])


_CHANGED = (
    "remat: `{name}` was changed between the forward and the backward of {label}, "
    "and the recompute may read it. The numbers of this `{kind}` cannot be put back. "
    "Change a copy, or change it after the backward, or pass what is needed of it as a "
    "tensor."
)
_SPENT = (
    "remat: a recompute reads the {kind} `{name}`, which the forward may have read "
    "already. Use a list or a tuple, pass what was read as an argument, or make the "
    "iterator inside the function."
)
_LARGE = (
    "remat: `{name}` changed since the call. It has {count} entries, too many to be "
    "copied in each call, and a recompute would read it as it is now. Pass what is "
    "needed of it as an argument, or change it after the backward; if the function "
    "changes it, outside of the function."
)
