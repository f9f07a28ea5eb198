"""A user's call, taken apart: its tensors, and the rest as a snapshot.

`api` makes one for a call under torch.func. `primal` makes a program of it.

Invariant: the tensors of the call are taken out of it once, and every run is given its
own. The first run is the forward, whose effects on the user's objects stay. The effects
of later runs are dropped.
Rejected: a program for each module of a model. What a function reaches is one set of
inputs, whatever holds it.
"""

import functools
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from remat._ambient.draws import without_draws
from remat._base.errors import CaptureError
from remat._base.types import Fn, Outputs
from remat._capture.handing_on import Forward
from remat._capture.restore import Run
from remat._capture.result_walk import Hidden, Own
from remat._capture.results import Emptied, Result
from remat._capture.search import Search
from remat._capture.snapshot import Bound, Snapshot, call_under
from remat._capture.structure import Out, slots_of
from remat._partial.options import DEFAULT, Options
from remat._torch import (
    current_layer,
    levels_requiring_grad,
    unwrap_dead,
)
from remat._transform.outer_levels import RefuseOuterLevels, holds_graph


_requires_grad = operator.attrgetter("requires_grad")


class Call:
    """One call of a user's function, taken apart.

    Attributes:
        policy: of the call, joined with those of the calls around.
        prune: as passed to `remat`.
        snapshot: what it refers to, without the tensors.
        wrapped: the inputs as they were passed, where the function runs below levels
            that they are of; empty at the base, and once the forward has run.
        is_differentiated_once: whether one level at most differentiates each input.
        may_read_early: says of an input, in a graph, whether a recompute may read it
            before the cotangents; None if none is.
        structure: of the result; None until the forward has run.
        hidden: what in the result may hold a tensor that cannot be seen.
    """

    __slots__ = (
        *("_emptied", "_fn", "_inputs", "_search", "hidden", "policy", "prune"),
        *("is_differentiated_once", "may_read_early", "snapshot", "structure"),
        "wrapped",
    )

    def __init__(
        self,
        fn: Fn,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: Options = DEFAULT,
    ) -> None:
        if options.rng == "error":
            fn = without_draws(fn, label)
        self.policy, self.prune = options.joined(), options.prune
        self.structure: Out | None = None
        self.hidden: Sequence[Hidden] = ()
        self._emptied: Emptied | None = None
        self.wrapped: Sequence[Tensor] = ()
        self.is_differentiated_once = True
        self.may_read_early: Callable[[Tensor], bool] | None = None
        self._fn: Any = fn
        self._search: Search | None = Search()
        self.snapshot = Snapshot(fn, label, args, kwargs, self._search)
        self._inputs = self._search.found.tensors

    @property
    def owner(self) -> Any:
        """The object that the function is a method of, or the function."""
        return getattr(self._fn, "__self__", self._fn)

    @property
    def is_lazy(self) -> bool:
        """Whether some module that it reaches has no parameters yet."""
        return self._search is not None and self._search.found.is_lazy

    def take_inputs(self) -> tuple[list[Tensor], list[bool]]:
        """Return the tensors of the call, and which require grad, at any level.

        From then on the caller holds them, and the call does not.
        """
        passed = self._inputs
        self._inputs: list[Tensor] = []
        inputs = [*map(unwrap_dead, passed)]
        if True in map(operator.is_not, inputs, passed) and holds_graph(passed, inputs):
            message = _PULLBACK.format(label=self.snapshot.label)
            warnings.warn(message, stacklevel=3)
            return inputs, [False] * len(inputs)
        if current_layer() is None:
            return inputs, [*map(_requires_grad, inputs)]
        self.wrapped = passed
        counts = [*map(levels_requiring_grad, inputs)]
        self.is_differentiated_once = max(counts, default=0) < 2
        return inputs, [count > 0 for count in counts]

    def body(self, fn: Bound, run: Forward) -> Fn:
        """Return what the forward calls: the function, or what calls it repeatedly.

        Args:
            fn: the function, with its arguments.
            run: the forward.
        """
        del run
        return fn

    def hand_on(self, run: Forward) -> None:
        """Let the user's objects hold what the function changed in the forward."""
        run.hand_on()

    def join(self, outs: Sequence[Any], inputs: Sequence[Tensor]) -> Any:
        """Return the value that the function returned, around tensors of its level."""
        assert self.structure is not None
        assert self._emptied is not None
        emptied, self._emptied = self._emptied, None  # which holds what is the user's
        return emptied.filled(self.structure.put_in(outs, inputs))

    def run_forward(self, inputs: Sequence[Tensor]) -> Result:
        """Call the function on other tensors; what it does to objects stays."""
        search = self._search
        assert search is not None
        if search.found.scripted:
            raise CaptureError(_SCRIPTED.format(name=search.found.scripted))
        run = Forward(inputs, search.found.tensors, search.originals())
        with run:
            fn, *around = self.snapshot.built(run)
            run.note()
            body = self.body(fn, run)
            if self.wrapped:
                refused = RefuseOuterLevels(self.wrapped, inputs, self.snapshot.name_of)
                body = functools.partial(_called_under, refused, body)
            value = call_under(body, *around)
            self.wrapped = ()
            self.hand_on(run)
            if type(value) is Tensor:
                return Result(value)
            tensors = slots_of(search.found.tensors)
            return Result(value, Own(run.owners(), tensors, search.known()))

    def split(self, result: Result, inputs: Sequence[Tensor]) -> Outputs:
        """Return the tensors of a forward's result, and keep its structure.

        Raises:
            CaptureError: the result holds tensors that cannot be seen.
        """
        self.hidden = result.hidden()
        for hidden in self.hidden:
            if hidden.why:
                raise CaptureError(hidden.told(_OPAQUE, self.snapshot.label))
        outs, self.structure = Out.split(result, inputs)
        self._emptied = result.without_tensors()
        return outs

    def forward_done(self) -> None:
        """Let go of what only the forward needs."""
        self._fn: Any = None
        self._search = None

    def run_again(self, inputs: Sequence[Tensor]) -> Result:
        """Call the function on other tensors; what it does to objects is dropped."""
        with Run(inputs) as run:
            return Result(self.snapshot.call(run))


def _called_under(mode: RefuseOuterLevels, fn: Fn) -> Any:
    with mode:
        return fn()


_PULLBACK = (
    "remat: {label} holds a pullback of torch.func.vjp. Its graph, recorded outside, "
    "can't be computed again: the function is called as it is, and no memory is saved. "
    "Call torch.func.vjp inside it."
)
_SCRIPTED = (
    "remat: {name} is a TorchScript module, whose parameters remat cannot replace. "
    "Pass the eager module instead."
)
_OPAQUE = "remat: {label} returned a {kind} (`result{where}`) that {why}."
