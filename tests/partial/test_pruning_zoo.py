"""The zoo of functions through the matrix of transforms, pruned and under policies.

The other tests of compositions run with `prune="auto"`, which leaves such small calls
alone. Here each function is recorded, replayed, and replayed again, and a later call
under another transform has another record or the same one.
"""

from itertools import product

import pytest
from support.pruning import POLICIES, call_caches, strikes
from support.tables import crossed, rows
from support.transforms import ALL, some
from support.zoo import ZOO, W, X, scalar

from remat import remat
from remat.testing import assert_same


FIRST = some("backward", "accumulated", "twice", "grad", "grad_and_value", "vjp")
FIRST |= some("vmap_grad", "vmap_grad_of_last", "batched_cotangents")
REASSOCIATED = some("grad_vmap_of_last", "grad_grad", "jvp_grad", "hessian")
REASSOCIATED |= some("jacrev_jacrev")


def derivative(transform, case, fn):
    """To one matrix where the order is two under torch.func."""
    call = ZOO[case][1]
    loss = lambda w, x=X: scalar(call(fn, w, x))
    return transform(loss, *((W,) if transform in REASSOCIATED.values() else (W, X)))


# Each case under each transform, with the policies in turn.
@crossed("case, name, policy", [*product(ZOO, [*FIRST, *REASSOCIATED])], POLICIES)
def test_the_zoo_under_a_transform(case, name, policy):
    if name == "batched_cotangents" and case in ("custom", "in_place"):
        pytest.skip("torch refuses it in plain code")
    fn, transform = ZOO[case][0], ALL[name]
    ours = remat(fn, policy=POLICIES[policy], prune=True)
    want = derivative(transform, case, fn)
    for _ in range(3):
        got = derivative(transform, case, ours)
        assert_same(got, want, reassociated=name in REASSOCIATED)
    assert (len(call_caches()) == 0) == transform.forward


@pytest.mark.one_in(3)
@rows("policy", POLICIES)
@pytest.mark.parametrize("case", ["matmul", "network", "in_place"])
def test_the_zoo_under_all_transforms_in_turn(case, policy):
    """Of one function: a record made under one is not used wrongly under another."""
    fn = ZOO[case][0]
    ours = remat(fn, policy=policy, prune=True)
    for _ in range(2):
        for name, transform in FIRST.items():
            if name != "batched_cotangents":
                want = derivative(transform, case, fn)
                assert_same(derivative(transform, case, ours), want)
    assert not any(strikes())
