"""What the signature of a call does not tell: each call is right all the same.

Control flow that depends on data, Python state that changes between calls and between
forward and backward, inputs that differ in what is not compared, exceptions half-way,
threads. A record is of another call: it is only used as far as it fits.
"""

import pytest
import torch
from support.pruning import (
    POLICIES,
    W,
    X,
    assert_exact,
    assert_like_plain,
    call_caches,
    dead_end,
    each_case,
    each_policy,
    given_up,
    written,
)
from support.zoo import leaves_of, scalar

from remat import remat
from remat.testing import assert_same


pytestmark = given_up


# --- State that changes between calls ---


STATE = {"value": 0}


def of_a_dict():
    return STATE["value"]


def set_state(value):
    STATE["value"] = value


# Functions of a value that changes.
CHANGES = """
another operation: h = x.sin() * w; dead_end(h.exp() if value else h.cos())
more operations: h = x.sin() * w
    for _ in range(value): h = h.tanh() * w
    dead_end(h.exp())
fewer operations: h = (x.sin() * w).exp(); h if value else dead_end(dead_end(h))
wired otherwise: u, v = x * 2, w * 3; dead_end((u if value else v) * w)
wired to another input: h = (x if value else w) * 2; h.sin() + (w if value else x)
an input not needed before: w.sin() + (x.exp() if value else x * 2)
an input no longer needed: w.sin() + (x * 2 if value else x.exp())
another constant: x * (2.5 + value) + (w * (value + 1)).sin()
another dimension: y = dead_end((x * 2).sum(value).exp())
    y + (x @ w).mean(value).sin()
another size: (x * (w[:2] * 2).sum(value).shape[0]).sin() + w.exp()
another shape: n = 2 if value else 8; y = (x.view(n, -1).mean(0) * 3).sum()
    y + (x * w).view(-1, n).sum(0).exp().sum()
another dtype: dtype = torch.float32 if value else torch.bfloat16
    (x.to(dtype).sin() * 2).to(x.dtype) * 3 + w.to(dtype).exp().double()
another count: parts = x.split(1 if value else 2)
    dead_end(torch.cat([p.sin() for p in parts]) * w)
saved for another reason: h = x * w; dead_end(h * (h if value else 3.0))
detached now and then: h = x.sin() * w; dead_end((h.detach() if value else h) * w)
"""
each_change = each_case(written(CHANGES, globals(), arguments=["value"]))


SEQUENCES = {
    "after the first call": [0, 1, 1, 1],
    "after inputs were dropped": [0, 0, 0, 1, 1],
    "back again": [1, 1, 1, 0, 1, 0, 1],
    "in each call": [0, 1] * 4,
}


def of_state(case, get=of_a_dict):
    return lambda x, w: case.fn(x, w, get())


USUAL = {"after the first call": "dots", "after inputs were dropped": "nothing"}
USUAL |= {"back again": "everything", "in each call": "nothing"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("sequence", "policy"),
    [
        pytest.param(
            *(sequence, policy),
            id=f"{sequence}-{name}",
            marks=() if USUAL[sequence] == name else pytest.mark.slow,
        )
        for sequence in SEQUENCES
        for name, policy in POLICIES.items()
    ],
)
@each_change
def test_state_changes_between_calls(case, policy, sequence):
    values = SEQUENCES[sequence]
    assert_exact(
        of_state(case),
        X,
        W,
        policy=policy,
        before=lambda call: set_state(values[call]),
        calls=len(values),
    )


@each_policy
def test_a_closure_is_made_anew_in_each_call(policy):
    def made(call):
        scale, flag, shift = 1.0 + call, call % 2, torch.full((4,), float(call))
        inner = lambda h: h.exp() if flag else h * shift
        return lambda x: dead_end(inner(x * scale))

    for call in range(8):
        ours = remat(made(call), policy=policy, prune=True)
        assert_like_plain(ours, made(call), X)
    assert len(call_caches()) <= 2


# --- State that changes between forward and backward, a documented limit ---


@each_policy
@each_change
def test_state_that_changes_before_the_backward_gives_no_mixture(case, policy):
    """The gradient of the forward's function, of the other one, or an error."""
    fn = of_state(case)
    ours = remat(fn, policy=policy, prune=True)
    full = remat(fn, prune=False)
    for then, now in [(0, 0), (0, 1), (0, 0), (0, 0), (0, 1), (1, 0)]:
        got = gradients(ours, then, now)
        right = [gradients(fn, then, then)]
        if then != now:
            right += [gradients(full, then, now), "an error"]
        assert any(is_same(got, want) for want in right)


def gradients(fn, then, now):
    """Those of `fn`, where the state changes before the backward."""
    x, w = leaves_of(X, W)
    set_state(then)
    loss = scalar(fn(x, w))
    set_state(now)
    try:
        return torch.autograd.grad(loss, (x, w), allow_unused=True)
    except (RuntimeError, IndexError):
        # torch's own, if a result has not the shape of its cotangent; or ours.
        return "an error"


def is_same(got, want):
    try:
        assert_same(got, want)
    except AssertionError:
        return False
    return True
