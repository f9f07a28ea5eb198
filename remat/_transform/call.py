"""What a user's call is made of, and how it is run around other tensors.

Invariant: the tensors of the call are taken out of it once, and every run is given its
own. The first run is the forward, whose effects on the user's objects stay; those of
later runs are dropped.
Rejected: a program for each module of a model. What a function reaches is one set of
inputs, whatever holds it.
"""

import operator
import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._ambient.draws import without_draws
from remat._base.errors import CaptureError
from remat._base.program import Program
from remat._base.types import Fn
from remat._capture.handing_on import Forward
from remat._capture.restore import Run
from remat._capture.search import Search
from remat._capture.snapshot import Snapshot
from remat._capture.structure import Out
from remat._torch import current_layer, requires_grad_at_any_level, unwrap_dead
from remat._transform.foreign import holds_graph


_requires_grad = operator.attrgetter("requires_grad")


class Call(Program):
    """One call of a user's function, taken apart.

    Attributes:
        above: the leaves as they were passed, until the forward has run, if it runs
            below the levels that they are of.
    """

    __slots__ = ("_fn", "_label", "_leaves", "_out", "_search", "_snapshot", "above")
    _out: Out | None

    def __init__(
        self,
        fn: Fn,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng: str = "replay",
    ) -> None:
        if rng == "error":
            fn = without_draws(fn, label)
        self._out = None
        self.above: Sequence[Tensor] = ()
        self._fn: Any = fn
        self._label = label
        self._search: Search | None = Search()
        self._snapshot = Snapshot(fn, label, args, kwargs, self._search)
        self._leaves = self._search.found.tensors

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        return self._snapshot.signature

    @property
    def label(self) -> str:
        """What errors and reports call it."""
        return self._label

    @property
    def compiled(self) -> bool:
        """Whether it reaches code that torch.compile or TorchScript made."""
        return self._snapshot.compiled

    @property
    @override
    def is_forward(self) -> bool:
        """Whether the next run is the first."""
        return self._out is None

    @property
    def is_lazy(self) -> bool:
        """Whether some module that it reaches has no parameters yet."""
        return self._search is not None and self._search.found.is_lazy

    def take_leaves(self) -> tuple[list[Tensor], list[bool]]:
        """Return the tensors of the call, and which require grad, at any level.

        And forget them.
        """
        above = self._leaves
        self._leaves: list[Tensor] = []
        leaves = [*map(unwrap_dead, above)]
        if True in map(operator.is_not, leaves, above) and holds_graph(above, leaves):
            warnings.warn(_PULLBACK.format(label=self._label), stacklevel=3)
            return leaves, [False] * len(leaves)
        if current_layer() is None:
            return leaves, [*map(_requires_grad, leaves)]
        self.above = above
        return leaves, [*map(requires_grad_at_any_level, leaves)]

    def join(self, outs: Sequence[Any], leaves: Sequence[Tensor]) -> Any:
        """Rebuild the value that the function returned."""
        assert self._out is not None
        return self._out.join(outs, leaves)

    def run_around(self, leaves: Sequence[Tensor], *, first: bool) -> Any:
        """Call the function around other tensors."""
        if not first:
            with Run(leaves, "live") as run:
                return self._snapshot.call(run)
        search = self._search
        assert search is not None
        if search.found.scripted:
            raise CaptureError(_SCRIPTED.format(name=search.found.scripted))
        run = Forward(leaves, search.found.tensors, search.originals())
        with run:
            built = self._snapshot.built(run)
            run.note()
            result = self._snapshot.called(*built)
            run.hand_on()
        return result

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        return self._snapshot.name_of(index)


_PULLBACK = (
    "remat: {label} holds a pullback of torch.func.vjp. Its graph, recorded outside, "
    "can't be computed again: the function is called as it is, and no memory is saved. "
    "Call torch.func.vjp inside it."
)
_SCRIPTED = (
    "remat: {name} is a TorchScript module, whose parameters remat cannot replace. "
    "Pass the eager module instead."
)
