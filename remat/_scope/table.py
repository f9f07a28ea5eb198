"""Which storages hold a value of a block: one table for each thread.

Invariant: an entry holds for one version of a storage, and as long as a tensor lives
that the block made on it. A value that is changed outside of a block loses its entry.
Rejected: to tell tensors by their identity. Consumers save views of a value, such as
the transposed weight of a linear layer.
Rejected: entries that live as long as their storage. The `loss.detach()` that is kept
for a log would hold all that the loss was made of.
"""

import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

from torch import Tensor

from remat._base.tensors import version_of
from remat._scope.values import (
    PASSING,
    Block,
    GivenTensor,
    Made,
    Operand,
    TensorLayout,
    has_layout,
    stays,
)
from remat._torch.tensors import StorageRef, storage_id
from remat._torch.tracing import eager_only


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class ValueEntry:
    """What one storage holds."""

    __slots__ = ("_ref", "is_parted", "key", "made", "table", "ties", "version")

    def __init__(self, table: "ValueTable", made: Made, tensor: Tensor) -> None:
        self.table, self.made, self.key = table, made, storage_id(tensor)
        # So that the key stays its own.
        self._ref = StorageRef(tensor.untyped_storage())
        # Of the storage when it held the value; None while it is not known.
        self.version: int | None = version_of(tensor)
        self.ties: dict[int, weakref.ref[Tensor]] = {}  # tensors that keep this alive
        self.is_parted = False  # whether these may count their versions apart
        self.tie(tensor)

    def tie(self, tensor: Tensor) -> None:
        """Keep this alive as long as a tensor lives."""
        key = id(tensor)
        if key not in self.ties:
            died = functools.partial(_died, self, key)
            self.ties[key] = weakref.ref(tensor, died)

    def tied(self) -> list[Tensor]:
        """Return the tensors that keep this alive."""
        return [t for tie in [*self.ties.values()] if (t := tie()) is not None]


@eager_only
def _died(entry: ValueEntry, key: int, _: Any) -> None:
    entry.ties.pop(key, None)
    if not entry.ties:
        entry.table.drop(entry)


