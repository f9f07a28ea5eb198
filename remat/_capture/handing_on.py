"""The forward of a call under torch.func, and how its changes reach the user's objects.

The forward runs on replicas: what leads to a tensor is made anew around the tensors of
the level below. When it has ended, what the function assigned to a replica is assigned
to the user's own object.

Invariant: a tensor of a level is never in an object of the user's where another thread,
or code outside of the level, could find it.
Rejected: exchanging the parameters of the user's own modules while the function runs.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.errors import CaptureError
from remat._capture.callables import CellNode, FunctionNode
from remat._capture.container_kinds import container_kind
from remat._capture.containers import ContainerNode, RegisteredNode
from remat._capture.holders import MISSING, content_of
from remat._capture.modules import HOOKS, REGISTRIES, ModuleNode, ViewNode
from remat._capture.nodes import Composite, ObjectNode
from remat._capture.objects import (
    assign_attributes,
    attributes,
    differing,
    replica_of,
    set_attributes,
    slots_in,
)
from remat._capture.restore import SnapshotRun


class _HeldBefore(NamedTuple):
    """What a value held before the function ran."""

    node: Composite
    value: Any
    state: dict[Any, Any]


class ChangedObject(NamedTuple):
    """An object that differs from what it was at the call."""

    node: Composite
    value: Any
    before: dict[Any, Any]
    now: dict[Any, Any]


class ForwardRun(SnapshotRun):
    """The first run of a call."""

    is_recompute = False
    __slots__ = ("_found", "_given", "_made", "_noted", "_originals", "_plain")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        found: Sequence[Tensor],
        originals: dict[int, Any],
    ) -> None:
        super().__init__(tensors)
        self._found, self._originals = found, originals
        self._made: list[tuple[Composite, Any]] = []
        self._given: list[tuple[Composite, Any]] = []
        self._noted: list[_HeldBefore] = []
        self._plain: list[_HeldBefore] = []

    @override
    def make(self, node: Composite) -> Any:
        if not node.live:
            value = self.built[node.identity] = self._originals[id(node)]
            return value
        new = super().make(node)
        self._made.append((node, new))
        return new

    @override
    def make_object(self, node: ObjectNode) -> Any:
        value = self._originals[id(node)]
        new = self.built[node.identity] = replica_of(node.kind, value)
        set_attributes(new, node.contents(self, value))
        return new

    def note(self) -> None:
        """Note what each replica holds, now that all are built."""
        self._noted = _noted(self._made)

    def watch(self, walked: Sequence[tuple[Any, Any]]) -> None:
        """Note what values hold that lead to no tensor, for `changed`."""
        found = [(node, value) for value, node in walked if node is not None]
        self._given = [pair for pair in found if not pair[0].live]
        self._plain = _noted(self._given)

    def hand_on(self) -> None:
        """Assign what the function changed to the user's objects."""
        changes = [(change.node, change.now) for change in _changed(self._noted)]
        if not changes:
            return
        # What was assigned may be a replica, or a tensor that stands for the user's.
        originals, owners = self._originals, self.owners()
        owners |= dict(zip(map(id, self.tensors), self._found, strict=True))
        for node, now in changes:
            _refuse_registered(node, originals[id(node)])
            owned = {key: _owned(v, owners) for key, v in now.items()}
            assign(node, originals[id(node)], owned)

    def changed(self) -> str:
        """Name what the function changed; "" if it changed nothing.

        Also what leads to no tensor, of which there is no replica.
        """
        return next((named_change(*change[1:]) for change in self.changes()), "")

    def changes(
        self, since: Sequence[_HeldBefore] | None = None
    ) -> Iterator[ChangedObject]:
        """Yield what changed since `noted_now` returned that, or since the call."""
        return _changed([*self._noted, *self._plain] if since is None else since)

    def noted_now(self) -> Sequence[_HeldBefore]:
        """Note what each value holds now."""
        return _noted((was.node, was.value) for was in [*self._noted, *self._plain])

    def given(self) -> Iterator[tuple[Composite, Any]]:
        """Yield each node, and the value or the replica that the function was given."""
        yield from self._given
        yield from self._made

    def owners(self) -> dict[int, Any]:
        """Return the user's own value for each replica, by the replica's identity."""
        originals = self._originals
        return {id(new): originals[id(node)] for node, new in self._made}


_MUTABLE = CellNode, ContainerNode, FunctionNode, ObjectNode, RegisteredNode


