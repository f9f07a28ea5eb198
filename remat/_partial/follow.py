"""The modes that follow a record: through a forward, or through a recompute in full.

`Follow` compares each operation with the next one of the record, and runs it. Its
subclasses say in `at` and `unexpected` what becomes of an operation that is next, or is
not: `Collect` and `Check` here, and `Replay` (`replay.py`).

Invariant: what is done for each operation is one look in a list, and its kernel.
Rejected: comparing views, copies and casts in a recompute in full. Who differentiates
decides about these.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._base.absent import MismatchError, inputs_of, tensors_of
from remat._base.errors import RecomputeError
from remat._base.source import user_line
from remat._partial.plan import Step
from remat._partial.runnable import (
    UNRECORDED,
    Kernel,
    RunnablePlan,
    has_same_statics,
    is_optional,
    statics_of,
)
from remat._partial.values import key_of
from remat._torch.modes import LeanDispatchMode, call_kernel
from remat._torch.operators import is_view_op
from remat._torch.tensors import has_no_memory
from remat._torch.tracing import eager_only


class Follow(LeanDispatchMode):
    """Follows a record from operation to operation.

    `kernels` has what each one calls, or None if `at` says what becomes of it.
    """

    def __init__(
        self, runnable: RunnablePlan, kernels: Sequence[Kernel | None]
    ) -> None:
        super().__init__()
        self.runnable = runnable
        self._funcs = runnable.funcs
        self._kernels: Sequence[Kernel | None] = kernels
        self._next = 0

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        if self._funcs[i] is not func:
            return self.unexpected(i, func, args, kwargs)
        self._next = i + 1
        kernel = self._kernels[i]
        if kernel is None:
            return self.at(i, func, args, kwargs)
        try:
            return kernel(*args, **kwargs) if kwargs else kernel(*args)
        except Exception as error:  # noqa: BLE001 - raised there
            self._next = i  # no record has what raises
            result = self.refused(error, func, args, kwargs)
            self._next = i + 1
            return result

    def at(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of the operation that the record has next."""
        raise NotImplementedError

    def unexpected(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that the record does not have next."""
        raise NotImplementedError

    def refused(self, error: Exception, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that torch refuses to run."""
        raise error

    def note_saved(self, outs: Sequence[Any]) -> None:
        """Do nothing: the record says what the graph saves."""

    def end(self) -> None:
        """Check that every recorded operation has run, or raise a MismatchError."""
        if self._funcs[self._next] is not None:
            raise self._differs(None)

    @override
    def note_unseen(self) -> None:
        self._differs(None)  # no record has operations that a mode does not see

    def _differs(self, func: Any) -> Exception:
        """Return the error that another operation ran than was recorded."""
        error = MismatchError(_described(self.runnable.record.steps, self._next, func))
        self._give_up()
        return error

    def _give_up(self) -> None:
        """Let nothing fit from now on: the function may catch the error and go on."""
        self._next = len(self._funcs) - 1


def _described(steps: Sequence[Step], i: int, func: Any) -> str:
    """Describe the first operation that is not as recorded, with those before."""

    def lines(part: Sequence[Step]) -> list[str]:
        ops = (step.op for step in part)
        return [f"{op.func}" + (f"  # {op.source}" if op.source else "") for op in ops]

    before, then = lines(steps[max(0, i - 2) : i]), lines(steps[i : i + 3])
    now = "nothing more" if func is None else f"{func}  # {user_line()}"
    forward = [*before, *(then or ["nothing more"])]
    parts = ("  forward:", forward), ("  recompute:", [*before, now])
    text = (line for head, part in parts for line in (head, *map("    ".__add__, part)))
    return "\n".join(text)


class Collect(Follow):
    """Collects, in a forward, the residuals that a plan saves.

    `on_residual` is called with each as it is made. Given the inputs, it also checks
    that each operation reads what it read when it was recorded: once inputs are
    dropped, only the plan can recompute.
    """

    def __init__(
        self,
        runnable: RunnablePlan,
        inputs: Sequence[Tensor] | None = None,
        on_residual: Callable[[Tensor], None] | None = None,
    ) -> None:
        super().__init__(runnable, runnable.collecting)
        # Whether it checks what each operation reads, for which it looks at all.
        self.verifies = inputs is not None
        self._numbers: dict[int, int] = {}
        if inputs is not None:
            self._kernels = [None] * len(self._kernels)
            pairs = zip(inputs, runnable.record.inputs, strict=True)
            self._numbers = {key_of(t): s for t, s in pairs}
        self._on_residual = on_residual
        self._collected: list[tuple[Tensor, int]] = []  # with their versions
        self._fits = True  # so far
        self.statics: dict[int, Any] = {}

    @override
    def at(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        kernel = self.runnable.kernels[i]
        self._next = i
        result = kernel(*args, **kwargs) if kwargs else kernel(*args)
        self._next = i + 1
        outputs = tensors_of(result)
        if i in self.runnable.residual_index:
            self._collect(i, args, kwargs, outputs)
        if self.verifies and self._fits and not self._verify(i, args, kwargs, outputs):
            self._give_up()
        return result

    @override
    def unexpected(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs) if kwargs else func(*args)
        if is_view_op(func) and has_no_memory(args[0]):
            # In a replay around: autograd makes views of absent tensors again, and
            # each is a storage of its own, where one that was freed may have been.
            for t in tensors_of(result):
                self._numbers.pop(key_of(t), None)
        elif func not in UNRECORDED:
            self._give_up()
        return result

    def _collect(
        self, i: int, args: Any, kwargs: Any, outputs: Sequence[Tensor]
    ) -> None:
        step = self.runnable.record.steps[i]
        if step.may_draw and not has_same_statics(step.op, args, kwargs):
            self._give_up()
        self.statics[i] = statics_of(args, kwargs)
        for k in self.runnable.residual_index[i]:
            # Not detached: below autograd a detached tensor has a version counter of
            # its own, so changes would go unnoticed.
            self._collected.append((outputs[k], outputs[k]._version))
            if self._on_residual is not None:
                self._on_residual(outputs[k])

    def _verify(
        self, i: int, args: Any, kwargs: Any, outputs: Sequence[Tensor]
    ) -> bool:
        """Say whether an operation reads the storages that it read."""
        runnable, inputs, numbers = (
            self.runnable,
            inputs_of(args, kwargs),
            self._numbers,
        )
        step, known = runnable.record.steps[i], runnable.known
        if (len(inputs), len(outputs)) != (len(step.reads), len(step.makes)):
            return False
        reads = zip(inputs, step.reads, strict=True)
        if not all(numbers.get(key_of(t), s) == s for t, s in reads if s in known):
            return False
        expected = runnable.expected.get(i)
        if expected is not None and not expected.fits(args, kwargs, inputs):
            return False
        numbers.update(zip(map(key_of, outputs), step.makes, strict=True))
        return True

    @override
    def _give_up(self) -> None:
        super()._give_up()
        self._fits = False

    @override
    def end(self) -> None:
        """Do nothing: `residuals` says whether the plan fits."""

    def residuals(self) -> list[Tensor] | None:
        """Return what was collected; None if the plan does not fit this forward."""
        unchanged = all(t._version == version for t, version in self._collected)
        complete = self._funcs[self._next] is None
        if not (self._fits and complete and unchanged):
            return None
        return [t.detach() for t, _ in self._collected]


class Check(Follow):
    """Follows a function that runs again in full, and must do what its forward did.

    An operation that differs is an error, also where the user's code catches it. Views,
    copies and casts are not compared: module hooks may make views, autograd copies, and
    autocast has a cache. What depends on no input may be missing: the function may have
    cached its result, a table of positions for instance.
    """

    def __init__(self, runnable: RunnablePlan) -> None:
        super().__init__(runnable, runnable.kernels)
        self._may_be_missing = runnable.may_be_missing
        self._error: Exception | None = None

    @override
    def unexpected(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        if not is_optional(func):
            while self._funcs[i] is not func and self._may_be_missing[i]:
                i += 1
            if self._funcs[i] is not func:
                call_kernel(func, *args, **(kwargs or {}))  # no record has what raises
                self._next = i
                raise self._differs(func)
            self._next = i + 1
        return call_kernel(func, *args, **(kwargs or {}))

    @override
    def _differs(self, func: Any) -> Exception:
        steps, i = self.runnable.record.steps, self._next
        before, after = (
            [step for step in part if not is_optional(step.op.func)]
            for part in (steps[:i], steps[i:])
        )
        text = _described([*before, *after], len(before), func)
        self._give_up()
        error = RecomputeError(DIFFERENT + text)
        self._error = self._error or error
        return error

    @override
    def end(self) -> None:
        """Check that every operation has run; raise what the function has caught."""
        while self._may_be_missing[self._next]:
            self._next += 1
        super().end()
        if self._error is not None:
            raise self._error


DIFFERENT = (
    "remat: the recompute ran other operations than the forward did. The function "
    "must compute the same thing twice: if it depends on outside state that changed, "
    "pass that state as an argument.\n"
)
