"""A step of a chain that keeps a tensor is refused, wherever it is kept."""

import torch

from remat._graph import graph


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
