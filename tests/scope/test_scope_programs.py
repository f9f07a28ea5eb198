"""Random programs with blocks at random places have the values of plain code."""

import contextlib

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.programs import PURE, SIZE, SMOOTH, Context, Step, steps

import remat
from remat import policies
from remat._torch.autograd import hooks_here
from remat.testing import assert_same, count_ops, live_bytes


KINDS = (*PURE, "stream", "stream", "asking")
POLICIES = [None, None, policies.dots_saveable, policies.save_larger_than(100)]


@st.composite
def plans(draw, kinds=KINDS, size=10):
    """Instructions, and where blocks begin and end: each may overlap others."""
    body = draw(st.lists(steps(kinds), min_size=2, max_size=size))
    places = st.integers(0, len(body))
    blocks = draw(
        st.lists(st.tuples(places, places, st.sampled_from(POLICIES)), max_size=4)
    )
    return body, [(min(a, b), max(a, b), p) for a, b, p in blocks]


def run(plan, xs, scope):
    """Run the instructions; sum the last values."""
    body, blocks = plan
    torch.manual_seed(11)
    values, context = [*xs, xs[0] * 1.0], Context()
    opened = [scope(policy) for *_, policy in blocks]
    for k, step in enumerate((*body, None)):
        for block, (start, end, _) in zip(opened, blocks, strict=True):
            if k == start < end:
                block.__enter__()
            if k == end > start:
                block.__exit__(None, None, None)
        if step is not None:
            values += step.run(values, context)
    return sum(v.double().square().sum() * (0.1 + k) for k, v in enumerate(values))


def leaves():
    generator = torch.Generator().manual_seed(0)
    shape = SIZE, SIZE
    make = lambda: torch.randn(shape, generator=generator, dtype=torch.double)
    return [make().requires_grad_(), make().requires_grad_()]


def nothing(policy=None):
    return contextlib.nullcontext()


def gradients(plan, scope, order):
    xs = leaves()
    y = run(plan, xs, scope)
    first = torch.autograd.grad(y, xs, create_graph=order > 1, allow_unused=True)
    found = [g for g in first if g is not None]
    if order > 1:
        again = sum(g.sin().sum() for g in found)
        if again.requires_grad:
            second = torch.autograd.grad(again, xs, allow_unused=True)
            found = [*found, *(g for g in second if g is not None)]
    return [y.detach(), *(g.detach() for g in found), torch.rand(2)]


@settings(max_examples=40)
@given(plans())
def test_random_programs(plan):
    wanted = gradients(plan, nothing, 1)
    assert_same(gradients(plan, remat.scope, 1), wanted)
    assert not hooks_here()


@settings(max_examples=15)
@given(plans(SMOOTH, 6))
def test_random_programs_to_second_order(plan):
    assert_same(gradients(plan, remat.scope, 2), gradients(plan, nothing, 2))


@pytest.mark.slow
@settings(max_examples=1000)
@given(plans(size=16))
def test_many_random_programs(plan):
    assert_same(gradients(plan, remat.scope, 1), gradients(plan, nothing, 1))


@settings(max_examples=10)
@given(plans(("unary", "binary"), 8))
def test_no_program_stores_more_than_plain_and_its_sources(plan):
    body, _ = plan
    whole = body, [(0, len(body), None)]
    xs = leaves()
    plain = live_bytes(lambda: run(whole, xs, nothing))
    ours = live_bytes(lambda: run(whole, xs, remat.scope))
    # What is given in the block: the copy of the first leaf, and the weights in `sum`.
    assert ours <= plain + 3 * xs[0].nbytes


def test_the_programs_have_something_run_again():
    plan = [Step("unary", "exp", 2), Step("unary", "sin", 3)], [(0, 2, None)]
    xs = leaves()
    counts = []
    for scope in (nothing, remat.scope):
        y = run(plan, xs, scope)
        with count_ops() as ops:
            torch.autograd.grad(y, xs, allow_unused=True)
        counts.append(ops["exp"])
    assert counts == [0, 1]
