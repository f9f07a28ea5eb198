"""The reports that `explain` and `compare` return: numbers that print as tables.

Invariant: reports hold neither tensors nor the user's function, so they pickle and
compare.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from remat._base.op import Value
from remat._base.source import short
from remat._report import plots as _plots, render as _render
from remat._report.peak import Peak
from remat.policies import Policy


@dataclass(frozen=True, slots=True)
class ExplainedInput:
    """An input of the call, and whether it is saved.

    Attributes:
        name: the input as the author of the function would write it: "params['w']".
        dtype: its dtype.
        shape: its shape.
        nbytes: the bytes of its storage, or 0 if an earlier input has the same storage.
        kept: whether it is saved for the backward.
        why: the reason.
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


@dataclass(frozen=True, slots=True)
class ExplainedOp:
    """An operation of the call, and what happens to its result.

    Attributes:
        name: the name of the operation: "mm".
        source: the user's line: "file.py:12, in block", or in a notebook
            "Cell In[9]:10".
        outputs: the values that it returned.
        nbytes: the bytes of its outputs, or 0 for a view.
        flops: its floating-point operations, as torch's `FlopCounterMode` counts them.
        fate: "saved", "offloaded", "recomputed", or "dead" if it is neither saved nor
            recomputed.
        times: how often the backward recomputes it. This can be more than once with
            nested calls of `remat`.
        kept: the bytes of its outputs that are saved or offloaded.
        why: the reason for its fate.
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
    fate: Literal["saved", "offloaded", "recomputed", "dead"]
    times: int
    kept: int
    why: str
    is_view: bool


@dataclass(frozen=True, slots=True)
class ExplainedBudget:
    """What a budget keeps: of `policies.within`.

    Attributes:
        limit: the bytes of the budget.
        nbytes: the bytes that it keeps.
        work: what is recomputed, in seconds at nominal rates, or as measured.
        whole_work: that of the whole forward.
        gap: how much less work another choice could cost, as a fraction of `work`. 0 if
            the solver has proven that none costs less.
        overdrawn: whether what must be kept takes more than the limit.
    """

    limit: int
    nbytes: int
    work: float
    whole_work: float
    gap: float
    overdrawn: bool

    def __str__(self) -> str:
        share = self.work / self.whole_work if self.whole_work else 0.0
        best = f"at most {self.gap:.1%} above the least" if self.gap else "the least"
        used = f"{self.nbytes:,} of {self.limit:,} bytes"
        over = ", exceeded by what must be kept" if self.overdrawn else ""
        return f"{used}{over}; {share:.0%} of the work again, {best}"


@dataclass(frozen=True, repr=False)
class Explanation(_render.Shown):
    """The report of `explain`. It prints as a table.

    Attributes:
        label: the name of the function.
        policy: the policy of the call, or None.
        inputs: the inputs of the call.
        ops: the operations of the call, in order.
        pruned: whether a recompute skips operations that the backward does not need.
        reason: why a recompute skips nothing, or "" if it does skip.
        plain_bytes: the bytes that stay alive for the backward without remat. This is
            an upper bound: in-place operations on views do not tell what they save.
        held_bytes: the part of the saved bytes that the graph holds without remat too:
            Python numbers, and what a Function keeps on its ctx.
        recomputed_bytes: the bytes that the largest recompute holds besides the saved
            ones. With nested calls, this is the largest of them with those around it.
        streams: the random streams whose states are saved. They are in no total.
        advice: what to change, and why.
        peak: what holds the peak of a step; None if the function is not one of a step.
        budget: what the budget of the policy keeps; None if it has none.

    Example:
        >>> import torch
        >>> from remat import explain
        >>> found = explain(lambda x: x.sin().exp(), torch.ones(4))
        >>> found.plain_bytes, found.saved_bytes
        (32, 16)
    """

    label: str
    policy: Policy | None
    inputs: tuple[ExplainedInput, ...]
    ops: tuple[ExplainedOp, ...]
    pruned: bool
    reason: str
    plain_bytes: int
    held_bytes: int
    recomputed_bytes: int
    streams: tuple[str, ...]
    advice: tuple[str, ...]
    peak: Peak | None = None
    budget: ExplainedBudget | None = None

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
        """Draw the bytes of each operation, coloured by fate.

        Args:
            ax: the matplotlib axes to draw on; None for new ones.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        ops = [op for op in self.ops if not op.is_view]
        labels = [f"{op.name} ({short(op.source)})" for op in ops]
        sizes, fates = [op.nbytes for op in ops], [op.fate for op in ops]
        return _plots.bars(labels, sizes, fates, self._table().title, ax)

    @property
    def _is_of_nothing(self) -> bool:
        """Whether nothing requires grad, so that there is nothing to recompute."""
        return not (self.inputs or self.ops)

    @override
    def _table(self) -> _render.Table:
        if self._is_of_nothing:
            notes = tuple(f"advice: {line}" for line in self.advice)
            title = f"remat of {self._name}: {self.reason}"
            return _render.Table(title, notes=notes)
        rows = [*map(_input_row, self.inputs)]
        rows += [_op_row(op) for op in self.ops if not op.is_view]
        parameters = [leaf for leaf in self.inputs if leaf.is_parameter]
        plural = "" if len(parameters) == 1 else "s"
        total = _render.size(sum(leaf.nbytes for leaf in parameters))
        return _render.Table(
            title=f"remat of {self._name}",
            columns=("operation", "line", "output", "#bytes", "#FLOPs", "fate", "why"),
            rows=tuple(row for row, _ in rows),
            kinds=tuple(kind for _, kind in rows),
            notes=tuple(self._notes()),
            folded=tuple(i for i, x in enumerate(self.inputs) if x.is_parameter),
            summary=f"{len(parameters)} parameter{plural}, {total}",
        )

    @property
    def _name(self) -> str:
        under = "" if self.policy is None else f" under {self.policy}"
        return f"{self.label}{under}"

    @override
    def __repr__(self) -> str:
        if self._is_of_nothing:
            return f"<Explanation of {self._name}: {self.reason}>"
        fates = Counter(op.fate for op in self.ops if not op.is_view)
        counts = ", ".join(f"{n} {fate}" for fate, n in fates.items())
        total = f"{fates.total()} operations ({counts})"
        operations = total if counts else "no operations"
        sizes = f"{self.saved_bytes:,} bytes saved, {self.plain_bytes:,} plain"
        return f"<Explanation of {self._name}: {operations}; {sizes}>"

    def _notes(self) -> Iterator[str]:
        less = f"; {self.offloaded_bytes:,} offloaded" if self.offloaded_bytes else ""
        yield f"saved: {self.saved_bytes:,} bytes{less}; plain: {self.plain_bytes:,}"
        yield f"{_PEAK}: {self.peak_bytes:,} bytes"
        if self.held_bytes:
            yield f"of these, the graph holds {self.held_bytes:,} itself"
        again = sum(op.times for op in self.ops if not op.is_view)
        count = sum(not op.is_view for op in self.ops)
        yield (
            f"recomputed: {self.recomputed_flops:,} of {self.flops:,} FLOPs "
            f"({self.recomputed_share:.0%}), {again} of {count} operations"
        )
        if self.budget is not None:
            yield f"budget: {self.budget}"
        yield "pruned: " + ("yes" if self.pruned else f"no, {self.reason}")
        if self.streams:
            streams = ", ".join(map(_shown_stream, self.streams))
            yield f"also saved: the state of {streams}"
        yield from (f"advice: {line}" for line in self.advice)
        yield from self.peak.lines() if self.peak is not None else ()


