"""Other tensors in place of the user's, wherever those are held: for torch.func.

Below a level of torch.func a function runs on other tensors than its caller has. For a
forward these stand in for the user's: a holder of one is written in place, and a value
that never changes, such as a tuple, is made again around it. When it ends, what the
function left there is mapped back: to the user's own tensors and values.

    lifted = reach.lifted(users, tensors)    users: what `reach.take_tensors` returned
    with lifted:
        value = lifted.call(fn, args, kwargs)
    reach.forward_done()

A recompute is a `Running` of `reach`, as under base autograd, on other tensors:

    running = reach.restored(tensors)
    with running:
        value = reach.call(running, tensors)
        running.end_run()
        ...                                  the graph of the run is differentiated

After `end_run` everything is as it was just before the run, but for tensors that stand
in: hooks in that graph call the user's functions, and what these change stays.

Invariant: only holders of what has a stand-in are written, and no other. What changed
in them meanwhile stays.
Rejected: rebuilt functions and containers. Code that no walk reaches holds the user's.
Rejected: a function mode that exchanges tensors as they are used. Nested transforms and
calls inside do not pass it.
"""

from collections.abc import Container, Mapping, Sequence
from functools import partial
from typing import Any, Self

from torch import Tensor
from typing_extensions import override

from remat._base.errors import CaptureError
from remat._base.types import ATOMS
from remat._reach.copies import without_copies
from remat._reach.exchange import Exchange
from remat._reach.holders import FUNCTIONS, SCOPES, SCRIPTED, HolderKind, kinds_of
from remat._reach.identities import end_leases, refuse_of_tensors
from remat._reach.left import Left, LeftAt, LeftPlace
from remat._reach.parts import (
    LOCK,
    Box,
    FindHolders,
    HolderNow,
    KindAndHolder,
    among,
    are_same,
    held_in,
    holding,
    written_to,
)
from remat._reach.roots import roots_of
from remat._torch.levels import is_of_level_above, is_of_torch_func


