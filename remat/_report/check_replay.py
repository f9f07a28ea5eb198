"""`check_replay`: whether a recompute computes what the forward did, bit for bit.

The function runs twice: as the forward of a rematerialized call, and as its recompute.
A mode copies the results of each operation in the first run, and compares them in the
second (`bitwise`).

Invariant: a value is compared as soon as it is made, so the report names the operation
where the two runs first differ.
Rejected: keeping hashes, which take no memory. Reporting the distance of two values
would need a third run, which may differ again.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._ambient.draws import without_draws
from remat._base.context import within
from remat._base.errors import RecomputeError
from remat._base.types import Fn
from remat._live.reach import Reach
from remat._live.results import Out, Result
from remat._partial.cache import CACHES
from remat._report.bitwise import RunValues, has_values
from remat._report.inputs import Inputs
from remat._report.labels import one_by_one, refuse_transforms, unwrapped
from remat._torch import below_all_levels, unwrap_dead
from remat._transform.leaves import ONLY_MARKS
from remat._transform.saved import Filling, Saved, recompute


@dataclass(frozen=True, slots=True)
class Agreement:
    """What `check_replay` compared and found equal.

    Attributes:
        operations: the number of operations that the function ran.
        values: the number of tensors compared: those that operations made or wrote, and
            those that existed before and were read.
        nbytes: the bytes of the compared tensors.

    Example:
        >>> import torch
        >>> check_replay(lambda x: x.sin().exp(), torch.ones(3))
        Agreement(operations=2, values=3, nbytes=36)
    """

    operations: int
    values: int
    nbytes: int


def check_replay(fn: Fn, /, *args: Any, **kwargs: Any) -> Agreement:
    """Run a function and its recompute, and compare everything they compute.

    Use this if gradients are wrong, or if `RecomputeError` is raised. The comparison is
    bit for bit. It names the operation where the recompute first differs from the
    forward, and says how. Both runs are in full, without a policy or pruning. Buffers
    are updated and random streams moved once, as by one call.

    Host memory holds a copy of every result, and of the inputs that operations read.
    Some values are not compared: uninitialized memory (`empty`, `new_empty`, ...), the
    states of random streams that attention returns, and the scratch memory of kernels
    of batch norm and recurrent layers.

    Args:
        fn: the function, rematerialized or not. Compiled functions run eagerly here.
        *args: its arguments. If no tensor that is passed or referred to requires grad,
            every floating argument is treated as if it did.
        **kwargs: its keyword arguments.

    Returns:
        How much was compared.

    Raises:
        RecomputeError: the recompute ran another operation, or an operation gave other
            bits.
        RuntimeError: `check_replay` is called under a transform of torch.func,
            forward-mode AD or torch.compile; or an input is a meta or fake tensor.

    Example:
        >>> import time, torch
        >>> from remat import remat
        >>> check_replay(remat(lambda x: x.sin().sin()), torch.ones(3))
        Agreement(operations=2, values=3, nbytes=36)
        >>> f = lambda x: x * time.perf_counter()
        >>> check_replay(f, torch.ones(3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        remat.RecomputeError: remat: recomputing `<lambda>` does something...
    """
    instead = "the transformed function: check_replay(torch.func.grad(f), x)"
    refuse_transforms("check_replay", instead)
    fn, label, options = unwrapped(fn)
    if options.rng == "error":
        fn = without_draws(fn, label)
    inputs = Inputs(fn, args, kwargs)
    args, kwargs = inputs.args, inputs.kwargs
    reach = Reach(fn, label, args, kwargs)
    leaves = [*map(unwrap_dead, reach.take_tensors())]
    if not all(map(has_values, leaves)):
        raise RuntimeError(_NO_VALUES)
    needs = [t.requires_grad for t in leaves]
    call = _Twice(reach, replace(options, prune=False), leaves, needs)
    first = RunValues()
    CACHES.clear()  # nested calls are first calls in both runs
    with one_by_one("check_replay", args):
        result = call.run_forward(fn, args, kwargs, leaves, first)
    CACHES.clear()
    second = RunValues(first.steps)
    failed: Exception | None = None
    try:
        call.run_recompute(second)
    except Exception as error:  # noqa: BLE001 - raised below
        failed = error
    if second.difference is not None:
        raise RecomputeError(second.described(label)) from failed
    if failed is not None:
        raise failed
    del result  # its graph holds the handles
    return Agreement(len(first.steps), first.values, first.nbytes)


_NO_VALUES = (
    "remat: check_replay compares values, and a meta or fake tensor has none. Pass "
    "tensors with values."
)
_GRADLESS = (
    "remat: recomputing {label} gave outputs that require grad: {now}, where in the "
    "forward: {then}. The function must compute the same thing twice."
)


# --- The two runs ---

_requires_grad = operator.attrgetter("requires_grad")


class _Twice(Saved):
    """A call that a mode follows, and whose recompute runs to its end."""

    __slots__ = ("_needs_grad", "_out")
    _needs_grad: list[bool]
    _out: Out

    def run_forward(
        self, fn: Fn, args: Any, kwargs: dict[str, Any], leaves: Any, mode: RunValues
    ) -> Any:
        """Run the forward; return its result, whose graph holds the handles."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with within(self.policy, under_mode=True), mode:
                return fn(*args, **kwargs)

        result = self.forward(watched, args, kwargs, leaves)
        outs, self._out = Out.split(Result(result), leaves)
        self._needs_grad = [*map(_requires_grad, outs)]
        return result

    def run_recompute(self, mode: RunValues) -> None:
        filling = _ToTheEnd(self.alive(), self)
        tensors = self.inputs.to_run_on(ONLY_MARKS)
        below_all_levels(recompute, self, filling, tensors, mode)
        if mode.difference is None and filling.error is not None:
            raise filling.error
        if mode.difference is None and filling.left > 1:
            raise filling.differs()

    @override
    def run_again(self, tensors: Sequence[Tensor]) -> None:
        def take(value: Any, **left: Any) -> Any:
            return self._out.split_again(Result(value, **left), tensors)

        outs = self.reach.run(tensors, take=take)
        now, then = [*map(_requires_grad, outs)], self._needs_grad
        if now != then:
            raise RecomputeError(_GRADLESS.format(label=self.label, now=now, then=then))


class _ToTheEnd(Filling):
    """Lets a recompute go on when all handles are filled, and when one does not fit."""

    __slots__ = ("error",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.left += 1  # or it would stop at the last handle
        self.error: RecomputeError | None = None  # the first that `Filling` raised

    @override
    def pack(self, t: Tensor) -> Any:
        try:
            return super().pack(t)
        except RecomputeError as error:
            self.error = self.error or error
            return t if t.is_leaf else t.detach()
