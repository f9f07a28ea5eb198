"""`explain` and `compare`: what `remat` does with each operation of a call, and why.

The call is run once and recorded. A policy is then a plan of the record: planning needs
no tensors, so any number of policies are compared for the price of one forward.

Invariant: the totals are those of a call: the bytes that stay alive between its forward
and its backward once one backward has succeeded, and the FLOPs that the backward spends
besides those without remat. Rejected: estimates of peak memory. What is alive around
the call is not known here.
"""

import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from remat._base.types import Fn
from remat._partial.cost import flops
from remat._partial.options import Options, Prune
from remat._partial.plan import Fate
from remat._report.examine import Examined, Leaf, examine
from remat._report.labels import label_of, refuse_transforms
from remat._report.outcome import Outcome, outcome_of
from remat._report.reasons import Reasons, name
from remat._report.reports import (
    ComparedPolicy,
    Comparison,
    ExplainedInput,
    ExplainedOp,
    Explanation,
)
from remat._transform.api import Rematerialized, remat
from remat._transform.saved import DIFFERENTIATED_AGAIN
from remat.policies import (
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
)


def explain(
    fn: Fn,
    /,
    *args: Any,
    policy: object = "own",
    prune: Prune | Literal["own"] = "own",
    **kwargs: Any,
) -> Explanation:
    """Say what `remat` does with each operation of a call, and why.

    The function is called once, on the tensors given, without a backward. If none that
    it is passed or refers to requires grad, every floating argument is taken to.
    Afterwards buffers, random streams and `.grad` are as they were; what the function
    does to Python objects stays done.

    The totals are those of a call after a backward has succeeded: only from then on are
    inputs dropped that no backward reads. All outputs are taken to be differentiated;
    where a backward reaches only some, it recomputes less.

    Args:
        fn: the function, rematerialized or not.
        *args: its arguments. Meta and fake tensors are accepted, for a model larger
            than memory.
        policy: as for `remat`. "own" is what `fn` was rematerialized with; None for one
            that is not.
        prune: likewise; "auto" for a function that is not rematerialized.
        **kwargs: its keyword arguments, of which none can be called `policy` or
            `prune`: bind such a one with `functools.partial`.

    Returns:
        The explanation. `print` shows a table, a notebook too, and `.plot()` a chart.

    Raises:
        RuntimeError: called under a transform of torch.func, forward-mode AD or
            torch.compile.
        CaptureError: the function does what cannot be recomputed, or a tensor has no
            storage.

    Example:
        >>> import torch
        >>> def f(x):
        ...     return x.sin().sin()
        >>> found = explain(f, torch.ones(3), prune=True)
        >>> [(op.name, op.fate, op.why) for op in found.ops]
        [('sin', 'recomputed', 'read by the backward of sin'),
         ('sin', 'dead', 'a result that the backward does not read')]
        >>> found.saved_bytes, found.plain_bytes
        (12, 24)
    """
    refuse_transforms("explain", "the function")
    inner, label, options = _unwrapped(fn, policy, prune)
    none = dataclasses.replace(options, policy=None)
    plainly = examine(inner, label, args, kwargs, none)
    if plainly is None:
        return _nothing(label, options)
    found = _again(inner, label, args, kwargs, options, plainly)
    return _explained(label, options, found, plainly)


def _unwrapped(fn: Fn, policy: Any, prune: Any) -> tuple[Fn, str, Options]:
    """Return the function that is recomputed, what to call it, and the options."""
    found = _remat_in(fn)
    if found is None:
        own, inner, label = Options(), fn, label_of(fn)
    else:
        (inner, call) = found
        own, label = call._options, call._label
    chosen: Any = own.policy if isinstance(policy, str) and policy == "own" else policy
    pruned = own.prune if prune == "own" else prune
    made = remat(inner, policy=chosen, prune=pruned)._options
    made = dataclasses.replace(made, rng=own.rng, higher_order=own.higher_order)
    return inner, label, made


def _remat_in(fn: Any) -> tuple[Fn, Rematerialized[..., Any]] | None:
    """Return what a rematerialized function, method or partial of one recomputes."""
    if isinstance(fn, Rematerialized):
        return fn.__wrapped__, fn
    if isinstance(fn, types.MethodType) and isinstance(fn.__func__, Rematerialized):
        return types.MethodType(fn.__func__.__wrapped__, fn.__self__), fn.__func__
    if isinstance(fn, functools.partial):
        found = _remat_in(fn.func)
        if found is not None:
            return functools.partial(found[0], *fn.args, **fn.keywords), found[1]
    return None


def _again(
    fn: Fn, label: str, args: Any, kwargs: Any, options: Options, plainly: Examined
) -> Examined:
    """Return what a call does under its policy, given what it does without one.

    That is the same, unless calls of `remat` within keep more under the former.
    """
    nested = any(inside for _, inside in plainly.inner)
    if options.policy is None or not nested:
        return plainly
    return examine(fn, label, args, kwargs, options) or plainly


