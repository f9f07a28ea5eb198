"""What torch does to modules, done to models of rematerialized ones.

Each model is compared with a plain one to which the same is done: three steps bit for
bit, and products are counted.
"""

import copy

import pytest
import torch
from support.clients import Client, built, changed, products, train
from support.runs import saved_and_loaded
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import remat
from remat.testing import assert_same


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(self.up(self.norm(x)).tanh().exp()))


class Model(nn.Module):
    """The last layer has the weight of the first one."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.layers = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(8, 8)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def layers(model):
    return [model.layers]


CLIENT = Client(
    Model, layers, lambda: {"x": torch.randn(4, 8)}, lambda out: out.square().mean()
)


def views(model):
    """`remat(layer)` in the place of each layer."""
    for i, layer in enumerate(model.layers):
        model.layers[i] = remat.remat(layer)


REMATERIALIZED = {"applied": remat.nn.apply, "views": views}
ways = pytest.mark.parametrize("way", REMATERIALIZED)


# --- What is done to a model ---


def parametrized(model):
    for layer in model.layers:
        parametrizations.weight_norm(layer.up)
        parametrizations.spectral_norm(layer.down)


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def parametrized_itself(model):
    """A parameter of the block itself, whose class torch replaces."""
    for layer in model.layers:
        layer.register_parameter("scale", nn.Parameter(torch.ones(8)))
        parametrize.register_parametrization(layer, "scale", Doubled())
        layer.register_forward_hook(lambda layer, args, out: out * layer.scale)


def pruned(model):
    for layer in model.layers:
        prune.random_unstructured(layer.up, "weight", amount=0.3)
        prune.l1_unstructured(layer.down, "weight", amount=0.3)


def pruned_for_good(model):
    pruned(model)
    for layer in model.layers:
        prune.remove(layer.up, "weight")
        prune.remove(layer.down, "weight")


def initialized(model):
    def init(module):
        if isinstance(module, Block):
            nn.init.normal_(module.up.weight, std=0.3)

    model.apply(init)


def moved(model):
    model.to(torch.float64).half().to(torch.float32)


def tied(model):
    for layer in model.layers:
        layer.up.weight = model.layers[0].up.weight


CHANGES = [
    parametrized,
    parametrized_itself,
    pruned,
    pruned_for_good,
    initialized,
    moved,
    tied,
]


@pytest.mark.one_in(2)
@ways
@pytest.mark.parametrize("is_before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_torch_changes(change, way, is_before):
    def build():
        model = Model()
        change(model)
        return model

    def both(model):
        steps = change, REMATERIALIZED[way]
        for step in steps if is_before else reversed(steps):
            step(model)

    client = Client(build, layers, CLIENT.inputs, CLIENT.loss)
    plain, model = built(client), changed(CLIENT, both)
    assert_same(train(client, model), train(client, plain))
    ran, of_plain = (products(client, m) for m in (model, plain))
    assert ran[0] == of_plain[0]
    assert ran[1] >= of_plain[1] + 3
    assert [*model.state_dict()] == [*plain.state_dict()]


# --- Copies ---


@ways
@pytest.mark.parametrize("again", [copy.deepcopy, saved_and_loaded])
def test_a_copy_trains_as_plain(way, again):
    ours = again(changed(CLIENT, REMATERIALIZED[way]))
    plain = built(CLIENT)
    assert_same(train(CLIENT, ours), train(CLIENT, plain))
    assert products(CLIENT, ours)[1] > products(CLIENT, plain)[1]
    assert ours.head.weight is ours.embed.weight
