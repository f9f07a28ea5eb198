"""A function's result without its tensors, until others are put in.

Under torch.func the forward computes tensors of the level below. What it returns stays
those very objects and containers: their tensors are taken out, and those of the level
are put in. So nobody's constructor runs, and an object that the user passed, and that
the function changed and returned, is that object.

Invariant: between the two nothing holds a tensor of the run. What holds no such tensor
is not touched. What cannot be changed, such as a tuple, is made again.
Rejected: copies of objects. Weak references, tables by identity, and whatever else
holds the object would know another one.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from remat._base.errors import RecomputeError
from remat._base.types import Outputs
from remat._reach.before import At, at
from remat._reach.left import Left
from remat._reach.making import make
from remat._reach.names import Path, written
from remat._reach.result_walk import NOTHING, Hidden, Own, Part, ResultWalk
from remat._torch import are_sizes_equal, is_below_tracer


class Result:
    """A result, taken apart, with what the function left in holders."""

    __slots__ = ("_left", "_value", "_walk", "own", "places", "tensors")

    def __init__(
        self, value: Any, own: Own = NOTHING, left: Sequence[Left] = ()
    ) -> None:
        self._value, self.own, self._left = value, own, left
        self.places: dict[Path, int] = {None: 0}
        # To walk a tensor would cost as much as a small call.
        if type(value) is Tensor and not (left or value.__dict__):
            self._walk, self.tensors = None, [value]
            return
        self._walk = walk = ResultWalk(value, own, [held.values() for held in left])
        self.places, self.tensors = walk.places, walk.tensors

    @property
    def is_left(self) -> bool:
        """Whether tensors of the run are in holders."""
        return self._walk is not None and bool(self._walk.left)

    def places_like(self, slots: Mapping[Path, int]) -> Collection[Path]:
        """Return its places, but for others than those of a forward in holders."""
        left = () if self._walk is None else self._walk.left
        if not left:
            return self.places.keys()
        return {p for p in self.places if p in slots or p not in left}

    def hidden(self) -> Sequence[Hidden]:
        """Return the values in which a tensor may be hidden."""
        if self._walk is None:
            return ()
        self._walk.look_into_functions()
        return self._walk.hidden

    def without_tensors(self) -> "Emptied":
        """Take the tensors out of what holds them."""
        walk = self._walk
        if walk is None:
            return Emptied(at(0), {}, (), {})
        parts = walk.parts
        live = {key: EmptiedPart(parts[key]) for key in walk.live()}

        def put_aside(value: Any) -> Any:
            index = walk.index_in(value)
            if index is not None:
                return at(index)
            value = walk.original(value)
            return live.get(id(value), value)

        for part in live.values():
            part.empty(put_aside)
        left = [(held, [*map(put_aside, held.values())]) for held in self._left]
        for held, kept in left:
            held.take_out([n for n, k in enumerate(kept) if _is_exchanged(k)])
        return Emptied(put_aside(self._value), live, left, walk.attributes)


def _is_exchanged(kept: Any) -> bool:
    """Say whether a value in a holder is a tensor, or is made again around some."""
    return type(kept) is At or (type(kept) is EmptiedPart and kept.frozen)


class EmptiedPart:
    """What holds tensors in a result, without them.

    Attributes:
        value: it itself; None if it is made again, for it still has its tensors.
        frozen: whether it is made again.
        made: it itself, or what was made, once that is there.
    """

    __slots__ = ("_held", "_kind", "frozen", "made", "value")

    def __init__(self, part: Part) -> None:
        self._held, self._kind = part.held, type(part.value)
        self.frozen = part.frozen
        self.value = self.made = None if part.frozen else part.value

    def empty(self, put_aside: Callable[[Any], Any]) -> None:
        """Put all aside that it holds, and take it out."""
        self._held = [
            (how, [*map(put_aside, keys)], [*map(put_aside, items)])
            for how, keys, items in self._held
        ]
        if not self.frozen:
            self._write(lambda kept: None if type(kept) in (At, EmptiedPart) else kept)

    def parts(self) -> list["EmptiedPart"]:
        """Return what it holds that is made again, or filled."""
        held = (part for _, keys, items in self._held for part in (*items, *keys))
        return [part for part in held if type(part) is EmptiedPart]

    def fill(self, find: Callable[[Any], Any]) -> bool:
        """Fill it, or make it again; say whether all that it takes is there."""
        if any(part.made is None for part in self.parts()):
            return False
        if self.frozen:
            how, _, items = self._held[0]
            self.made = how.new(self._kind, [*map(find, items)], None)
        self._write(find)
        return True

    def _write(self, find: Callable[[Any], Any]) -> None:
        for how, keys, items in self._held:
            if not how.frozen:
                # Past methods of the user's, which may do more than set an item.
                how.write(self.made, [*map(find, keys)], [*map(find, items)])


class Emptied:
    """A result without its tensors."""

    __slots__ = ("_attributes", "_kept", "_left", "_parts")

    def __init__(
        self,
        kept: Any,
        parts: Mapping[int, EmptiedPart],
        left: Sequence[tuple[Left, Sequence[Any]]],
        attributes: Mapping[int, dict[str, Any]],
    ) -> None:
        self._kept, self._parts, self._left = kept, parts, left
        self._attributes = attributes

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Put tensors in, also in holders, and return the result."""

        def find(kept: Any) -> Any:
            if type(kept) is At:
                return tensors[kept.number]
            return kept.made if type(kept) is EmptiedPart else kept

        if self._parts:
            self._fill_parts(find)
        for index, attributes in self._attributes.items():
            vars(tensors[index]).update(attributes)
        for held, kept in self._left:
            held.put([*map(find, kept)])
        return find(self._kept)

    def _fill_parts(self, find: Callable[[Any], Any]) -> None:
        entered: set[int] = set()

        def enter(part: EmptiedPart) -> Sequence[EmptiedPart] | None:
            if id(part) in entered:
                return None
            entered.add(id(part))
            return part.parts()

        for part in self._parts.values():
            make(part, enter, lambda one: one.fill(find))


