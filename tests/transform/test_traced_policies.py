"""Policies in compiled code: made outside and inside of it, and followed there.

What runs again is counted: of `tanh(tanh(x @ w) @ w)` up to two tanh and two products.
"""

import functools

import pytest
import torch
from support.tables import rows
from support.traced import (
    TRANSFORMS,
    W,
    X,
    assert_traced,
    begins_again,
    block,
    differentiated,
)
from support.zoo import plainly
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx

from remat import checkpoint_name, policies, remat
from remat.testing import assert_same


aten = torch.ops.aten

# A row's policy saves a name that is not there.
pytestmark = pytest.mark.filterwarnings("ignore:.*has the key 'b', but no value")


def named(w, x):
    return torch.tanh(checkpoint_name(torch.tanh(x @ w), "a") @ w)


def is_product(op):
    return op.packet is aten.mm


# A policy, and how many tanh and products of the forward run again under it.
POLICIES = {
    "none": (lambda: None, 2, 2),
    "nothing": (lambda: policies.nothing_saveable, 2, 2),
    "dots": (lambda: policies.dots_saveable, 2, 0),
    "everything": (lambda: policies.everything_saveable, 0, 0),
    "a name": (lambda: policies.save_only_these_names("a"), 1, 1),
    "another name": (lambda: policies.save_only_these_names("b"), 2, 2),
    "any name but": (lambda: policies.save_any_names_but_these("b"), 1, 1),
    "a union": (
        lambda: policies.save_only_these_names("a") | policies.dots_saveable,
        1,
        0,
    ),
    "an intersection": (
        lambda: policies.save_only_these_names("a") & policies.dots_saveable,
        *(2, 2),
    ),
    "from both": (
        lambda: policies.save_from_both_policies(
            policies.save_only_these_names("a"), policies.dots_saveable
        ),
        *(1, 0),
    ),
    "a lambda": (lambda: lambda op: op.packet is aten.mm, 2, 0),
    "a function": (lambda: is_product, 2, 0),
    "operations": (lambda: policies.save_ops(aten.tanh), 0, 0),
    "large": (lambda: policies.save_larger_than(8), 0, 0),
    "small": (lambda: policies.save_smaller_than(8), 2, 2),
    "no budget": (lambda: policies.within(0), 2, 2),
}
# By the bytes of results: one has 256, and three in a batch.
BUDGETS = {
    "a budget for one": (lambda: policies.within(4 * 8 * 8), 1, 1),
    "a budget as a text": (lambda: policies.within("0.5 KiB"), 0, 0),
    "a budget with a name": (
        lambda: policies.within(4 * 8 * 8) | policies.save_only_these_names("a"),
        *(1, 1),
    ),
    "a budget of products": (
        lambda: policies.dots_saveable & policies.within(4 * 8 * 8),
        *(2, 1),
    ),
}


# Each makes a loss of `named` under a policy.


def outside(policy):
    fn = remat(named, policy=policy())
    return lambda w, x: fn(w, x).square().sum()


def inside(policy):
    """The policy is made where Dynamo traces it."""
    return lambda w, x: remat(named, policy=policy())(w, x).square().sum()


def compiled(loss, transform):
    return differentiated(loss, TRANSFORMS[transform], "aot_eager")


@functools.cache
def plain(fn, transform):
    return compiled(lambda w, x: fn(w, x).square().sum(), transform)


def check(loss, transform, tanh, products, fn=named):
    want, once = plain(fn, transform)
    got, ops = compiled(loss, transform)
    assert_same(got, want)
    assert begins_again(ops), "what is kept passes the barrier too"
    assert ops["tanh"] - once["tanh"] == tanh
    dots = [sum(o[name] for name in ("mm", "bmm")) for o in (ops, once)]
    assert dots[0] - dots[1] == products


@rows(
    "policy, tanh, products",
    POLICIES | BUDGETS,
    fast=[
        *("none", "dots", "everything", "another name", "operations", "large"),
        *("a budget for one", "a budget of products"),
    ],
)
def test_a_policy_is_followed(policy, tanh, products):
    check(outside(policy), "backward", tanh, products)


# What Dynamo warns of when it is made in compiled code: it calls a cached function.
MADE_INSIDE = {k: row for k, row in POLICIES.items() if k != "operations"}


@rows(
    "policy, tanh, products",
    MADE_INSIDE | BUDGETS,
    fast=["a name", "a union", "a lambda", "a budget as a text"],
)
def test_a_policy_that_is_made_inside_is_followed(policy, tanh, products):
    check(inside(policy), "backward", tanh, products)


def test_a_policy_of_operations_may_be_made_inside():
    check(inside(POLICIES["operations"][0]), "backward", 0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["grad", "vmap_grad", "vjp"])
@rows("policy, tanh, products", MADE_INSIDE)
@rows("made", {"outside": outside, "inside": inside})
def test_every_policy_under_transforms(made, policy, tanh, products, transform):
    check(made(policy), transform, tanh, products)


@pytest.mark.slow
@rows("transform, size", {"grad": ("grad", 256), "batch": ("vmap_grad", 3 * 256)})
def test_a_budget_counts_what_a_transform_makes(transform, size):
    for count in range(3):
        loss = outside(lambda count=count: policies.within((count + 1) * size - 1))
        check(loss, transform, 2 - count, 2 - count)


# --- One function, several policies ---


def test_policies_that_differ_are_compiled_apart():
    """The second is not taken for the first."""
    counts = []
    for policy in (None, policies.dots_saveable, policies.everything_saveable):
        _, ops = compiled(outside(lambda policy=policy: policy), "grad")
        counts.append((ops["tanh"], ops["mm"]))
    assert counts == [(4, 8), (4, 6), (2, 6)]


def test_policies_of_two_calls_in_one_graph_are_their_own():
    def program(wrap):
        if wrap is plainly:
            first = second = block
        else:
            first = remat(block, policy=policies.dots_saveable)
            second = remat(block, policy=policies.everything_saveable)
        return lambda w, x: (first(w, x) + second(w, x * 2)).square().sum()

    (want, once), (got, ops) = (
        compiled(program(wrap), "backward") for wrap in (plainly, remat)
    )
    assert_same(got, want, reassociated=True)
    assert (once["tanh"], ops["tanh"]) == (4, 6)


# --- Names, where nothing is compiled ---


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_name_is_kept_in_a_trace(mode):
    fn = remat(named, policy=policies.save_only_these_names("a"))
    graph = make_fx(grad(lambda w, x: fn(w, x).square().sum()), tracing_mode=mode)(W, X)
    graph.graph.eliminate_dead_code()
    tanh = graph.graph.find_nodes(op="call_function", target=aten.tanh.default)
    assert len(tanh) == 3
    assert_same(graph(W, X), grad(lambda w, x: named(w, x).square().sum())(W, X))


def test_a_name_outside_of_a_call_is_no_operation():
    def program(wrap):
        return lambda w, x: checkpoint_name(wrap(block)(w, x), "a").square().sum()

    assert_traced(program, TRANSFORMS["backward"], "aot_eager")


def test_names_in_a_batch():
    check(outside(POLICIES["a name"][0]), "vmap_grad", 1, 1)
