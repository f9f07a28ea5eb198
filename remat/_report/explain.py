"""`explain`: what `remat` does with each operation of a call, and why.

The call runs once and is recorded (`examine`). `fates` says what happens to each
operation, and why.

Invariant: the totals are those of a call after one backward has succeeded. They are the
bytes that stay alive until the backward, and the FLOPs that the backward recomputes.
Rejected: the peak of a program. What is alive around the call is not known here, so the
peak is an estimate for the call alone.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from remat._base.labels import name_in
from remat._base.types import Fn
from remat._partial.budget import cost_of
from remat._partial.cost import flops
from remat._partial.names import told_of_key
from remat._partial.options import Options, Prune
from remat._partial.plan import Fate
from remat._report.examine import Examined, InputLeaf, examine
from remat._report.fates import Outcome, Reasons, name, outcome_of
from remat._report.labels import label_of_function, one_by_one, refuse_transforms
from remat._report.reports import (
    ExplainedBudget,
    ExplainedInput,
    ExplainedOp,
    Explanation,
)
from remat._report.step import peak_of
from remat._transform.api import options_of
from remat._transform.module import recomputed_by
from remat._transform.refused import refuse_function
from remat._transform.rematerialized import Rematerialized
from remat._transform.saved import DIFFERENTIATED_AGAIN
from remat.policies._places import unmatched


def explain(
    fn: Fn,
    /,
    *args: Any,
    policy: object = "own",
    prune: Prune | Literal["own"] = "own",
    **kwargs: Any,
) -> Explanation:
    """Explain what `remat` does with each operation of a call, and why.

    The function is called once on the given tensors, without a backward. A function
    that returns a loss, or runs a backward itself, is called again, as it is and with
    its backward: `peak` says what holds the peak of that step. Buffers, random streams
    and `.grad` are restored afterwards. Changes that the function makes to Python
    objects stay. If no tensor that is passed or referred to requires grad,
    every floating argument is treated as if it did.

    The totals are those of a call after a backward has succeeded: from then on, inputs
    that no backward reads are dropped. All outputs are assumed to be differentiated. A
    backward that reaches only some of them recomputes less.

    Args:
        fn: the function, rematerialized or not.
        *args: its arguments. Meta and fake tensors are accepted, so the model can be
            larger than memory.
        policy: as for `remat`. "own" means the policy of a rematerialized `fn`, and
            None for another `fn`.
        prune: as for `remat`. "own" means the option of a rematerialized `fn`, and
            "auto" for another `fn`.
        **kwargs: its keyword arguments. They cannot be named `policy` or `prune`: bind
            such an argument with `functools.partial`.

    Returns:
        The explanation. `print` and notebooks show a table, and `.plot()` draws a
        chart.

    Raises:
        RuntimeError: `explain` is called under a transform of torch.func, forward-mode
            AD or torch.compile.
        CaptureError: the function cannot be recomputed, or a tensor has no storage.

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
    inner, label, options = unwrapped(fn, policy, prune)
    none = dataclasses.replace(options, policy=None)
    with one_by_one("explain", args):
        plainly = examine(inner, label, args, kwargs, none)
    if plainly is None:
        nothing = label, options.policy, (), (), False, _NO_GRAD, 0, 0, 0, ()
        return Explanation(*nothing, (_NO_GRAD_ADVICE,))
    found = examined_again(inner, label, args, kwargs, options, plainly)
    report = explained(label, options, found, plainly)
    if not (found.scalar or found.differentiates):
        return report
    is_own = policy == "own" and prune == "own"
    step = fn if is_own else Rematerialized(inner, "", options, name_in(label))
    again = bool(found.calls) or recomputed_by(step) is not None
    return dataclasses.replace(report, peak=peak_of(step, args, kwargs, again=again))


def unwrapped(fn: Fn, policy: Any, prune: Any) -> tuple[Fn, str, Options]:
    """Return the function that is recomputed, its label, and the options."""
    found = recomputed_by(fn)
    if found is None:
        own, inner, label = Options(), fn, label_of_function(fn)
    else:
        (inner, call) = found
        own, label = call._options, call.__remat_label__
    chosen: Any = own.policy if isinstance(policy, str) and policy == "own" else policy
    pruned = own.prune if prune == "own" else prune
    refuse_function(inner)
    made = options_of(chosen, pruned)
    made = dataclasses.replace(made, rng=own.rng, higher_order=own.higher_order)
    return inner, label, made


