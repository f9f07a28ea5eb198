"""`remat.nn.weight_noise`: equal to noise that is stored, and not stored."""

import copy

import pytest
import torch
from support.scopes import hooks_here, leaf
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import remat
from remat import random
from remat.nn import weight_noise
from remat.testing import assert_same, count_ops, live_bytes


class Stored(nn.Module):
    """The same noise, by plain code."""

    def __init__(self, std, key=None):
        super().__init__()
        self.std, self.key = std, key

    def forward(self, weight):
        if not self.training:
            return weight
        if self.key is None:
            noise = torch.randn_like(weight)
        else:
            noise = random.normal(self.key(), weight.shape, weight.dtype)
        return weight + self.std * noise


class Dropped(nn.Module):
    """Weight dropout, in a block."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, weight):
        if not self.training:
            return weight
        with self.block():
            return functional.dropout(weight, 0.25)


def model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 8), nn.Linear(8, 2)
    )


def trained(net, steps=3):
    x = leaf(5, 3, 8).detach()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    losses = []
    for _ in range(steps):
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in net.parameters()), torch.rand(1)]


def layers(net):
    return [m for m in net if hasattr(m, "weight")]


@pytest.mark.parametrize("keyed", [False, True])
def test_training_is_as_with_stored_noise(keyed):
    ours, plain, step = model(), model(), iter(range(100))
    root = random.key(3)
    now = {"ours": 0, "plain": 0}

    def key_of(who, k):
        if not keyed:
            return None
        return lambda: random.fold_in(random.fold_in(root, k), now[who])

    for k, layer in enumerate(layers(ours)):
        assert weight_noise(layer, 0.2, key=key_of("ours", k)) is layer
    for k, layer in enumerate(layers(plain)):
        noise = Stored(0.2, key_of("plain", k))
        parametrize.register_parametrization(layer, "weight", noise, unsafe=True)
    assert next(step) == 0
    with count_ops() as ops:
        found = trained(ours)
    with count_ops() as plain_ops:
        wanted = trained(plain)
    assert_same(found, wanted)
    assert not hooks_here()
    assert ops["add"] == plain_ops["add"] + 9  # for each layer and step
    if not keyed:
        assert ops["randn_like"] == 2 * plain_ops["randn_like"] == 2 * 9


def test_weight_dropout_trains_as_when_it_is_stored():
    nets = []
    for block in (remat.scope, torch.enable_grad):
        net = model()
        for layer in layers(net):
            noise = Dropped(block)
            parametrize.register_parametrization(layer, "weight", noise, unsafe=True)
        nets.append(net)
    with count_ops() as ops:
        found = trained(nets[0])
    with count_ops() as plain_ops:
        wanted = trained(nets[1])
    assert_same(found, wanted)
    # The masks: also where a layer's input needs no gradient, dropout's backward reads
    # its own.
    assert ops["bernoulli_"] == 2 * plain_ops["bernoulli_"]


def test_no_noisy_weight_is_stored():
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = leaf(2, 64)
    plain = live_bytes(lambda: net(x))
    for layer in net:
        weight_noise(layer, 0.1)
    noisy = live_bytes(lambda: net(x))
    # No tensor besides those of plain code. The states of the stream are no tensors.
    assert noisy == plain
    with parametrize.cached():
        assert net[0].weight is net[0].weight


def test_evaluation_gives_the_parameter():
    layer = weight_noise(nn.Linear(3, 3), 0.5)
    original = layer.parametrizations.weight.original
    assert not torch.equal(layer.weight, original)
    assert layer.eval().weight is original
    assert "std=0.5" in repr(layer)
    parametrize.remove_parametrizations(layer, "weight")
    assert type(layer.weight) is nn.Parameter
    assert_same(layer.weight, original)


def test_the_keys_of_a_state_dict_are_those_of_parametrizations():
    layer = weight_noise(nn.Linear(3, 3), 0.5)
    assert {*layer.state_dict()} == {"parametrizations.weight.original", "bias"}
    other = weight_noise(nn.Linear(3, 3), 0.5)
    other.load_state_dict(layer.state_dict())
    assert_same(other.eval().weight, layer.eval().weight)


@pytest.mark.parametrize("outer", ["remat", "checkpoint"])
def test_a_recompute_of_the_module_draws_the_same_noise(outer):
    root = random.key(1)

    def gradients(call):
        torch.manual_seed(0)
        layer = weight_noise(nn.Linear(3, 3), 0.5, key=lambda: random.fold_in(root, 1))
        torch.manual_seed(2)
        call(layer, leaf(2, 3)).sin().sum().backward()
        return [p.grad for p in layer.parameters()]

    call = {
        "remat": lambda layer, x: remat.remat(layer)(x),
        "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    }[outer]
    wanted = gradients(lambda layer, x: layer(x))
    assert_same(gradients(call), wanted)


def test_a_copy_has_noise_of_its_own():
    layer = weight_noise(nn.Linear(3, 3), 0.5)
    other = copy.deepcopy(layer)
    assert not torch.equal(layer.weight, other.weight)
    assert_same(layer.eval().weight, other.eval().weight)


@pytest.mark.parametrize(
    ("std", "name", "message"),
    [(-1.0, "weight", "negative std, -1.0"), (1.0, "w", "no parameter 'w' in Linear")],
)
def test_what_cannot_be_is_an_error(std, name, message):
    with pytest.raises(ValueError, match=message):
        weight_noise(nn.Linear(2, 2), std, name=name)


def test_what_is_no_key_is_refused_at_once():
    layer = nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"weight_noise got key=3\. Pass a key"):
        weight_noise(layer, 0.1, key=3)
    assert not parametrize.is_parametrized(layer)
