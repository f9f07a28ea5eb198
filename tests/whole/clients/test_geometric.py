"""Layers of PyTorch Geometric inside remat: message passing over a graph."""

import pytest
import torch
from support.clients import STYLES, Client, adamw, assert_trains_as_plain, sgd
from torch import nn

from remat import remat


pytestmark = pytest.mark.clients
pytest.importorskip("torch_geometric", reason="needs the extra `clients`")


class Layer(nn.Module):
    def __init__(self, convolution):
        super().__init__()
        self.convolution = convolution
        self.linear = nn.Linear(8, 8)

    def forward(self, x, edges):
        return x + self.linear(self.convolution(x, edges).tanh())


class Network(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList([Layer(make()) for _ in range(3)])

    def forward(self, x, edges):
        for layer in self.layers:
            x = layer(x, edges)
        return {"x": x, "loss": x.sin().mean()}


def graph():
    return {"x": torch.randn(12, 8), "edges": torch.randint(12, (2, 40))}


def of_layer(name, **options):
    def make():
        import torch_geometric.nn

        return getattr(torch_geometric.nn, name)(8, 8, **options)

    return Client(
        lambda: Network(make), lambda m: [m.layers], graph, lambda out: out["loss"]
    )


CLIENTS = {
    "gcn": of_layer("GCNConv"),
    "gcn-cached": of_layer("GCNConv", cached=True),
    "gat": of_layer("GATConv", heads=2, concat=False, dropout=0.2),
    "sage": of_layer("SAGEConv", aggr="max"),
}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", CLIENTS)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
def test_three_steps_are_those_of_plain(name, style, optimizer):
    assert_trains_as_plain(CLIENTS[name], style, remat, optimizer=optimizer)
