"""The forward of a call under torch.func, and how its changes reach the user's objects.

The forward runs on replicas: what leads to a tensor is made anew around the tensors of
the level below. When it has ended, what the function assigned to a replica is assigned
to the user's own object.

Invariant: a tensor of a level is never in an object of the user's where another thread,
or code outside of the level, could find it.
Rejected: exchanging the parameters of the user's own modules while the function runs.
"""

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.errors import CaptureError
from remat._capture.callables import EMPTY, CellNode, FunctionNode, content_of
from remat._capture.containers import DictNode, RegisteredNode, SequenceNode
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
    """What a value held before the function ran.

    Attributes:
        node: that the value was found as.
        value: the value, or its replica.
        state: what it held, by key.
    """

    node: Composite
    value: Any
    state: dict[Any, Any]


class ForwardRun(SnapshotRun):
    """The first run of a call.

    Args:
        tensors: what stands for the tensors found.
        found: the tensors found, the user's.
        originals: the user's own value for each node, by the identity of the node.
    """

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
        changes = [(was.node, now) for was, now in _changed(self._noted)]
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
        for _, value, before, now in self.changes():
            return named_change(value, before, now)
        return ""

    def changes(
        self, since: Sequence[_HeldBefore] | None = None
    ) -> Iterator[tuple[Any, Any, Any, Any]]:
        """Yield what changed: its node, its value, what it held, and what it holds.

        Args:
            since: what `noted_now` returned; None for the call.
        """
        noted = [*self._noted, *self._plain] if since is None else since
        for was, now in _changed(noted):
            yield was.node, was.value, was.state, now

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


_MUTABLE = (
    *(CellNode, DictNode, FunctionNode, ObjectNode, RegisteredNode, SequenceNode),
)


def _noted(pairs: Iterable[tuple[Any, Any]]) -> list[_HeldBefore]:
    """Note what values hold now, those of them that can change and tell it."""
    mutable = [(n, value) for n, value in pairs if isinstance(n, _MUTABLE)]
    telling = [pair for pair in mutable if _tells_changes(*pair)]
    return [_HeldBefore(node, value, state_of(node, value)) for node, value in telling]


def _changed(
    noted: Iterable[_HeldBefore],
) -> Iterator[tuple[_HeldBefore, dict[Any, Any]]]:
    """Yield what was noted of each value that changed, with what it holds now."""
    for was in noted:
        now = state_of(was.node, was.value)
        if now.keys() != was.state.keys() or differing(now, was.state):
            yield was, now


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
        return {} if content is EMPTY else {0: content}
    if isinstance(node, FunctionNode):
        scope = value.__globals__
        return {name: scope[name] for name in node.stores if name in scope}
    if isinstance(node, DictNode):
        return dict(value)
    if isinstance(node, RegisteredNode):
        return dict(enumerate(node.now(value)))
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
    elif isinstance(node, DictNode):
        _refill(value, held)
    elif isinstance(value, set):
        value.clear()
        value.update(held.values())
    elif isinstance(value, (list, deque)):
        value.clear()
        value.extend(held.values())


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


def _refill(value: dict[Any, Any], held: dict[Any, Any]) -> None:
    for key in value.keys() - held.keys():
        del value[key]
    value.update(held)


_REGISTERED = (
    "remat: a {name} was changed in the function. Its class is registered with "
    "remat.register, and under torch.func the function is given another one that holds "
    "the same. Return a new {name} instead."
)