def examined_again(
    fn: Fn, label: str, args: Any, kwargs: Any, options: Options, plainly: Examined
) -> Examined:
    """Return what a call does under its policy, given what it does without one."""
    nested = any(inside for _, inside in plainly.inner)
    if options.policy is None or not nested:  # nested calls save more under the policy
        return plainly
    return examine(fn, label, args, kwargs, options) or plainly


_NO_GRAD = "no tensor requires grad, so remat just calls the function"
_NO_GRAD_ADVICE = (
    "No floating tensor is passed, and none that the function refers to requires grad: "
    "there is no backward to recompute for. Pass what is to be differentiated."
)


def explained(
    label: str, options: Options, found: Examined, plainly: Examined
) -> Explanation:
    outcome, budget = outcome_of(found, options), None
    if outcome.spent is not None:
        spent, solution = outcome.spent, outcome.spent.solution
        whole = sum(map(cost_of(spent.budget), found.record.steps))
        kept = spent.budget.nbytes, solution.nbytes, solution.work, whole, solution.gap
        budget = ExplainedBudget(*kept, bool(spent.overdrawn))
    reasons = Reasons(found, outcome)
    inputs, counted = _inputs(found, outcome, reasons, options)
    indices = range(len(outcome.plan.fates))
    ops = [_operation(i, found, outcome, reasons, counted) for i in indices]
    # The one node of such a call holds its inputs and residuals, and nothing else.
    held = frozenset[int]() if options.higher_order else found.itself - counted
    roots = frozenset[int]().union(*found.record.roots)
    again = bytes_recomputed(found, held | counted, roots)
    report = Explanation(
        label=label,
        policy=options.policy,
        inputs=inputs,
        ops=tuple(ops),
        pruned=not outcome.unpruned,
        reason=outcome.unpruned,
        plain_bytes=total_bytes(plainly, saved_by_plain(plainly)),
        held_bytes=total_bytes(found, held),
        recomputed_bytes=again,
        streams=found.streams,
        advice=(),
        budget=budget,
    )
    advice = _advice(report, found, plainly, higher_order=options.higher_order)
    return dataclasses.replace(report, advice=tuple(advice))


# --- What becomes of it ---


def _inputs(
    found: Examined, outcome: Outcome, reasons: Reasons, options: Options
) -> tuple[tuple[ExplainedInput, ...], set[int]]:
    """Return what becomes of the inputs, and the storages that they keep alive."""
    rows: list[ExplainedInput] = []
    counted: set[int] = set()
    for i, (leaf, s) in enumerate(zip(found.leaves, found.record.inputs, strict=True)):
        kept = i not in outcome.dropped
        nbytes = 0 if s in counted else found.sizes[s]
        nbytes += leaf.nbytes if leaf.is_copied and i not in outcome.unread else 0
        is_source = i in outcome.plan.residual_sources and leaf.needs
        is_linked = options.higher_order and is_source
        why = reasons.of_input(s) or _why(leaf, kept, is_linked, outcome.unpruned)
        meta = leaf.name, leaf.dtype, leaf.shape
        rows.append(ExplainedInput(*meta, nbytes, kept, why, leaf.is_parameter))
        counted |= {s} if kept else set()
    return tuple(rows), counted


def _why(leaf: InputLeaf, kept: bool, is_linked: bool, unpruned: str) -> str:
    """Say why an input that nothing reads is kept, or is not."""
    if not kept:
        return "nothing that is recomputed reads it"
    if unpruned:
        return f"nothing is left out: {unpruned}"
    if is_linked:
        return "a saved value was computed from it, for higher derivatives"
    return leaf.stays or "too small to be worth dropping"


