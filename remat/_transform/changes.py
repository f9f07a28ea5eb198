"""Writes to inputs: who makes them, those that torch does not count, and what is read.

    changes_of, changed_by  what a call or a body of a node changes, and at which line
    FirstBytes              what the first calls write though torch does not count it
    as_written              a recompute on large inputs that the forward wrote to

Invariant: a recompute never reads of an input what is not as it was at the call, and
afterwards it holds what it held before. A write that may be repeated is no error.
Rejected: to watch every forward, or to copy large inputs in each: most are only read.
"""

import contextlib
import functools
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tag, Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._ambient.ambient import Ambient
from remat._base.absent import DETACH, LIKE
from remat._base.errors import MutationError
from remat._base.operators import Observer
from remat._base.source import user_line
from remat._base.tensors import taken_apart, version_of, versions_of
from remat._base.types import TENSORS, Fn
from remat._partial.effects import written_by
from remat._reach.reach import Reach
from remat._torch.levels import base_tensor
from remat._torch.modes import (
    call_kernel,
    function_mode_count,
    no_torch_functions,
    unseen,
)
from remat._torch.nodes import faking, inputs_of_body, run_body
from remat._torch.operators import is_view_op
from remat._torch.tensors import has_no_memory, is_shared, preserved_version, storage_id
from remat._transform.leaves import bytes_at


def changes_of(
    origin: Reach, inputs: Sequence[Tensor], run: Callable[[Sequence[Tensor]], object]
) -> dict[int, str]:
    """Run a function once more, on copies; return what changes each input.

    By its index: the operation and the user's line, the first change first.
    """
    if not all(map(_can_be_copied, inputs)):
        return {}
    found: dict[int, str] = {}
    with contextlib.suppress(Exception), torch.no_grad():  # the error is another one
        copies = [t.detach().clone() for t in inputs]
        index = {storage_id(t): i for i, t in enumerate(copies)}
        ambient = Ambient(origin.streams, True)
        ambient.forward_done()
        with ambient.restored(), _NoteChanges(index, found):
            run(copies)
    return found


def changed_by(body: Any) -> tuple[Sequence[int], bool]:
    """Return the inputs that the body of a node changes; whether others share them.

    This is remembered with it.
    """
    known = body.meta.get("remat_changes")
    if known is None:
        known = body.meta["remat_changes"] = _changes_of_body(body)
    return known


def _changes_of_body(body: Any) -> tuple[Sequence[int], bool]:
    examples = inputs_of_body(body)
    found: dict[int, str] = {}
    with faking(examples) as copies:
        if copies is None:
            return (), False
        index = {_memory(c): i for i, c in enumerate(copies) if isinstance(c, Tensor)}
        with _NoteChanges(index, found):
            outs = run_body(body, *copies)
    inputs = sorted(found)
    changed = [_memory(examples[i]) for i in inputs]
    others = [e for i, e in enumerate(examples) if i not in found]
    others = {_memory(e) for e in others if isinstance(e, Tensor)}
    results = {_memory(o) for o in tree_leaves(outs) if isinstance(o, Tensor)}
    is_shared = len({*changed}) < len(changed) or not others.isdisjoint(changed)
    written = {_memory(copies[i]) for i in inputs}
    return inputs, is_shared or not results.isdisjoint(written)


def _memory(tensor: Tensor) -> int:
    """Return the number of the storage of a tensor, inside of all wrappers."""
    return storage_id(taken_apart(base_tensor(tensor))[0])


def _can_be_copied(tensor: Tensor) -> bool:
    """Say whether a tensor is strided and its memory is there. FSDP frees memory."""
    if tensor.layout is not torch.strided or type(tensor) not in TENSORS:
        return False
    below = base_tensor(tensor)
    return tensor.is_meta or below.untyped_storage().nbytes() >= below.nbytes


class _NoteChanges(Observer):
    """Notes the first operation that writes to each of some storages."""

    unseen = frozenset()

    def __init__(self, index: dict[int, int], found: dict[int, str]) -> None:
        super().__init__()
        self._index, self._found = index, found

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Before it runs: it may give a tensor other memory.
        for tensor in written_by(func, args, kwargs):
            i = self._index.get(_memory(tensor))
            if i is not None:
                self._found.setdefault(i, f"{func} at {user_line()}")
        return super().run(func, args, kwargs)