class Lifted(Exchange):
    """A context in which other tensors stand in for the user's."""

    __slots__ = "_holding", "_kept", "_own", "_remade", "_users"

    def __init__(
        self,
        holding: Sequence[FindHolders],
        users: Sequence[Any],
        tensors: Sequence[Any],
    ) -> None:
        super().__init__(tensors)
        self._holding, self._kept = holding, users  # whose identities are noted
        pairs = [(u, t) for u, t in zip(users, tensors, strict=True) if u is not t]
        self._found = {id(u): t for u, t in pairs}
        known = {*map(id, users)}
        self._own = own = without_copies(users)
        if own is not users:  # another thread may put what is the user's back there
            pairs = [(o, t) for o, t in zip(own, tensors, strict=True) if o is not t]
            self._found.update((id(o), t) for o, t in pairs)
        self._users = {id(t): u for u, t in pairs if id(t) not in known}
        self._remade: dict[int, tuple[Box, Any]] = {}  # with what is the user's

    def __enter__(self) -> Self:
        if self._found and self._holding:
            try:
                self._exchange()
            except BaseException:
                self.put_back()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def without(self, kind: type) -> "Lifted":
        """Put back what is the user's in place of stand-ins of a class."""
        if kind not in map(type, self.tensors):
            return self
        self.put_back()
        each = zip(self._kept, self.tensors, strict=True)
        pairs = [(u, t) for u, t in each if type(t) is not kind]
        left = Lifted(self._holding, [u for u, _ in pairs], [t for _, t in pairs])
        return left.__enter__()

    # --- What stands in for what ---

    @property
    def users(self) -> Mapping[int, Any]:
        """By the identity of what stands in, what of the user's it stands in for."""
        return self._users

    def of(self, value: Any) -> Any:
        """Return what stands in for a value of the user's; itself if nothing does."""
        return self._found.get(id(value), value)

    def own(self, value: Any) -> Any:
        """Return what is the user's of a value that may stand in for that."""
        return self._users.get(id(value), value)

    def call(self, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call a function of the user's on what stands in for its arguments."""
        of = self.of
        return of(fn)(*map(of, args), **{k: of(v) for k, v in kwargs.items()})

    # --- The exchange ---

    def _exchange(self) -> None:
        to_write: dict[Any, KindAndHolder] = {}
        new: Any = self._found
        while new:
            found = [one for here in self._holding for one in here(new)]
            new = set()
            for kind, holder in found:
                if not kind.frozen:
                    to_write[_key_of(kind, holder)] = kind, holder
                elif kind is SCRIPTED:
                    raise CaptureError(_SCRIPTED.format(name=holder.original_name))
                elif id(holder) not in self._remade:
                    kinds = kinds_of(holder, type(holder))
                    self._remade[id(holder)] = Box(holder, kinds), holder
                    new.add(id(holder))
        self._make_again()
        for kind, holder in to_write.values():
            self._write(kind, holder)

    def _make_again(self) -> None:
        """Make values that never change again, around what stands in."""
        of, boxes = self.of, {key: box for key, (box, _) in self._remade.items()}
        for box in boxes.values():
            box.put_aside(lambda value: boxes.get(id(value)) or of(value))
        for box, value in self._remade.values():
            self._users[id(self.found(box))] = value

    def _write(self, kind: HolderKind, holder: Any) -> None:
        of = self.of
        if of(holder) is not holder:  # it is made again
            return
        with LOCK:  # what another thread put there may be taken away meanwhile
            for written in written_to(kind, holder, *kind.held(holder)):
                self.undo.append(written.end)
                written.replace(of, self.own)


def _key_of(kind: HolderKind, holder: Any) -> tuple[int, ...]:
    if kind is SCOPES:
        scope, names = holder
        return id(scope), id(names)
    return id(holder), id(kind)


# --- A forward ---


class LiftedForward(Lifted):
    """The context of a forward: what it left is mapped back, wherever it is."""

    __slots__ = "_asks", "_boxes", "_known", "_numbers", "_roots", "left"

    def __init__(
        self,
        roots: Sequence[Any],
        boxes: Mapping[int, tuple[Any, Any]],
        users: Sequence[Tensor],
        tensors: Sequence[Any],
        asks: Container[str] = (),
    ) -> None:
        self._asks = asks  # by what code tells a value from another one like it
        self._roots = [(root, root.live) for root in roots]
        here: list[FindHolders] = [
            partial(holding, root.layout, live) for root, live in self._roots
        ]
        self._boxes: list[HolderNow] = []
        if boxes:
            passed = [*boxes.values()]
            self._boxes = [*held_in(passed)]
            here.append(partial(among, self._boxes))
        self._known: Container[int] | None = None
        # After a run:
        self.left: list[Left] = []
        self._numbers: list[int] = []  # if they may be identities
        super().__init__(here, users, tensors)

    @override
    def __enter__(self) -> Self:
        asks_id = "id" in self._asks
        if asks_id:
            held = [part for held in self._boxes for part in held.parts()]
            held += [v for _, t in self._roots for v in (*t.values, *t.keys)]
            refuse_of_tensors(held, self._found)
        super().__enter__()
        passed = {id(held.holder) for held in self._boxes}
        if asks_id and not passed.isdisjoint(self._remade):
            self.put_back()
            key = next(key for key in self._remade if key in passed)
            kind = type(self._remade[key][1]).__qualname__
            raise CaptureError(_CONTAINER.format(kind=kind))
        return self

    @override
    def __exit__(self, *error: object) -> None:
        super().__exit__()
        self._take_attributes_back()
        for held in self._boxes:
            keys, now = held.kind.held(held.holder)
            if not (are_same(keys, held.keys) and are_same(now, held.values)):
                self._map_back((None, id(held.holder)), held.kind, held.holder)
        for i, (root, live) in enumerate(self._roots):
            root.forward_done()
            if root.effects:
                groups = live.groups
                for group, number in sorted(root.effects):
                    kind, holders = groups[group]
                    self._map_back((i, (group, number)), kind, holders[number])
        if error[0] is not None:
            self.left.clear()

    def _take_attributes_back(self) -> None:
        """Have values that were made again leave the user's what was set on them."""
        for key, (box, value) in self._remade.items():
            for part in box.held:
                if part.kind.frozen:
                    continue
                given = self.values(part.keys), self.values(part.items)
                now = part.kind.held(self._found[key])
                if not all(map(are_same, given, now)):
                    part.kind.write(value, *([*map(self.own, held)] for held in now))

    def lease_all(self) -> None:
        """Refer to what the function reached, for hooks that it set."""
        end_leases()
        for root, live in self._roots:
            root.lease_all(live)

    def _map_back(self, where: LeftPlace, kind: HolderKind, holder: Any) -> None:
        """Have a holder that the function wrote hold what is the user's."""
        if kind.frozen:
            return
        with LOCK:  # of another thread there may be a copy, which is not to be left
            keys, values = kind.held(holder)
            if self._found:
                own_keys, own = self.owned(keys), self.owned(values)
                if not (are_same(own_keys, keys) and are_same(own, values)):
                    kind.write(holder, own_keys, own)
                    keys, values = own_keys, own
        held = [*values, *keys]
        if "id" in self._asks:
            self._numbers += [value for value in held if type(value) is int]
        if kind is not FUNCTIONS and not isinstance(holder, set):
            at = [i for i, value in enumerate(held) if self.may_be_left(value)]
            if at:
                self.left.append(Left(LeftAt(where, kind, at), holder))

    def may_be_left(self, value: Any) -> bool:
        """Say whether a value in a holder leads to tensors that the run computed."""
        kind = type(value)
        if kind in ATOMS or id(value) in self.known:
            return False
        if not issubclass(kind, Tensor):
            return True
        if value.requires_grad or is_of_torch_func(value):
            # Another thread may be in levels of its own, or have a copy there.
            is_here = without_copies([value])[0] is value
            return is_here and not (self._is_users(value) or is_of_level_above(value))
        return False

    def leaves_alone(self, result: Tensor) -> bool:
        """Say whether a run returned a tensor of its own and left nothing."""
        return not (self.left or self._numbers or id(result) in self._users)

    def refuse_identities(self, tensors: Sequence[Tensor]) -> None:
        """Refuse a run that keeps the identities of its tensors."""
        if self._numbers:
            refuse_of_tensors(self._numbers, {*self._users, *map(id, tensors)})

    def _is_users(self, tensor: Tensor) -> bool:
        return any(tensor is t for t in (*self._kept, *self._own))

    def owned(self, values: Sequence[Any]) -> list[Any]:
        """Return what is the user's of values, and in those that the function made."""
        owned = [*map(self.own, values)]
        new: list[Any] = []
        for value in owned:
            kind = type(value)
            is_plain = kind in ATOMS or issubclass(kind, Tensor)
            if not is_plain and id(value) not in self.known:
                new.append(value)
        if not new:
            return owned
        roots = roots_of([lambda: new])  # a list, as a variable of a function
        pairs = [(r.layout, r.live) for r in roots if r.live is not None]
        here = [partial(holding, *pair) for pair in pairs]
        stand_ins = [*self._found.values()]
        ours = [t for t in stand_ins if id(t) in self._users]
        before = [*new]
        Back(here, ours, [*map(self.own, ours)]).put()
        back = {id(b): now for b, now in zip(before, new, strict=True)}
        return [back.get(id(value), value) for value in owned]

    @property
    def known(self) -> Container[int]:
        """The identities of all that the function could reach before it ran."""
        if self._known is None:
            known = {id(part) for held in self._boxes for part in held.parts()}
            known.update(id(held.holder) for held in self._boxes)
            for _, live in self._roots:
                known.update(memoryview(live.marks[0]).cast("Q"))
                known.update(map(id, live.owners))
            self._known = known
        return self._known


class Back(Lifted):
    """The other way: the user's own in place of what stood in for it. It stays."""

    __slots__ = ()

    def put(self) -> None:
        """Put it there."""
        self._exchange()

    @override
    def _write(self, kind: HolderKind, holder: Any) -> None:
        keys, values = ([*map(self.of, held)] for held in kind.held(holder))
        kind.write(self.of(holder), keys, values)


_CONTAINER = (
    "remat: a {kind} that was passed holds a tensor that is differentiated. Under "
    "torch.func the function gets another one around another tensor, and it may ask "
    "for the identity of that (`id`). Pass the tensors themselves, or look up by "
    "something else."
)
_SCRIPTED = (
    "remat: {name} is a TorchScript module, whose parameters remat cannot replace. "
    "Pass the eager module instead."
)
