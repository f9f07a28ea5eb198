"""`compat.checkpoint` where torch's does not work: torch.func, swapped parameters.

And generators that are passed, and early stop and checks under torch.func.
"""

import functools

import pytest
import torch
from support.checkpoints import ours, theirs, wrapped
from support.compared import assert_compared, leaf, points
from support.zoo import Evaluations, counted
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, jvp, vjp, vmap

from remat.testing import assert_same


def body(x):
    return (x.sin() * x).exp()


def loss(fn):
    return lambda x: fn(x).sum()


TRANSFORMS = {
    "grad": lambda f: grad(loss(f))(points(3)),
    "vjp": lambda f: vjp(f, points(3))[1](points(3))[0],
    "jacrev": lambda f: jacrev(f)(points(3)),
    "vmap(grad)": lambda f: vmap(grad(loss(f)))(points(2, 3)),
    "hessian": lambda f: hessian(loss(f))(points(3)),
    "grad(grad)": lambda f: grad(lambda x: grad(loss(f))(x).square().sum())(points(3)),
    "jvp(grad)": lambda f: jvp(grad(loss(f)), (points(3),), (points(3),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(name):
    """torch's checkpoint raises under all of them."""
    transform = TRANSFORMS[name]
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        transform(wrapped(theirs)(body))
    fn, calls = counted(body)
    got = transform(wrapped(ours)(fn))
    assert len(calls) >= 2
    assert_same(got, transform(body), reassociated=True)


@pytest.mark.parametrize(
    "options", [{"early_stop": False}, {"determinism_check": "none"}, {"debug": True}]
)
def test_options_under_torch_func(options):
    """A recompute there runs to the end, and its results are compared, in any case."""
    fn, calls = counted(body)
    got = grad(loss(functools.partial(ours, fn, **options)))(points(3))
    assert len(calls) == 2
    assert_same(got, grad(loss(body))(points(3)))


def test_functional_call_with_the_backward_outside():
    """torch's recompute reads the module's own parameters, and is silently wrong."""
    linear = nn.Linear(3, 3)
    calls = Evaluations()

    class Block(nn.Module):
        def __init__(self, checkpoint):
            super().__init__()
            self.linear, self.checkpoint = linear, checkpoint

        def compute(self, x):
            calls.note(None)
            return self.linear(x).sin().exp()

        def forward(self, x):
            return self.checkpoint(self.compute, x)

    def gradients(checkpoint):
        swapped = {
            "linear.weight": leaf(3, 3),
            "linear.bias": leaf(3),
        }
        out = functional_call(Block(checkpoint), swapped, (points(2, 3),))
        return torch.autograd.grad(out.sum(), [*swapped.values()])

    want = gradients(lambda fn, x: fn(x))
    calls.clear()
    assert_same(gradients(ours), want)
    assert len(calls) == 2
    assert not gradients(theirs)[0].allclose(want[0])


def test_a_generator_that_is_passed():
    """torch's recompute draws the next numbers from it."""

    def program(wrap, counting):
        generator = torch.Generator().manual_seed(3)

        def noisy(x, generator):
            return (x * torch.rand(50, generator=generator)).sin()

        x = leaf(50)
        wrap(counting(noisy))(x, generator).sum().backward()
        return x.grad, torch.rand(3, generator=generator)

    assert_compared(program, 2, wrap=wrapped(ours))
    with pytest.raises(AssertionError, match="differs in value"):
        assert_compared(program, 2, wrap=wrapped(theirs))


def test_a_batched_forward_with_the_backward_outside():
    """`vmap` around the call, `backward` around that."""

    def program(wrap, counting):
        x = leaf(2, 3)
        vmap(wrap(counting(body)))(x).sum().backward()
        return x.grad

    assert_compared(program, 2, wrap=wrapped(ours))


def test_buffers_are_updated_once():
    """torch's recompute updates them again."""

    evaluations = []

    def tracked(checkpoint):
        norm = nn.BatchNorm1d(3)
        x = leaf(4, 3)
        body, calls = counted(lambda x: norm(x).sin())
        checkpoint(body, x).sum().backward()
        evaluations.append(len(calls))
        return int(norm.num_batches_tracked), norm.running_mean, x.grad

    count, mean, slope = tracked(ours)
    want = tracked(lambda fn, x: fn(x))
    assert (count, tracked(theirs)[0]) == (1, 2)
    assert evaluations == [2, 1, 2]
    assert_same((mean, slope), want[1:])