# --- Writes that torch does not count, in the first calls ---


_CALLS = 3  # in which they are looked for
_BYTES = 64  # of each tensor that are read
# How many calls there were of an object, or of a function's code; with a reference.
_COUNTED: dict[int, tuple[Any, int]] = {}


class FirstBytes:
    """The first bytes of tensors in the first calls of an object, or of some code.

    Torch does not count writes through `.data` and `.numpy()`. A function that does so
    usually does it in its first call, and to a whole tensor.
    """

    def __init__(self, tensors: Sequence[Tensor], key: int = 0) -> None:
        self._then, self._key = _first_bytes(tensors), key  # of what is called

    def look_again(self) -> None:
        """Watch the next calls, too."""
        if known := _COUNTED.get(self._key):
            _COUNTED[self._key] = known[0], 0

    def changed(
        self, tensors: Sequence[Tensor], known: Container[int] = ()
    ) -> list[int]:
        """Return which hold other bytes now, in the same memory and version."""
        pairs = enumerate(zip(self._then, _first_bytes(tensors), strict=True))
        changed = (i for i, (a, b) in pairs if a and b and a[0] == b[0] and a != b)
        return [i for i in changed if i not in known]


def first_bytes(owner: Any, tensors: Sequence[Tensor]) -> FirstBytes | None:
    """Note them if this is one of the first calls of an object or a function."""
    if type(owner) is FunctionType:
        owner = owner.__code__  # functions are often made anew for a call
    known = _COUNTED.get(key := id(owner))
    if known is None:
        if not type(owner).__weakrefoffset__:
            return None
        known = weakref.ref(owner, lambda _: _COUNTED.pop(key, None)), 0
    elif known[1] == _CALLS:
        return None
    _COUNTED[key] = known[0], known[1] + 1
    return FirstBytes(tensors, key)


def run_watched(
    reach: Any, at: Sequence[int], tensors: Sequence[Tensor], run: Fn, *args: Any
) -> Any:
    """Run a call again; refuse a write that changes what the forward wrote.

    `at` are the inputs to which the forward wrote and torch did not count it.
    """
    written = [tensors[i] for i in at]
    noted = FirstBytes(written)
    try:
        return run(*args)
    finally:  # also where it stops early
        for k in noted.changed(written):
            text = _UNCOUNTED.format(name=reach.name_of(at[k]), label=reach.label)
            raise MutationError(text)


def _first_bytes(tensors: Sequence[Tensor]) -> list[Any]:
    if function_mode_count():
        with no_torch_functions():  # a mode may note who reads memory
            return [*map(_held, tensors)]
    return [*map(_held, tensors)]


def _held(t: Tensor) -> Any:
    """Return address, version and bytes; None if to read the memory may write to it."""
    is_plain = type(t) in TENSORS and t.is_cpu and t.layout is torch.strided
    try:
        if not is_plain or not t.numel() or has_no_memory(t) or is_shared(t):
            return None
        if t.untyped_storage().nbytes() < t.nbytes:
            return None  # FSDP frees the memory of what it gathers
    except RuntimeError:
        return None  # of a vmap that has ended
    count = min(_BYTES, t.nbytes) if t.is_contiguous() else t.element_size()
    address = t.data_ptr()
    return (address, version_of(t)), bytes_at(address, count)


# --- Large inputs that the forward wrote to, as to a cache ---
#
# Nothing is copied before a forward. A recompute starts from what they held when the
# forward ended, if the next call that may write to them has copied that, as it does if
# somebody may ask for it; else from what they hold by then. It may read an element that
# it has written itself, and one that nobody has written since the call began.


