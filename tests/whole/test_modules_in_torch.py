"""What torch does to modules, done to models of rematerialized ones.

Each model is compared with a plain one to which the same is done: three steps bit for
bit, and products are counted.
"""

import copy

import pytest
import torch
from support.clients import (
    Client,
    assert_changed_trains_as_plain,
    built,
    changed,
    products,
    train,
)
from support.runs import saved_and_loaded
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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


def frozen(model):
    model.layers[1].requires_grad_(False).eval()


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


@ways
def test_a_frozen_block(way):
    def change(model):
        REMATERIALIZED[way](model)
        frozen(model)

    plain, ours = changed(CLIENT, frozen), changed(CLIENT, change)
    assert_same(train(CLIENT, ours), train(CLIENT, plain))
    assert products(CLIENT, ours)[1] > products(CLIENT, plain)[1]


# --- Copies ---


@ways
@pytest.mark.parametrize("again", [copy.deepcopy, saved_and_loaded])
def test_a_copy_trains_as_plain(way, again):
    ours = again(changed(CLIENT, REMATERIALIZED[way]))
    plain = built(CLIENT)
    assert_same(train(CLIENT, ours), train(CLIENT, plain))
    assert products(CLIENT, ours)[1] > products(CLIENT, plain)[1]
    assert ours.head.weight is ours.embed.weight


@ways
def test_an_average_of_a_model_follows_it(way):
    """Its copy is rematerialized too."""
    seen = []
    for change in lambda model: None, REMATERIALIZED[way]:
        model = changed(CLIENT, change)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))

        def update(model, step, average=average):
            average.update_parameters(model)

        run = train(CLIENT, model, before=update)
        average.update_parameters(model)
        seen.append([run, [p.clone() for p in average.parameters()]])
    assert_same(seen[1], seen[0])
    assert products(CLIENT, average.module) == products(CLIENT, model)
    assert products(CLIENT, model)[1] > products(CLIENT, built(CLIENT))[1]


# --- torch.compile ---


@pytest.mark.one_in(2)
@ways
def test_compiled_whole(way):
    """A compiler has its own rules of what to recompute; values are the same."""
    seen = []
    for change in lambda model: None, REMATERIALIZED[way]:
        model = changed(CLIENT, change).eval()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            torch.manual_seed(0)
            model.zero_grad()
            out = compiled(torch.randn(4, 8))
            out.square().mean().backward()
        seen.append([out, [p.grad for p in model.parameters()]])
    assert_same(seen[1], seen[0])
    assert_changed_trains_as_plain(CLIENT, REMATERIALIZED[way])


@ways
def test_compiled_in_place_and_block_by_block(way):
    plain, ours = built(CLIENT).eval(), changed(CLIENT, REMATERIALIZED[way]).eval()
    for layer in ours.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    seen = []
    for model in plain, ours:
        torch.manual_seed(0)
        out = model(torch.randn(4, 8))
        out.square().mean().backward()
        seen.append([out, [p.grad for p in model.parameters()]])
    assert_same(seen[1], seen[0])
