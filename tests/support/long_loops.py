"""Two loops of many steps: a reaction-diffusion system, and a recurrent network.

Each step runs an operation that no backward runs, so that a count of it counts steps.
"""

from typing import NamedTuple

import torch


class Medium(NamedTuple):
    """Parameters of a FitzHugh-Nagumo system of two substances.

    Attributes:
        diffusion: how fast each spreads.
        coupling: how fast each makes the others, as a matrix.
        source: how fast each is supplied.
    """

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