_aten: Any = torch.ops.aten
# These write all of what they are given, and read nothing of it.
_FILLS = {
    *(_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar),
    *(_aten.fill_.Tensor, _aten.normal_.default, _aten.uniform_.default),
    *(_aten.bernoulli_.float, _aten.bernoulli_.Tensor, _aten.exponential_.default),
    *(_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from")),
    *(_aten._foreach_zero_.default, _aten._foreach_copy_.default),
}
# These write a part of it, given the places and the values.
_PARTS = {
    *(_aten.index_put_.default, _aten.put_.default, _aten.scatter_.src),
    *(_aten.scatter_.value, _aten.index_copy_.default, _aten.index_fill_.int_Scalar),
    *(_aten.index_fill_.int_Tensor, _aten.masked_fill_.Scalar),
    *(_aten.masked_fill_.Tensor, _aten.masked_scatter_.default),
    _aten.fill_diagonal_.default,
}
_VALUES = {"value", "values", "src", "source", "fill_value"}
# What calls wrote to, while somebody may ask for their values.
ENDED: set["weakref.ref[HeldAtEnd]"] = set()


class HeldAtEnd:
    """What an input held that a forward wrote to, when that ended."""

    __slots__ = ("__weakref__", "held", "storage", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.storage, self.version = storage_id(tensor), tensor._version
        # Its memory then, if another call may have written to it since.
        self.held: torch.UntypedStorage | None = None
        ENDED.add(weakref.ref(self, ENDED.discard))


def before_a_call(inputs: Sequence[Tensor]) -> None:
    """Copy what a call may write to and an earlier one needs as it is."""
    by_storage = {storage_id(t): t for t in inputs if is_plain(t)}
    for written in filter(None, [ref() for ref in [*ENDED]]):
        t = by_storage.get(written.storage)
        if t is not None and written.held is None and written.version == t._version:
            with unseen():
                written.held = t.untyped_storage().clone()


def is_written(inputs: Sequence[Tensor], saved: Any) -> bool:
    """Say whether a forward wrote to an input that needs no grad and has no copy."""
    each = enumerate(zip(versions_of(inputs), saved.versions, saved.needs, strict=True))
    copied = saved.may_be_written
    return any(a != b and not need and i not in copied for i, (a, b, need) in each)


def note_written(
    inputs: Sequence[Tensor], saved: Any, written: Sequence[int]
) -> dict[int, HeldAtEnd]:
    """Note, after the forward, to which inputs it wrote."""
    for i in written:  # hooks around the call may have packed what they held before
        saved.values[i], saved.versions[i] = inputs[i].detach(), inputs[i]._version
    return {i: HeldAtEnd(inputs[i]) for i in written}


class _Elements:
    """Which elements of a storage a run has written, and which it read before."""

    def __init__(self, tensor: Tensor, name: Callable[[], str], others: bool) -> None:
        self.name, self._others, self._size = name, others, tensor.element_size()
        count = tensor.untyped_storage().nbytes() // self._size
        self._written = torch.zeros(count, dtype=torch.bool, device=tensor.device)
        self._read = torch.zeros_like(self._written)

    def may_be_used(self, tensor: Tensor, *, reads: bool, marks: Any = None) -> bool:
        """Note that elements are read, and then that those that are marked are written.

        Say whether what is read is as it was, and nothing is written that was read.
        """
        written, read = self._of(self._written, tensor), self._of(self._read, tensor)
        if written is None or read is None:
            return False
        if reads:
            if not (self._others or written.all()):
                return False
            read |= ~written
        new = torch.zeros_like(written)
        if marks is not None:
            marks(new)
            written |= new
        return not (read & new).any()

    def _of(self, elements: Tensor, tensor: Tensor) -> Tensor | None:
        if tensor.element_size() != self._size:
            return None
        # Of several elements that are one in memory, the first.
        pairs = [*zip(tensor.shape, tensor.stride(), strict=True)]
        shape = [size if stride else min(size, 1) for size, stride in pairs]
        return elements.as_strided(shape, tensor.stride(), tensor.storage_offset())


class ReadsWritten(Observer):
    """A mode for a recompute on inputs that the forward wrote to.

    Each has its name, and whether what the run has not written is as at the call.
    """

    unseen = frozenset({DETACH})

    def __init__(self, tensors: Sequence[tuple[Tensor, Any, bool]]) -> None:
        super().__init__()
        with unseen():
            self._known = {storage_id(t): _Elements(t, n, o) for t, n, o in tensors}

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not (is_view_op(func) or Tag.inplace_view in func.tags):
            values = tree_leaves((args, kwargs))
            for t, elements in self._known_of(values):
                is_target = any(t is w for w in written_by(func, args, kwargs))
                marks = _marks(func, args, kwargs) if is_target else None
                reads = marks is None or sum(t is v for v in values) > 1
                reads &= func.overloadpacket.__name__ not in LIKE
                marks = marks or (_mark_all if is_target else None)
                with unseen():
                    is_right = elements.may_be_used(t, reads=reads, marks=marks)
                if not is_right:
                    message = _READ.format(name=elements.name(), what=func)
                    raise MutationError(message)
        return call_kernel(func, *args, **kwargs)

    @override
    def note_unseen_reads(self, values: Sequence[Any]) -> None:
        for t, elements in self._known_of(values):
            with unseen():
                is_right = elements.may_be_used(t, reads=True)
            if not is_right:
                what = "what torch compiles by itself"
                raise MutationError(_READ.format(name=elements.name(), what=what))

    def _known_of(self, values: Sequence[Any]) -> list[tuple[Tensor, _Elements]]:
        tensors = [t for t in values if isinstance(t, Tensor)]
        tensors = [t for t in tensors if t.layout is torch.strided]
        found = ((t, self._known.get(storage_id(t))) for t in tensors)
        return [(t, elements) for t, elements in found if elements is not None]


def is_plain(tensor: Any) -> bool:
    """Say whether a tensor is strided, of no subclass, and torch counts its writes."""
    is_strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_strided and not tensor.is_inference()


def _mark_all(new: Tensor) -> None:
    new.fill_(True)


def _marks(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[Tensor], object] | None:
    """Return what marks what an operation writes; None if it reads that, too."""
    arguments = func._schema.arguments
    if func in _FILLS or any(a.is_out for a in arguments):
        return _mark_all
    named = [(a.name, value) for a, value in zip(arguments, args, strict=False)]
    if func not in _PARTS or kwargs or ("accumulate", True) in named[3:]:
        return None
    # The operation itself marks them: it writes True in place of its values.
    with unseen():
        others = [
            (torch.ones_like(a, dtype=torch.bool) if isinstance(a, Tensor) else True)
            if name in _VALUES
            else a
            for name, a in named[1:]
        ]
    return lambda new: func(new, *others)


@contextmanager
def as_written(
    inputs: Mapping[int, HeldAtEnd],
    tensors: Sequence[Tensor],
    name_of: Callable[[int], str],
    changed: Container[int],
) -> Iterator[None]:
    """Run a recompute on `tensors`, of which the forward wrote to some inputs.

    `changed` are the indices of inputs that were changed since the forward ended.
    """
    found = {i: tensors[i] for i in inputs}
    with preserved_version((*found.values(),)):
        with unseen():
            # Whole storages: a view may show an element twice.
            storages = {storage_id(t): t.untyped_storage() for t in found.values()}
            before = [(storage, storage.clone()) for storage in storages.values()]
            lost = {i for i in inputs if i in changed}
            for i in [*lost]:
                held = inputs[i].held
                if held is not None:
                    found[i].untyped_storage().copy_(held)
                    lost.remove(i)
        names = {i: functools.partial(name_of, i) for i in inputs}
        reads = [(t, names[i], i not in lost) for i, t in found.items()]
        try:
            with ReadsWritten(reads):
                yield
        finally:
            with unseen(), torch.no_grad():
                for storage, held in before:
                    storage.copy_(held)


_UNCOUNTED = (
    "remat: `{name}` was changed inside {label} by a write that torch does not count, "
    "as through `.data`, `.numpy()` or a pointer, and the recompute did it again. Its "
    "values and these gradients are not those of plain code: do it outside, or in "
    "place on a tensor that needs no gradient (`with torch.no_grad()`)."
)
_READ = (
    "remat: `{name}` was changed in place inside the function, and the recompute reads "
    "of it what is not as it was at the call (in {what}). Work on a copy "
    "(`{name}.clone()`), or write what is read before it is read."
)
