"""A long loop as it is used: an adjoint of 1,000 time steps."""

import pytest
import torch
from support.long_loops import (
    CHANGES,
    Medium,
    laplacian,
    medium,
    runge_kutta,
    square,
)

from remat import chain
from remat.chain.schedules import Binomial
from remat.testing import assert_same, count_ops, peak_bytes


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def leaves(tensors):
    return [t.requires_grad_() for t in tensors]


# --- Reaction and diffusion ---


TIMES = 1000
CHECKPOINTS = 10
SIZE = 24


class Reaction:
    """The gradient of a measure of the final state, in two ways."""

    def __init__(self, steps=TIMES):
        self.steps = steps
        self.state, *rest = leaves([square(SIZE), *medium()])
        self.medium, self.stencil = Medium(*rest), laplacian(SIZE)

    def gradients_of(self, final):
        ends = [self.state, *self.medium]
        return torch.autograd.grad(final[0].square().mean(), ends)

    def plain(self):
        state = self.state
        for _ in range(self.steps):
            state = runge_kutta(state, self.medium, self.stencil)
        return self.gradients_of(state)

    def chained(self):
        medium, stencil = self.medium, self.stencil

        def body(_, state):
            return runge_kutta(state, medium, stencil)

        options = {"checkpoints": CHECKPOINTS}
        final = chain.fori_loop(0, self.steps, body, self.state, **options)
        return self.gradients_of(final)


@pytest.mark.parametrize(
    ("steps", "counts"),
    [(25, (25, 40)), pytest.param(TIMES, (1000, 3640), marks=pytest.mark.slow)],
)
def test_an_adjoint_is_that_of_plain_code(steps, counts):
    reaction = Reaction(steps)
    with count_ops() as ops:
        found = reaction.chained()
    expected = reaction.plain()
    assert torch.equal(found[0], expected[0]), "of the state: bit for bit"
    # Those of parameters are added up step by step, in another order.
    assert_same(found, expected, reassociated=True)
    assert all(gradient.abs().max() > 1e-4 for gradient in expected)
    assert Binomial(CHECKPOINTS).evaluations(steps) == counts
    assert ops["addmm"] == CHANGES * sum(counts)


@pytest.mark.slow
def test_an_adjoint_holds_its_checkpoints_and_one_step():
    reaction = Reaction()
    carry = reaction.state.nbytes
    peak = peak_bytes(reaction.chained)
    one, many = (peak_bytes(Reaction(n).plain) for n in (1, 101))
    each = (many - one) / 100
    # Beside these: the live carry, the result, its cotangent.
    assert peak <= (CHECKPOINTS + 4) * carry + one
    assert peak < (one + each * TIMES) / 200
