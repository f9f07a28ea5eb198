"""`explain`: what `remat` does with each operation, and why; what policy to write.

The call runs once and is recorded (`examine`). `fates` says what happens to each
operation, and why.

Invariant: the totals are those of a call after one backward has succeeded. They are the
bytes that stay alive until the backward, and the FLOPs that the backward recomputes. A
policy that is suggested is planned as a call would plan it.
Rejected: the peak of a program. What is alive around the call is not known here, so the
peak is an estimate for the call alone. Rejected: to suggest the best set of results.
`policies.within` solves for it; a name or an operator is what people write and keep.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from remat import policies
from remat._base.errors import name_in
from remat._base.types import Fn
from remat._partial.names import told_of_key
from remat._partial.options import Options, Prune
from remat._report.examine import Examined, examine
from remat._report.fates import Fates
from remat._report.inputs import one_by_one, refuse_transforms, unwrapped
from remat._report.reports import Explanation, SuggestedPolicy
from remat._report.step import peak_of
from remat._transform.api import options_of, refuse_function
from remat._transform.rematerialized import Rematerialized
from remat.policies import Policy, nothing_saveable, save_ops
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
    objects stay. If no result requires grad, it is called again, and every floating
    argument is differentiated.

    The totals are those of a call after a backward has succeeded: from then on, inputs
    that no backward reads are dropped. All outputs are assumed to be differentiated.

    Args:
        fn: the function, rematerialized or not.
        *args: its arguments. Meta and fake tensors are accepted, so the model can be
            larger than memory.
        policy: as for `remat`. "own" means that of a rematerialized `fn`, else None.
        prune: as for `remat`. "own" means that of a rematerialized `fn`, else "auto".
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
         ('sin', 'dead', 'the backward does not read it')]
        >>> found.saved_bytes, found.plain_bytes
        (12, 24)
    """
    refuse_transforms("explain", "the function")
    inner, label, options = chosen(fn, policy, prune)
    none = replace(options, policy=None)
    with one_by_one("explain", args):
        plainly = examine(inner, label, args, kwargs, none)
    is_own = policy == "own" and prune == "own"
    step = fn if is_own else Rematerialized(inner, "", options, name_in(label))
    if plainly is None:  # a step may have parameters that calls leave alone, as FSDP's
        peak = peak_of(step, args, kwargs)
        why = {"reason": _NO_GRAD, "advice": () if peak else (_NO_GRAD_ADVICE,)}
        return Explanation(label, options.policy, peak=peak, **why)
    found = examined_again(inner, label, args, kwargs, options, plainly)
    is_step = found.scalar or found.differentiates
    peak = peak_of(step, args, kwargs) if is_step else None
    report = Fates(found, options).explained(label, plainly)
    suggested = _suggested(report, found, options, plainly)
    report = replace(report, peak=peak, suggested=suggested)
    return replace(report, advice=tuple(_advice(report, found, plainly)))


def chosen(fn: Fn, policy: Any, prune: Any) -> tuple[Fn, str, Options]:
    """Return the function that is recomputed, its label, and the options."""
    inner, label, own = unwrapped(fn)
    refuse_function(inner)
    is_own = isinstance(policy, str) and policy == "own"
    pruned = own.prune if prune == "own" else prune
    made = options_of(own.policy if is_own else policy, pruned)
    made = replace(made, rng=own.rng, higher_order=own.higher_order)
    return inner, label, made


def examined_again(
    fn: Fn, label: str, args: Any, kwargs: Any, options: Options, plainly: Examined
) -> Examined:
    """Return what a call does under its policy, given what it does without one."""
    if options.policy is None or not any(plainly.inside):
        return plainly
    # Calls within save more under the policy.
    return examine(fn, label, args, kwargs, options) or plainly


_NO_GRAD = "no tensor requires grad, so remat just calls the function"
_NO_GRAD_ADVICE = (
    "No floating tensor is passed, and none that the function refers to requires grad: "
    "there is no backward to recompute for. Pass what is to be differentiated."
)


# --- Advice ---


def _advice(report: Explanation, found: Examined, plainly: Examined) -> Iterator[str]:
    """Yield what to change; of a step, what `report.peak` does not say."""
    pairs = zip(report.inputs, found.leaves, strict=True)
    alive = sum(row.nbytes for row, leaf in pairs if row.kept and leaf.kept)
    leaves = zip(plainly.leaves, plainly.log.inputs, strict=True)
    anyway = {s for leaf, s in leaves if leaf.kept}
    ours = report.saved_bytes - alive
    plain = plainly.nbytes(plainly.saved_by_plain() - anyway)
    if report.peak is None:
        if not (found.differentiable or found.differentiates):
            yield _NO_RESULT
        elif ours >= _MOST * plain:
            yield _SAVES_NOTHING.format(ours=ours, plain=plain)
    if report.policy is not None:
        near = unmatched(report.policy, [step.op for step in found.log.steps])
        for part, key in sorted(near, key=lambda each: each[1]):
            yield f"The {told_of_key(key, near[part, key])}"


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


# --- The policy to write ---


ENOUGH = 0.5  # of the FLOPs that run again without it


def _suggested(
    report: Explanation, found: Examined, options: Options, plainly: Examined
) -> SuggestedPolicy | None:
    """Return the policy that saves what takes most FLOPs for each of its bytes."""
    if any(found.inside) or report.budget is not None or not report.recomputed_flops:
        return None
    sizes, work = Counter(), Counter()
    for step, op in zip(found.log.steps, report.ops, strict=True):
        if op.flops * op.times:
            sizes[step.op.packet] += op.nbytes
            work[step.op.packet] += op.flops
    left = (1 - ENOUGH) * work.total()
    saved: list[Any] = []
    for operator in sorted(work, key=lambda each: -work[each] / max(1, sizes[each])):
        if left > 0:
            saved.append(operator)
        left -= work[operator]
    policy = save_ops(*saved)
    if report.policy is not None and report.policy != nothing_saveable:
        policy = report.policy | policy
    under = Fates(found, replace(options, policy=policy))
    made, code = under.explained(report.label, plainly), code_of(policy)
    if not code or made.recomputed_flops >= report.recomputed_flops:
        return None
    return SuggestedPolicy(code, made.saved_bytes, made.recomputed_share)


def code_of(policy: Policy) -> str:
    """Return a policy as code that runs; "" if it does not print as code.

    Example:
        >>> code_of(policies.dots_saveable | policies.save_only_these_names("a"))
        "policies.dots_saveable | policies.save_only_these_names('a')"
    """
    text = repr(policy)
    try:
        tree = ast.parse(text, mode="eval")
    except SyntaxError:  # of a function, say
        return ""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    if not {node.id for node in names} <= {*dir(policies), "torch"}:
        return ""
    for at in sorted((n.col_offset for n in names if n.id != "torch"), reverse=True):
        text = f"{text[:at]}policies.{text[at:]}"
    return ast.unparse(ast.parse(text))  # without parentheses around it
