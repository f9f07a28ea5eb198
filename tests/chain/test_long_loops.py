"""Long loops as they are used: an adjoint of 1,000 time steps, a net over 10,000."""

import pytest
import torch
from support.long_loops import (
    CHANGES,
    Medium,
    gated_unit,
    gates,
    laplacian,
    medium,
    runge_kutta,
    square,
)

from remat import chain
from remat.chain.schedules import Binomial, Sqrt
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
    [(60, (60, 110)), pytest.param(TIMES, (1000, 3640), marks=pytest.mark.slow)],
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


# --- A recurrent network ---


LENGTH, BATCH, INPUTS, WIDTH = 10_000, 4, 2, 32


class Network:
    """The gradient of a loss of all outputs, in two ways."""

    def __init__(self, length=LENGTH):
        random = torch.Generator().manual_seed(2)
        xs = torch.randn(length, BATCH, INPUTS, generator=random, dtype=torch.float64)
        start = torch.zeros(BATCH, WIDTH, dtype=torch.float64)
        self.start, self.xs, *self.gates = leaves([start, xs, *gates(INPUTS, WIDTH)])

    def gradients_of(self, last, ys):
        ends = [self.start, self.xs, *self.gates]
        return torch.autograd.grad(ys.square().sum() + last.sum(), ends)

    def body(self):
        weights = type(gates(1, 1))(*self.gates)
        return lambda h, x: gated_unit(weights, h, x)

    def plain(self):
        body, h, ys = self.body(), self.start, []
        for x in self.xs.unbind():
            h, y = body(h, x)
            ys.append(y)
        return self.gradients_of(h, torch.stack(ys))

    def scanned(self):
        return self.gradients_of(*chain.scan(self.body(), self.start, self.xs))


@pytest.mark.parametrize("length", [200, pytest.param(LENGTH, marks=pytest.mark.slow)])
def test_a_network_over_many_steps_has_the_gradients_of_plain_code(length):
    network = Network(length)
    with count_ops() as ops:
        found = network.scanned()
    expected = network.plain()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    assert_same(found, expected, reassociated=True)
    assert all(gradient.abs().max() > 1e-4 for gradient in expected)
    assert ops["tanh"] == sum(Sqrt().evaluations(length)) == 2 * length


@pytest.mark.slow
def test_a_network_over_many_steps_peaks_below_plain_over_a_tenth_of_them():
    # What plain holds grows with the steps.
    assert peak_bytes(Network().scanned) < peak_bytes(Network(LENGTH // 10).plain) / 2
