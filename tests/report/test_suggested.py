"""The policy to write, which `explain` and `compare` print as code that runs."""

import pytest
import torch
from support.zoo import make
from torch.utils.flop_counter import FlopCounterMode

import remat
from remat import compare, explain, policies


def attend(params, x):
    q, k, v = ((x @ params[name]).sin().exp() for name in "qkv")
    weights = torch.softmax(q @ k.mT, -1)
    return torch.tanh(weights @ v @ params["out"]) @ params["out"]


PARAMS = {name: make(64, 64, seed=i).requires_grad_() for i, name in enumerate("qkv")}
PARAMS["out"] = make(64, 64, seed=3).requires_grad_()
# The scores of attention take more bytes for each of their FLOPs than the products.
X = make(2, 32, 64, seed=9)


def run_again(policy):
    """The FLOPs that a backward repeats: those beyond a plain backward."""
    totals = []
    for fn in attend, remat.remat(attend, policy=policy):
        fn(PARAMS, X).sum().backward()  # the first call of a kind is recorded
        out = fn(PARAMS, X).sum()
        with FlopCounterMode(display=False) as counter:
            out.backward()
        totals.append(counter.get_total_flops())
    return totals[1] - totals[0]


@pytest.mark.parametrize("report", [explain, compare])
def test_it_runs_and_repeats_what_it_says(report):
    found = report(attend, PARAMS, X)
    assert str(found.suggested) in str(found).splitlines()
    code = found.suggested.code
    policy = eval(code, {"torch": torch, "policies": policies})
    under = explain(attend, PARAMS, X, policy=policy)
    assert under.saved_bytes == found.suggested.saved_bytes
    assert under.recomputed_share == found.suggested.recomputed_share
    again = run_again(policy)
    assert again == round(found.suggested.recomputed_share * under.flops)
    assert 0 < 2 * again <= run_again(None)


def test_a_policy_that_is_there_stays():
    own = policies.save_only_these_names("a")
    found = explain(attend, PARAMS, X, policy=own).suggested
    assert found.code.startswith("policies.save_only_these_names('a') | policies.save_")


def wide(x):
    return torch.sin(torch.sin(x))


NOTHING = {
    "no FLOPs": lambda: explain(wide, X),
    "all is saved": lambda: explain(attend, PARAMS, X, policy=policies.dots_saveable),
    "a budget": lambda: explain(attend, PARAMS, X, policy=policies.within("1 kB")),
    "blocks": lambda: explain(lambda p, x: remat.remat(attend)(p, x), PARAMS, X),
    "compared, no FLOPs": lambda: compare(wide, X),
    "compared, a function": lambda: compare(
        attend, PARAMS, X, policies=[lambda op: op.nbytes > 0]
    ),
    "compared, blocks": lambda: compare(
        lambda p, x: remat.remat(attend)(p, x), PARAMS, X
    ),
}


@pytest.mark.parametrize("case", NOTHING.values(), ids=NOTHING)
def test_nothing_is_told_where_nothing_can_be(case):
    found = case()
    assert found.suggested is None
    assert "to recompute less" not in str(found)
