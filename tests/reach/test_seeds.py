"""`torch.seed()` inside of a call: each run takes the seeds of its forward."""

import pytest
import torch
from support.zoo import ops_of

from remat import remat
from remat.testing import count_ops


def masked(x):
    torch.seed()
    return (x * torch.rand(8)).sin().exp()


def gradient_and_mask(fn):
    """Return the gradient of a call, and the one that its own draws imply."""
    x = torch.linspace(-1, 1, 8).requires_grad_()
    y = fn(x)
    y.sum().backward()
    mask = torch.asin(y.detach().log()) / x.detach()
    return x.grad, y.detach() * (x.detach() * mask).cos() * mask


@pytest.mark.parametrize("prune", [False, True])
def test_a_recompute_draws_what_a_forward_drew_that_took_a_seed_itself(prune):
    with count_ops() as ops:
        grad, expected = gradient_and_mask(remat(masked, prune=prune))
    torch.testing.assert_close(grad, expected)
    assert ops["rand"] == 2


def test_the_stream_goes_on_where_the_forward_left_it():
    fn, x = remat(masked), torch.ones(8, requires_grad=True)
    y = fn(x)
    state = torch.get_rng_state()
    ops = ops_of(lambda: y.sum().backward())
    assert torch.equal(torch.get_rng_state(), state)
    assert ops["rand"] == 1


def test_calls_within_calls_take_the_seeds_of_the_call_around():
    inner = remat(masked)
    with count_ops() as ops:
        grad, expected = gradient_and_mask(remat(lambda x: inner(x) * 1.0))
    torch.testing.assert_close(grad, expected)
    assert ops["rand"] > 1


def test_a_recompute_before_the_forward_has_ended_draws_the_same():
    """`autograd.grad` inside reads handles while the forward still runs."""

    def twice(x):
        y = masked(x)
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y, dx

    x = torch.linspace(-1, 1, 8).requires_grad_()
    with count_ops() as ops:
        y, dx = remat(twice)(x)
    mask = torch.asin(y.detach().log()) / x.detach()
    torch.testing.assert_close(dx, y * (x * mask).cos() * mask)
    assert ops["rand"] > 1