def _noted(pairs: Iterable[tuple[Any, Any]]) -> list[_HeldBefore]:
    """Note what values hold now, those of them that can change and tell it."""
    mutable = [(n, value) for n, value in pairs if isinstance(n, _MUTABLE)]
    telling = [pair for pair in mutable if _tells_changes(*pair)]
    return [_HeldBefore(node, value, state_of(node, value)) for node, value in telling]


def _changed(noted: Iterable[_HeldBefore]) -> Iterator[ChangedObject]:
    """Yield what was noted of each value that changed, with what it holds now."""
    for node, value, before in noted:
        now = state_of(node, value)
        if now.keys() != before.keys() or differing(now, before):
            yield ChangedObject(node, value, before, now)


def _owned(value: Any, owners: dict[int, Any]) -> Any:
    """Return the user's own value; a list that is new gets those that it holds."""
    own = owners.get(id(value), value)
    if own is value and type(value) is list:
        value[:] = [owners.get(id(v), v) for v in value]
    return own


def named_change(value: Any, before: dict[Any, Any], now: dict[Any, Any]) -> str:
    """Name what of a value changed."""
    kind = type(value).__name__
    changed = [k for k in {**before, **now} if before.get(k, now) is not now.get(k)]
    if not changed or not isinstance(changed[0], str) or isinstance(value, dict):
        return f"a {kind}"
    return f"`{changed[0]}` of a {kind}"


def _refuse_registered(node: Composite, value: Any) -> None:
    if isinstance(node, RegisteredNode):
        raise CaptureError(_REGISTERED.format(name=type(value).__qualname__))


def _tells_changes(node: Composite, value: Any) -> bool:
    """Say whether a value that did not change says so."""
    if isinstance(value, torch.autocast):
        return False  # it notes what it finds whenever it is entered
    if not isinstance(node, RegisteredNode):
        return True
    return all(map(operator.is_, node.now(value), node.now(value)))


def state_of(node: Composite, value: Any) -> dict[Any, Any]:
    """Return what a value holds, by key."""
    if isinstance(node, ModuleNode):
        entries = attributes(value)
        for name in REGISTRIES:
            registry = entries.pop(name)
            entries |= {(name, key): v for key, v in registry.items()}
        return entries
    if isinstance(node, ViewNode):
        return slots_in(value)
    if isinstance(node, ObjectNode):
        return attributes(value)
    if isinstance(node, CellNode):
        content = content_of(value)
        return {} if content is MISSING else {0: content}
    if isinstance(node, FunctionNode):
        scope = value.__globals__
        return {name: scope[name] for name in node.stores if name in scope}
    if isinstance(node, RegisteredNode):
        return dict(enumerate(node.now(value)))
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, (set, frozenset)):
        return {id(item): item for item in value}
    return dict(enumerate(value))


def assign(node: Composite, value: Any, held: dict[Any, Any]) -> None:
    """Have the user's own value hold what its replica holds."""
    if isinstance(node, ModuleNode):
        assign_attributes(value, _in_own_dicts(value, held))
    elif isinstance(node, ViewNode):
        set_attributes(value, held)
    elif isinstance(node, ObjectNode):
        assign_attributes(value, held)
    elif isinstance(node, CellNode):
        value.cell_contents = held[0]
    elif isinstance(node, FunctionNode):
        value.__globals__.update(held)
    else:
        _refill(value, held)


def _in_own_dicts(module: Any, held: dict[Any, Any]) -> dict[str, Any]:
    """Put what a module is to hold into its own dicts; return its attributes.

    Handles of hooks refer to these dicts.
    """
    dicts = {name: {} for name in REGISTRIES}
    for key in [key for key in held if isinstance(key, tuple)]:
        dicts[key[0]][key[1]] = held.pop(key)
    dicts |= {name: held[name] for name in HOOKS if isinstance(held.get(name), dict)}
    own = vars(module)
    for name, entries in dicts.items():
        _refill(own[name], entries)
    return held | {name: own[name] for name in dicts}


def _refill(value: Any, held: dict[Any, Any]) -> None:
    """Have a container hold this and nothing else."""
    how = container_kind(type(value))
    if how is not None and not how.frozen:
        how.put_back(value, [*held], [*held.values()])


_REGISTERED = (
    "remat: a {name} was changed in the function. Its class is registered with "
    "remat.register, and under torch.func the function is given another one that holds "
    "the same. Return a new {name} instead."
)
