"""Modules: trained, frozen, tied, hooked, called functionally."""

import pytest
import torch
from support.changes import Wrapped
from support.runs import assert_replayed, replayed
from support.tables import rows
from support.transforms import TRANSFORMS
from torch import nn
from torch.func import functional_call, grad, vmap

from remat import remat
from remat.testing import count_ops


class Sin(nn.Module):
    def forward(self, x):
        return x.sin()


def mlp():
    return nn.Sequential(nn.Linear(4, 8), Sin(), nn.Linear(8, 4))


def grads(module):
    return {name: p.grad for name, p in module.named_parameters()}


def step(call, module, x):
    """The output, and all gradients of its square."""
    y = call(x)
    y.pow(2).sum().backward()
    return y, grads(module), x.grad


# --- Training --------------------------------------------------------------------


def frozen(module, *parts):
    for part in parts or [module]:
        part.requires_grad_(False)
    return module


def partly_frozen():
    module = mlp()
    return frozen(module, module[0])


def with_unused():
    module = mlp()
    module[1].register_parameter("unused", nn.Parameter(torch.ones(3)))
    return module


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x).sin())


MLP = ["0.weight", "0.bias", "2.weight", "2.bias"]
# A module, whether its input needs grad, and the parameters that get a gradient.
GRADIENTS = {
    "only parameters": (mlp, False, MLP),
    "only the input": (lambda: frozen(mlp()), True, []),
    "some parameters": (partly_frozen, False, MLP[2:]),
    "not an unused parameter": (with_unused, False, MLP),
    "tied weights": (Tied, False, ["a.weight", "a.bias", "b.bias"]),
}


@rows("make, of_input, names", GRADIENTS)
@replayed(sin=2)
def test_what_needs_grad_gets_it(wrap, make, of_input, names):
    module = make()
    x = torch.randn(2, 4, requires_grad=of_input)
    y, found, of_x = step(wrap(module), module, x)
    nonzero = [name for name, g in found.items() if g is not None and g.any()]
    assert nonzero == names
    assert (of_x is not None) == of_input
    return y, found, of_x


def test_nothing_needs_grad():
    module = frozen(mlp())
    with count_ops() as ops:
        y = remat(module)(torch.randn(2, 4))
    assert not y.requires_grad
    assert ops["sin"] == 1
    with count_ops() as ops:
        remat(module.requires_grad_())(torch.randn(2, 4)).sum().backward()
    assert ops["sin"] == 2


# --- functional_call -------------------------------------------------------------


# How often a transform runs the sine, plain and rematerialized.
ONCE = (1, 2)
SINES = {
    **dict.fromkeys(["backward", "backward_vmap", "grad", "vjp", "jacrev"], ONCE),
    **dict.fromkeys(["vmap_grad", "grad_vmap"], ONCE),
    "twice": (6, 8),
    "grad_grad": (6, 9),
    "jacrev_jacrev": (2, 5),
    "hessian": (2, 3),
}


@pytest.mark.parametrize("name", SINES)
def test_functional_call_under_transforms(name):
    transform = TRANSFORMS[name]

    def program(wrap):
        module = mlp()
        call, x = Wrapped(module, wrap), torch.randn(2, 4)

        def loss(*params):
            named = dict(zip(call.state_dict(), params, strict=True))
            return functional_call(call, named, (x,)).pow(2).sum()

        return transform(loss, *(p.detach() for p in module.parameters()))

    # A second derivative uses each weight in the call and in its derivative: sums of
    # several terms are added up in another order.
    assert_replayed(program, reassociated=transform.order == 2, sin=SINES[name])


@replayed(sin=2)
def test_functional_call_with_one_batched_parameter(wrap):
    module = mlp()
    call, x = Wrapped(module, wrap), torch.randn(2, 4)
    params = {k: p.detach() for k, p in call.named_parameters()}
    params["module.2.bias"] = torch.stack([params["module.2.bias"]] * 3)
    in_dims = ({k: 0 if k == "module.2.bias" else None for k in params},)
    loss = lambda params: functional_call(call, params, (x,)).pow(2).sum()
    return vmap(grad(loss), in_dims)(params)
