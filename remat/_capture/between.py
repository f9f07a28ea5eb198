"""What a call's objects hold between two steps of a chain, to be put back there.

A step may change objects: count, or append a number to a list. The next step finds
what it left. So a checkpoint of a chain holds, besides the carry, what changed objects
held; a run that begins there puts it back.

Invariant: what is noted holds numbers, words, and containers of these. Whatever else
the call reached stands there as its node, and each run puts in its own.
Rejected: to leave out what is only written. Nothing tells that of a Python object: to
count is to read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from remat._base.types import INERT
from remat._capture.containers import ContainerNode
from remat._capture.modules import ViewNode
from remat._capture.nodes import CellNode, Composite, Node, ObjectNode, TensorNode
from remat._capture.objects import assign_attributes, attributes
from remat._capture.runs import (
    ChangedObject,
    ForwardRun,
    SnapshotRun,
    assign,
    held_by,
    named_change,
)


class _New(NamedTuple):
    """A container that is made anew."""

    kind: type
    items: tuple[Any, ...]  # of a dict, keys and values by turns


class _HeldBetween(NamedTuple):
    """What an object held."""

    entries: dict[Any, Any]  # of an object, only those that changed since the call
    gone: Sequence[str] = ()


# Of each object that changed since the call, by its node.
Between: TypeAlias = Mapping[Composite, _HeldBetween]
Nodes: TypeAlias = dict[Composite, None]  # in the order in which they were found
NOTHING: Between = {}


class Unnoted(Exception):  # noqa: N818
    """What changed cannot be noted; its text is what a message calls it."""


def _noted(changes: Iterable[ChangedObject], known: Mapping[int, Node]) -> Between:
    """Note what objects hold, in which `known` values stand as nodes."""
    found: dict[Composite, _HeldBetween] = {}
    for change in changes:
        held = _held(change, known)
        if held is None:
            raise Unnoted(named_change(change.value, change.before, change.now))
        found[change.node] = held
    return found


def changed_in_forward(run: ForwardRun) -> Between:
    """Note what differs from the call, while its forward runs."""
    changes = [*run.changes()]
    if not changes:
        return NOTHING
    known = {id(value): node for node, value in run.given()}
    return _noted(changes, _tensors_of(run.tensors) | known)


class RecomputedObjects:
    """What is noted of a recompute."""

    __slots__ = ("_before", "_known", "_run")

    def __init__(
        self, run: SnapshotRun, nodes: Iterable[Composite], others: Iterable[Composite]
    ) -> None:
        self._run = run
        self._before = [(n, v, held_by(n, v)) for n in nodes for v in [n.build(run)]]
        self._known: dict[int, Node] = _tensors_of(run.tensors)
        for node in others:
            value = run.built.get(node.identity)
            if value is not None:
                self._known[id(value)] = node

    def put_back(self, held: Between) -> None:
        """Have objects hold what they held between two steps."""
        for node, was in held.items():
            value = node.build(self._run)
            entries = {k: _made(entry, self._run) for k, entry in was.entries.items()}
            if isinstance(node, ObjectNode):
                now = {k: v for k, v in attributes(value).items() if k not in was.gone}
                assign_attributes(value, now | entries)
            else:
                assign(node, value, entries)

    def noted(self) -> Between:
        """Note what objects hold now."""
        changes = (
            ChangedObject(n, v, was, held_by(n, v)) for n, v, was in self._before
        )
        return _noted(changes, self._known)


def _tensors_of(tensors: Sequence[Tensor]) -> dict[int, Node]:
    return {id(t): TensorNode.of(i) for i, t in enumerate(tensors)}


def _held(change: ChangedObject, known: Mapping[int, Node]) -> _HeldBetween | None:
    """Return what an object holds; None if it cannot be put back."""
    node, before, now = change.node, change.before, change.now
    entries, gone = now, ()
    if isinstance(node, ObjectNode) and not isinstance(node, ViewNode):
        entries = {k: v for k, v in now.items() if before.get(k, now) is not v}
        gone = [k for k in before if k not in now]
        if not all(isinstance(k, str) for k in (*entries, *gone)):
            return None  # a parameter or buffer of a module
    elif not isinstance(node, (CellNode, ContainerNode)):
        return None
    if isinstance(change.value, dict) and not INERT.issuperset(map(type, entries)):
        return None
    items = {k: _item(v, known) for k, v in entries.items()}
    is_known = all(item is not _UNKNOWN for item in items.values())
    return _HeldBetween(items, gone) if is_known else None


def _item(value: Any, known: Mapping[int, Node]) -> Any:
    """Return what stands for a value; `_UNKNOWN` if nothing does."""
    node = known.get(id(value))
    if node is not None:
        return node
    kind = type(value)
    if kind in INERT or isinstance(value, type):
        return value
    if kind not in _CONTAINERS:
        return _UNKNOWN
    parts = [part for pair in value.items() for part in pair] if kind is dict else value
    items = tuple([_item(part, known) for part in parts])
    return _UNKNOWN if any(item is _UNKNOWN for item in items) else _New(kind, items)


def _made(item: Any, run: SnapshotRun) -> Any:
    if isinstance(item, Node):
        return item.build(run)
    if type(item) is not _New:
        return item
    items = [_made(part, run) for part in item.items]
    if item.kind is dict:
        return dict(zip(items[::2], items[1::2], strict=True))
    return item.kind(items)


_UNKNOWN: Any = object()
_CONTAINERS = (dict, list, tuple, set, frozenset)
