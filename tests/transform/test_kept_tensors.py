"""A step of a chain that keeps a tensor is refused, wherever it is kept."""

import pytest
import torch
from support.tables import rows

from remat import CaptureError, chain
from remat._graph import graph


X = torch.ones(3)
GLOBAL = []


def test_graphs_of_others_are_walked_once(monkeypatch):
    asked = []

    def counted(value, edge_of=graph.edge_of):
        asked.append(value)
        return edge_of(value)

    monkeypatch.setattr(graph, "edge_of", counted)
    leaf, other = (torch.ones(3, requires_grad=True) for _ in range(2))
    ends, others, chain_of = {graph.edge_of(leaf)}, set(), [other]
    for _ in range(200):
        chain_of.append(chain_of[-1].sin())
    for t in chain_of:
        assert not graph.leads_to(graph.edge_of(t), ends, others)
    assert 400 < len(asked) < 800
    assert graph.leads_to(graph.edge_of((leaf.sin() * other).exp()), ends, others)


class Holder:
    def __init__(self):
        self.seen, self.table = [], {}

    def append(self, x):
        y = x.sin()
        self.seen.append((1, y))
        return y.exp()

    def assign(self, x):
        y = x.sin()
        self.table["y"] = y
        return y.exp()


def to_a_global(x):
    y = x.sin()
    GLOBAL.append(y)
    return y.exp()


KEPT = {
    "list of an attribute": lambda: Holder().append,
    "dict of an attribute": lambda: Holder().assign,
    "global": lambda: to_a_global,
}


@rows("place", KEPT)
def test_a_step_that_keeps_a_tensor_is_refused(place):
    fn = place()
    with pytest.raises(CaptureError, match="left it other than by being returned"):
        chain.fori_loop(0, 3, lambda i, x: fn(x), X.clone().requires_grad_())
    GLOBAL.clear()
