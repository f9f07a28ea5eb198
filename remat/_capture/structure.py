"""The structure of a function's result, around its tensors.

Invariant: nothing here holds a tensor. A result that is one tensor has the treedef
`None`: to flatten it would cost as much as the rest of a small call.
Rejected: the treedef alone. An input that is returned as it is must be that very input,
and a tensor that is returned twice must be one.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat._base import pytree
from remat._base.errors import RecomputeError
from remat._base.types import Leaf, Outputs


class Out:
    """The structure of a function's result.

    Attributes:
        treedef: how the leaves make up the result.
        slots: for each leaf the index of an output, `~index` of an input returned as
            it is, or `None`.
        statics: the leaves that are no tensors, by position.
        metas: shape, dtype and device of each output.
    """

    __slots__ = ("metas", "slots", "statics", "treedef")

    def __init__(
        self,
        treedef: pytree.Treedef | None,
        slots: list[int | None],
        statics: dict[int, Leaf],
        outs: Sequence[Tensor],
    ) -> None:
        self.treedef, self.slots, self.statics = treedef, slots, statics
        self.metas = [(t.shape, t.dtype, t.device) for t in outs]

    @classmethod
    def split(cls, result: Any, inputs: Sequence[Tensor]) -> tuple[Outputs, "Out"]:
        """Take a result apart into the tensors computed and the structure."""
        if isinstance(result, Tensor) and id(result) not in map(id, inputs):
            return (result,), cls(None, [0], {}, (result,))
        known = {id(t): ~i for i, t in enumerate(inputs)}
        flat, treedef = pytree.flatten(result)
        outs: list[Tensor] = []
        slots: list[int | None] = []
        statics = {}
        for k, leaf in enumerate(flat):
            slot = None
            if not isinstance(leaf, Tensor):
                statics[k] = leaf
            elif (slot := known.get(id(leaf))) is None:
                slot = known[id(leaf)] = len(outs)
                outs.append(leaf)
            slots.append(slot)
        return tuple(outs), cls(treedef, slots, statics, outs)

    def join(self, outs: Sequence[Any], inputs: Sequence[Tensor]) -> Any:
        """Rebuild the result."""
        if self.treedef is None:
            return outs[0]
        flat = [
            self.statics[k] if s is None else outs[s] if s >= 0 else inputs[~s]
            for k, s in enumerate(self.slots)
        ]
        return pytree.unflatten(self.treedef, flat)

    def split_again(self, result: Any, inputs: Sequence[Tensor]) -> Outputs:
        """Take the result of a recompute apart, which must be built like this.

        Raises:
            RecomputeError: it is not.
        """
        if self.treedef is None and isinstance(result, Tensor):
            meta = (result.shape, result.dtype, result.device)
            if meta == self.metas[0]:
                return (result,)
        outs, again = Out.split(result, inputs)
        if again.metas != self.metas or again.slots != self.slots:
            raise RecomputeError(_DIFFERENT.format(now=again.metas, then=self.metas))
        if again.treedef != self.treedef:
            raise RecomputeError(
                _DIFFERENT.format(now=again.treedef, then=self.treedef)
            )
        return outs


_DIFFERENT = (
    "remat: the recompute returned {now} where the forward returned {then}. The "
    "function must compute the same thing twice: if it depends on outside state that "
    "changed, pass that state as an argument."
)
