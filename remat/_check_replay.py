"""`check_replay`: whether a recomputation computes what the forward did, bit for bit.

The function runs twice, as the forward of a rematerialized call and as its
recomputation. A mode copies what each operation of the forward made; another compares
that with what the operations of the recomputation make.

Invariant: a value is compared as soon as it is made, so what is reported is where the
two part, and not where it shows. Rejected: comparing gradients, which tell that
something differs and not what. And keeping hashes, which take no memory: how far two
values are apart could be told only by running the function a third time, when it may do
something else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat import _rules
from remat._api import Rematerialized
from remat._compare import CompareValues, KeepValues, has_values
from remat._compat import (
    grad_mode,
    without_hooks,
)
from remat._errors import RecomputeError
from remat._options import DEFAULT
from remat._primal import Primal
from remat._program import Facts, Program, detached, has_derivatives
from remat._reporting import label_of, refuse_transforms
from remat._traces import TRACES
from remat._types import Fn


@dataclass(frozen=True, slots=True)
class Agreement:
    """What `check_replay` found to be the same twice.

    Attributes:
        operations: how many the function ran.
        values: how many tensors were compared: what operations made or wrote, and what
            they read that was there before.
        nbytes: the bytes of those tensors.
    """

    operations: int
    values: int
    nbytes: int


def check_replay(fn: Fn, /, *args: Any, **kwargs: Any) -> Agreement:
    """Run a function and its recomputation, and compare all they compute, bit by bit.

    For a function whose gradients are not what they should be, or that raises
    `RecomputeError`: it names the operation where the recomputation leaves the forward,
    and how. Each is run once and in full, as without a policy or pruning: a difference
    is found also in what a policy keeps at present. For the function it is as one call:
    buffers are updated and random streams moved once.

    A copy of all that operations make, and of the inputs that they read, is held in the
    memory of the host: more than the function needs without `remat`. On the device it
    is what one call of `remat` needs. What is a view of something else is not copied.

    Not compared are memory that is given out as it is (`empty`, `new_empty`, ...), the
    states of random streams that attention returns, the scratch memory of kernels of
    batch norm and recurrent layers, and meta tensors, which have no values. Compiled
    functions run eagerly here.

    Args:
        fn: the function, rematerialized or not.
        *args: its arguments. If nothing that it is passed or refers to requires grad,
            every floating argument is taken to.
        **kwargs: its keyword arguments.

    Returns:
        How much was compared.

    Raises:
        RecomputeError: the recomputation ran another operation, or one gave other bits.
        RuntimeError: called under a transform of torch.func, forward-mode AD or
            torch.compile; or an input is a meta or fake tensor.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> check_replay(remat(lambda x: x.sin().sin()), torch.ones(3))
        Agreement(operations=2, values=3, nbytes=36)
        >>> scales = iter([2.0, 3.0])
        >>> f = lambda x: x * next(scales)
        >>> check_replay(f, torch.ones(3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        remat._errors.RecomputeError: remat: recomputing `<lambda>` does something...
    """
    instead = "the transformed function: check_replay(torch.func.grad(f), x)"
    refuse_transforms("check_replay", instead)
    options, label = DEFAULT, label_of(fn)
    if isinstance(fn, Rematerialized):
        fn, options, label = fn.__wrapped__, fn._options, fn._label
    forward = KeepValues()
    call = _Call(fn, label, args, kwargs, replace(options, prune=False))
    call.mode = forward
    leaves, _ = call.take_leaves()
    if not all(has_values(t) for t in leaves):
        raise RuntimeError(_NO_VALUES)
    TRACES.clear()  # calls within do in both what a first call does
    saved = call.run_forward(leaves)
    TRACES.clear()
    recomputation = CompareValues(forward.steps)
    try:
        call.run_again(saved, recomputation)
    except Exception as error:
        if recomputation.difference is None:
            raise
        raise RecomputeError(recomputation.described(label)) from error
    if recomputation.difference is not None:
        raise RecomputeError(recomputation.described(label))
    values, nbytes = forward.values, forward.nbytes
    return Agreement(len(forward.steps), values, nbytes)


_NO_VALUES = (
    "remat: check_replay compares values, and a meta or fake tensor has none. Pass "
    "tensors that are on a device."
)


# --- The two runs ---


class _Call(Primal):
    """A call that a mode follows."""

    __slots__ = ("mode",)
    mode: Any

    @override
    def _tracing(
        self, program: Program, leaves: Sequence[Tensor], inner: Sequence[Tensor]
    ) -> Any:
        """Have the forward followed by our mode, and nothing kept."""
        del program, leaves
        return _Tracing(self.mode)

    @override
    def own_among(
        self, leaves: Sequence[Tensor], needs: Sequence[bool]
    ) -> Sequence[int]:
        """Return none, for what autograd does not know of may be differentiated."""
        del leaves, needs
        return ()

    def run_forward(self, leaves: Sequence[Tensor]) -> Sequence[Tensor]:
        """Be the forward; return what a call would save."""
        self.facts = Facts(self._needs(leaves), self.uses(len(leaves)), exact=True)
        with grad_mode(False):
            outs = self.forward(self, leaves)
        kept = self.facts.kept
        return _rules.replace(leaves, kept, outs[len(outs) - len(kept) :])

    def _needs(self, leaves: Sequence[Tensor]) -> list[bool]:
        needs = [t.requires_grad for t in leaves]
        if True in needs:
            return needs
        passed = [isinstance(path, int) for path in self._origins]
        return [p and has_derivatives(t) for p, t in zip(passed, leaves, strict=True)]

    def run_again(self, saved: Sequence[Tensor], mode: Any) -> None:
        """Be the recomputation."""
        inner = detached(saved, self.facts.needs)
        with grad_mode(True):
            outs = without_hooks(self._run_under, mode, inner)
        if mode.difference is None:
            self.is_as_recorded(outs)

    def _run_under(self, mode: Any, leaves: Sequence[Tensor]) -> Any:
        return self.run(*leaves, mode=mode)


class _Tracing:
    """In place of what traces a forward."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode

    def finish(
        self, outs: Sequence[Any], *, may_drop: bool
    ) -> tuple[None, list[Tensor]]:
        """Return no recipe and no residuals."""
        del outs, may_drop
        return None, []
