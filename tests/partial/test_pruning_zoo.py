"""The zoo of functions through the matrix of transforms, pruned and under policies.

The other tests of compositions run with `prune="auto"`, which leaves such small calls
alone. Here each function is recorded, replayed, and replayed again, and a later call
under another transform has another record or the same one.
"""

import pytest
import torch
from support.pruning import POLICIES, traces
from support.zoo import WS, XS, ZOO, V, W, X, leaves_of, scalar
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

from remat import remat
from remat._partial.cache import CACHES
from remat.testing import assert_same


def backward(loss):
    w, x = leaves_of(W, X)
    return torch.autograd.grad(loss(w, x), (w, x))


def accumulated(loss):
    w, x = leaves_of(W, X)
    (loss(w, x) + loss(w, x * 2)).backward()
    return w.grad, x.grad


def twice_differentiated(loss):
    w, x = leaves_of(W, X)
    first = torch.autograd.grad(loss(w, x), (w, x), create_graph=True)
    return [first, torch.autograd.grad(scalar(first), (w, x), allow_unused=True)]


def batched_cotangents(loss):
    w, x = leaves_of(W, X)
    out = loss(w, x)
    cts = torch.tensor([1.0, 2.0], dtype=out.dtype)
    return torch.autograd.grad(out, (w, x), cts, is_grads_batched=True)


EXACT = {
    "backward": backward,
    "grad": lambda loss: grad(loss, (0, 1))(W, X),
    "grad_and_value": lambda loss: grad_and_value(loss)(W, X),
    "vjp": lambda loss: vjp(loss, W, X)[1](torch.ones((), dtype=W.dtype)),
    "vmap of grad": lambda loss: vmap(grad(loss, (0, 1)))(WS, XS),
    "vmap of grad over one": lambda loss: vmap(grad(loss), (None, 0))(W, XS),
    "batched cotangents": batched_cotangents,
    "accumulated": accumulated,
    "create_graph": twice_differentiated,
}
REASSOCIATED = {
    "grad of vmap": lambda loss: grad(lambda w: vmap(loss, (None, 0))(w, XS).sum())(W),
    "grad of grad": lambda loss: grad(lambda w: scalar(grad(loss)(w, X)))(W),
    "jvp of grad": lambda loss: jvp(lambda w: grad(loss)(w, X), (W,), (V,)),
    "hessian": lambda loss: hessian(lambda s: loss(W * s, X))(
        torch.tensor(1.3).double()
    ),
    "jacrev of grad": lambda loss: jacrev(lambda s: grad(loss)(W * s, X))(
        torch.tensor(0.7).double()
    ),
}


# Calls that are differentiated forward are not recorded.
FORWARD = "jvp of grad", "hessian"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("transform", [*EXACT, *REASSOCIATED])
@pytest.mark.parametrize("case", ZOO)
def test_the_zoo_under_transforms(case, transform, policy):
    fn, call = ZOO[case]
    apply = EXACT.get(transform) or REASSOCIATED[transform]
    if transform == "batched cotangents" and case in ("custom", "in_place"):
        pytest.skip("torch refuses it in plain code")
    ours = remat(fn, policy=POLICIES[policy], prune=True)
    want = apply(lambda w, x: scalar(call(fn, w, x)))
    for _ in range(3):
        got = apply(lambda w, x: scalar(call(ours, w, x)))
        assert_same(got, want, reassociated=transform in REASSOCIATED)
    assert (len(CACHES) == 0) == (transform in FORWARD)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ZOO)
def test_the_zoo_under_all_transforms_in_turn(case, policy):
    """Of one function: a record made under one is not used wrongly under another."""
    fn, call = ZOO[case]
    ours = remat(fn, policy=POLICIES[policy], prune=True)
    for _ in range(2):
        for transform, apply in EXACT.items():
            if transform == "batched cotangents":
                continue
            want = apply(lambda w, x: scalar(call(fn, w, x)))
            got = apply(lambda w, x: scalar(call(ours, w, x)))
            assert_same(got, want)
    assert [t.misfits for t in traces()] == [0] * len(CACHES)
