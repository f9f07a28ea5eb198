"""Results whose saving is decided late, once it is known what is read instead.

A program may compute another value from a result that the plan saves, and read only
that value from then on. Then the value is saved in place of the result, so that no more
bytes are saved than planned.

Invariant: of each late result, the result or the value that is read in its place is
stored, unless nobody can read either any more.
Rejected: to save both. A layer that makes two results more than was planned would save
one more, and the budget would not hold.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from remat._base.tensors import version_of
from remat._scope.table import ValueEntry, ValueTable
from remat._scope.values import Made


class _Replacing(NamedTuple):
    """A value that is read, and its memory, which may be there longer than it."""

    entry: ValueEntry
    memory: Tensor


class _Late(NamedTuple):
    entry: ValueEntry
    nbytes: int
    instead: Sequence[_Replacing]  # what was read, while the result was there too


class LateResults:
    """The late results of one thread, in the order in which they were made."""

    def __init__(self, table: ValueTable) -> None:
        self._table = table
        self._waiting: list[_Late] = []
        # Of the operation that runs. They are in the table when it is over.
        self._new: Sequence[tuple[Made, Tensor]] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of results that wait."""
        return sum(each.nbytes for each in self._waiting)

    def add(self, makes: Sequence[tuple[Made, Tensor]]) -> int:
        """Have results of the operation that runs wait; return how many bytes."""
        self._new = makes
        return sum(t.nbytes for _, t in makes)

    def settle(self, read: Sequence[ValueEntry], owed: int, is_replaced: bool) -> None:
        """Decide when an operation runs that is planned, and has read some values.

        So many bytes are owed. Where operations were not planned that ran before, what
        is read may have replaced results.
        """
        waiting = [*self._waiting]
        self._waiting.clear()
        owed -= self._take_new()
        for late in waiting:
            owed -= late.nbytes
            entry, instead, is_read = late.entry, late.instead, late.entry in read
            if is_replaced and not (instead or is_read):
                instead = [_Replacing(e, e.tied()[0].detach()) for e in read]
            late = late._replace(instead=instead)
            if not is_read and _is_there(entry) and _are_there(instead):
                self._waiting.append(late)
            elif not self._decide(late, is_read):
                owed += late.nbytes
        for entry in read:
            owed -= self.store(entry) if owed > 0 else 0

    def _decide(self, late: _Late, is_read: bool) -> bool:
        """Store a result or what was read instead; say whether something is stored."""
        if _is_there(late.entry) and (is_read or not _are_there(late.instead)):
            return self.store(late.entry) > 0
        return any(self._store(each.entry, each.memory) for each in late.instead)

    def _take_new(self) -> int:
        new, self._new = self._new, ()
        for _, t in new:
            entry = self._table.entry_of(t)
            if entry is not None:
                self._waiting.append(_Late(entry, t.nbytes, ()))
        return sum(t.nbytes for _, t in new)

    def store_all(self) -> bool:
        """Decide now; say whether there was something to decide."""
        waiting = [*self._waiting]
        self._waiting.clear()
        for late in waiting:
            self._decide(late, is_read=False)
        return bool(waiting)

    def store(self, entry: ValueEntry) -> int:
        """Store a value, if its storage holds it; return how many bytes."""
        tied = entry.tied()
        return self._store(entry, tied[0].detach()) if tied else 0

    def _store(self, entry: ValueEntry, tensor: Tensor) -> int:
        made = entry.made
        if entry.version != version_of(tensor) or made.stored is not None:
            return 0
        whole = made.layout.view_of(tensor)
        made.stored, made.operation = self._table.given_of(whole, made.layout), None
        self._table.drop(entry)
        return whole.nbytes


def _are_there(values: Sequence[_Replacing]) -> bool:
    """Say whether somebody can read any of some values."""
    return any(_is_there(each.entry) for each in values)


def _is_there(entry: ValueEntry) -> bool:
    """Say whether somebody can read a value."""
    return bool(entry.ties)