def _shown_stream(name: str) -> str:
    if name == "cpu":
        return "the CPU's random stream"
    return name if name.startswith("a ") else f"the random stream of {name}"


def _input_row(leaf: ExplainedInput) -> tuple[tuple[str, ...], str]:
    what = _render.short_array(leaf.dtype, leaf.shape)
    fate = "saved" if leaf.kept else "dropped"
    row = (leaf.name, "input", what, f"{leaf.nbytes:,}", "", fate, leaf.why)
    return row, "saved" if leaf.kept else "dead"


def _op_row(op: ExplainedOp) -> tuple[tuple[str, ...], str]:
    what = " ".join(_render.short_array(v.dtype, v.shape) for v in op.outputs)
    fate = op.fate if op.times < 2 else f"{op.fate} x{op.times}"
    costs = f"{op.nbytes:,}", f"{op.flops:,}"
    return (op.name, short(op.source), what, *costs, fate, op.why), op.fate


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """What one policy saves and recomputes.

    Attributes:
        name: the policy as it prints, or its name in the mapping that was passed;
            "plain" for code without remat, and "as written" for the function with the
            blocks that it calls.
        saved_bytes: the bytes that stay alive for the backward and are not offloaded.
        peak_bytes: an estimate of the peak: the saved bytes, and what the recompute of
            the largest call holds.
        offloaded_bytes: the bytes that are offloaded.
        recomputed_flops: the FLOPs that the backward recomputes.
        recomputed_share: the recomputed FLOPs, divided by the FLOPs of the forward.

    Example:
        >>> import torch
        >>> from remat import compare
        >>> found = compare(lambda x: x.sin().exp(), torch.ones(4), policies=[])
        >>> [(row.name, row.saved_bytes) for row in found.rows]
        [('plain', 32), ('nothing_saveable', 16)]
    """

    name: str
    saved_bytes: int
    peak_bytes: int
    offloaded_bytes: int
    recomputed_flops: int
    recomputed_share: float


