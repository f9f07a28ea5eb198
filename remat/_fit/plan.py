"""A plan: which results of a step are saved, and how a model follows it.

It covers a whole step, operation by operation, or blocks, which are recomputed at once.

Invariant: a plan holds names and numbers, neither tensors nor modules. So it pickles,
compares, and can be made on one machine and followed on another.
Rejected: a plan that keeps the model. It is followed by the real one, which may not
exist yet.
"""

import functools
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Self, TypeAlias, TypeVar

from torch import nn
from typing_extensions import override

from remat._base.errors import BudgetError, missing
from remat._base.sizes import Unit, in_unit, number_in
from remat._fit import files
from remat._report import render as _render
from remat._scope.following import Course
from remat._transform.api import caller
from remat.nn._applied import PLAN, REMAT, refuse_others
from remat.nn._apply import apply_from
from remat.nn._followed import FollowedScope, begin_scope, end_scope, follow
from remat.nn._select import with_blocks
from remat.policies import Policy


Over: TypeAlias = Literal["step", "blocks", "functional"]
FLAGS = {
    "blocks": ("auto", "replay", False, False),
    "functional": (False, "replay", False, False),
}
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
        >>> import remat
        >>> model = torch.nn.Sequential(*[torch.nn.GELU() for _ in range(4)])
        >>> x = torch.ones(256, 8, requires_grad=True)
        >>> plan = remat.fit(model, x, budget="50kB")
        >>> [(segment.name, segment.saved) for segment in plan.segments]
        [('0', 0), ('1', 8192), ('2', 8192), ('3', 8192)]
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
        again: the bytes of the results that are made again.
        seconds: what runs again, at nominal rates of FLOPs and bytes.
        courses: which results a scope saves: in training, in evaluation.
        units: the blocks that are recomputed at once, and which of their results are
            saved, None where none is; of a plan for a step, where no scope can act.
        units_peak: the most bytes that are alive there; 0 if there are no units.

    Example:
        >>> import torch
        >>> import remat
        >>> model = torch.nn.Sequential(*[torch.nn.GELU() for _ in range(4)])
        >>> x = torch.ones(256, 8, requires_grad=True)
        >>> plan = remat.fit(model, x, budget="50kB")
        >>> plan.applied.peak == plan.around.peak <= 50_000
        True
    """

    peak: int
    peak_at: str
    recomputed: int
    again: int
    seconds: float
    courses: tuple[Course, ...] = ()
    units: tuple[tuple[str, Policy | None], ...] = ()
    units_peak: int = 0


@dataclass(frozen=True, repr=False)
class Plan(_render.Shown):
    """The plan of `remat.fit`. It prints as a table of segments.

    `plan.apply(model)` has each forward of the model follow it, whatever the loss is.
    If it covers a whole step, `with plan:` around forward and loss recomputes in the
    loss, too. Without grad, both do nothing. Inputs of other sizes follow the plan; the
    budget holds for those that it was made for.

    Attributes:
        label: the name of the model or function.
        over: what it covers: "step", "blocks", or "functional".
        budget: the bytes that a step may take.
        unit: that in which the budget was given: "MB".
        resident: the bytes that exist before the step, or before later ones.
        states: those of them that an optimizer has.
        plain_peak: the peak without remat.
        flops: those of a step without remat.
        applied: what a step does after `plan.apply(model)`; None if only `with plan:`
            stays under the budget, or the step calls the model several times.
        around: what it does in `with plan:`; None of a plan over blocks.
        segments: what is saved where.
        blocks: those in which something is recomputed.
        device: the kind of device that it was made for.
        lacks_solver: whether the plan was chosen without scipy, which was not
            installed. It may recompute more than necessary then.
        is_applied: whether `apply` or `with` was called.

    Example:
        >>> import torch
        >>> import remat
        >>> model = torch.nn.Sequential(*[torch.nn.GELU() for _ in range(4)])
        >>> x = torch.ones(256, 8, requires_grad=True)
        >>> plan = remat.fit(model, x, budget="50kB")
        >>> plan.plain_peak, plan.peak <= plan.budget
        (57344, True)
    """

    label: str
    over: Over
    budget: int
    unit: Unit
    resident: int
    states: int
    plain_peak: int
    flops: int
    applied: Followed | None
    around: Followed | None
    segments: tuple[FitSegment, ...]
    blocks: tuple[str, ...]
    device: str
    lacks_solver: bool = False
    is_applied: bool = field(default=False, compare=False)

    @property
    def _shown(self) -> Followed:
        found = self.applied or self.around
        assert found is not None
        return found

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
    def again(self) -> int:
        """The bytes of results that are made again after `plan.apply(model)`."""
        return self._shown.again

    @property
    def share(self) -> float:
        """The recomputed FLOPs, as a share of those of a step without remat."""
        return self.recomputed / self.flops if self.flops else 0.0

    def apply(self, model: M, *, offload_inputs: Any = False) -> M:
        """Have each forward of a model follow the plan.

        Args:
            model: a model that does what the plan was made for; or a function, the
                whole step, which runs in `with plan:`.
            offload_inputs: as of `remat.remat`, for plans over blocks.

        Returns:
            The model, changed in place. `remat.nn.remove(model)` undoes it. For a
            function, another function.

        Raises:
            BudgetError: the loss holds so much that only `with plan:` stays under the
                budget.
            TypeError: what is passed is neither a model nor a function.
            ValueError: the model follows a plan, or is recomputed, already; or it is
                another one, or on another device; or the plan is over a step (inputs).

        Example:
            >>> import torch
            >>> import remat
            >>> model = torch.nn.Sequential(*[torch.nn.GELU() for _ in range(4)])
            >>> x = torch.ones(256, 8, requires_grad=True)
            >>> model is remat.fit(model, x, budget="50kB").apply(model)
            True
        """
        result = model
        self._refuse_no_model(model)
        if offload_inputs and self.over != "blocks":
            raise ValueError(_NO_INPUTS)
        if not isinstance(model, nn.Module):
            result = _following(model, self)
        elif self.applied is None:
            raise BudgetError(_ONLY_AROUND.format(label=self.label), self.peak)
        elif self.over != "step":
            self._refuse_another_device(model)
            refuse_others(model, "plan.apply", (REMAT,))
            if self.applied.units:
                flags = *FLAGS[self.over][:-1], offload_inputs
                found = with_blocks(model, self.applied.units)
                apply_from(caller(), *found, flags=flags, by=PLAN)
        else:
            self._refuse_another_device(model)
            found = self.applied
            over = found.units_peak - self.budget
            follow(model, self.label, found.courses, found.units, caller(), over)
        object.__setattr__(self, "is_applied", True)
        return result

    def _refuse_no_model(self, model: Any) -> None:
        kind = type(model).__name__
        if self.around is None and not isinstance(model, nn.Module):
            raise TypeError(_OF_BLOCKS.format(label=self.label, kind=kind))
        if not callable(model):
            raise TypeError(_NO_MODEL.format(label=self.label, kind=kind))

    def _refuse_another_device(self, model: nn.Module) -> None:
        kinds = {p.device.type for p in model.parameters() if not p.is_meta}
        if kinds - {self.device}:
            shown = ", ".join(sorted(kinds))
            others = {"device": self.device, "kinds": shown}
            raise ValueError(_OTHER_DEVICE.format(label=self.label, **others))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file, as JSON: for the next run, or for other ranks.

        Args:
            path: of the file. One that is there is replaced.

        Example:
            >>> import tempfile
            >>> import torch
            >>> import remat
            >>> model = torch.nn.Sequential(*[torch.nn.GELU() for _ in range(4)])
            >>> x = torch.ones(256, 8, requires_grad=True)
            >>> plan = remat.fit(model, x, budget="50kB")
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     plan.save(f"{folder}/plan.json")
            ...     remat.Plan.load(f"{folder}/plan.json") == plan
            True
        """
        files.write(path, self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        """Read a plan that `save` has written.

        Args:
            path: of the file.

        Returns:
            The plan, which was not applied yet.

        Raises:
            ValueError: the file holds no plan, or one of another version of remat, or
                one that was changed: the message names the key.
        """
        return files.read(path, cls)

    def __enter__(self) -> Self:
        if self.around is None:
            raise TypeError(_OF_BLOCKS.format(label=self.label, kind="with block"))
        object.__setattr__(self, "is_applied", True)
        begin_scope(FollowedScope(self.label, self.around.courses))
        return self

    def __exit__(self, *raised: object) -> None:
        end_scope(*raised)

    def plot(self, ax: Any = None) -> Any:
        """Draw peak and recomputed FLOPs, beside those of a step without remat.

        Args:
            ax: the matplotlib axes to draw on; None for new ones.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        each = {"plan.apply(model)": self.applied, "with plan": self.around}
        found = {k: (f.peak, f.recomputed) for k, f in each.items() if f is not None}
        found = {"plain": (self.plain_peak, 0), **found}
        above = f"peak of {self.label}, budget {self._bytes(self.budget)}"
        at = [*found.values()]
        return _render.points([*found], at, above, ax, budget=self.budget)

    @override
    def __repr__(self) -> str:
        saved = f"{self.share:.1%} of its FLOPs recomputed"
        text = f"Plan of {self.label}: {saved}, peak {self._bytes(self.peak)}"
        return f"<{text}{'' if self.is_applied else ', ' + _NOT_APPLIED}>"

    @override
    def _table(self) -> _render.Table:
        unit = () if self.unit == "B" else (f"#saved {self.unit}",)
        return _render.Table(
            title=f"{self.label} in {self._bytes(self.budget)}",
            columns=(
                *("segment", "#operations", *unit),
                *("#saved bytes", "#recomputed FLOPs"),
            ),
            rows=tuple(
                (
                    *(s.name, f"{s.operations}"),
                    *(number_in(s.saved, self.unit) for _ in unit),
                    *(f"{s.saved:,}", f"{s.recomputed:,}"),
                )
                for s in self.segments
            ),
            kinds=tuple(
                "recomputed" if s.recomputed else "saved" for s in self.segments
            ),
            notes=(
                *([] if self.is_applied else [_NOT_APPLIED]),
                *self._notes(),
                *([_NO_SOLVER] if self.lacks_solver else []),
            ),
        )

    def _bytes(self, nbytes: int) -> str:
        return in_unit(nbytes, self.unit)

    def _notes(self) -> Iterator[str]:
        """Yield the lines below the table."""
        yield f"peak: {self._bytes(self.peak)}, {self.peak_at}"
        yield f"peak without remat: {self._bytes(self.plain_peak)}"
        yield f"before the step: {self._bytes(self.resident)}"
        if self.states:
            yield f"of them states of the optimizer: {self._bytes(self.states)}"
        yield f"recomputed: {self.recomputed:,} FLOPs, {self.share:.1%} of a step"
        shown = f"{self._bytes(self.again)} of results, " if self.again else ""
        yield f"that is {shown}{self.seconds * 1e3:,.3f} ms at nominal rates"


def _following(fn: Callable[..., Any], plan: Plan) -> Any:
    @functools.wraps(fn)
    def followed(*args: Any, **kwargs: Any) -> Any:
        with plan:
            return fn(*args, **kwargs)

    return followed


_NO_MODEL = (
    "remat: the plan for {label} is applied to the model or the function of the step; "
    "got an object of type {kind}."
)
_OF_BLOCKS = (
    "remat: the plan for {label} covers its blocks, and is applied to the model: "
    "plan.apply(model); got a {kind}."
)
_NOT_APPLIED = "not applied yet: plan.apply(model)"
_NO_SOLVER = f"without a solver: {missing('scipy')}"
_OTHER_DEVICE = (
    "remat: the plan for {label} was made for {device}, and the model is on {kinds}, "
    "where kernels hold other bytes. Call remat.fit there, or with device=."
)
_NO_INPUTS = "remat: this plan is over a step. offload_inputs= needs over='blocks'."
_ONLY_AROUND = (
    "remat: the plan for {label} cannot be applied to the model: it stays under its "
    "budget only if it covers the loss, or the step calls the model several times. Run "
    "forward and loss in `with plan:`, or pass a larger budget to remat.fit."
)
