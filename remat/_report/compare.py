"""`compare`: what policies save, and what they recompute.

The call runs once and is recorded. Each policy then gives a plan of the record, which
needs no tensors. A function that calls rematerialized functions, its *blocks*, runs
once for each row.

Invariant: each row is what `explain` reports for the same call under that policy.
Rejected: one call for each policy. The calls could draw or decide differently.
"""

import dataclasses
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from remat._base.errors import name_in
from remat._base.types import Fn
from remat._partial.budget import problem_of, solution_of
from remat._partial.cost import flops, work
from remat._partial.options import Options, Prune
from remat._report.examine import Examined, examine
from remat._report.explain import ENOUGH, chosen, code_of, examined_again
from remat._report.fates import Fates
from remat._report.inputs import one_by_one, refuse_transforms
from remat._report.reports import ComparedPolicy, Comparison, SuggestedPolicy
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
    with one_by_one("compare", args):
        plainly = _examined(call, options, blocks)
    rows = [_row_of_blocks("plain", plainly)]
    codes: list[str] = []
    if blocks.names:
        plain = _examined(call, options, CalledBlocks(plain=True))
        written = _row_of_blocks("as written", plainly)
        rows = [written, _row_of_blocks("plain", plain)]
    for name, policy in [("", None), *_named(policies)]:
        if isinstance(policy, Mapping):
            blocks_of_row = CalledBlocks(policy)
            found = _examined(call, options, blocks_of_row)
            blocks_of_row.refuse_unused(label)
            rows.append(_row_of_blocks(name, found))
        else:
            row_options = chosen(fn, policy, prune)[2]
            rows.append(_row(name, call, row_options, plainly))
            codes.append(code_of(row_options.policy or nothing_saveable))
    if blocks.names:
        return Comparison(label, tuple(rows))
    suggested = _suggested(rows, codes)
    try:
        front = [
            _row(name, call, chosen(fn, policy, prune)[2], plainly)
            for name, policy in _budgets(plainly)
        ]
    except ImportError as error:
        why = _NO_FRONT.format(error=error)
        return Comparison(label, tuple(rows), (), why, suggested)
    return Comparison(label, tuple(rows), tuple(front), suggested=suggested)


_NO_FRONT = "without what policies.within reaches. {error}"
_NOT_COMPARED = (
    "remat: compare found nothing to differentiate: no floating tensor is passed, and "
    "no tensor that the function refers to requires grad. Pass a floating tensor."
)


def _named(policies: Any) -> Iterator[tuple[str, Any]]:
    """Yield each policy with its name, "" if it is called as it prints."""
    if isinstance(policies, Mapping):
        yield from policies.items()
    else:
        several = policies if isinstance(policies, Iterable) else [policies]
        yield from (("", policy) for policy in several)


def _budgets(plainly: Examined) -> Iterator[tuple[str, Policy]]:
    """Yield budgets by name, from nothing to everything; this needs scipy."""
    record = plainly.record
    may = [Decision.SAVE] * len(record.steps)
    problem, _ = problem_of(record, may, (), plainly.exposed, work)
    most = solution_of(problem, problem.may_save).nbytes
    for nbytes in sorted({most * k // _PARTS for k in range(_PARTS + 1)}):
        yield f"within({nbytes})", within(nbytes, time_limit=_SECONDS)


_PARTS = 6  # of what is saved at most
_SECONDS = 1.0  # for each


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
                return lowering, dataclasses.replace(options, policy=policy)
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


# --- Rows ---


def _suggested(
    rows: Sequence[ComparedPolicy], codes: Sequence[str]
) -> SuggestedPolicy | None:
    """Return the policy that saves least, of those that repeat little enough."""
    plain, none, *others = rows
    useful = [
        (row.saved_bytes, row.recomputed_flops, code, row)
        for row, code in zip(others, codes[1:], strict=True)
        if code
        and row.saved_bytes < plain.saved_bytes
        and row.recomputed_flops <= ENOUGH * none.recomputed_flops
    ]
    if not (useful and none.recomputed_flops):
        return None
    saved, _, code, row = min(useful, key=lambda each: each[:3])
    return SuggestedPolicy(code, saved, row.recomputed_share)


_Compared: TypeAlias = tuple[Fn, str, tuple[Any, ...], dict[str, Any]]


def _examined(call: _Compared, options: Options, blocks: CalledBlocks) -> Examined:
    """Run the call once."""
    found = examine(*call, options, blocks.ask)
    if found is None:
        raise ValueError(_NOT_COMPARED)
    return found


def _row(
    name: str, call: _Compared, options: Options, plainly: Examined
) -> ComparedPolicy:
    """Return the row of a policy for the whole function."""
    found = examined_again(*call, options, plainly)
    report = Fates(found, options).explained(call[1], plainly)
    return ComparedPolicy(
        name or str(report.policy or nothing_saveable),
        report.saved_bytes,
        report.peak_bytes,
        report.offloaded_bytes,
        report.recomputed_flops,
        report.recomputed_share,
    )


def _row_of_blocks(name: str, found: Examined) -> ComparedPolicy:
    """Return the row of a run as it was, without `remat` around the function."""
    costs = [*map(flops, found.record.steps)]
    again = sum(costs[i] for call in found.calls for i in call.again)
    kept = found.itself.union(*found.record.roots, *(c.inputs for c in found.calls))
    away = kept & frozenset().union(*(call.away for call in found.calls))
    saved = found.nbytes(kept - away)
    peak = saved + found.bytes_recomputed(kept, frozenset())
    share = again / sum(costs) if again else 0.0
    return ComparedPolicy(name, saved, peak, found.nbytes(away), again, share)
