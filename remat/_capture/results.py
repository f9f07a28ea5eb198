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

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from remat._base.errors import RecomputeError
from remat._base.types import Outputs
from remat._capture.container_kinds import refill
from remat._capture.containers import FACTORY
from remat._capture.nodes import Composite, Node, ObjectNode, TensorNode
from remat._capture.objects import set_attributes
from remat._capture.paths import Path, written
from remat._capture.result_walk import NOTHING, Hidden, Own, ResultWalk, is_changed
from remat._torch import are_sizes_equal, is_below_tracer


class LeftInHolder(Protocol):
    """What a function left in one holder, which is a part of its result."""

    def values(self) -> Sequence[Any]:
        """Return the values."""

    def take_out(self, numbers: Sequence[int]) -> None:
        """Take some of them out of the holder."""

    def put(self, new: Mapping[int, Any]) -> None:
        """Put others in their places."""


class Result:
    """A result, taken apart, with what the function left in holders."""

    __slots__ = ("_left", "_node", "_value", "_walk", "own", "places", "tensors")

    def __init__(
        self, value: Any, own: Own = NOTHING, left: Sequence[LeftInHolder] = ()
    ) -> None:
        self._value, self.own = value, own
        self.places: dict[Path, int] = {}
        self._left: list[tuple[LeftInHolder, dict[int, Node]]] = []
        # To walk a tensor would cost as much as a small call.
        if type(value) is Tensor and not left:
            self._walk, self._node = None, TensorNode.of(0)
            self.tensors = [value]
            self.places[None] = 0
            return
        self._walk = walk = ResultWalk(own)
        self._node = walk.visit(value, None)
        for number, held in enumerate(left):
            nodes = walk.visit_left(held.values(), number)
            if nodes:
                self._left.append((held, nodes))
        self.places, self.tensors = walk.places, walk.tensors

    @property
    def is_left(self) -> bool:
        """Whether some of it is in holders."""
        return bool(self._left)

    def places_like(self, slots: Mapping[Path, int]) -> Collection[Path]:
        """Return its places, but for others than those of a forward in holders."""
        left: Container[Path] = () if self._walk is None else self._walk.left
        return {p for p in self.places if p in slots or p not in left}

    def hidden(self) -> Sequence[Hidden]:
        """Return the values in which a tensor may be hidden."""
        if self._walk is None:
            return ()
        self._walk.look_into_functions()
        return self._walk.hidden

    def without_tensors(self) -> "Emptied":
        """Take the tensors out of what holds them."""
        if self._walk is None:
            return Emptied(None, self._node, {}, ())
        pairs = [(n, v) for v, n in self._walk.walked() if n is not None]
        # What is made again is not held: it has its tensors still.
        pairs = [(n, v) for n, v in pairs if is_changed(n, v) or not n.live]
        values = {id(node): value for node, value in pairs}

        def leave_empty(child: Node) -> Any:
            return values.get(id(child))

        for node, value in pairs:
            if node.live:
                _change(node, value, leave_empty)
        for held, nodes in self._left:
            held.take_out([*nodes])
        value = self._value if self._node is None else None
        return Emptied(value, self._node, values, self._left)


class Emptied:
    """A result without its tensors."""

    __slots__ = ("_left", "_node", "_value", "_values")

    def __init__(
        self,
        value: Any,
        node: Node | None,
        values: dict[int, Any],
        left: Sequence[tuple[LeftInHolder, dict[int, Node]]],
    ) -> None:
        self._value, self._node, self._values = value, node, values
        self._left = left

    def filled(self, tensors: Sequence[Any]) -> Any:
        """Put tensors in, also in holders, and return the result."""
        if self._node is None and not self._left:
            return self._value
        if type(self._node) is TensorNode and not self._left:
            return tensors[self._node.index]
        filling = _PuttingIn(tensors, self._values)
        value = self._value if self._node is None else self._node.build(filling)
        left = [
            (held, {n: node.build(filling) for n, node in nodes.items()})
            for held, nodes in self._left
        ]
        filling.end()
        for held, new in left:
            held.put(new)
        return value


class _PuttingIn:
    """Puts tensors in. What it changes it changes last: that may refer to itself."""

    __slots__ = ("_changed", "_values", "built", "tensors")

    def __init__(self, tensors: Sequence[Any], values: dict[int, Any]) -> None:
        self.tensors, self._values = tensors, values
        self.built: dict[int, Any] = {}
        self._changed: list[tuple[Composite, Any]] = []

    def make(self, node: Composite) -> Any:
        """Return the value of a node, which is changed later or made again."""
        value = self._values.get(id(node), self)
        if value is self:
            return node.new(self)
        self.built[node.identity] = value
        if node.live:
            self._changed.append((node, value))
        return value

    def end(self) -> None:
        """Change what was met."""
        for node, value in self._changed:  # which grows
            _change(node, value, self._build)

    def _build(self, child: Node) -> Any:
        return child.build(self)

    def make_object(self, node: ObjectNode) -> Any:
        """Not asked: objects are not made again."""
        raise NotImplementedError

    def make_view(self, node: Any) -> Any:
        """Not asked: a view in a result stays as it is."""
        raise NotImplementedError


_Build: TypeAlias = Callable[[Node], Any]


def _change(node: Any, value: Any, build: _Build) -> None:
    """Put what `build` gives for the parts of a value into it."""
    children = node.children
    named = {n: build(children[n]) for n in node.entries.keys() & children.keys()}
    if FACTORY in named and hasattr(value, FACTORY):
        value.default_factory = named.pop(FACTORY)
    if named:
        set_attributes(value, named)
    if isinstance(node, ObjectNode):
        return
    items, keys = node.items.copy(), node.keys.copy()
    for key, child in children.items():
        if isinstance(key, int):
            items[key] = build(child)
        elif key not in node.entries:
            keys[int(key)] = build(child)
    for i, index in node.tensors:
        items[i] = build(TensorNode.of(index))
    # Past methods of the user's, which may do more than set an item.
    refill(node.how, value, keys, items)


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
