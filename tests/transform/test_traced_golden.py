"""The golden table in graphs: they hold each operation as often as eager code runs it.

Graphs hold nothing that nobody reads. So these are the numbers of JAX, which are those
of the eager code (tests/parity/test_golden.py), but for `DEAD`.
"""

from collections import Counter

import pytest
import torch
from support.golden import (
    CALLS_WITHIN,
    REASSOCIATED,
    ROWS,
    as_it_is,
    backward_of,
    block,
    compared,
    dots,
    executed,
    least,
    only,
    ours,
    pruned,
    table,
    within,
)
from support.tables import rows
from support.traced import Graphs, begins_again, compiling, operations, ran
from support.zoo import Evaluations, W, X, leaves_of
from torch.func import grad_and_value, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import policies, remat
from remat.testing import assert_same


# Of a result that nobody uses the forward is not in a graph either.
DEAD = {"sin, exp": table("exp 1"), "sin2, exp2": table("exp 2")}
# Of these rows nothing is recomputed, and nothing that is kept is read.
NOTHING_AGAIN = "plain", "2x+1"
# The others are slow tests, where each is compiled.
FEW = "sin2", "remat", "dots", "everything", "remat(dots)", "dots(remat)", "remat(two)"
COTANGENT = torch.linspace(0.5, 2, 16, dtype=X.dtype).view(4, 4)


def of_graphs(row):
    return ours(row) - DEAD.get(row, Counter())


# --- By .backward(): the graph of the forward, and that of the backward ---


def backward(fn):
    w, x = leaves_of(W, X)
    out = fn(w, x)
    out.backward(COTANGENT)
    return out.detach(), w.grad, x.grad


few_rows = rows("row", {row: row for row in ROWS}, fast=FEW)


@pytest.mark.one_in(3)
@few_rows
def test_the_graphs_of_forward_and_backward_hold_what_jax_runs(row):
    plain, fn, in_forward, _ = ROWS[row]
    graphs = Graphs()
    with compiling():
        got = backward(torch.compile(fn, backend=graphs, fullgraph=True))
    forward = table(in_forward) - DEAD.get(row, Counter())
    assert compared(graphs.forward, row) == forward
    assert compared(graphs.backward, row) == backward_of(row)
    assert begins_again(graphs.backward) == (row not in NOTHING_AGAIN)
    assert_same(got, backward(plain), reassociated=row in REASSOCIATED)


# --- Under torch.func, and in traces: one graph has both ---


def by_vjp(fn):
    def pulled(w, x, cotangent):
        out, pull = vjp(fn, w, x)
        return out, pull(cotangent)

    return pulled


def by_grad(fn):
    return grad_and_value(lambda w, x, cotangent: (fn(w, x) * cotangent).sum(), (0, 1))


def by_backward(fn):
    def gradients(w, x, cotangent):
        out = fn(w, x)
        how = {"allow_unused": True, "materialize_grads": True}
        gradients = torch.autograd.grad(out, (w, x), cotangent, **how)
        return out.detach(), [g.detach() for g in gradients]

    return gradients


ARGS = W, X, COTANGENT
BATCHES = tuple(torch.stack([t, -t, 2 * t]) for t in ARGS)
UNDER_FUNC = {
    "vjp": (by_vjp, ARGS),
    "grad": (by_grad, ARGS),
    "vmap of vjp": (lambda fn: vmap(by_vjp(fn)), BATCHES),
    "vmap of grad": (lambda fn: vmap(by_grad(fn)), BATCHES),
}
REST = [how for how in UNDER_FUNC if how != "grad"]
# The product with the cotangent, and its derivative.
AROUND = {how: table("mul 2") for how in UNDER_FUNC if "grad" in how}


@pytest.mark.parametrize(
    "how", ["grad", *(pytest.param(how, marks=pytest.mark.slow) for how in REST)]
)
@few_rows
@pytest.mark.one_in(3)
def test_the_graph_of_a_transform_holds_what_jax_runs(how, row):
    plain, fn, *_ = ROWS[row]
    transform, args = UNDER_FUNC[how]
    graphs = Graphs()
    with compiling():
        compiled = torch.compile(transform(fn), backend=graphs, fullgraph=True)
        got = compiled(*args)
    held = graphs.forward - AROUND.get(how, Counter())
    assert compared(held, row) == of_graphs(row)
    assert begins_again(graphs.forward) == (row not in NOTHING_AGAIN)
    assert not graphs.backward
    assert_same(got, transform(plain)(*args), reassociated=row in REASSOCIATED)


