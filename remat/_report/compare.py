"""`compare`: what policies save, and what they recompute.

Called by users. The call runs once and is recorded. Each policy then gives a plan of
the record. Planning needs no tensors, so many policies cost one forward.

Invariant: each row is what `explain` reports for the same call under that policy.
Rejected: one call for each policy. The calls could draw or decide differently.
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
    """Compare policies: what each saves, and what each recomputes.

    The function is called once, as by `explain`, and every policy is planned on the
    record of that call. If the function itself calls `remat`, it is called once per
    policy. The first row is plain code without remat: what autograd saves, and nothing
    recomputed. The second row is remat without a policy.

    Args:
        fn: the function, rematerialized or not. Its own policy gets no row.
        *args: its arguments. Meta and fake tensors are accepted.
        policies: the policies, each of which is anything that `remat` accepts as a
            policy. The default is a selection of JAX's policies.
        prune: as for `explain`.
        **kwargs: its keyword arguments. They cannot be named `policies` or `prune`:
            bind such an argument with `functools.partial`.

    Returns:
        The comparison. `print` and notebooks show a table, and `.plot()` draws a chart.

    Raises:
        RuntimeError: `compare` is called under a transform of torch.func, forward-mode
            AD or torch.compile.
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
    "remat: compare found nothing to differentiate: no floating tensor is passed, and "
    "no tensor that the function refers to requires grad. Pass a floating tensor."
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
