"""What the tests of JAX's policies share: what runs in a backward, and what is kept."""

from functools import partial

import torch
from support import compared

from remat import saved_residuals
from remat.testing import assert_same, count_ops


points = partial(compared.points, dtype=torch.double)
MATRIX, BATCH = points(2, 2), points(2, 2, 2)

DOTS = {"mm", "bmm", "mv", "addmm", "baddbmm"}


def keys_of(policy):
    """The names and places that a policy mentions."""
    return {key for _, key in policy.keys}


def run(fn, *args):
    """Its gradients, and what ran forward and backward; products count as `dot`."""
    leaves = [x.detach().clone().requires_grad_() for x in args]
    with count_ops() as forward:
        out = fn(*leaves)
    with count_ops() as backward:
        grads = torch.autograd.grad(out.sum(), leaves)
    for ops in (forward, backward):
        ops["dot"] = sum(ops[name] for name in DOTS)
    return grads, forward, backward


def assert_runs(fn, plain, *args, calls=3, **counts):
    """`fn` has the gradients of `plain`, and its backward runs what it is said to."""
    expected, *_ = run(plain, *args)
    for call in range(calls):
        actual, _, backward = run(fn, *args)
        assert_same(actual, expected)
        assert {name: backward[name] for name in counts} == counts, call


def chain_of_three(x):
    return (x @ x).sin().exp()


def settled(fn, *args):
    """The residuals of a call whose inputs may be dropped: after a recompute."""
    for _ in range(2):
        leaves = [x.detach().clone().requires_grad_() for x in args]
        torch.autograd.grad(fn(*leaves).sum(), leaves)
    return [r.origin for r in saved_residuals(fn, *args)]
