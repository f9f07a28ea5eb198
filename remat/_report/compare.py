"""`compare`: what policies save, against what they recompute.

Called by users. The call is run once and recorded. A policy is then a plan of the
record: planning needs no tensors, so many policies are compared for the price of one
forward.

Invariant: each row is what `explain` says of the same call under that policy.
Rejected: one call for each policy, which could draw or decide something else.
"""

from collections.abc import Iterable
from typing import Any, Literal

from remat._base.types import Fn
from remat._partial.cost import flops
from remat._partial.options import Prune
from remat._report.examine import Examined, examine
from remat._report.explain import (
    bytes_of,
    examined_again,
    explained,
    saved_by_plain,
    unwrapped,
)
from remat._report.labels import refuse_transforms
from remat._report.reports import ComparedPolicy, Comparison, Explanation
from remat.policies import (
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
)


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
    record of that call. If it calls `remat` within it, it is called once per policy.
    The first row is plain: what autograd keeps without remat, and nothing recomputed.
    The second row is remat without a policy.

    Args:
        fn: the function, rematerialized or not. Its own policy gets no row.
        *args: its arguments. Meta and fake tensors are accepted.
        policies: each anything that `remat` takes as a policy; by default the usual
            ones of JAX.
        prune: as for `explain`.
        **kwargs: its keyword arguments. None of them can be called `policies` or
            `prune`: bind such an argument with `functools.partial`.

    Returns:
        The comparison. `print` shows a table, a notebook too, and `.plot()` a chart.

    Raises:
        RuntimeError: called under a transform of torch.func, forward-mode AD or
            torch.compile.
        TypeError: one of the policies is not a policy.
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
    each = [unwrapped(fn, policy, prune) for policy in wanted]
    inner, label, options = each[0]
    plainly = examine(inner, label, args, kwargs, options)
    if plainly is None:
        raise ValueError(_NOT_COMPARED)
    rows = [_plain_row(plainly)]
    for _, _, options in each:
        found = examined_again(inner, label, args, kwargs, options, plainly)
        rows.append(_row(explained(label, options, found, plainly)))
    return Comparison(label, tuple(rows))


_NOT_COMPARED = (
    "remat: compare was given a function without anything to differentiate: no "
    "floating tensor is passed, and none that it refers to requires grad."
)


def _plain_row(found: Examined) -> ComparedPolicy:
    costs = [*map(flops, found.record.steps)]
    pairs = zip(costs, found.inner, strict=True)
    again = sum(cost * times for cost, (times, _) in pairs)
    saved = bytes_of(found, saved_by_plain(found))
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
