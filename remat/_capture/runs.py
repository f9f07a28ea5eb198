"""Runs of a call, in which what it refers to is as it was.

In a recompute functions and containers are made anew. Objects and modules stay the same
objects, so that a table with weak keys still finds them: for the run they hold what
they held at the call. One that leads to a tensor is made anew, to hold another tensor.
The forward runs on such replicas, too. What it assigned to a replica is handed on to
the user's own object when it has ended.

Invariant: one thread at a time sets objects back, and the others make all of them anew.
A tensor of a level is never in an object of the user's where another thread, or code
outside of the level, could find it.
Rejected: making all objects anew always. A table with weak keys does not know a copy.
"""

import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.code import VIEWED
from remat._base.context import empty, here
from remat._base.errors import CaptureError
from remat._capture.container_kinds import container_kind, refill
from remat._capture.containers import ContainerNode, RegisteredNode
from remat._capture.holders import MISSING, content_of
from remat._capture.modules import HOOKS, REGISTRIES, ModuleNode, ViewNode
from remat._capture.nodes import CellNode, Composite, FunctionNode, ObjectNode
from remat._capture.objects import (
    assign_attributes,
    attributes,
    check_class,
    differing,
    exchange_attributes,
    exchange_dict,
    replica_of,
    set_attributes,
    slots_in,
)


_EXCHANGING = threading.RLock()
_Undo = list[tuple[Any, dict[str, Any]]]


class _View(NamedTuple):
    """A view of a module, and what it held before a run."""

    view: Any
    slots: dict[str, Any]
    attributes: dict[str, Any]


class SnapshotRun:
    """A context in which everything is as it was, for one run."""

    is_recompute = True

    __slots__ = (
        *("_all_anew", "_cells", "_holds_lock", "_undo", "_views", "built"),
        "tensors",
    )

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self._all_anew = tensors, False
        self.built: dict[int, Any] = {}
        self._undo: _Undo = []
        self._cells: list[Any] = []
        self._holds_lock = False
        self._views: list[_View] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _undo(self._undo)
        for was in reversed(self._views):
            exchange_dict(was.view, was.attributes)
            set_attributes(was.view, was.slots)
        if self._holds_lock:
            # Not before: another thread may exchange what these objects hold from now.
            _EXCHANGING.release()
        # Hooks in the graph of a recompute call its functions: `differentiated` empties
        # their cells later.
        later = here().cells if self.is_recompute else None
        if later is None:
            empty(self._cells)
        else:
            later += self._cells

    def make(self, node: Composite) -> Any:
        """Return the value of a node that was not built yet."""
        new = node.new(self)
        if type(node) is CellNode and node.may_hold_itself:
            # Emptied at the end. Others stay: a function may outlive the run.
            self._cells.append(new)
        return new

    def make_object(self, node: ObjectNode) -> Any:
        """Return an object that holds what it held."""
        value = node.ref()
        if value is None or self._makes_anew(node.live):
            new = self.built[node.identity] = replica_of(node.kind, value)
            set_attributes(new, node.contents(self, None))
            return new
        check_class(node.kind, type(value))
        # Before its parts are made: one of them may refer to it.
        self.built[node.identity] = value
        self._set_back(value, node.contents(self, value))
        return value

    def _set_back(self, value: Any, contents: dict[str, Any]) -> None:
        before = exchange_attributes(value, contents)
        self._undo.append((value, before))
        for was in self._views:  # one that the module itself refers to
            if vars(was.view) is before:
                exchange_dict(was.view, vars(value))

    def make_view(self, node: ViewNode) -> Any:
        """Return a view of a module, which has the dict that the module has now."""
        view = node.ref()
        slots = node.contents(self, view)
        module = slots[VIEWED]
        if view is not None and getattr(view, VIEWED) is module:
            check_class(node.kind, type(view))
            held = slots_in(view)
            self._views.append(_View(view, held, exchange_dict(view, vars(module))))
        else:  # the module was made anew
            view = replica_of(node.kind, view)
            exchange_dict(view, vars(module))
        set_attributes(view, slots)
        self.built[node.identity] = view
        return view

    def _makes_anew(self, is_live: bool) -> bool:
        if self._all_anew or is_live:
            return True
        if not self._holds_lock:
            self._holds_lock = _EXCHANGING.acquire(blocking=False)
            if not self._holds_lock:
                self._all_anew = True
        return not self._holds_lock


def _undo(exchanged: _Undo) -> None:
    for value, before in reversed(exchanged):
        exchange_attributes(value, before)


# --- The forward, and how its changes reach the user's objects ---


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
    __slots__ = ("_found", "_made", "_noted", "_originals", "_plain", "_tensorless")

    def __init__(
        self,
        tensors: Sequence[Tensor],
        found: Sequence[Tensor],
        originals: dict[int, Any],
    ) -> None:
        super().__init__(tensors)
        self._found, self._originals = found, originals
        self._made: list[tuple[Composite, Any]] = []
        self._tensorless: list[tuple[Composite, Any]] = []
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

    def owners(self) -> dict[int, Any]:
        """Return the user's own value for each replica, by the replica's identity."""
        originals = self._originals
        return {id(new): originals[id(node)] for node, new in self._made}

    # --- For a chain: called by `chain/_forward.py` and `between` ---

    def watch(self, walked: Sequence[tuple[Any, Any]]) -> None:
        """Note what values hold that lead to no tensor, for `changes`."""
        found = [(node, value) for value, node in walked if node is not None]
        self._tensorless = [pair for pair in found if not pair[0].live]
        self._plain = _noted(self._tensorless)

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
        yield from self._tensorless
        yield from self._made


_MUTABLE = CellNode, ContainerNode, FunctionNode, ObjectNode, RegisteredNode


def _noted(pairs: Iterable[tuple[Any, Any]]) -> list[_HeldBefore]:
    """Note what values hold now, those of them that can change and tell it."""
    mutable = [(n, value) for n, value in pairs if isinstance(n, _MUTABLE)]
    telling = [pair for pair in mutable if _tells_changes(*pair)]
    return [_HeldBefore(node, value, held_by(node, value)) for node, value in telling]


def _changed(noted: Iterable[_HeldBefore]) -> Iterator[ChangedObject]:
    """Yield what was noted of each value that changed, with what it holds now."""
    for node, value, before in noted:
        now = held_by(node, value)
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


def held_by(node: Composite, value: Any) -> dict[Any, Any]:
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
        refill(how, value, [*held], [*held.values()])


_REGISTERED = (
    "remat: a {name} was changed in the function. Its class is registered with "
    "remat.register, and under torch.func the function is given another one that holds "
    "the same. Return a new {name} instead."
)
