"""`compat.checkpoint` under torch.compile and make_fx: the recompute is in graphs."""

import functools

import pytest
import torch
from support.compared import leaf
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import checkpoint as torchs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from remat import compat
from remat.testing import assert_same, count_ops


pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(x, w):
    return torch.sigmoid(x @ w) @ w


def graphs_of(fn, *args):
    """The gradients that compiled code gives, and its forward and backward graphs."""
    found = {}

    def keep(name):
        def compiler(graph, _):
            found[name] = [str(node.target) for node in graph.graph.nodes]
            return make_boxed_func(graph.forward)

        return compiler

    def backend(graph, inputs):
        return aot_module_simplified(
            graph,
            inputs,
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )

    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    got = torch.autograd.grad(compiled(*args).sum(), args)
    return got, found


def products(names):
    return sum("aten.mm" in name for name in names)


def assert_recomputes(fn, *, backward):
    args = leaf(4, 4), leaf(4, 4)
    got, graphs = graphs_of(fn, *args)
    want = torch.autograd.grad(block(*args).sum(), args)
    assert_same(got, want, reassociated=True)
    counts = products(graphs["forward"]), products(graphs["backward"])
    assert counts == (2, backward)


CALLS = {
    "ours": lambda x, w: compat.checkpoint(block, x, w),
    "with options": lambda x, w: compat.checkpoint(
        block, x, w, use_reentrant=True, early_stop=False, preserve_rng_state=False
    ),
    "decorated": compat.checkpoint(use_reentrant=False)(block),
    "torch's": lambda x, w: torchs.checkpoint(block, x, w, use_reentrant=False),
}


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_the_recompute_is_in_the_graph(name, patched):
    """Four products of the gradients, and the first one again."""
    if patched:
        with compat.patch():
            assert_recomputes(CALLS[name], backward=5)
    else:
        assert_recomputes(CALLS[name], backward=5)


def test_a_selection_is_honoured():
    context_fn = functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default]
    )
    assert_recomputes(
        lambda x, w: compat.checkpoint(block, x, w, context_fn=context_fn), backward=4
    )


def test_a_sequence_is_traced_without_a_break():
    counter = CompileCounterWithBackend("aot_eager")
    functions = [torch.sin] * 4

    def f(x):
        return compat.checkpoint_sequential(functions, 2, x).sum()

    x, y = leaf(3), leaf(3)
    torch.compile(f, backend=counter, fullgraph=True)(x).backward()
    f(y).backward()
    assert counter.frame_count == 1
    assert_same(x.grad, y.grad)
    (graph,) = counter.graphs
    assert "higher_order.remat" in graph.code


def test_a_graph_break_inside_runs_it_eagerly():
    def breaks(x, w):
        y = x @ w
        torch._dynamo.graph_break()
        return y.sigmoid() @ w

    compiled = torch.compile(
        lambda x, w: compat.checkpoint(breaks, x, w), backend="aot_eager"
    )
    args = leaf(4, 4), leaf(4, 4)
    with count_ops() as ops:
        out = compiled(*args).sum()
        got = torch.autograd.grad(out, args)
    assert ops["mm"] == 2 + 1 + 4
    assert_same(got, torch.autograd.grad(block(*args).sum(), args))


def test_a_trace_by_make_fx_holds_the_recompute():
    def gradients(x, w):
        out = compat.checkpoint(block, x, w).sum()
        return torch.autograd.grad(out, (x, w))

    args = leaf(4, 4), leaf(4, 4)
    trace = make_fx(gradients)(*args)
    trace.graph.eliminate_dead_code()
    names = [str(node.target) for node in trace.graph.nodes]
    assert products(names) == 2 + 5
    assert_same(trace(*args), torch.autograd.grad(block(*args).sum(), args))
