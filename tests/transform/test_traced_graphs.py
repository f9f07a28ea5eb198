"""Who else makes graphs: make_fx, aot_function, linearize and export."""

import pytest
import torch
from support.tables import rows
from support.traced import W, X, block, operations, ran
from support.zoo import leaves_of, plainly
from torch import nn
from torch._dynamo import compiled_autograd
from torch._functorch.aot_autograd import aot_module, make_boxed_func
from torch.func import grad, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from remat import policies, remat
from remat.testing import assert_same


MODES = ["real", "fake", "symbolic"]


def loss_of(fn):
    return lambda w, x: fn(w, x).square().sum()


def gradients(fn):
    w, x = leaves_of(W, X)
    value = fn(w, x)
    value.backward()
    return value.detach(), w.grad, x.grad


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8, dtype=torch.double)
        self.last = nn.Linear(8, 8, dtype=torch.double)

    def forward(self, x):
        return torch.tanh(self.last(torch.tanh(self.first(x))))


# --- make_fx ---


# A transform, and how many tanh its graph holds for plain, and with remat.
TRACED = {
    "grad": (grad, 2, 4),
    "grad of grad": (
        lambda loss: grad(lambda w, x: grad(loss)(w, x).square().sum()),
        2,
        8,
    ),
    "vmap of grad": (lambda loss: vmap(grad(loss), (None, 0)), 2, 4),
    "vjp": (lambda loss: lambda w, x: vjp(loss, w, x)[1](x.sum()), 2, 4),
    "jvp": (lambda loss: lambda w, x: jvp(loss, (w, x), (w, x)), 2, 2),
}


@rows("mode", {mode: mode for mode in MODES}, fast=["real"])
@rows("transform, plain, rematerialized", TRACED)
@pytest.mark.one_in(3)
def test_a_trace_holds_the_recompute(transform, plain, rematerialized, mode):
    graphs = [
        make_fx(transform(loss_of(wrap(block))), tracing_mode=mode)(W, X)
        for wrap in (plainly, remat)
    ]
    counts = [operations(graph)["tanh"] for graph in graphs]
    assert counts == [plain, rematerialized]
    assert_same(graphs[1](W, X), graphs[0](W, X), reassociated=True)
    other = W + 0.1, X * 2
    want = transform(loss_of(block))(*other)
    assert_same(graphs[1](*other), want, reassociated=True)


def test_a_symbolic_trace_takes_other_sizes():
    graph = make_fx(grad(loss_of(remat(block))), tracing_mode="symbolic")(W, X)
    x = torch.cat([X, X])
    assert_same(graph(W, x), grad(loss_of(block))(W, x))
    assert operations(graph)["tanh"] == 4


def test_a_trace_without_a_gradient_holds_the_function():
    graph = make_fx(remat(block))(W, X)
    assert operations(graph)["tanh"] == 2
    with torch.no_grad():
        graph = make_fx(remat(block))(*leaves_of(W, X))
    assert operations(graph)["tanh"] == 2
    assert operations(graph)["remat::barrier"] == 0


# A function of two inputs, and how many of them are read after the cotangents.
READ_LATE = {
    "products": (block, 1),
    "a view": (lambda w, x: torch.tanh(x @ w.t()), 1),
    "a sum": (lambda w, x: torch.tanh(x + w[:4]), 1),
    "one after the other": (lambda w, x: torch.tanh(torch.tanh(x) @ w), 1),
    "a change in place": (lambda w, x: torch.tanh(x.exp().add_(w[:4])), 1),
    "a product of one": (lambda w, x: torch.tanh((w @ w) * x.mean()), 2),
    "a cast": (lambda w, x: torch.tanh(x.sin() @ w.float().double()), 2),
    "a norm": (lambda w, x: torch.tanh(x.sin() @ (w / w.norm())), 2),
    "a layer norm": (
        lambda w, x: torch.tanh(nn.functional.layer_norm(x, (8,), w[0])),
        1,
    ),
    "two norms": (
        lambda w, x: torch.tanh(nn.functional.layer_norm(x, (8,), w[0].sin())),
        2,
    ),
    "a quotient": (lambda w, x: torch.tanh(x / w[:4]), 2),
}