def _operation(
    i: int, found: Examined, outcome: Outcome, reasons: Reasons, counted: set[int]
) -> ExplainedOp:
    """Return what becomes of an operation; count the storages of its residuals."""
    step, fate = found.record.steps[i], outcome.plan.fates[i]
    within, inside = found.inner[i]
    saved = {step.makes[k] for j, k in outcome.plan.residuals if j == i} - counted
    counted |= saved
    op, why = step.op, reasons.of_operation(i)
    if within and fate is Fate.DEAD:
        why = f"in the backward of remat({inside}), within this"
    word: Literal["saved", "offloaded", "recomputed", "dead"]
    if fate is Fate.SAVED:
        word = "offloaded" if i in outcome.offloaded else "saved"
    else:
        word = "recomputed" if within or fate.is_run else "dead"
    return ExplainedOp(
        name=name(op),
        source=op.source,
        outputs=op.outputs,
        nbytes=0 if step.is_view else op.nbytes,
        flops=flops(step),
        fate=word,
        times=within + fate.is_run,
        kept=total_bytes(found, saved),
        why=why,
        is_view=step.is_view,
    )


def total_bytes(found: Examined, storages: Iterable[int]) -> int:
    return sum(found.sizes[s] for s in storages)


def saved_by_plain(found: Examined) -> frozenset[int]:
    """Return the storages that stay alive for the backward without remat."""
    return found.itself.union(found.readers, *found.record.roots)


def bytes_recomputed(found: Examined, kept: frozenset[int], own: frozenset[int]) -> int:
    """Return the bytes that the largest recompute holds besides what was `kept`.

    Blocks are alike in most models, so the first that a backward recomputes is at the
    peak. `own` is what a recompute of the whole call holds.
    """
    # The recompute of a call within holds those of the calls around it, too.
    held = {-1: own - kept}
    for i, call in enumerate(found.calls):
        held[i] = held[call.around] | (call.holds - kept)
    return max(sum(found.sizes[s] for s in storages) for storages in held.values())


# --- Advice ---


def _advice(
    report: Explanation, found: Examined, plainly: Examined, *, higher_order: bool
) -> Iterator[str]:
    """Yield what to change. The most common mistake is a remat that saves nothing."""
    pairs = zip(report.inputs, found.leaves, strict=True)
    alive = sum(row.nbytes for row, leaf in pairs if row.kept and leaf.stays)
    leaves = zip(plainly.leaves, plainly.record.inputs, strict=True)
    anyway = {s for leaf, s in leaves if leaf.stays}
    ours = report.saved_bytes - alive
    plain = total_bytes(plainly, saved_by_plain(plainly) - anyway)
    if not (found.differentiable or found.differentiates):
        yield _NO_RESULT
    elif ours >= _MOST * plain:
        yield _SAVES_NOTHING.format(ours=ours, plain=plain)
    elif found.scalar and not found.calls:
        yield _WHOLE_LOSS.format(plain=plain)
    if report.label in DIFFERENTIATED_AGAIN and not higher_order:
        yield _HIGHER_ORDER.format(plain=plain)
    if report.policy is not None:
        ops = [step.op for step in found.record.steps]
        for (_, key), near in sorted(unmatched(report.policy, ops).items(), key=_key):
            yield f"The {told_of_key(key, near)}"


_NO_RESULT = (
    "No result requires grad: no backward follows, and nothing is saved or recomputed. "
    "Look for detach(), no_grad() and integers in the function, or leave remat out."
)
_MOST = 0.9  # of what plain keeps: then less is saved than a recompute is worth
_SAVES_NOTHING = (
    "Remat saves next to nothing here: besides parameters and other leaves, "
    "{ours:,} bytes stay alive with it and {plain:,} without. The backward reads "
    "little but the inputs of the function, or the policy saves all that it reads. Put "
    "remat around more operations, save fewer results, or leave it out."
)
_WHOLE_LOSS = (
    "The result is a single number, like that of a whole loss. Its backward starts "
    "right after the forward, and recomputes all of the {plain:,} bytes that plain "
    "code saves, so the peak is no lower. Put remat around each part of the model, "
    "except the last."
)
_HIGHER_ORDER = (
    "A backward of this function was differentiated again (create_graph=True). What "
    "that backward computed stayed in memory, as in plain code: about as much as the "
    "{plain:,} bytes that plain code saves in the forward, and more with each order. "
    "With higher_order=True it is recomputed, too."
)


def _key(item: Any) -> str:
    return item[0][1]