MADE = {
    "vjp, real": (by_vjp, "real"),
    "vjp, fake": (by_vjp, "fake"),
    "vjp, symbolic": (by_vjp, "symbolic"),
    "autograd.grad, real": (by_backward, "real"),
    "autograd.grad, symbolic": (by_backward, "symbolic"),
}
OTHERS = [how for how in MADE if how != "vjp, real"]


@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize(
    "how", ["vjp, real", *(pytest.param(how, marks=pytest.mark.slow) for how in OTHERS)]
)
def test_a_trace_by_make_fx_holds_what_jax_runs(how, row):
    transform, mode = MADE[how]
    plain, fn, *_ = ROWS[row]
    w, x = leaves_of(W, X) if transform is by_backward else (W, X)
    graph = make_fx(transform(fn), tracing_mode=mode)(w, x, COTANGENT)
    held = operations(graph)
    assert compared(held, row) == of_graphs(row)
    assert begins_again(held) == (row not in NOTHING_AGAIN)
    got, want = graph(w, x, COTANGENT), transform(plain)(w, x, COTANGENT)
    assert_same(got, want, reassociated=row in REASSOCIATED)


@pytest.mark.parametrize("case", CALLS_WITHIN)
def test_a_call_within_that_nothing_reads_keeps_nothing_in_a_trace(case):
    fn, plain = within(case, pruned, dots), within(case, as_it_is, as_it_is)
    graph, plainly = (make_fx(by_vjp(f))(*ARGS) for f in (fn, plain))
    again = executed(operations(graph)) - executed(operations(plainly))
    assert only(again, "tanh", "dot") == least(case)
    assert_same(graph(*ARGS), by_vjp(plain)(*ARGS), reassociated=True)


def test_a_trace_holds_dead_code_until_it_is_eliminated():
    """A recompute runs the last operation again, which no derivative reads."""
    fn = ROWS["sin2"][1]
    graph = make_fx(by_vjp(fn))(*ARGS)
    sines = [n for n in graph.graph.nodes if n.target is torch.ops.aten.sin.default]
    assert len(sines) == 4
    assert operations(graph)["sin"] == 3


# --- Policies decide alike ---


def noting(policy, notes):
    def decide(op):
        decision = policy(op)
        shapes = tuple(tuple(value.shape) for value in op.outputs)
        notes.note((str(op.func), shapes, sorted(op.names), bool(decision)))
        return decision

    return decide


POLICIES = {
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "dots or large": policies.dots_saveable | (lambda op: op.nbytes > 10**6),
    "everything": policies.everything_saveable,
    "no dots": ~policies.dots_saveable,
}


@pytest.mark.one_in(3)
@rows("policy", POLICIES)
def test_a_policy_is_asked_about_the_same_operations_and_decides_alike(policy):
    """The derivative reads them all; eager code asks about no others."""

    def asked(call):
        notes = Evaluations()
        call(remat(block, policy=noting(policy, notes)))
        return {*map(str, notes)}

    def by_compiled(fn):
        with compiling():
            backward(torch.compile(fn, backend="aot_eager", fullgraph=True))

    eager = asked(backward)
    assert eager
    assert asked(by_compiled) == eager
    assert asked(lambda fn: make_fx(by_vjp(fn))(*ARGS)) == eager


@pytest.mark.one_in(3)
@few_rows
def test_the_backend_eager_runs_what_eager_code_does(row):
    """Its node is eager remat, which leaves out what no derivative reads."""
    plain, fn, *_ = ROWS[row]
    with compiling():
        compiled = torch.compile(by_vjp(fn), backend="eager", fullgraph=True)
        compiled(*ARGS)
        got, ops = ran(lambda: compiled(*ARGS))
    assert compared(ops, row) == ours(row)
    assert_same(got, by_vjp(plain)(*ARGS), reassociated=row in REASSOCIATED)
