"""`sequential`: layers in a row, with their parameters, buffers and random streams."""

import pytest
import torch
from support.loops import (
    Plain,
    assert_backward,
    assert_chained,
    of_backward,
    schedule_of,
)
from support.tables import rows
from support.zoo import W, X, leaves_of
from torch import nn

from remat import chain, policies
from remat.chain.schedules import Advance, Reverse, Uniform
from remat.testing import assert_same, count_ops


OPTIONS = {
    "sqrt": {},
    "two segments": {"segments": 2},
    "two checkpoints": {"checkpoints": 2},
    "all": {"checkpoints": "all"},
    "a schedule": {"checkpoints": Uniform(3)},
}


class Net(nn.Module):
    """Layers of several widths, with buffers and dropout."""

    def __init__(self, kind=nn.Sequential):
        super().__init__()
        layers = [
            *(nn.Linear(8, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Dropout(0.3)),
            *(nn.Linear(16, 6), nn.Tanh(), nn.Dropout(0.2), nn.BatchNorm1d(6)),
            nn.Sequential(nn.Linear(6, 4), nn.Tanh()),
        ]
        self.layers = layers if kind is list else kind(*_given(kind, layers))
        self.all = nn.ModuleList(layers)


def _given(kind, layers):
    return layers if kind is nn.Sequential else [layers]


def trained(loops, kind=nn.Sequential, **options):
    """Two steps of a training; all that it left behind."""
    torch.manual_seed(5)
    net = Net(kind).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    found = []
    for _ in range(2):
        x = torch.randn(6, 8, dtype=torch.double, requires_grad=True)
        out = loops.sequential(net.layers, x, **options)
        loss = out.square().sum() * torch.rand(())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [out, x.grad, *(p.grad.clone() for p in net.parameters())]
    return [t.detach() for t in found], net.state_dict(), torch.rand(2)


@rows("options", OPTIONS)
def test_layers_train_as_in_a_plain_loop(options):
    """The same parameters, buffers that are updated once, and the same dropout."""

    def program(loops):
        return trained(loops, **options)

    with count_ops() as plain:
        program(Plain)
    assert_chained(program, steps=6, runs=tanhs(**options))
    with count_ops() as ops:
        program(chain)
    assert ops["native_batch_norm_backward"] == plain["native_batch_norm_backward"] == 4
    assert ops["bernoulli_"] > plain["bernoulli_"] == 4


def tanhs(**options):
    """How often the three layers with tanh run in two steps, of nine layers."""
    schedule, runs = schedule_of(**options), 3
    for action in schedule.backward(9):
        if isinstance(action, Advance | Reverse):
            runs += sum(k in (1, 5, 8) for k in range(action.start, action.stop))
    return 2 * runs


@pytest.mark.parametrize("kind", [list, nn.ModuleList, nn.Sequential])
def test_layers_are_a_list_or_a_module_that_holds_a_list(kind):
    assert_chained(lambda loops: trained(loops, kind, segments=3), steps=6, runs=12)


def test_layers_may_come_from_a_generator():
    def run(loops, w, x, **options):
        return loops.sequential(
            (lambda h: torch.tanh(h @ w) for _ in range(5)), x, **options
        )

    assert_backward(run, W, X, steps=5, checkpoints=2)


def test_values_between_layers_are_any_pytree():
    def run(loops, w, x, **options):
        layers = [
            lambda h: {"a": torch.tanh(h @ w), "n": 3},
            lambda h: (h["a"][:2], [torch.tanh(h["a"][2:]), h["n"], None]),
            lambda h: torch.tanh(torch.cat([h[0], h[1][0]]).float()) * h[1][1],
            lambda h: (torch.tanh(h.double()), "end"),
        ]
        return loops.sequential(layers, x, **options)

    assert_backward(run, W, X, steps=4, checkpoints=2)
    assert_backward(run, W, X, steps=4, checkpoints="all")


def test_arguments_go_to_each_layer_and_have_gradients():
    def run(loops, w, x, mask, **options):
        def layer(h, w, *, rest):
            return torch.tanh(h @ w) * rest["mask"][0]

        layers = [lambda h, w, rest: layer(h, w, rest=rest)] * 6
        rest = {"mask": [mask], "number": 3}
        return loops.sequential(layers, x, w, rest, **options)

    assert_backward(run, W, X, X.cos(), steps=6, checkpoints=3)
    assert_backward(run, W, X, X.cos(), steps=6, segments=2, reassociated=True)


def test_a_policy_is_that_of_each_layer():
    def program(loops, **options):
        def run(w, x):
            layer = lambda h: torch.tanh(h @ w) @ w
            return loops.sequential([layer] * 6, x, checkpoints="all", **options)

        return of_backward(run, W, X)

    assert_chained(program, steps=6, runs=12, reassociated=True)
    policy = policies.dots_saveable
    with count_ops() as ops:
        got = program(chain, policy=policy)
    assert_same(got, program(Plain), reassociated=True)
    # Products: two in a forward, again as each step is reversed, and two gradients of
    # each. A tanh runs once more, as the policy does not save it.
    assert (ops["tanh"], ops["mm"]) == (18, 6 * (2 + 2 + 4))


def test_no_layers_return_the_input():
    (x,) = leaves_of(X)
    assert chain.sequential([], x) is x


def test_without_gradients_layers_run_once():
    torch.manual_seed(1)
    net = Net().double().eval()
    x = torch.randn(6, 8, dtype=torch.double)
    for context in (torch.no_grad, torch.inference_mode):
        with context(), count_ops() as ops:
            out = chain.sequential(net.layers, x, checkpoints=2)
        assert_same(out.clone(), net.layers(x).detach())
        assert ops["tanh"] == 3
        assert not out.requires_grad
