"""Chains in compiled code and in traces."""

from collections import Counter

import pytest
import torch
from support.loops import Plain, by_scan, by_sequential
from support.tables import rows
from support.traced import ran
from support.zoo import W, X, leaves_of, scalar
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx

from remat import chain
from remat.chain import schedules
from remat.testing import assert_same


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.one_in(2)
@rows("program", {"scan": by_scan, "sequential": by_sequential})
def test_loops_of_known_length_are_compiled(program):
    def gradients(loops, w, x):
        return torch.autograd.grad(scalar(program(loops, w, x)), (w, x))

    w, x = leaves_of(W, X)
    compiled = torch.compile(
        lambda w, x: program(chain, w, x), backend="aot_eager", fullgraph=True
    )

    def run():
        return torch.autograd.grad(scalar(compiled(w, x)), (w, x))

    run()
    got, ops = ran(run)
    assert_same(got, gradients(Plain, w, x), reassociated=True)
    assert ops["tanh"] >= 20


# --- Schedules and progress ----------------------------------------------------------


def of_tanh(x, length=12, **options):
    """Twelve steps of one tanh, in a graph."""

    def body(i, h):
        return torch.tanh(h)

    return chain.fori_loop(0, length, body, x, **options)


def compiled_runs(**options):
    """What runs in compiled code: steps, and barriers, one for each segment."""
    (x,) = leaves_of(X)
    compiled = torch.compile(
        lambda x: of_tanh(x, **options), backend="aot_eager", fullgraph=True
    )

    def run():
        return torch.autograd.grad(scalar(compiled(x)), x)

    run()
    got, ops = ran(run)
    plain = Plain.fori_loop(0, 12, lambda i, h: torch.tanh(h), x)
    assert_same(got, torch.autograd.grad(scalar(plain), x))
    return ops["tanh"], ops["remat::barrier"]


def traced_runs(**options):
    def loss(x):
        return scalar(of_tanh(x, **options))

    graph = make_fx(grad(loss))(X).graph
    graph.eliminate_dead_code()
    ops = Counter(node.target for node in graph.nodes)
    barrier = torch.ops.remat.barrier.default
    return ops[torch.ops.aten.tanh.default], ops[barrier]


SEGMENTS = {
    "None": ({}, 4),
    "all": ({"checkpoints": "all"}, 12),
    "units": ({"checkpoints": "all", "unroll": 5}, 3),
    "uniform": ({"checkpoints": schedules.Uniform(5)}, 5),
    "sqrt": ({"checkpoints": schedules.Sqrt()}, 4),
}
# A schedule gives the same segments to both: one is compiled, all are traced.
GRAPHS = [(traced_runs, name) for name in SEGMENTS] + [(compiled_runs, "uniform")]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("runs", "name"), GRAPHS)
def test_a_graph_has_the_segments_of_the_schedule(runs, name):
    options, count = SEGMENTS[name]
    assert runs(**options) == (24, count)


OTHERS = {
    "Binomial": {"checkpoints": 3},
    "Online": {"checkpoints": schedules.Online(3)},
}


@pytest.mark.parametrize(
    ("runs", "name"),
    [*((traced_runs, name) for name in OTHERS), (compiled_runs, "Binomial")],
)
def test_a_graph_that_cannot_follow_a_schedule_says_so_once(runs, name):
    says = f"fori_loop is a part of a graph, which cannot follow {name} checkpoints"
    with pytest.warns(UserWarning, match=says) as told:
        assert runs(**OTHERS[name]) == (24, 4)
    assert len(told) == 1
    torch._dynamo.reset()
    assert runs(**OTHERS[name]) == (24, 4)  # a warning would be an error


def test_without_gradients_a_graph_needs_no_schedule():
    compiled = torch.compile(
        lambda x: of_tanh(x, checkpoints=3), backend="aot_eager", fullgraph=True
    )
    with torch.no_grad():
        assert_same(compiled(X), of_tanh(X))


@pytest.mark.parametrize(
    "runs", [traced_runs, pytest.param(compiled_runs, marks=pytest.mark.slow)]
)
def test_a_graph_says_that_it_does_not_call_progress(runs):
    done = []
    with pytest.warns(UserWarning, match="without Python: progress= is not called"):
        assert runs(progress=done.append) == (24, 4)
    assert not done


def test_a_graph_says_that_it_stores_nothing_on_disk(folder):
    with pytest.warns(UserWarning, match="disk=True is not followed"):
        assert traced_runs(disk=True) == (24, 4)
    assert not [*folder.iterdir()]


def test_a_while_loop_is_refused_in_compiled_code():
    @torch.compile(backend="eager", fullgraph=True)
    def compiled(x):
        return chain.while_loop(lambda h: h.sum() > 1, torch.sin, x, checkpoints=2)

    with pytest.raises(Exception, match="while_loop cannot be compiled: how many"):
        compiled(leaves_of(X)[0])
