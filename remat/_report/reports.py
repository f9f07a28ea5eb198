"""The report that `explain` returns: numbers that print as a table.

Invariant: it holds neither tensors nor the user's function, so it pickles and compares.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from typing_extensions import override

from remat._base.op import Value
from remat._base.source import short
from remat._report import render as _render
from remat._report.peak import Peak
from remat.policies import Policy


FateName: TypeAlias = Literal["saved", "offloaded", "recomputed", "dead"]


@dataclass(frozen=True, slots=True)
class ExplainedInput:
    """An input of the call, and whether it is saved.

    Attributes:
        name: the input as the author of the function would write it: "params['w']".
        dtype, shape: those of the input.
        nbytes: the bytes of its storage, or 0 if an earlier input has the same storage.
        kept, why: whether it is saved for the backward, and the reason.
        is_parameter: whether it is a leaf that requires grad, which is alive anyway.

    Example:
        >>> import torch
        >>> from remat import explain
        >>> found = explain(lambda w, x: w @ x, torch.ones(4, 4), torch.ones(4))
        >>> [(leaf.name, leaf.nbytes, leaf.kept) for leaf in found.inputs]
        [('w', 64, True), ('x', 16, True)]
    """

    name: str
    dtype: Any
    shape: tuple[int, ...]
    nbytes: int
    kept: bool
    why: str
    is_parameter: bool = False

    def _row(self) -> tuple[tuple[str, ...], str]:
        what = _render.short_array(self.dtype, self.shape) if self.dtype else ""
        fate = "saved" if self.kept else "dropped"
        row = (self.name, "input", what, f"{self.nbytes:,}", "", fate, self.why)
        return row, "saved" if self.kept else "dead"


@dataclass(frozen=True, slots=True)
class ExplainedOp:
    """An operation of the call, and what happens to its result.

    Attributes:
        name: the name of the operation: "mm".
        source: the user's line: "file.py:12, in block", in a notebook "Cell In[9]:10".
        outputs: the values that it returned.
        nbytes: the bytes of its outputs, or 0 for a view.
        flops: its floating-point operations, as torch's `FlopCounterMode` counts them.
        fate, why: "saved", "offloaded", "recomputed", or "dead" if it is none of these.
        times: how often the backward recomputes it: more than once with nested calls.
        kept: the bytes of its outputs that are saved or offloaded.
        is_view: whether its outputs are views of its inputs.

    Example:
        >>> import torch
        >>> from remat import explain
        >>> found = explain(lambda x: x.sin().exp(), torch.ones(4))
        >>> [(op.name, op.nbytes, op.fate) for op in found.ops]
        [('sin', 16, 'recomputed'), ('exp', 16, 'recomputed')]
    """

    name: str
    source: str
    outputs: tuple[Value, ...]
    nbytes: int
    flops: int
    fate: FateName
    times: int
    kept: int
    why: str
    is_view: bool

    def _row(self) -> tuple[tuple[str, ...], str]:
        what = " ".join(_render.short_array(v.dtype, v.shape) for v in self.outputs)
        fate = self.fate if self.times < 2 else f"{self.fate} x{self.times}"
        costs = f"{self.nbytes:,}", f"{self.flops:,}"
        line = self.name, short(self.source), what, *costs, fate, self.why
        return line, self.fate


@dataclass(frozen=True, slots=True)
class ExplainedBudget:
    """What a budget keeps: of `policies.within`."""

    limit: int
    nbytes: int  # that it keeps
    work: float  # of the recompute, in seconds, and of the whole forward
    whole_work: float
    # How much less work another choice could cost, as a fraction. 0 if the solver has
    # proven that none costs less.
    gap: float
    overdrawn: bool  # what must be kept takes more than the limit

    def __str__(self) -> str:
        share = self.work / self.whole_work if self.whole_work else 0.0
        best = f"at most {self.gap:.1%} above the least" if self.gap else "the least"
        over = ", exceeded by what must be kept" if self.overdrawn else ""
        used = f"{self.nbytes:,} of {self.limit:,} bytes{over}"
        return f"{used}; {share:.0%} of the work again, {best}"


@dataclass(frozen=True, slots=True)
class SuggestedPolicy:
    """A policy to write, and what `explain` tells of the call under it."""

    code: str  # an expression of `torch` and of `policies`, the module of remat
    saved_bytes: int
    recomputed_share: float

    def __str__(self) -> str:
        share = f"{self.recomputed_share:.0%} of FLOPs again"
        code = f"to recompute less, write policy={self.code}"
        return f"{code}: {self.saved_bytes:,} bytes saved, {share}"


@dataclass(frozen=True, repr=False)
class Explanation(_render.Shown):
    """The report of `explain`. It prints as a table.

    Attributes:
        label, policy: the name of the function, and the policy of the call, or None.
        inputs, ops: what the call is given, and what it does, in order.
        pruned, reason: whether a recompute skips operations that the backward does not
            need; if not, why.
        plain_bytes: the bytes that stay alive for the backward without remat. This is
            an upper bound: in-place operations on views do not tell what they save.
        held_bytes: the part of the saved bytes that the graph holds without remat too:
            Python numbers, and what a Function keeps on its ctx.
        recomputed_bytes: the bytes that the largest recompute holds besides the saved
            ones. With nested calls, this is the largest of them with those around it.
        streams: the random streams whose states are saved. They are in no total.
        advice: what to change, and why. Of a step, `peak` has it.
        peak: what holds the peak of a step; None if the function is not one of a step.
        budget: what the budget of the policy keeps; None if it has none.
        suggested: the policy to write if less is to be recomputed, as code; None if
            nothing is gained, or if the function calls rematerialized functions.

    Example:
        >>> import torch
        >>> from remat import explain
        >>> found = explain(lambda x: x.sin().exp(), torch.ones(4))
        >>> found.plain_bytes, found.saved_bytes
        (32, 16)
    """

    label: str
    policy: Policy | None
    inputs: tuple[ExplainedInput, ...] = ()
    ops: tuple[ExplainedOp, ...] = ()
    pruned: bool = False
    reason: str = ""
    plain_bytes: int = 0
    held_bytes: int = 0
    recomputed_bytes: int = 0
    streams: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    peak: Peak | None = None
    budget: ExplainedBudget | None = None
    suggested: SuggestedPolicy | None = None

    @property
    def saved_bytes(self) -> int:
        """The bytes that stay alive for the backward and are not offloaded."""
        kept = self.held_bytes + sum(i.nbytes for i in self.inputs if i.kept)
        return kept + sum(op.kept for op in self.ops if op.fate == "saved")

    @property
    def peak_bytes(self) -> int:
        """The peak of the call without gradients: what is saved and what is recomputed.

        What single operations need for a moment is not counted either.
        """
        return self.saved_bytes + self.recomputed_bytes

    @property
    def offloaded_bytes(self) -> int:
        """The bytes that are offloaded."""
        return sum(op.kept for op in self.ops if op.fate == "offloaded")

    @property
    def flops(self) -> int:
        """The FLOPs of the forward."""
        return sum(op.flops for op in self.ops)

    @property
    def recomputed_flops(self) -> int:
        """The FLOPs that the backward recomputes."""
        return sum(op.flops * op.times for op in self.ops)

    @property
    def recomputed_share(self) -> float:
        """The recomputed FLOPs, divided by the FLOPs of the forward."""
        return self.recomputed_flops / self.flops if self.flops else 0.0

    def plot(self, ax: Any = None) -> Any:
        """Draw the bytes of each operation on matplotlib axes, coloured by fate.

        Returns the axes: new ones if `ax` is None.
        """
        labels = [f"{op.name} ({short(op.source)})" for op in self._shown_ops]
        sizes = [op.nbytes for op in self._shown_ops]
        fates = [op.fate for op in self._shown_ops]
        return _render.bars(labels, sizes, fates, f"remat of {self._name}", ax)

    @property
    def _shown_ops(self) -> list[ExplainedOp]:
        return [op for op in self.ops if not op.is_view]

    @property
    def _name(self) -> str:
        under = "" if self.policy is None else f" under {self.policy}"
        return self.label + under

    @override
    def _table(self) -> _render.Table:
        title = f"remat of {self._name}"
        if not self.inputs:  # nothing requires grad
            return _render.Table(f"{title}: {self.reason}", notes=tuple(self._told()))
        rows = [row._row() for row in (*self._shown_inputs, *self._shown_ops)]
        return _render.Table(
            title=title,
            columns=("operation", "line", "output", "#bytes", "#FLOPs", "fate", "why"),
            rows=tuple(row for row, _ in rows),
            kinds=tuple(kind for _, kind in rows),
            notes=(*self._totals(), *self._told()),
        )

    @property
    def _shown_inputs(self) -> list[ExplainedInput]:
        """The inputs, with many parameters as one."""
        sizes = [leaf.nbytes for leaf in self.inputs if leaf.is_parameter]
        if len(sizes) <= _FEW:
            return [*self.inputs]
        meta = f"{len(sizes)} parameters", None, (), sum(sizes)
        others = [leaf for leaf in self.inputs if not leaf.is_parameter]
        return [ExplainedInput(*meta, True, "they are alive anyway"), *others]

    @override
    def __repr__(self) -> str:
        if not self.inputs:
            return f"<Explanation of {self._name}: {self.reason}>"
        fates = Counter(op.fate for op in self._shown_ops)
        counts = ", ".join(f"{n} {fate}" for fate, n in fates.items()) or "none"
        total = f"{fates.total()} operations ({counts})"
        sizes = f"{self.saved_bytes:,} bytes saved, {self.plain_bytes:,} plain"
        return f"<Explanation of {self._name}: {total}; {sizes}>"

    def _totals(self) -> Iterator[str]:
        less = f"; {self.offloaded_bytes:,} offloaded" if self.offloaded_bytes else ""
        yield f"saved: {self.saved_bytes:,} bytes{less}; plain: {self.plain_bytes:,}"
        yield f"peak without gradients: {self.peak_bytes:,} bytes"
        again = sum(op.times for op in self._shown_ops)
        work = f"{self.recomputed_flops:,} of {self.flops:,} FLOPs"
        share = f"({self.recomputed_share:.0%}), {again} of {len(self._shown_ops)}"
        yield f"recomputed: {work} {share} operations"
        if self.budget is not None:
            yield f"budget: {self.budget}"
        yield "pruned: " + ("yes" if self.pruned else f"no, {self.reason}")
        if self.streams:
            yield f"also saved: the state of random streams: {', '.join(self.streams)}"

    def _told(self) -> Iterator[str]:
        if self.suggested is not None:
            yield str(self.suggested)
        yield from (f"advice: {line}" for line in self.advice)
        yield from self.peak.lines() if self.peak is not None else ()


_FEW = 4  # parameters, which have a line each
