"""`compare`: what policies save, and what they recompute.

The call runs once and is recorded. Each policy then gives a plan of the record, which
needs no tensors. A function that calls rematerialized functions, its *blocks*, runs
once for each row.

Invariant: each row is what `explain` reports for the same call under that policy.
Rejected: one call for each policy. The calls could draw or decide differently.
"""

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any, Literal, TypeAlias

from typing_extensions import override

from remat._base.errors import name_in
from remat._base.types import Fn
from remat._partial.budget import problem_of, solution_of
from remat._partial.effects import flops, work
from remat._partial.options import Options, Prune
from remat._report import render as _render
from remat._report.examine import Examined, examine
from remat._report.explain import ENOUGH, chosen, code_of, examined_again
from remat._report.fates import Fates
from remat._report.inputs import one_by_one, refuse_transforms
from remat._report.reports import SuggestedPolicy
from remat._transform.api import options_of
from remat._transform.lowering import Lowering
from remat._transform.module import module_of
from remat._transform.rematerialized import BoundMethod, Rematerialized
from remat.policies import (
    Decision,
    Policy,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    within,
)


# --- The values that are returned ---


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """What one policy saves and recomputes.

    Attributes:
        name: the policy as it prints, or its name in the mapping that was passed;
            "plain" for code without remat, and "as written" for the function with the
            blocks that it calls.
        saved_bytes: the bytes that stay alive for the backward and are not offloaded.
        peak_bytes: the saved bytes, and what the recompute of the largest call holds.
        offloaded_bytes: the bytes that are offloaded.
        recomputed_flops, recomputed_share: the FLOPs that the backward recomputes, and
            their share of the FLOPs of the forward.

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

    def _row(self) -> tuple[str, ...]:
        sizes = self.saved_bytes, self.peak_bytes, self.offloaded_bytes
        numbers = (f"{n:,}" for n in (*sizes, self.recomputed_flops))
        return self.name, *numbers, f"{self.recomputed_share:.0%}"


@dataclass(frozen=True, repr=False)
class Comparison(_render.Shown):
    """The report of `compare`. It prints as a table.

    Attributes:
        label: the name of the function.
        rows: of the function as written, if it calls rematerialized functions; of plain
            code; of remat without a policy; and of each policy.
        front: what `policies.within` reaches, with budgets from nothing to everything.
            Empty if the function calls rematerialized functions, or without scipy.
        suggested: the policy to write, as code: that of the rows which saves least and
            repeats at most half of what `nothing_saveable` does; None if none does.

    Example:
        >>> import torch
        >>> from remat import compare
        >>> compare(lambda x: x.sin().exp(), torch.ones(4), policies=[])
        <Comparison for `<lambda>`: 2 rows; 16 to 32 bytes saved>
    """

    label: str
    rows: tuple[ComparedPolicy, ...]
    front: tuple[ComparedPolicy, ...] = ()
    suggested: SuggestedPolicy | None = None

    @override
    def __repr__(self) -> str:
        sizes = [row.saved_bytes for row in self.rows]
        between = f"{min(sizes):,} to {max(sizes):,} bytes saved"
        return f"<Comparison for {self.label}: {len(self.rows)} rows; {between}>"

    def plot(self, ax: Any = None) -> Any:
        """Draw recomputed FLOPs against saved bytes, a point for each policy.

        A dashed line joins what `policies.within` reaches. Returns the matplotlib axes:
        new ones if `ax` is None.
        """
        names = [row.name for row in self.rows]
        at, front = (
            [(row.saved_bytes, row.recomputed_flops) for row in rows]
            for rows in (self.rows, self.front)
        )
        return _render.points(names, at, f"policies for {self.label}", ax, front)

    @override
    def _table(self) -> _render.Table:
        cells = [row._row() for row in self.rows]
        for row in (row._row() for row in self.front):
            cells += [row] if all(row[1:] != cell[1:] for cell in cells) else []
        sizes = "#saved bytes", "#peak without gradients", "#offloaded"
        return _render.Table(
            title=f"policies for {self.label}",
            columns=("policy", *sizes, "#FLOPs recomputed", "#share"),
            rows=tuple(cells),
            notes=() if self.suggested is None else (str(self.suggested),),
        )


# --- The report ---


_USUAL = dots_with_no_batch_dims_saveable, dots_saveable, everything_saveable


def compare(
    fn: Fn,
    /,
    *args: Any,
    policies: Iterable[object] | Mapping[str, object] | Policy = _USUAL,
    prune: Prune | Literal["own"] = "own",
    **kwargs: Any,
) -> Comparison:
    """Compare policies: what each saves, and what each recomputes.

    The function is called once, as by `explain`, and every policy is planned on the
    record of that call. If the function calls rematerialized functions, its *blocks*,
    it is called once for each row. These are the rows:

    - "as written": the function with its blocks as they are. Only if it has blocks.
    - "plain": code without remat, also without that of the blocks.
    - "nothing_saveable": remat around the whole function, without a policy.
    - One row for each of `policies`.
    - Some rows for `policies.within`, with budgets from nothing to everything, as far
      as they are unlike the rows above. They are left out if the function has blocks,
      and if scipy is not installed.

    The peak without gradients is what is saved, and what the recompute of the largest
    call holds. A step needs more: gradients, and what single operations take.

    Args:
        fn: the function, rematerialized or not. Its own policy gets no row.
        *args: its arguments. Meta and fake tensors are accepted.
        policies: what `remat` accepts as a policy, once or several times. A mapping
            gives each row a name. There, a value may also be a mapping from blocks to
            policies: such a row is the function as written, except that these blocks
            have these policies. A block is given by its name, which may have wildcards
            ("Block*"), or as an object: the function or the module that is
            rematerialized, or what `remat` returned. The first key that fits a block
            counts.
        prune: as for `explain`. Blocks keep theirs.
        **kwargs: its keyword arguments. They cannot be named `policies` or `prune`:
            bind such an argument with `functools.partial`.

    Returns:
        The comparison. `print` and notebooks show a table, and `.plot()` draws a chart.

    Raises:
        RuntimeError: `compare` is called under a transform of torch.func, forward-mode
            AD or torch.compile.
        TypeError: one of the policies is not a policy.
        ValueError: no tensor requires grad, or a policy is for a block that the
            function does not call.

    Example:
        >>> import torch
        >>> from remat import remat
        >>> from remat.policies import dots_saveable
        >>> def f(w, x):
        ...     return (w @ (w @ x).tanh()).tanh()
        >>> def model(w, x):
        ...     for _ in range(4):
        ...         x = remat(f)(w, x)
        ...     return x
        >>> w, x = torch.ones(4, 4), torch.ones(4, 4)
        >>> dots = {"all blocks: dots": {"*": dots_saveable}}
        >>> for row in compare(model, w, x, policies=dots).rows:
        ...     print(row.name, row.saved_bytes, row.peak_bytes, row.recomputed_flops)
        as written 320 448 1024
        plain 640 640 0
        nothing_saveable 128 448 1792
        all blocks: dots 832 960 0
    """
    refuse_transforms("compare", "the function")
    inner, label, options = chosen(fn, None, prune)
    call, blocks = (inner, label, args, kwargs), CalledBlocks()

    def examined(blocks: CalledBlocks) -> Examined:
        found = examine(*call, options, blocks.ask)
        if found is None:
            raise ValueError(_NOT_COMPARED)
        return found

    with one_by_one("compare", args):
        plainly = examined(blocks)
    rows = [_row_of_blocks("plain", plainly)]
    if blocks.names:
        plain = examined(CalledBlocks(plain=True))
        written = _row_of_blocks("as written", plainly)
        rows = [written, _row_of_blocks("plain", plain)]
    if isinstance(policies, Mapping):
        named = [(str(name), policy) for name, policy in policies.items()]
    else:
        several = policies if isinstance(policies, Iterable) else [policies]
        named = [("", policy) for policy in several]
    of_all: list[tuple[ComparedPolicy, str]] = []
    for name, policy in [("", None), *named]:
        if isinstance(policy, Mapping):
            of_row = CalledBlocks(policy)
            rows.append(_row_of_blocks(name, examined(of_row)))
            of_row.refuse_unused(label)
        else:
            of_all.append(_row(name, call, chosen(fn, policy, prune)[2], plainly))
            rows.append(of_all[-1][0])
    if blocks.names:
        return Comparison(label, tuple(rows))
    front: list[ComparedPolicy] = []
    with suppress(ImportError):  # of scipy
        for name, policy in _budgets(plainly):
            asked = chosen(fn, policy, prune)[2]
            front.append(_row(name, call, asked, plainly)[0])
    suggested = _suggested(rows[0], of_all)
    return Comparison(label, tuple(rows), tuple(front), suggested)


_NOT_COMPARED = (
    "remat: compare found nothing to differentiate: no floating tensor is passed, and "
    "no tensor that the function refers to requires grad. Pass a floating tensor."
)


def _budgets(plainly: Examined) -> Iterator[tuple[str, Policy]]:
    """Yield budgets by name, from nothing to everything; this needs scipy."""
    may = [Decision.SAVE] * len(plainly.log.steps)
    problem, _ = problem_of(plainly.log, may, (), plainly.exposed, work)
    most = solution_of(problem, problem.may_save).nbytes
    for nbytes in sorted({most * k // _PARTS for k in range(_PARTS + 1)}):
        yield f"within({nbytes})", within(nbytes, time_limit=_SECONDS)


_PARTS = 6  # of what is saved at most
_SECONDS = 1.0  # for each


def _suggested(
    plain: ComparedPolicy, policies: Sequence[tuple[ComparedPolicy, str]]
) -> SuggestedPolicy | None:
    """Return the policy that saves least, of those that repeat little enough."""
    most = ENOUGH * policies[0][0].recomputed_flops  # by saving nothing
    useful = [
        (row.saved_bytes, row.recomputed_flops, code, row.recomputed_share)
        for row, code in policies[1:]
        if code and row.saved_bytes < plain.saved_bytes and row.recomputed_flops <= most
    ]
    if not (useful and most):
        return None
    saved, _, code, share = min(useful)
    return SuggestedPolicy(code, saved, share)


_Compared: TypeAlias = tuple[Fn, str, tuple[Any, ...], dict[str, Any]]


def _row(
    name: str, call: _Compared, asked: Options, plainly: Examined
) -> tuple[ComparedPolicy, str]:
    """Return the row of a policy for the whole function, and the policy as code."""
    found = Fates(examined_again(*call, asked, plainly), asked)
    report = found.explained(call[1], plainly)
    row = ComparedPolicy(
        name or str(asked.policy or nothing_saveable),
        report.saved_bytes,
        report.peak_bytes,
        report.offloaded_bytes,
        report.recomputed_flops,
        report.recomputed_share,
    )
    return row, code_of(asked.policy or nothing_saveable)


def _row_of_blocks(name: str, found: Examined) -> ComparedPolicy:
    """Return the row of a run as it was, without `remat` around the function."""
    costs = [*map(flops, found.log.steps)]
    again = sum(costs[i] for call in found.calls for i in call.again)
    inputs = (call.inputs for call in found.calls)
    kept = frozenset(found.itself).union(*found.log.roots, *inputs)
    away = kept.intersection(chain.from_iterable(call.away for call in found.calls))
    saved = found.nbytes(kept - away)
    peak = saved + found.bytes_recomputed(kept, frozenset())
    share = again / sum(costs) if again else 0.0
    return ComparedPolicy(name, saved, peak, found.nbytes(away), again, share)


# --- Blocks ---


class CalledBlocks:
    """The blocks of one run."""

    def __init__(
        self, policies: Mapping[Any, Any] | None = None, *, plain: bool = False
    ) -> None:
        each = (policies or {}).items()
        self._policies = {key: options_of(policy).policy for key, policy in each}
        self._plain, self._unused = plain, {*self._policies}
        self.names: dict[str, None] = {}  # of the blocks that were called

    def ask(
        self, block: Rematerialized, lowering: Lowering, args: tuple[Any, ...]
    ) -> tuple[Lowering, Options]:
        """Return how a block is called."""
        options = block._options
        if lowering is Lowering.PLAIN:  # there is nothing to differentiate
            return lowering, options
        self.names[name_in(block.__remat_label__)] = None
        if self._plain:
            return Lowering.PLAIN, options
        for key, policy in self._policies.items():
            if _is_of(key, block, args):
                self._unused.discard(key)
                return lowering, replace(options, policy=policy)
        return lowering, options

    def refuse_unused(self, label: str) -> None:
        """Raise a ValueError if a key was of no block."""
        for key in self._policies:
            if key in self._unused:
                names = ", ".join(map(repr, self.names)) or "none"
                raise ValueError(_NO_BLOCK.format(key=key, label=label, names=names))


def _is_of(key: Any, block: Rematerialized, args: tuple[Any, ...]) -> bool:
    """Say whether a key is of a block: by name, or as one of its objects."""
    if isinstance(key, str):
        return fnmatchcase(name_in(block.__remat_label__), key)
    if isinstance(key, (types.MethodType, BoundMethod)):
        of_method = key.__func__ is block and bool(args) and args[0] is key.__self__
        return of_method or key == block.__wrapped__
    key = module_of(key)
    # The function of the block may be a method, bound or called with its object.
    owner = getattr(block.__wrapped__, "__self__", block)
    return any(key is part for part in (block, block.__wrapped__, owner, *args[:1]))


_NO_BLOCK = (
    "remat: compare has a policy for the block {key!r}, but {label} calls no such "
    "rematerialized function. It calls: {names}. Give the name of one of these, a "
    "pattern such as '*', or the function or module itself."
)
