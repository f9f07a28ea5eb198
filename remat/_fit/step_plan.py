"""The plan for a whole step: which results are saved, operation by operation.

Invariant: a plan holds names and numbers, neither tensors nor modules. So it pickles,
compares, and can be made on one machine and followed on another.
Rejected: a plan that keeps the model. It is followed by the real one, which may not
exist yet.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from torch import nn
from typing_extensions import override

from remat._base.errors import BudgetError
from remat._base.optional import missing
from remat._report import plots as _plots, render as _render
from remat._scope.following import Course
from remat._transform.api import caller
from remat.nn._followed import FollowedScope, begin_scope, end_scope, follow


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class FitSegment:
    """What a plan does with the operations of a block, or between two blocks.

    Attributes:
        name: of the block in `model.named_modules()`, or of the module that is not in
            a block; "outside" for what is in no module, as the loss.
        operations: how many operations it runs.
        saved: the bytes that its forward leaves alive for the backward.
        recomputed: the FLOPs that the backward runs again.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import remat
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*[layer() for _ in range(4)])
        >>> plan = remat.fit(model, torch.ones(256, 8), budget="350kB")
        >>> [segment.name for segment in plan.segments]
        ['0', '1', '2', '3']
    """

    name: str
    operations: int
    saved: int
    recomputed: int


@dataclass(frozen=True, slots=True)
class Followed:
    """What a step does that follows a plan.

    Attributes:
        peak: the most bytes that are alive.
        peak_at: where that is: "mm in the backward of layers.3".
        recomputed: the FLOPs that run again.
        seconds: what runs again, at nominal rates of FLOPs and bytes.
        courses: which results are saved: in training, in evaluation.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import remat
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*[layer() for _ in range(4)])
        >>> plan = remat.fit(model, torch.ones(256, 8), budget="350kB")
        >>> plan.applied.peak == plan.around.peak <= 350_000
        True
    """

    peak: int
    peak_at: str
    recomputed: int
    seconds: float
    courses: tuple[Course, ...]


@dataclass(frozen=True, repr=False)
class StepPlan(_render.Shown):
    """The plan of `remat.fit` for a whole step. It prints as a table of segments.

    `plan.apply(model)` has each forward of the model follow it, whatever the loss is.
    `with plan:` around forward and loss recomputes in the loss, too. Without grad, both
    do nothing. Inputs of other sizes follow the plan; the budget holds for those that
    it was made for.

    Attributes:
        label: the name of the model or function.
        budget: the bytes that a step may take.
        resident: the bytes that exist before the step.
        plain_peak: the peak without remat.
        flops: those of a step without remat.
        applied: what a step does after `plan.apply(model)`; None if only `with plan:`
            stays under the budget, or the step calls the model several times.
        around: what it does in `with plan:`.
        segments: what is saved where.
        blocks: those in which something is recomputed. They are recomputed as a whole
            where a plan for a whole step cannot be followed: in compiled code, under
            torch.func and with FSDP.
        device: the kind of device that it was made for.
        lacks_solver: whether the plan was chosen without scipy, which was not
            installed. It may recompute more than necessary then.
        is_applied: whether `apply` or `with` was called.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import remat
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*[layer() for _ in range(4)])
        >>> plan = remat.fit(model, torch.ones(256, 8), budget="350kB")
        >>> plan.plain_peak, plan.peak <= plan.budget
        (461984, True)
    """

    label: str
    budget: int
    resident: int
    plain_peak: int
    flops: int
    applied: Followed | None
    around: Followed
    segments: tuple[FitSegment, ...]
    blocks: tuple[str, ...]
    device: str
    lacks_solver: bool = False
    is_applied: bool = field(default=False, compare=False)

    @property
    def _shown(self) -> Followed:
        return self.applied or self.around

    @property
    def peak(self) -> int:
        """The most bytes that are alive in a step after `plan.apply(model)`."""
        return self._shown.peak

    @property
    def peak_at(self) -> str:
        """Where the peak is."""
        return self._shown.peak_at

    @property
    def recomputed(self) -> int:
        """The FLOPs that run again after `plan.apply(model)`."""
        return self._shown.recomputed

    @property
    def seconds(self) -> float:
        """What runs again after `plan.apply(model)`, at nominal rates."""
        return self._shown.seconds

    @property
    def share(self) -> float:
        """The recomputed FLOPs, as a share of those of a step without remat."""
        return self.recomputed / self.flops if self.flops else 0.0

    def apply(self, model: M) -> M:
        """Have each forward of a model follow the plan.

        Args:
            model: a model that does what the plan was made for; or a function, the
                whole step, which runs in `with plan:`.

        Returns:
            The model, changed in place. `remat.nn.remove(model)` undoes it. For a
            function, another function.

        Raises:
            BudgetError: the loss holds so much that only `with plan:` stays under the
                budget.
            ValueError: the model follows a plan, or is recomputed, already; or it is on
                another device than the plan was made for.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> import remat
            >>> def layer():
            ...     return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
            >>> model = nn.Sequential(*[layer() for _ in range(4)])
            >>> plan = remat.fit(model, torch.ones(256, 8), budget="350kB")
            >>> model is plan.apply(model)
            True
        """
        result = model
        if not isinstance(model, nn.Module):
            result = _following(model, self)
        elif self.applied is None:
            raise BudgetError(_ONLY_AROUND.format(label=self.label), self.around.peak)
        else:
            self._refuse_another_device(model)
            follow(model, self.label, self.applied.courses, self.blocks, caller())
        object.__setattr__(self, "is_applied", True)
        return result

    def _refuse_another_device(self, model: nn.Module) -> None:
        kinds = {p.device.type for p in model.parameters() if not p.is_meta}
        if kinds - {self.device}:
            shown = ", ".join(sorted(kinds))
            raise ValueError(
                _OTHER_DEVICE.format(label=self.label, device=self.device, kinds=shown)
            )

    def __enter__(self) -> Self:
        object.__setattr__(self, "is_applied", True)
        begin_scope(FollowedScope(self.label, self.around.courses))
        return self

    def __exit__(self, *_: object) -> None:
        end_scope()

    def plot(self, ax: Any = None) -> Any:
        """Draw peak and recomputed FLOPs, beside those of a step without remat.

        Args:
            ax: the matplotlib axes to draw on; None for new ones.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        found = {"plan.apply(model)": self.applied, "with plan": self.around}
        shown = {k: v for k, v in found.items() if v is not None}
        labels = ["plain", *shown]
        peaks = [self.plain_peak, *(each.peak for each in shown.values())]
        costs = [0, *(each.recomputed for each in shown.values())]
        title = f"peak of {self.label}, budget {_render.mebibytes(self.budget)}"
        return _plots.points_in(self.budget, labels, peaks, costs, title, ax)

    @override
    def __repr__(self) -> str:
        saved = f"{self.share:.1%} of its FLOPs recomputed"
        text = f"StepPlan of {self.label}: {saved}, peak {_render.mebibytes(self.peak)}"
        return f"<{text}{'' if self.is_applied else ', ' + _NOT_APPLIED}>"

    @override
    def _table(self) -> _render.Table:
        return _render.Table(
            title=f"{self.label} in {_render.mebibytes(self.budget)}",
            columns=("segment", "#operations", "#saved MiB", "#recomputed FLOPs"),
            rows=tuple(map(_row, self.segments)),
            kinds=tuple(
                "recomputed" if each.recomputed else "saved" for each in self.segments
            ),
            notes=(
                *([] if self.is_applied else [_NOT_APPLIED]),
                f"peak: {_render.mebibytes(self.peak)}, {self.peak_at}",
                f"peak without remat: {_render.mebibytes(self.plain_peak)}",
                f"before the step: {_render.mebibytes(self.resident)}",
                f"recomputed: {self.recomputed:,} FLOPs, {self.share:.1%} of a step",
                *([_NO_SOLVER] if self.lacks_solver else []),
            ),
        )


def _row(segment: FitSegment) -> tuple[str, ...]:
    saved = _render.mebibytes(segment.saved).removesuffix(" MiB")
    return segment.name, f"{segment.operations}", saved, f"{segment.recomputed:,}"


def _following(fn: Callable[..., Any], plan: StepPlan) -> Any:
    @functools.wraps(fn)
    def followed(*args: Any, **kwargs: Any) -> Any:
        with plan:
            return fn(*args, **kwargs)

    return followed


_NOT_APPLIED = "not applied yet: plan.apply(model)"
_NO_SOLVER = f"without a solver: {missing('scipy')}"
_OTHER_DEVICE = (
    "remat: the plan for {label} was made for {device}, and the model is on {kinds}. "
    "Other kernels run there, which hold other bytes. Call remat.fit where the model "
    "is, or with device=."
)
_ONLY_AROUND = (
    "remat: the plan for {label} cannot be applied to the model: it stays under its "
    "budget only if it covers the loss, or the step calls the model several times. Run "
    "forward and loss in `with plan:`, or pass a larger budget to remat.fit."
)