@dataclass(frozen=True, repr=False)
class Comparison(_render.Shown):
    """The report of `compare`. It prints as a table.

    Attributes:
        label: the name of the function.
        rows: one row each for the function as written, if it calls rematerialized
            functions; for plain code; for remat without a policy; and for each policy.
        front: what `policies.within` reaches, with budgets from nothing to everything.
            Empty if the function calls rematerialized functions.
        no_front: why there is no front; "" if there is one.

    Example:
        >>> import torch
        >>> from remat import compare
        >>> compare(lambda x: x.sin().exp(), torch.ones(4), policies=[])
        <Comparison for `<lambda>`: 2 rows; 16 to 32 bytes saved>
    """

    label: str
    rows: tuple[ComparedPolicy, ...]
    front: tuple[ComparedPolicy, ...] = ()
    no_front: str = ""

    @override
    def __repr__(self) -> str:
        sizes = [row.saved_bytes for row in self.rows]
        between = f"{min(sizes):,} to {max(sizes):,} bytes saved"
        return f"<Comparison for {self.label}: {len(self.rows)} rows; {between}>"

    def plot(self, ax: Any = None) -> Any:
        """Draw recomputed FLOPs against saved bytes, a point for each policy.

        A dashed line joins what `policies.within` reaches.

        Args:
            ax: the matplotlib axes to draw on; None for new ones.

        Returns:
            The axes.

        Raises:
            ImportError: matplotlib is not installed.
        """
        names = [row.name for row in self.rows]
        sizes = [row.saved_bytes for row in self.rows]
        costs = [row.recomputed_flops for row in self.rows]
        line = [(row.saved_bytes, row.recomputed_flops) for row in self.front]
        return _plots.points(names, sizes, costs, self._table().title, ax, line)

    @override
    def _table(self) -> _render.Table:
        cells = [*map(_compared_row, self.rows)]
        for row in map(_compared_row, self.front):
            if not any(row[1:] == other[1:] for other in cells):
                cells.append(row)
        return _render.Table(
            title=f"policies for {self.label}",
            columns=("policy", *map("#{}".format, _COSTS)),
            rows=tuple(cells),
            notes=(self.no_front,) if self.no_front else (),
        )


_PEAK = "peak without gradients"
_COSTS = "saved bytes", _PEAK, "offloaded", "FLOPs recomputed", "share"


def _compared_row(row: ComparedPolicy) -> tuple[str, ...]:
    sizes = row.saved_bytes, row.peak_bytes, row.offloaded_bytes
    numbers = (f"{n:,}" for n in (*sizes, row.recomputed_flops))
    return row.name, *numbers, f"{row.recomputed_share:.0%}"