# --- Where its tensors are ---


class Out:
    """The structure of a function's result: where in it each tensor is.

    It holds no tensor, and no value of the user's: a graph holds it.

    Attributes:
        slots: for each path in the result the index of an output, or `~index` of an
            input that is returned as it is.
        metas: shape, dtype and device of each output.
    """

    __slots__ = ("_of_tensors", "metas", "slots")

    def __init__(
        self, slots: dict[Path, int], of_tensors: list[int], outs: Sequence[Tensor]
    ) -> None:
        self.slots, self._of_tensors = slots, of_tensors
        self.metas = _metas_of(outs)

    @classmethod
    def split(cls, result: Result, inputs: Sequence[Tensor]) -> tuple[Outputs, "Out"]:
        """Return the tensors that were computed, and the structure."""
        tensors, own = result.tensors, result.own.tensors
        known = slots_of(inputs)
        known.update(own)
        outs: list[Tensor] = []
        slots: dict[Path, int] = {}
        of_tensors = [0] * len(tensors)
        for place, index in result.places.items():
            tensor = tensors[index]
            slot = known.get(id(tensor))
            if slot is None:
                slot = known[id(tensor)] = len(outs)
                outs.append(tensor)
            slots[place] = of_tensors[index] = slot
        return tuple(outs), cls(slots, of_tensors, outs)

    def put_in(self, outs: Sequence[Any], inputs: Sequence[Tensor]) -> list[Any]:
        """Return the tensors of a result, from those of its level."""
        return [outs[s] if s >= 0 else inputs[~s] for s in self._of_tensors]

    def split_again(self, result: Result, inputs: Sequence[Tensor]) -> Outputs:
        """Take the result of a recompute apart, which must be built like this."""
        places = result.places_like(self.slots)
        if places != self.slots.keys():
            now, then = [*map(_shown, places)], [*map(_shown, self.slots)]
            raise RecomputeError(_DIFFERENT.format(now=now, then=then))
        # By place: a dict may have been filled in another order. Tensors that were one
        # may be two now, for under vmap an operation does not return what it is given.
        outs: list[Tensor] = []
        for place, slot in self.slots.items():
            if slot == len(outs):
                outs.append(result.tensors[result.places[place]])
        metas = _metas_of(outs)
        if not {*map(id, inputs)}.isdisjoint(map(id, outs)):
            raise RecomputeError(_DIFFERENT.format(now="an input", then="a result"))
        if not (
            self._is_equal_in_graph(metas) if is_below_tracer() else metas == self.metas
        ):
            raise RecomputeError(_DIFFERENT.format(now=metas, then=self.metas))
        return tuple(outs)

    def _is_equal_in_graph(self, metas: Sequence[tuple[Any, ...]]) -> bool:
        """Compare what a graph computes, where sizes may depend on values."""
        return len(metas) == len(self.metas) and all(
            are_sizes_equal(now[0], then[0]) and now[1:] == then[1:]
            for now, then in zip(metas, self.metas, strict=True)
        )


def slots_of(inputs: Sequence[Tensor]) -> dict[int, int]:
    """Return the slot of each input, by its identity."""
    return dict(zip(map(id, inputs), range(-1, ~len(inputs), -1), strict=True))


def _metas_of(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(t.shape, t.dtype, t.device) for t in tensors]


def _shown(place: Path) -> str:
    return f"result{written(place)[1]}"


_DIFFERENT = (
    "remat: the recompute returned {now} where the forward returned {then}. The "
    "function must compute the same thing twice: if it depends on outside state that "
    "changed, pass that state as an argument."
)