class ValueTable:
    """What the storages of one thread hold."""

    def __init__(self) -> None:
        self._entries: dict[int, ValueEntry] = {}
        # By storage and version.
        self._given: dict[int, dict[int | None, weakref.ref[GivenTensor]]] = {}
        self._unsettled: list[tuple[ValueEntry, Tensor]] = []
        self.sender: Block | None = None  # which sends away what it is given
        self._to_send: list[tuple[Any, Any]] = []  # with the user's own tensors
        self.handles: set[Any] = set()  # weak references to all
        self.recomputes: Any = weakref.WeakValueDictionary()  # of backwards, by number
        self.lock = threading.RLock()  # a backward may read handles in several threads
        self.when_empty: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._entries)

    # --- Entries ---

    def entry_of(self, tensor: Tensor) -> ValueEntry | None:
        """Return the entry of a tensor, if its storage holds the value still."""
        self.settle()
        entry = self.entry_at(tensor)
        if entry is None or entry.version != version_of(tensor):
            return None
        return entry

    def entry_at(self, tensor: Tensor) -> ValueEntry | None:
        """Return the entry of the storage of a tensor, whatever it holds now."""
        if not (self._entries and has_layout(tensor)):
            return None
        return self._entries.get(storage_id(tensor))

    def entry_in(self, storage: int) -> ValueEntry | None:
        """Return the entry of the storage of a number, whatever it holds now."""
        return self._entries.get(storage)

    def enter(self, made: Made, tensor: Tensor) -> None:
        """Note that the storage of a new tensor holds a value."""
        entry = ValueEntry(self, made, tensor)
        self._entries[entry.key] = entry

    def wrote(self, entry: ValueEntry, tensor: Tensor) -> None:
        """Note that an operation wrote to a tensor. Its version is counted later."""
        entry.version = None
        self._unsettled.append((entry, tensor))

    def settle(self) -> None:
        """Read the versions of what operations wrote to."""
        if not self._unsettled:
            return
        unsettled = [*self._unsettled]
        self._unsettled.clear()
        for entry, tensor in unsettled:
            entry.version = version_of(tensor)
            if any(version_of(t) != entry.version for t in entry.tied()):
                self.drop(entry)  # these count their versions apart

    def drop(self, entry: ValueEntry) -> None:
        """Take an entry out."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        entry.ties.clear()
        if not self._entries and self.when_empty is not None:
            self.when_empty()

    def forget_running(self, block: Block) -> None:
        """Take out what a block made of values of earlier blocks, without a gradient.

        A running mean would hold all that it ever saw. It is given to the next block.
        """
        self._given = {
            key: known
            for key, known in self._given.items()
            if any(given() is not None for given in known.values())
        }
        known: dict[Made, bool] = {}
        for entry in [*self._entries.values()]:
            made = entry.made
            if made.part.block is block and (
                made.unread == PASSING
                or (
                    _is_of_earlier(made, block, known)
                    and not any(t.requires_grad for t in entry.tied())
                )
            ):
                self.drop(entry)

    def forget_used_up(self) -> None:
        """Take out what was made in blocks that are closed and used up.

        A value that is kept, for a log say, would hold all that it was made of. And
        where tensors have version counters of their own.
        """
        for entry in [*self._entries.values()]:
            part = entry.made.part
            is_over = part.is_used_up and not part.block.is_open
            if is_over or (entry.is_parted and len(entry.ties) > 1):
                self.drop(entry)

    # --- Operands ---

    def given_of(self, tensor: Tensor, layout: TensorLayout) -> GivenTensor:
        """Return a tensor that no block made, as the operations read it."""
        sender = self.sender
        base = None if sender is None else tensor._base
        if base is not None and has_layout(base):
            tensor, layout = base, TensorLayout.of(base)  # of `x.view(...)`
        known = self._given.setdefault(storage_id(tensor), {})
        ref = known.get(version_of(tensor))
        given = None if ref is None else ref()
        if given is None:
            part = None if sender is None else sender.part()
            given = GivenTensor(tensor, layout, part)
            known[version_of(tensor)] = weakref.ref(given)
            if part is not None and not stays(tensor):
                self._to_send.append((weakref.ref(given), weakref.ref(tensor)))
        return given

    def given_to_send(self, tensor: Tensor) -> GivenTensor | None:
        """Return what stands for a tensor, if a block is open that sends it out."""
        if self.sender is None or not has_layout(tensor) or stays(tensor):
            return None
        return self.given_of(tensor, TensorLayout.of(tensor))

    def send_given(self, away: Any) -> None:
        """Send out what blocks were given, but for parameters."""
        each = [(given(), tensor()) for given, tensor in self._to_send]
        self._to_send.clear()
        for given, tensor in each:
            if given is not None:
                given.send(away, tensor)
        # Another storage may get its number.
        for known in self._given.values():
            for version, ref in [*known.items()]:
                given = ref()
                if given is not None and given.is_away:
                    del known[version]

    def keep_given(self, tensor: Tensor) -> None:
        """Have what was given in the storage of a tensor keep what it holds."""
        if has_layout(tensor):
            for ref in self._given.pop(storage_id(tensor), {}).values():
                given = ref()
                if given is not None:
                    given.keep()


class Operands:
    """Called with each tensor of an operation, in order: returns what stands for it.

    A storage is taken as given if something wrote to it unseen. That is so for blank
    memory that is read, and for a storage that an alias with its own version counter
    wrote to, such as `.data`.
    """

    __slots__ = ("_table", "_written_to", "found", "storages")

    def __init__(self, table: ValueTable, written_to: "Sequence[Tensor]") -> None:
        self._table, self._written_to = table, written_to
        self.found: list[Operand] = []  # so far
        self.storages: set[int] = set()  # their numbers

    def __call__(self, tensor: Tensor) -> Operand:
        """Return what stands for a tensor."""
        if has_layout(tensor):
            key, layout = storage_id(tensor), TensorLayout.of(tensor)
            self.storages.add(key)
            of = self._value_of(tensor, key) or self._table.given_of(tensor, layout)
            operand = Operand.of_layout(of, layout)
        else:
            operand = Operand(GivenTensor(tensor, None), None)
        self.found.append(operand)
        return operand

    def _value_of(self, tensor: Tensor, key: int) -> Made | None:
        entry = self._table.entry_in(key)
        if entry is None:
            return None
        made = entry.made
        is_read_blank = made.is_blank and all(t is not tensor for t in self._written_to)
        if is_read_blank or entry.version != version_of(tensor):
            self._table.drop(entry)
            return None
        return made


def _is_of_earlier(made: Made, block: Block, known: dict[Made, bool]) -> bool:
    """Say whether a value was made of values of blocks before."""
    stack = [made]
    while stack:
        top = stack[-1]
        read = () if top.operation is None else top.operation.reads
        missing = [m for m in read if m.part.block is block and m not in known]
        if top in known or not missing:
            stack.pop()
            known[top] = any(known.get(m, True) for m in read)
        else:
            stack += missing
    return known[made]
