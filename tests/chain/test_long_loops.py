"""A long loop as it is used: an adjoint of 1,000 time steps."""

from typing import NamedTuple

import pytest
import torch

from remat import chain
from remat.chain.schedules import Binomial
from remat.testing import assert_same, count_ops, peak_bytes


class Medium(NamedTuple):
    """Parameters of a FitzHugh-Nagumo system of two substances."""

    diffusion: torch.Tensor
    coupling: torch.Tensor
    source: torch.Tensor


def medium():
    values = [[0.5], [0.1]], [[1.0, -1.0], [0.2, -0.1]], [[0.3], [0.0]]
    return Medium(*(torch.tensor(v, dtype=torch.float64) for v in values))


def laplacian(size):
    """The five-point stencil on a periodic grid, as a matrix of its cells."""
    one = torch.eye(size, dtype=torch.float64)
    line = one.roll(1, 0) + one.roll(-1, 0) - 2 * one
    return torch.kron(line, one) + torch.kron(one, line)


FIRST = torch.tensor([[1.0], [0.0]], dtype=torch.float64)


def change(state, medium, stencil):
    linear = torch.addmm(medium.source, medium.coupling, state)
    return medium.diffusion * (state @ stencil) + linear - FIRST * state**3


CHANGES = 4  # of a step; each runs `addmm` once


def runge_kutta(state, medium, stencil, dt=0.1):
    """A step of the classic method of fourth order."""
    first = change(state, medium, stencil)
    second = change(torch.add(state, first, alpha=dt / 2), medium, stencil)
    third = change(torch.add(state, second, alpha=dt / 2), medium, stencil)
    fourth = change(torch.add(state, third, alpha=dt), medium, stencil)
    inner = torch.add(second, third)
    return torch.add(state, torch.add(first + fourth, inner, alpha=2), alpha=dt / 6)


def square(size):
    """A square of the first substance, and noise."""
    random = torch.Generator().manual_seed(0)
    state = torch.zeros(2, size, size, dtype=torch.float64)
    state[0, size // 3 : size // 2, size // 3 : size // 2] = 1
    state += 0.01 * torch.randn(state.shape, generator=random, dtype=torch.float64)
    return state.flatten(1)


class Gates(NamedTuple):
    """Weights of a recurrent unit with one gate."""

    inputs: torch.Tensor
    state: torch.Tensor
    bias: torch.Tensor


def gates(inputs, width):
    random = torch.Generator().manual_seed(1)
    shapes = (inputs, 2 * width), (width, 2 * width), (2 * width,)
    made = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
    return Gates(*(w / width**0.5 for w in made))


def gated_unit(gates, h, x):
    """A step, which runs `tanh` once: the next state, and what is read of it."""
    known, proposed = (h @ gates.state).chunk(2, -1)
    given, offered = torch.addmm(gates.bias, x, gates.inputs).chunk(2, -1)
    gate = torch.sigmoid(given + known)
    h = torch.lerp(h, torch.tanh(offered + gate * proposed), gate)
    return h, h.mean(-1)


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
