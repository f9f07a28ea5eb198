"""What is set on tensors as attributes, and what it leads to.

The attributes of a tensor that a call reaches are put aside like its arguments. A run
again finds them on the tensors that it is given, holding what they held. Under
torch.func the tensors of a forward stand in for the user's, and begin with the
attributes of these. When it has run, the user's have those that the stand-ins have by
then. What was computed is left there as in any other holder (`left`).

Invariant: afterwards no stand-in has an attribute. One that leads to what was computed
from it would be a cycle through the graph, which the garbage collector does not see.
Rejected: one dict for both. A graph may hold a stand-in, and so would hold what the
user sets later.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

from torch import Tensor

from remat._base.code import has_marks
from remat._base.types import ATOMS, TENSORS
from remat._reach.arguments import CallArguments
from remat._reach.exchange import Exchange
from remat._reach.holders import ATTRIBUTES, flatten
from remat._reach.left import ON_INPUT, Left, LeftAt
from remat._reach.lifted import LiftedForward
from remat._reach.parts import are_same
from remat._reach.roots import Root, roots_of
from remat._torch.levels import unwrap_dead


_attributes = attrgetter("__dict__")
_NOTHING: dict[str, Any] = {}
_FLAT = ATOMS | {list}  # as they are put aside: lists of constants
_OWN = "retain_grad"  # of a stand-in, which asks the input


def put_aside(
    passed: CallArguments, roots: list[Root], each: list[list[Tensor]]
) -> dict[int, dict[str, Any]]:
    """Put aside what is set on tensors of a call, by the identity of the tensor.

    Args:
        passed: what the call is given. Tensors that attributes lead to are added.
        roots: of the call. Those that attributes lead to are added.
        each: the tensors of each of these.
    """
    todo = [*passed.tensors, *flatten(each)]
    dicts = [*map(_attributes, todo)]
    marked_at = [*map(bool, dicts)]
    marked, held_by = [*compress(todo, marked_at)], [*compress(dicts, marked_at)]
    if TENSORS.issuperset(map(type, marked)):
        # At the speed of C: libraries set a flag on each parameter.
        values = [*flatten(map(dict.values, held_by))]
        are_constants = ATOMS.issuperset(map(type, values))
        if are_constants or _are_own(values, passed, roots):
            copies = map(dict.copy if are_constants else _copied, held_by)
            return dict(zip(map(id, marked), copies, strict=True))
    found: dict[int, dict[str, Any]] = {}
    while True:
        todo = [*passed.tensors, *flatten(each)]
        marked = [
            (t, held)
            for t in todo
            if (held := t.__dict__) and has_marks(type(t)) and id(t) not in found
        ]
        before = len(passed.tensors), len(passed.roots)
        for t, held in marked:
            found[id(t)] = _aside(passed, t, held)
        if before == (len(passed.tensors), len(passed.roots)):
            return found
        if len(passed.roots) > before[1]:
            roots[:] = roots_of(passed.roots.values())
            each[:] = [root.tensors() for root in roots]


def _are_own(
    values: Sequence[Any], passed: CallArguments, roots: Iterable[Root]
) -> bool:
    """Say whether all are constants, and lists of these that nothing else holds.

    Runs find copies of those, which no code tells from others.
    """
    lists = [value for value in values if type(value) not in ATOMS]
    if {*map(type, lists)} != {list} or not ATOMS.issuperset(map(type, flatten(lists))):
        return False
    ids = {*map(id, lists)}
    held = [passed.boxes, *(root.before.places(root.layout) for root in roots)]
    facts = passed.facts, *(root.layout.facts for root in roots)
    are_told = any("id" in each.asks for each in facts)
    is_one_of_many = len(ids) < len(lists) or not all(map(ids.isdisjoint, held))
    return not (are_told or is_one_of_many)


def _copied(held: Mapping[str, Any]) -> dict[str, Any]:
    return {k: [*v] if type(v) is list else v for k, v in held.items()}


def _aside(passed: CallArguments, t: Tensor, held: dict[str, Any]) -> dict[str, Any]:
    if ATOMS.issuperset(map(type, held.values())):  # as flags of libraries are
        return held.copy()
    is_dead = unwrap_dead(t) is not t
    return {
        name: passed.put_aside(value) if name != _OWN else value
        for name, value in held.items()
        # Of a level that has ended: the graph between the two is gone.
        if not (is_dead and isinstance(value, Tensor))
    }


def set_again(
    attributes: Mapping[int, dict[str, Any]], tensors: Sequence[Tensor], to: Exchange
) -> None:
    """Set on the tensors of a run what was set on those of the call."""
    kinds = {*map(type, flatten(map(dict.values, attributes.values())))}
    if kinds <= _FLAT:
        each = attributes.values()
        dicts = map(_attributes, map(tensors.__getitem__, attributes))
        each = map(_copied, each) if list in kinds else each
        deque(map(dict.update, dicts, each), maxlen=0)
        return
    for i, held in attributes.items():
        if not ATOMS.issuperset(map(type, held.values())):
            held = dict(zip(held, to.values([*held.values()]), strict=True))
        tensors[i].__dict__.update(held)


class Lent:
    """The attributes of the user's tensors, while a forward runs on others.

    A tensor that stands for itself has them, too, around what stands in for others.
    """

    __slots__ = "_pairs", "_then"

    def __init__(
        self,
        users: Sequence[Tensor],
        tensors: Sequence[Tensor],
        *,
        were_set: bool = True,
    ) -> None:
        self._pairs = [
            (n, user, tensor)
            for n, (user, tensor) in enumerate(zip(users, tensors, strict=True))
            if has_marks(type(tensor)) and has_marks(type(user))
        ]
        each = [vars(user) if were_set else _NOTHING for _, user, _ in self._pairs]
        self._then = [held.copy() for held in each]

    def call(self, lifted: LiftedForward, body: Callable[[], Any]) -> Any:
        """Call something while the tensors of the forward have them."""
        for (_, _, tensor), then in zip(self._pairs, self._then, strict=True):
            vars(tensor).update((name, lifted.of(v)) for name, v in then.items())
        try:
            return body()
        except BaseException:  # what was set before that stays
            self.end(lifted)
            raise

    def end(self, lifted: LiftedForward) -> bool:
        """Set on the user's what the others have; say whether that is something new."""
        is_new = False
        for (n, user, tensor), then in zip(self._pairs, self._then, strict=True):
            now = {k: v for k, v in vars(tensor).items() if k != _OWN or k in then}
            if vars(tensor) is not vars(user):  # as a constant in a level has
                vars(tensor).clear()
            if [*now] == [*then] and are_same([*now.values()], [*then.values()]):
                continue
            is_new, values = True, lifted.owned([*now.values()])
            ATTRIBUTES.write(vars(user), [*now], values)
            found = [i for i, value in enumerate(values) if lifted.may_be_left(value)]
            if found:
                at = LeftAt((ON_INPUT, n), ATTRIBUTES, found)
                lifted.left.append(Left(at, vars(user)))
        return is_new
