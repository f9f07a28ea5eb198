"""The plan by blocks: which blocks of a model are recomputed, and what that costs.

Invariant: as of `StepPlan`, it holds neither tensors nor modules.
Rejected: a plan of single operations. The budget of a block's policy is spent when it
runs, so a plan fits blocks of other sizes.
"""

from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn
from typing_extensions import override

from remat._base.errors import missing
from remat._fit.step_plan import drawn, mib, notes, title
from remat._report import render as _render
from remat._transform.api import caller
from remat.nn._applied import PLAN, REMAT, refuse_others
from remat.nn._apply import apply_from
from remat.policies import Policy


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class FitBlock:
    """What a plan does with a block.

    Attributes:
        name: in `model.named_modules()`.
        recomputes: whether it is recomputed.
        policy: its policy; None if no result is saved, or it is not recomputed.
        around: whether other blocks are in it, which are recomputed within it.
        saved: the bytes that one forward of it leaves alive.
        recomputed: the FLOPs that one backward of it recomputes.

    Example:
        >>> import torch
        >>> import remat
        >>> layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
        >>> model, x = nn.Sequential(*layers), torch.ones(256, 8)
        >>> plan = remat.fit(model, x, budget="80kB", over="blocks")
        >>> [(block.name, block.recomputes) for block in plan.blocks]
        [('0', True), ('1', True), ('2', False), ('3', False)]
    """

    name: str
    recomputes: bool
    policy: Policy | None
    around: bool
    saved: int
    recomputed: int


@dataclass(frozen=True, repr=False)
class FitPlan(_render.Shown):
    """The plan of `remat.fit` by blocks. It prints as a table of blocks.

    Attributes:
        label: the name of the model.
        budget: the bytes that a step may take.
        peak: the most bytes that are alive in a step: parameters, buffers, arguments,
            gradients, and all that forward, loss and backward make.
        resident: the part of it that exists before the step.
        plain_peak: the peak without remat.
        recomputed: the FLOPs that a step recomputes.
        flops: those of a step without remat.
        seconds: what is recomputed, at nominal rates of FLOPs and bytes.
        peak_at: where the peak is: "mm in the backward of layers.3".
        blocks: what is done with each block, in the order of `named_modules()`.
        lacks_budgets: whether the plan was chosen without scipy, which was not
            installed. It may recompute more than necessary then.

    Example:
        >>> import torch
        >>> import remat
        >>> layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
        >>> model, x = nn.Sequential(*layers), torch.ones(256, 8)
        >>> plan = remat.fit(model, x, budget="80kB", over="blocks")
        >>> plan
        <FitPlan of Sequential: 2 of 4 blocks recomputed, peak 0.072 MiB>
        >>> plan.plain_peak, plan.peak <= plan.budget
        (91552, True)
    """

    label: str
    budget: int
    peak: int
    resident: int
    plain_peak: int
    recomputed: int
    flops: int
    seconds: float
    peak_at: str
    blocks: tuple[FitBlock, ...]
    lacks_budgets: bool = False

    @property
    def share(self) -> float:
        """The recomputed FLOPs, as a share of those of a step without remat."""
        return self.recomputed / self.flops if self.flops else 0.0

    def apply(self, model: M) -> M:
        """Recompute the blocks of a model as planned, in place.

        Args:
            model: a model with the same blocks.

        Returns:
            The model. `remat.nn.remove(model)` undoes it.

        Raises:
            TypeError: what is passed is not a module.
            ValueError: the model has no such block, or it is recomputed already.

        Example:
            >>> import torch
            >>> import remat
            >>> layers = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
            >>> model, x = nn.Sequential(*layers), torch.ones(256, 8)
            >>> plan = remat.fit(model, x, budget="80kB", over="blocks")
            >>> model is plan.apply(model)
            True
        """
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise TypeError(_NO_MODEL.format(label=self.label, kind=kind))
        refuse_others(model, "plan.apply", (REMAT,))
        chosen = {b.name: b.policy for b in self.blocks if b.recomputes}
        return apply_from(caller(), model, chosen, by=PLAN) if chosen else model

    def plot(self, ax: Any = None) -> Any:
        """Draw peak and recomputed FLOPs, beside those of a step without remat.

        Args:
            ax: the matplotlib axes to draw on; None for new ones.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        return drawn(self, {"fit": (self.peak, self.recomputed)}, ax)

    @override
    def __repr__(self) -> str:
        count = sum(block.recomputes for block in self.blocks)
        return (
            f"<FitPlan of {self.label}: {count} of {len(self.blocks)} blocks "
            f"recomputed, peak {_render.mebibytes(self.peak)}>"
        )

    @override
    def _table(self) -> _render.Table:
        return _render.Table(
            title=title(self),
            columns=("block", "fate", "policy", "#saved MiB", "#recomputed FLOPs"),
            rows=tuple(map(_row, self.blocks)),
            kinds=tuple("recomputed" if b.recomputes else "saved" for b in self.blocks),
            notes=(
                *notes(self),
                *([_NO_BUDGETS] if self.lacks_budgets else []),
            ),
        )


def _row(block: FitBlock) -> tuple[str, ...]:
    policy = "" if block.policy is None else str(block.policy)
    inside = ", with the blocks in it" if block.around else ""
    fate = f"recomputed{inside}" if block.recomputes else "saved"
    return block.name, fate, policy, mib(block.saved), f"{block.recomputed:,}"


_NO_MODEL = (
    "remat: this plan is for the blocks of {label}: pass the model; got an object of "
    "type {kind}."
)
_NO_BUDGETS = f"without a solver: {missing('scipy')}"