def _nothing(label: str, options: Options) -> Explanation:
    return Explanation(
        label, options.policy, (), (), False, _NO_GRAD, 0, 0, (), (_NO_GRAD_ADVICE,)
    )


_NO_GRAD = "no tensor requires grad, so remat just calls the function"
_NO_GRAD_ADVICE = (
    "No floating tensor is passed, and none that the function refers to requires grad: "
    "there is no backward to recompute for. Pass what is to be differentiated."
)


def _explained(
    label: str, options: Options, found: Examined, plainly: Examined
) -> Explanation:
    outcome = outcome_of(found, options)
    made, unpruned = outcome.plan, outcome.unpruned
    readers, itself = found.readers, found.itself
    reasons = Reasons(found.record, made, readers, itself, found.exposed, unpruned)
    inputs, counted = _inputs(found, outcome, reasons, options)
    indices = range(len(made.fates))
    ops = [_operation(i, found, outcome, reasons, counted) for i in indices]
    # The one node of a call holds its inputs alone, and what its policy keeps.
    held = frozenset[int]() if options.higher_order else itself - counted
    report = Explanation(
        label=label,
        policy=options.policy,
        inputs=inputs,
        ops=tuple(ops),
        pruned=not unpruned,
        reason=unpruned,
        plain_bytes=_bytes_of(plainly, _saved_by_plain(plainly)),
        held_bytes=_bytes_of(found, held),
        streams=found.streams,
        advice=(),
    )
    advice = _advice(report, found, plainly, higher_order=options.higher_order)
    return dataclasses.replace(report, advice=tuple(advice))


# --- What becomes of it ---


def _inputs(
    found: Examined, outcome: Outcome, reasons: Reasons, options: Options
) -> tuple[tuple[ExplainedInput, ...], set[int]]:
    """Return what becomes of the inputs, and the storages that are kept with them."""
    rows: list[ExplainedInput] = []
    counted: set[int] = set()
    for i, (leaf, s) in enumerate(zip(found.leaves, found.record.inputs, strict=True)):
        kept = i not in outcome.dropped
        nbytes = 0 if s in counted else found.sizes[s]
        nbytes += leaf.nbytes if leaf.is_copied and i not in outcome.unread else 0
        linked = (
            options.higher_order and i in outcome.plan.residual_sources and leaf.needs
        )
        why = reasons.of_input(s) or _why(leaf, kept, linked, outcome.unpruned)
        rows.append(
            ExplainedInput(leaf.name, leaf.dtype, leaf.shape, nbytes, kept, why)
        )
        counted |= {s} if kept else set()
    return tuple(rows), counted


def _why(leaf: Leaf, kept: bool, linked: bool, unpruned: str) -> str:
    """Say why an input is kept, or not, that nothing reads."""
    if not kept:
        return "nothing that is recomputed reads it"
    if unpruned:
        return f"nothing is left out: {unpruned}"
    if linked:
        return "what is kept was computed from it, for higher derivatives"
    return leaf.stays or "too small to be worth dropping"


def _operation(
    i: int, found: Examined, outcome: Outcome, reasons: Reasons, counted: set[int]
) -> ExplainedOp:
    """Return what becomes of an operation, and count the storages kept of it."""
    step, fate = found.record.steps[i], outcome.plan.fates[i]
    within, inside = found.inner[i]
    kept = {step.makes[k] for j, k in outcome.plan.residuals if j == i} - counted
    counted |= kept
    op, why = step.op, reasons.of_operation(i)
    if within and fate is Fate.DEAD:
        why = f"in the backward of remat({inside}), within this"
    return ExplainedOp(
        name=name(op),
        source=op.source,
        outputs=op.outputs,
        nbytes=0 if step.is_view else op.nbytes,
        flops=flops(step),
        fate=_word(fate, within=within, away=i in outcome.offloaded),
        times=within + fate.is_run,
        kept=_bytes_of(found, kept),
        why=why,
        is_view=step.is_view,
    )


def _word(
    fate: Fate, *, within: int, away: bool
) -> Literal["saved", "offloaded", "recomputed", "dead"]:
    if fate is Fate.SAVED:
        return "offloaded" if away else "saved"
    return "recomputed" if within or fate.is_run else "dead"


def _bytes_of(found: Examined, storages: Iterable[int]) -> int:
    return sum(found.sizes[s] for s in storages)


def _saved_by_plain(found: Examined) -> frozenset[int]:
    """Return the storages that stay alive for the backward without remat."""
    return found.itself.union(found.readers, *found.record.roots)


# --- Advice ---


