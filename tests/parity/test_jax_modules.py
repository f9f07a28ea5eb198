"""What the tests of Equinox, flax and haiku say of layers, methods and carries."""

import dataclasses

import pytest
import torch
from support.compared import compared, points
from support.zoo import Evaluations, counted, plainly
from torch import nn
from torch.func import functional_call, grad

from remat import remat
from remat.testing import assert_same, count_ops


class First(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


class Both(First):
    def forward(self, x):
        return self.inner(x, x)


class Self(First):
    def forward(self, x):
        return self.inner(x, x, x)[0]


class Fused(First):
    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


class Indexed(First):
    def forward(self, x):
        return self.inner(torch.tensor([[1, 2, 3, 1], [4, 0, 1, 1]])) * x[..., None]


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


def linear_then(layer):
    return nn.Sequential(nn.Linear(4, 4), layer)


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


LAYERS = {
    "Linear": (lambda: nn.Linear(4, 3), (2, 4)),
    "Bilinear": (lambda: Both(nn.Bilinear(4, 4, 3)), (2, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 2), (2, 4, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 2), (2, 2, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 2, 4, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (2, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (2, 4)),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), (6, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 5)),
    "PReLU": (nn.PReLU, (2, 4)),
    "GELU MLP": (mlp, (2, 4)),
    "Dropout": (lambda: linear_then(nn.Dropout(0.5)), (8, 4)),
    "Dropout in place": (lambda: linear_then(nn.Dropout(0.5, True)), (8, 4)),
    "AlphaDropout": (lambda: linear_then(nn.AlphaDropout(0.5)), (8, 4)),
    "Dropout2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.5)),
        (2, 2, 6, 6),
    ),
    "GRU": (lambda: First(nn.GRU(4, 3, num_layers=2)), (5, 2, 4)),
    "LSTM": (lambda: First(nn.LSTM(4, 3, 2, dropout=0.5)), (5, 2, 4)),
    "GRUCell": (lambda: nn.GRUCell(4, 3), (2, 4)),
    "MultiheadAttention": (
        lambda: Self(nn.MultiheadAttention(4, 2, batch_first=True)),
        (2, 3, 4),
    ),
    "MultiheadAttention, fused": (
        lambda: Fused(nn.MultiheadAttention(4, 2, batch_first=True)),
        (2, 3, 4),
    ),
    "TransformerEncoderLayer": (
        lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.5, batch_first=True),
        (2, 3, 4),
    ),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        (2, 4),
    ),
    "orthogonal": (
        lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
        (2, 4),
    ),
    "Embedding": (lambda: Indexed(nn.Embedding(5, 4)), (2, 4)),
}


@pytest.mark.parametrize(("make", "shape"), LAYERS.values(), ids=list(LAYERS))
def test_every_kind_of_layer(make, shape):
    """haiku, flax: all library modules, values, gradients, buffers and names."""
    torch.manual_seed(1)
    # The sine saves the result of the layer, which is therefore recomputed whole.
    module = nn.Sequential(make(), Sine()).train()
    calls = Evaluations()
    module[0].register_forward_hook(lambda *_: calls.note(None))
    x = torch.randn(shape).requires_grad_()
    state = {k: v.clone() for k, v in module.state_dict().items()}
    results = []
    for fn in (remat(module), module):
        module.load_state_dict(state)
        torch.manual_seed(2)
        out = fn(x)
        leaves = {"x": x, **dict(module.named_parameters())}
        grads = torch.autograd.grad((out * out.cos()).sum(), list(leaves.values()))
        buffers = {k: v.clone() for k, v in module.named_buffers()}
        named = dict(zip(leaves, grads, strict=True))
        results.append((out.detach(), named, buffers, torch.get_rng_state()))
    assert len(calls) == 2 + 1
    assert_same(results[0], results[1])


def test_parameters_of_a_deep_stack_by_functional_call():
    """equinox's MLP, flax's remat_scan: a stack called with other parameters."""
    blocks = nn.Sequential(
        *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(12))
    )
    params = {k: v.detach() * 1.5 for k, v in blocks.named_parameters()}

    class Stack(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.blocks, self.wrap = blocks, wrap

        def forward(self, x):
            for block in self.blocks:
                x = self.wrap(block)(x)
            return x.square().sum()

    def grads(wrap):
        def loss(params):
            named = {f"blocks.{k}": v for k, v in params.items()}
            return functional_call(Stack(wrap), named, (points(2, 4),))

        return grad(loss)(params)

    with count_ops() as ops:
        got = grads(remat)
    assert ops["tanh"] == 24
    assert_same(got, grads(plainly))


class Block(nn.Module):
    def __init__(self, tanh):
        super().__init__()
        self.linear, self.tanh = nn.Linear(3, 3), tanh

    @remat
    def decorated(self, x, *, train):
        assert train is True
        return self.tanh(self.linear(x))


def test_a_decorated_method_and_its_static_flag():
    """flax: methods, and a flag that arrives as a Python bool."""
    tanh, calls = counted(torch.tanh)
    block = Block(tanh)
    out = block.decorated(points(2, 3), train=True)
    got = torch.autograd.grad(out.sum(), block.linear.weight)
    assert len(calls) == 2
    want = block.linear(points(2, 3)).tanh().sum()
    assert_same(got, torch.autograd.grad(want, block.linear.weight))


@dataclasses.dataclass(frozen=True)
class State:
    x: torch.Tensor
    name: str
    hidden: dict


@compared(evaluations=6, plain=3)
def test_a_carry_may_be_any_pytree(wrap, counting):
    """equinox: filtered transforms, where what is no array is static."""
    body = counting(lambda x, h: (x * h).sin())

    @wrap
    def step(state):
        hidden = {"h": state.hidden["h"] + 1, "n": None}
        x = body(state.x, state.hidden["h"])
        return dataclasses.replace(state, x=x, hidden=hidden)

    def loss(x):
        state = State(x, "run", {"h": points(3), "n": None})
        for _ in range(3):
            state = step(state)
        assert state.name == "run"
        return state.x.sum()

    return grad(loss)(points(3))
