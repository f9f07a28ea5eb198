"""The structure of a function's result: where in it each tensor is.

Invariant: nothing here holds a tensor, or a value of the user's: a graph holds it.
Rejected: a treedef. A result may be built of objects that no registry knows, and a
recompute has to agree on its tensors alone.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat._base.errors import RecomputeError
from remat._base.types import Outputs
from remat._capture.results import Result


class Out:
    """The structure of a function's result.

    Attributes:
        slots: for each place in the result the index of an output, or `~index` of an
            input that is returned as it is.
        metas: shape, dtype and device of each output.
    """

    __slots__ = ("_of_tensors", "metas", "slots")

    def __init__(
        self, slots: dict[str, int], of_tensors: list[int], outs: Sequence[Tensor]
    ) -> None:
        self.slots, self._of_tensors = slots, of_tensors
        self.metas = [(t.shape, t.dtype, t.device) for t in outs]

    @classmethod
    def split(
        cls, result: Result, inputs: Sequence[Tensor], places: Sequence[str] = ()
    ) -> tuple[Outputs, "Out"]:
        """Return the tensors that were computed, and the structure.

        Args:
            result: the result.
            inputs: of the run.
            places: in the order in which the tensors are to be; as found by default.
        """
        tensors, own = result.tensors, result.own.tensors
        known = {id(t): ~i for i, t in enumerate(inputs)}
        known.update((key, ~i) for key, i in own.items())
        outs: list[Tensor] = []
        slots: dict[str, int] = {}
        of_tensors = [0] * len(tensors)
        for place in places or result.places:
            index = result.places[place]
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
        """Take the result of a recompute apart, which must be built like this.

        Raises:
            RecomputeError: it is not.
        """
        if result.places.keys() != self.slots.keys():
            now, then = [*map(_shown, result.places)], [*map(_shown, self.slots)]
            raise RecomputeError(_DIFFERENT.format(now=now, then=then))
        # A dict or an object may have been filled in another order.
        outs, again = Out.split(result, inputs, [*self.slots])
        if again.metas != self.metas or again.slots != self.slots:
            raise RecomputeError(_DIFFERENT.format(now=again.metas, then=self.metas))
        return outs


def _shown(place: str) -> str:
    return f"result{place}"


_DIFFERENT = (
    "remat: the recompute returned {now} where the forward returned {then}. The "
    "function must compute the same thing twice: if it depends on outside state that "
    "changed, pass that state as an argument."
)