@pytest.mark.one_in(4)
@rows("fn, late", READ_LATE)
@pytest.mark.parametrize("mapped", [False, True])
def test_inputs_that_only_products_read_pass_no_barrier(fn, late, mapped):
    def transformed(fn):
        loss = loss_of(fn)
        return vmap(grad(loss), (None, 0)) if mapped else grad(loss)

    x = torch.stack([X, X + 1]) if mapped else X
    graph = make_fx(transformed(remat(fn)))(W, x)
    assert_same(graph(W, x), transformed(fn)(W, x))
    found, plain = (operations(g) for g in (graph, make_fx(transformed(fn))(W, x)))
    assert found["remat::barrier"] == late
    assert found["tanh"] == 2 * plain["tanh"]


# --- AOTAutograd by itself ---


def test_aot_module_recomputes_in_its_backward():
    counts = []

    def compiler(graph, _):
        counts.append(operations(graph)["tanh"])
        return make_boxed_func(graph.forward)

    module = Model()
    x = X.clone().requires_grad_()
    aot_module(remat(module), compiler)(x).square().sum().backward()
    got = x.grad, [p.grad for p in module.parameters()]
    x = X.clone().requires_grad_()
    module.zero_grad()
    module(x).square().sum().backward()
    assert_same(got, (x.grad, [p.grad for p in module.parameters()]))
    assert counts == [2, 2]


# --- torch.export: the graph is plain's, node for node ---


class Calling(nn.Module):
    """Applies remat in its forward."""

    def __init__(self, wrap, **options):
        super().__init__()
        self.model, self.wrap, self.options = Model(), wrap, options

    def forward(self, x):
        y = self.wrap(self.model, **self.options)(x)
        return y + self.wrap(torch.sin, **self.options)(x)


def nodes(exported):
    return [(node.op, str(node.target)) for node in exported.graph.nodes]


def plain(fn, **_):
    return fn


@pytest.mark.one_in(2)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "policy", [None, policies.dots_saveable, policies.everything_saveable], ids=str
)
def test_an_export_is_plains(strict, policy):
    torch.manual_seed(0)
    ours = torch.export.export(Calling(remat, policy=policy), (X,), strict=strict)
    torch.manual_seed(0)
    theirs = torch.export.export(Calling(plain), (X,), strict=strict)
    assert nodes(ours) == nodes(theirs)
    assert_same(ours.module()(X), theirs.module()(X))


# --- Compiled autograd: nothing special ---


@pytest.mark.filterwarnings("default")  # inductor warns of slow numerics
@rows("compiles_forward", {"eager": False, "compiled": True}, fast=["eager"])
@rows("backend", {k: k for k in ("aot_eager", "eager", "inductor")}, fast=["aot_eager"])
def test_a_backward_of_compiled_autograd_gives_what_plain_gives(
    backend, compiles_forward
):
    torch._dynamo.reset()
    loss = loss_of(remat(block))
    if compiles_forward:
        loss = torch.compile(loss, backend=backend)
    want = gradients(loss_of(block))
    for _ in range(2):
        w, x = leaves_of(W, X)
        value = loss(w, x)
        with compiled_autograd._enable(torch.compile(backend=backend)):
            _, ops = ran(value.backward)
        got = value.detach(), w.grad, x.grad
        assert_same(got, want, reassociated=backend == "inductor")
    if backend != "inductor":
        assert ops["tanh"] == 2
    torch._dynamo.reset()


# --- Beside torch's checkpoint ---


def test_torchs_checkpoint_in_the_same_graph():
    def mixed(wrap):
        def loss(w, x):
            y = checkpoint(block, w, x, use_reentrant=False)
            return wrap(block)(w, y).square().sum()

        return loss

    results = []
    for wrap in (plainly, remat):
        torch._dynamo.reset()
        compiled = torch.compile(mixed(wrap), backend="aot_eager", fullgraph=True)
        results.append(gradients(compiled))
        _, ops = ran(lambda compiled=compiled: gradients(compiled))
        results.append(ops["tanh"])
    want, once, got, again = results
    assert_same(got, want, reassociated=True)
    assert again == once + 2
    torch._dynamo.reset()