def _advice(
    report: Explanation, found: Examined, plainly: Examined, *, higher_order: bool
) -> Iterator[str]:
    """Yield what to change: remat that saves nothing is the most common mistake."""
    pairs = zip(report.inputs, found.leaves, strict=True)
    alive = sum(row.nbytes for row, leaf in pairs if row.kept and leaf.stays)
    leaves = zip(plainly.leaves, plainly.record.inputs, strict=True)
    anyway = {s for leaf, s in leaves if leaf.stays}
    ours = report.saved_bytes - alive
    plain = _bytes_of(plainly, _saved_by_plain(plainly) - anyway)
    if ours >= _MOST * plain:
        yield _SAVES_NOTHING.format(ours=ours, plain=plain)
    elif found.scalar:
        yield _WHOLE_LOSS.format(plain=plain)
    if report.label in DIFFERENTIATED_AGAIN and not higher_order:
        yield _HIGHER_ORDER.format(plain=plain)
    if report.policy is not None:
        for unknown in sorted(report.policy.names - found.record.names):
            yield _UNKNOWN.format(unknown=unknown)


_MOST = 0.9  # of what plain keeps: less is saved than is worth a recomputation
_SAVES_NOTHING = (
    "Remat saves next to nothing here: besides parameters and other leaves, "
    "{ours:,} bytes stay alive with it and {plain:,} without. What the backward reads "
    "is about what goes into the function, or all that the policy keeps. Put remat "
    "around more operations, keep fewer results, or leave it out."
)
_WHOLE_LOSS = (
    "The result is a single number, as of a whole loss. Its backward starts right "
    "after it and first recomputes all of the {plain:,} bytes that plain keeps, so "
    "that the peak is no lower. Put remat around the parts of the model, one by one, "
    "and leave out the last."
)
_HIGHER_ORDER = (
    "A backward of it was differentiated again (create_graph=True). What that backward "
    "computed stayed in memory, as in plain code: about as much as the {plain:,} bytes "
    "that plain keeps of the forward, and more with each order. With higher_order=True "
    "it is recomputed, too."
)
_UNKNOWN = (
    "No checkpoint_name in this call gives the name {unknown!r}, which the policy has: "
    "nothing is kept for it. Name the value, or correct the policy."
)


# --- compare ---


_USUAL = (
    dots_with_no_batch_dims_saveable,
    dots_saveable,
    everything_saveable,
)


def compare(
    fn: Fn,
    /,
    *args: Any,
    policies: Iterable[object] = _USUAL,
    prune: Prune | Literal["own"] = "own",
    **kwargs: Any,
) -> Comparison:
    """Tabulate what policies save against what they recompute.

    The function is called once, as by `explain`, and every policy is planned on the
    record of that call; once for each policy if it has calls of `remat` within it. The
    first row is plain: what autograd keeps without remat, and nothing recomputed. The
    second is remat without a policy.

    Args:
        fn: the function, rematerialized or not. The policy it has is no row of its own.
        *args: its arguments. Meta and fake tensors are accepted.
        policies: anything that `remat` takes as one; JAX's usual ones if not given.
        prune: as for `explain`.
        **kwargs: its keyword arguments, of which none can be called `policies` or
            `prune`.

    Returns:
        The comparison. `print` shows a table, a notebook too, and `.plot()` a chart.

    Raises:
        RuntimeError: called under a transform of torch.func, forward-mode AD or
            torch.compile.
        TypeError: one of the policies is none.
        ValueError: no tensor requires grad.

    Example:
        >>> import torch
        >>> from remat.policies import dots_saveable
        >>> def f(w, x):
        ...     return (w @ (w @ x).tanh()).tanh()
        >>> w, x = torch.ones(4, 4), torch.ones(4, 4)
        >>> found = compare(f, w, x, policies=[dots_saveable], prune=True)
        >>> for row in found.rows:
        ...     print(row.name, row.saved_bytes, row.recomputed_flops)
        plain 256 0
        nothing_saveable 128 256
        dots_saveable 256 0
    """
    refuse_transforms("compare", "the function")
    wanted = [None, *policies]
    each = [_unwrapped(fn, policy, prune) for policy in wanted]
    inner, label, options = each[0]
    plainly = examine(inner, label, args, kwargs, options)
    if plainly is None:
        raise ValueError(_NOT_COMPARED)
    rows = [_plain_row(plainly)]
    for _, _, options in each:
        found = _again(inner, label, args, kwargs, options, plainly)
        rows.append(_row(_explained(label, options, found, plainly)))
    return Comparison(label, tuple(rows))


_NOT_COMPARED = (
    "remat: compare was given a function without anything to differentiate: no "
    "floating tensor is passed, and none that it refers to requires grad."
)


def _plain_row(found: Examined) -> ComparedPolicy:
    costs = [*map(flops, found.record.steps)]
    pairs = zip(costs, found.inner, strict=True)
    again = sum(cost * times for cost, (times, _) in pairs)
    saved = _bytes_of(found, _saved_by_plain(found))
    share = again / sum(costs) if again else 0.0
    return ComparedPolicy("plain", saved, 0, again, share)


def _row(report: Explanation) -> ComparedPolicy:
    return ComparedPolicy(
        str(report.policy or nothing_saveable),
        report.saved_bytes,
        report.offloaded_bytes,
        report.recomputed_flops,
        report.recomputed_share,
    )
