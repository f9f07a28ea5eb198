"""The structure of a function's result: where in it each tensor is.

In comes a result that was taken apart (`result_walk`). Out come the tensors that the
function computed. A recompute must return them in the same places.

Invariant: a structure holds no tensor and no value of the user's: a graph holds it.
Rejected: to compare in the order of the walk. A dict may be filled in another one.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat._base.errors import RecomputeError
from remat._base.types import Outputs
from remat._reach.names import Path, written
from remat._reach.result_walk import Result
from remat._torch.graphs import is_below_tracer
from remat._torch.tracing import are_sizes_equal


class Out:
    """Where the tensors of a result are.

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
