"""What a recompute reads of large inputs that the forward wrote to, as to a cache.

Nothing is copied before a forward: it would be much, and most inputs are only read. So
a recompute starts from what they hold by then. It may read an element that it has
written itself, and one that nobody has written since the call began.

Invariant: anything else is refused, and afterwards they hold what they held before.
Rejected: to copy them from the second call on. The first one would still be refused.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._base.absent import DETACH
from remat._base.errors import MutationError
from remat._base.observer import Observer
from remat._partial.effects import written_by
from remat._torch import (
    call_kernel,
    is_view_op,
    preserved_version,
    storage_id,
    unseen,
)


_aten: Any = torch.ops.aten
# These write all of what they are given, and read nothing of it.
_FILLS = {
    *(_aten.copy_.default, _aten.zero_.default, _aten.fill_.Scalar),
    *(_aten.fill_.Tensor, _aten.normal_.default, _aten.uniform_.default),
    *(_aten.bernoulli_.float, _aten.random_.default),
}


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
        if not is_view_op(func):
            values = tree_leaves((args, kwargs))
            with unseen():
                for t in values:
                    elements = self._elements_of(t)
                    if elements is None:
                        continue
                    is_target = any(t is w for w in written_by(func, args, kwargs))
                    marks = _marks(func, args) if is_target else None
                    reads = marks is None or sum(t is v for v in values) > 1
                    is_right = not reads or elements.may_read(t)
                    if is_target:
                        is_right &= elements.may_write(t, marks or _mark_all)
                    if not is_right:
                        message = _READ.format(name=elements.name(), func=func)
                        raise MutationError(message)
        return call_kernel(func, *args, **kwargs)

    @override
    def note_unseen(self) -> None:
        """Refuse what torch compiles by itself: what that reads, nobody sees."""
        name = next(iter(self._known.values())).name()
        raise MutationError(_READ.format(name=name, func="what torch compiles"))

    def _elements_of(self, value: Any) -> _Elements | None:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return None
        return self._known.get(storage_id(value))


def _marks(func: Any, args: Sequence[Any]) -> Callable[[Tensor], object] | None:
    """Return what marks the elements that an operation writes; None if it reads, too.

    What is marked has the shape of what is written to.
    """
    if func in _FILLS or any(a.is_out for a in func._schema.arguments):
        return _mark_all
    if func is _aten.index_put_.default and not any(args[3:]):
        return lambda new: _aten.index_put_(new, args[1], new.new_ones(()))
    if func is _aten.index_copy_.default:
        return lambda new: new.index_fill_(args[1], args[2], True)
    return None


def _mark_all(new: Tensor) -> None:
    new.fill_(True)


@contextmanager
def preserved_contents(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Have tensors hold what they hold now, after the body; no version is counted."""
    with preserved_version((*tensors,)):
        with unseen():
            # Whole storages: a view may show an element twice.
            storages = {storage_id(t): t.untyped_storage() for t in tensors}
            before = [(storage, storage.clone()) for storage in storages.values()]
        try:
            yield
        finally:
            with unseen(), torch.no_grad():
                for storage, held in before:
                    storage.copy_(held)


_READ = (
    "remat: `{name}` was changed in place inside the function, and the recompute reads "
    "of it what is not as it was at the call (in {func}). Work on a copy "
    "(`{name}.clone()`), or write what is read before it is read."
)
