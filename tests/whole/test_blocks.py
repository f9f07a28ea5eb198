"""Which blocks `remat.nn.apply` finds in models of the shapes that others write."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import remat
from remat.testing import count_ops


def linear():
    return nn.Linear(4, 4)


def norm():
    return nn.LayerNorm(4)


class Parts(nn.Module):
    """Calls its submodules one after another, those of lists too."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        for part in self.modules():
            if part is not self and not [*part.children()]:
                x = part(x)
        return x


class Block(Parts):
    def __init__(self):
        super().__init__(norm=norm(), up=linear(), act=nn.Tanh(), down=linear())


class Attention(Block):
    pass


class FeedForward(Block):
    pass


class Stage(Parts):
    pass


class Layer(Parts):
    pass


def layer_of_list(name):
    """A layer that has a list of blocks, and layers of other kinds besides."""
    return Layer(attention=Attention(), out=linear(), **{name: several(2)})


def several(count, make=Block):
    return nn.ModuleList(make() for _ in range(count))


def normed_and_activated():
    return nn.Sequential(linear(), norm(), nn.Tanh())


class Inverted(Parts):
    """As in MobileNet: a block is a Sequential of layers, each with its norm."""

    def __init__(self):
        layers = [normed_and_activated() for _ in range(2)]
        super().__init__(conv=nn.Sequential(*layers, linear()))


class Adapter(nn.Module):
    """An adapter as peft puts one around a layer."""

    def __init__(self):
        super().__init__()
        self.base_layer, self.a, self.b = linear(), linear(), linear()

    def forward(self, x):
        return self.base_layer(x) + self.b(self.a(x))


class Mlp(Parts):
    def __init__(self, make):
        super().__init__(norm=norm(), mlp=nn.Sequential(make(), nn.Tanh(), make()))


def weight_normed():
    return parametrizations.weight_norm(linear())


def shared():
    block = Block()
    return nn.Sequential(block, block, block)


MODELS = {
    "a stage of one block, if another has several": (
        lambda: Parts(
            stages=nn.ModuleList(
                [
                    Stage(blocks=several(1), last=linear()),
                    Stage(blocks=several(2), last=linear()),
                ]
            )
        ),
        ["stages.0.blocks.0", "stages.1.blocks.0", "stages.1.blocks.1"],
    ),
    "stages of one block each": (
        lambda: several(2, lambda: Stage(blocks=several(1), last=linear())),
        ["0", "1"],
    ),
    "a single block in a list, if another list has several": (
        lambda: Parts(middle=several(1), layers=several(2)),
        ["middle.0", "layers.0", "layers.1"],
    ),
    "a single block in each of several lists": (
        lambda: Parts(layer1=nn.Sequential(Block()), layer2=nn.Sequential(Block())),
        ["layer1.0", "layer2.0"],
    ),
    "a single block in each of several lists of a list": (
        lambda: nn.Sequential(nn.Sequential(Block()), nn.Sequential(Block())),
        ["0.0", "1.0"],
    ),
    "lists in a list": (
        lambda: nn.ModuleList(
            [nn.ModuleList([Attention(), FeedForward()]) for _ in range(2)]
        ),
        ["0.0", "0.1", "1.0", "1.1"],
    ),
    "a dictionary of blocks": (
        lambda: Parts(layers=nn.ModuleDict({"0": Block(), "1": Block()})),
        ["layers.0", "layers.1"],
    ),
    "a layer with experts and attention": (
        lambda: several(2, lambda: layer_of_list("experts")),
        ["0", "1"],
    ),
    "sublayers of different classes": (
        lambda: several(
            2, lambda: Layer(layer=nn.ModuleList([Attention(), FeedForward()]))
        ),
        ["0", "1"],
    ),
    "a block of another class in a list of blocks": (
        lambda: nn.Sequential(Block(), Block(), Attention(), linear()),
        ["0", "1", "2"],
    ),
    "layers with norms in a block": (
        lambda: nn.Sequential(*(Inverted() for _ in range(2))),
        ["0", "1"],
    ),
    "only layers with activations": (
        lambda: nn.Sequential(*(normed_and_activated() for _ in range(2)), linear()),
        ["0", "1"],
    ),
    "adapters in a block": (
        lambda: nn.Sequential(*(Mlp(Adapter) for _ in range(2))),
        ["0", "1"],
    ),
    "parametrized layers in a block": (
        lambda: nn.Sequential(*(Mlp(weight_normed) for _ in range(2))),
        ["0", "1"],
    ),
    "lazy layers": (
        lambda: nn.Sequential(*(Mlp(lambda: nn.LazyLinear(4)) for _ in range(2))),
        ["0", "1"],
    ),
    "one block, several times": (shared, ["0"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_of_a_model(name):
    build, names = MODELS[name]
    model = build()
    assert [*remat.nn.blocks(model)] == names
    assert [*remat.nn.blocks(remat.nn.apply(model))] == names


def test_blocks_that_are_recomputed_in_different_ways_are_the_same_blocks():
    model = nn.Sequential(Block(), Block())
    remat.nn.apply(model, {"0": None, "1": remat.policies.dots_saveable})
    with pytest.raises(ValueError, match=r"`0` .* is recomputed already"):
        remat.nn.apply(model)


def test_a_block_that_is_called_several_times_is_recomputed_as_often():
    model = remat.nn.apply(shared())
    x = torch.ones(2, 4)
    for _ in range(2):
        with count_ops() as ops:
            model(x).sum().backward()
        assert ops["tanh"] == 3 + 3


def test_only_modules_have_blocks_that_are_enabled():
    with pytest.raises(TypeError, match=r"int is not a module\. Pass a model, such as"):
        remat.nn.enable(3)
