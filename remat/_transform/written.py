"""What a recompute reads of large inputs that the forward wrote to, as to a cache.

Nothing is copied before a forward: large inputs take much memory, and most are only
read. So a recompute starts from what they held when the forward ended, if the next call
that may write to them has copied that, as it does if somebody may ask for it; else from
what they hold by then. It may read an element that it has written itself, and one that
nobody has written since the call began.

Invariant: anything else is refused, and afterwards they hold what they held before.
Rejected: to copy them in each call from the second one on. A cache is not copied at all
if each call is followed by its backward.
"""

import functools
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._base.absent import DETACH, LIKE
from remat._base.errors import MutationError
from remat._base.observer import Observer
from remat._base.tensors import versions_of
from remat._partial.effects import written_by
from remat._torch import (
    call_kernel,
    is_view_op,
    preserved_version,
    storage_id,
    unseen,
)
from remat._transform.inputs import SavedInputs


_aten: Any = torch.ops.aten
# These write all of what they are given, and read nothing of it.
_FILLS = {
    *(_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar),
    *(_aten.fill_.Tensor, _aten.normal_.default, _aten.uniform_.default),
    *(_aten.bernoulli_.float, _aten.bernoulli_.Tensor, _aten.exponential_.default),
    *(_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from")),
    *(_aten._foreach_zero_.default, _aten._foreach_copy_.default),
}


def _mark_all(new: Tensor, *_: Any) -> None:
    new.fill_(True)


def _mark_places(new: Tensor, indices: Any, *_: Any) -> None:
    _aten.index_put_(new, indices, new.new_ones(()))


def _mark_numbers(new: Tensor, index: Tensor, *_: Any) -> None:
    new.put_(index, new.new_ones(index.shape))


def _mark_scattered(new: Tensor, dim: int, index: Tensor, *_: Any) -> None:
    new.scatter_(dim, index, True)


def _mark_slices(new: Tensor, dim: int, index: Tensor, *_: Any) -> None:
    new.index_fill_(dim, index, True)


def _mark_masked(new: Tensor, mask: Tensor, *_: Any) -> None:
    new.masked_fill_(mask, True)


def _mark_diagonal(new: Tensor, _: Any, wrap: bool = False) -> None:
    new.fill_diagonal_(True, wrap)


# These write a part of it, which is marked given their other arguments.
_PARTS: dict[Any, Callable[..., None]] = {
    _aten.index_put_.default: _mark_places,
    _aten.put_.default: _mark_numbers,
    _aten.scatter_.src: _mark_scattered,
    _aten.scatter_.value: _mark_scattered,
    _aten.index_copy_.default: _mark_slices,
    _aten.index_fill_.int_Scalar: _mark_slices,
    _aten.index_fill_.int_Tensor: _mark_slices,
    _aten.masked_fill_.Scalar: _mark_masked,
    _aten.masked_fill_.Tensor: _mark_masked,
    _aten.masked_scatter_.default: _mark_masked,
    _aten.fill_diagonal_.default: _mark_diagonal,
}
_ADDS = {_aten.index_put_.default, _aten.put_.default}  # if the fourth argument says so


# These change the shape alone, or make the memory of a result as large as it is.
_SHAPES = {
    *(_aten.t_.default, _aten.transpose_.default, _aten.unsqueeze_.default),
    *(_aten.squeeze_.default, _aten.squeeze_.dim, _aten.squeeze_.dims),
    *(_aten.as_strided_.default, _aten.resize_.default),
}


# What calls wrote to, while somebody may ask for their values.
ENDED: set["weakref.ref[HeldAtEnd]"] = set()


class HeldAtEnd:
    """What an input held that a forward wrote to, when that ended.

    Attributes:
        storage: the number of its storage.
        held: its memory then, if another call may have written to it since.
    """

    __slots__ = ("__weakref__", "_version", "held", "storage")

    def __init__(self, tensor: Tensor) -> None:
        self.storage, self._version = storage_id(tensor), tensor._version
        self.held: torch.UntypedStorage | None = None
        ENDED.add(weakref.ref(self, ENDED.discard))

    def hold(self, tensor: Tensor) -> None:
        """Copy the memory, if it is that of a tensor, and as it was."""
        if self.held is None and self._version == tensor._version:
            with unseen():
                self.held = tensor.untyped_storage().clone()


def before_a_call(inputs: Sequence[Tensor]) -> None:
    """Copy what a call may write to and an earlier one needs as it is."""
    by_storage = {storage_id(t): t for t in inputs if is_plain(t)}
    for written in [ref() for ref in [*ENDED]]:
        tensor = None if written is None else by_storage.get(written.storage)
        if written is not None and tensor is not None:
            written.hold(tensor)


def is_written(inputs: Sequence[Tensor], saved: SavedInputs) -> bool:
    """Say whether a forward wrote to an input that needs no grad and has no copy."""
    now = versions_of(inputs)
    if now == saved.versions:
        return False
    each = enumerate(zip(now, saved.versions, saved.needs, strict=True))
    copied = saved.may_be_written
    return any(a != b and not need and i not in copied for i, (a, b, need) in each)


def note_written(
    inputs: Sequence[Tensor], saved: SavedInputs, written: Sequence[int]
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

    def may_read(self, tensor: Tensor) -> bool:
        """Note that elements are read; say whether they are what they were."""
        written, read = self._of(self._written, tensor), self._of(self._read, tensor)
        if written is None or read is None or not (self._others or written.all()):
            return False
        read |= ~written
        return True

    def may_write(self, tensor: Tensor, where: Callable[[Tensor], object]) -> bool:
        """Note what `where` marks as written; say whether none of it was read."""
        written, read = self._of(self._written, tensor), self._of(self._read, tensor)
        if written is None or read is None:
            return False
        new = torch.zeros_like(written)
        where(new)
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

    Args:
        tensors: those inputs, each with its name, and whether an element that the run
            has not written is what it was at the call.
    """

    unseen = frozenset({DETACH})

    def __init__(
        self, tensors: Sequence[tuple[Tensor, Callable[[], str], bool]]
    ) -> None:
        super().__init__()
        with unseen():
            self._known = {storage_id(t): _Elements(t, n, o) for t, n, o in tensors}

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not (is_view_op(func) or func in _SHAPES):
            values = tree_leaves((args, kwargs))
            with unseen():
                for t in values:
                    elements = self._elements_of(t)
                    if elements is None:
                        continue
                    is_target = any(t is w for w in written_by(func, args, kwargs))
                    marks = _marks(func, args, kwargs) if is_target else None
                    reads = marks is None or sum(t is v for v in values) > 1
                    reads &= func.overloadpacket.__name__ not in LIKE
                    is_right = not reads or elements.may_read(t)
                    if is_target:
                        is_right &= elements.may_write(t, marks or _mark_all)
                    if not is_right:
                        message = _READ.format(name=elements.name(), what=func)
                        raise MutationError(message)
        return call_kernel(func, *args, **kwargs)

    @override
    def note_unseen_reads(self, values: Sequence[Any]) -> None:
        with unseen():
            for t in values:
                elements = self._elements_of(t)
                if elements is not None and not elements.may_read(t):
                    what = "what torch compiles by itself"
                    raise MutationError(_READ.format(name=elements.name(), what=what))

    def _elements_of(self, value: Any) -> _Elements | None:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        return self._known.get(storage_id(value))


def is_plain(tensor: Any) -> bool:
    """Say whether a tensor is strided, of no subclass, and torch counts its writes."""
    is_strided = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_strided and not tensor.is_inference()


def _marks(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> Callable[[Tensor], object] | None:
    """Return what marks the elements that an operation writes; None if it reads, too.

    What is marked has the shape of what is written to.
    """
    if func in _FILLS or any(a.is_out for a in func._schema.arguments):
        return _mark_all
    mark = _PARTS.get(func)
    if mark is None or kwargs or (func in _ADDS and any(args[3:])):
        return None
    return lambda new: mark(new, *args[1:])


@contextmanager
def as_written(
    inputs: Mapping[int, HeldAtEnd],
    tensors: Sequence[Tensor],
    name_of: Callable[[int], str],
    changed: Container[int],
) -> Iterator[None]:
    """Run a recompute on inputs that the forward wrote to.

    Args:
        inputs: those inputs, by index.
        tensors: what the recompute runs on.
        name_of: tells the name of an input.
        changed: the indices of those that were changed since the forward ended.
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


_READ = (
    "remat: `{name}` was changed in place inside the function, and the recompute reads "
    "of it what is not as it was at the call (in {what}). Work on a copy "
    "(`{name}.clone()`), or write what is read before it is read."
)
