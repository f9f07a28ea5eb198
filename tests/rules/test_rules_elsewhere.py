"""Rules and kept calls in compiled code, in blocks of a scope, and in reports."""

import warnings

import pytest
import torch
from support.traced import Graphs
from support.zoo import X, leaves_of, make
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import remat as api
from remat import (
    custom_vjp,
    explain,
    fit,
    keep,
    policies,
    remat,
    saved_residuals,
    scope,
)
from remat.testing import assert_same, memory_timeline


# Its derivative is not that of the function, so that it shows who follows the rule.
CLIPPED = custom_vjp(lambda x: x * 1.0)
CLIPPED.defvjp(lambda x: (x * 1.0, None), lambda _, ct: (ct.clamp(-0.1, 0.1),))
TRIPLED = custom_vjp(torch.sin)
TRIPLED.defremat(
    lambda x: (x.sin(), x.cos()),
    lambda cos, x: (x.sin(), {"cos": cos}),
    lambda res, ct: (ct * res["cos"] * 3,),
)
PAIRED = custom_vjp(lambda n, x, y: (x * y * n, x + y), nondiff_argnums=(0,))
PAIRED.defvjp(
    lambda n, x, y: ((x * y * n, x + y), (x, y)),
    lambda n, res, cts: (cts[0] * res[1] * n + cts[1], cts[0] * res[0] * n + cts[1]),
)
ITSELF = custom_vjp(lambda x: x * 1.0)
ITSELF.defvjp(lambda x: (ITSELF(x), None), lambda _, ct: (ct.clamp(-0.1, 0.1),))
GATED = custom_vjp(lambda x, w: (x @ w).tanh())
GATED.defvjp(
    lambda x, w: ((x @ w).tanh(), (x, w)),
    lambda res, ct: (ct @ res[1].mT, res[0].mT @ ct),
)
KEPT = keep(lambda x: x.exp().sin())
FUNCTIONS = {
    "itself": lambda x: ITSELF(x * 2).exp(),
    "clipped": lambda x: CLIPPED(x * 2).exp(),
    "tripled": lambda x: TRIPLED(x * 2).exp(),
    "paired": lambda x: sum(PAIRED(3.0, x.sin(), x.exp())),
    "kept": lambda x: KEPT(x * 2).exp(),
    "in a row": lambda x: GATED(GATED(GATED(x, x.mT @ x), x.mT @ x), x.mT).exp(),
}
by_name = pytest.mark.parametrize("name", FUNCTIONS)


def gradient(fn):
    (x,) = leaves_of(X)
    return torch.autograd.grad(fn(x).sum(), x)[0]


# --- Compiled ---


# Of Dynamo, which makes an instance of a Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("transform", [lambda f: f, remat])
@by_name
def test_compiled_code_follows_the_derivative(name, transform):
    fn, want = transform(FUNCTIONS[name]), gradient(FUNCTIONS[name])
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        found = gradient(torch.compile(fn, backend=backend, fullgraph=True))
        torch.testing.assert_close(found, want)


# Of Dynamo, which makes an instance of a Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("transform", [lambda f: f, remat])
@pytest.mark.parametrize("rule", [CLIPPED, ITSELF])
def test_compiled_torch_func_follows_the_rule(rule, transform):
    """Also of what it differentiates itself, where Dynamo leaves a Function out."""
    slope = torch.func.grad(transform(lambda x: rule(x).exp().sum()))
    found = torch.compile(slope, backend="aot_eager", fullgraph=True)(X)
    assert_same(found, X.exp().clamp(-0.1, 0.1))
    assert not found.requires_grad


def gated_fwd(x, w):
    h = torch.tanh(x @ w)
    return h * x, {"h": h}


def gated_bwd(res, ct):
    x, w, h = res
    inner = ct * x * (1 - h * h)
    return inner @ w.mT + ct * h, x.mT @ inner


def gated():
    fn = custom_vjp(lambda x, w: gated_fwd(x, w)[0])
    fn.defremat(
        gated_fwd, lambda res, x, w: (res["h"] * x, (x, w, res["h"])), gated_bwd
    )
    return fn


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("policy", [None, "nothing", {"other": "save"}])
def test_compiled_code_keeps_what_a_rule_keeps(policy):
    fn = gated()
    policy = policies.nothing_saveable if policy == "nothing" else policy
    x, w = leaves_of(X, make(4, 4, seed=3))
    want = torch.autograd.grad(fn.fn(x.sin(), w).exp().sum(), (x, w))
    for each, again in ((fn, 0), (fn.fn, 1)):
        torch._dynamo.reset()
        graphs = Graphs()
        block = remat(lambda x, w, fn=each: fn(x.sin(), w).exp(), policy=policy)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no value is called `other`
            out = torch.compile(block, backend=graphs, fullgraph=True)(x, w)
            found = torch.autograd.grad(out.sum(), (x, w))
        torch.testing.assert_close(found, want)
        assert graphs.backward["mm"] == 2 + again
        assert graphs.backward["tanh"] == again


@pytest.mark.parametrize("transform", [lambda f: f, remat])
@by_name
def test_graphs_of_make_fx_follow_the_derivative(name, transform):
    fn, (x,) = transform(FUNCTIONS[name]), leaves_of(X)
    graph = make_fx(lambda x: torch.autograd.grad(fn(x).sum(), x)[0])(x)
    torch.testing.assert_close(graph(x), gradient(FUNCTIONS[name]))


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiled_code_refuses_a_result_that_it_cannot_take():
    tree = custom_vjp(lambda x: {"a": x})
    tree.defvjp(lambda x: ({"a": x * 1}, None), lambda _, ct: (ct["a"],))
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"must be a tensor or a tuple of tensors"):
        torch.compile(lambda x: tree(x)["a"], backend="eager", fullgraph=True)(
            *leaves_of(X)
        )


# --- Scope and plans ---


@by_name
def test_blocks_of_a_scope_are_right(name):
    def run(x):
        with scope():
            y = FUNCTIONS[name](x.sin())
        return y.cos()

    assert_same(gradient(run), gradient(lambda x: FUNCTIONS[name](x.sin()).cos()))


def test_a_plan_for_a_step_is_right():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.up = torch.nn.Linear(16, 16)

        def forward(self, x):
            return x + TRIPLED(KEPT(self.up(x)).tanh())

    model = torch.nn.Sequential(*(Layer() for _ in range(4)))
    x = torch.randn(64, 16)
    model(x).square().mean().backward()
    want = [p.grad for p in model.parameters()]
    model.zero_grad()
    plan = fit(model, x, loss=lambda y: y.square().mean(), budget=70_000)
    applied = plan.apply(model)
    applied(x).square().mean().backward()
    assert_same([p.grad for p in model.parameters()], want)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.fn = nn.Parameter(make(16, 16, seed=5)), gated()

    def forward(self, x):
        return self.fn(x.sin(), self.weight).exp().clamp(max=2).sin()


def test_a_plan_over_blocks_counts_what_rules_keep():
    model = nn.Sequential(*[Gated() for _ in range(4)])
    x = make(64, 16, seed=6)
    held = sum(t.nbytes for t in (x, *model.parameters()))

    def peak():
        def step():
            model(x).square().mean().backward()

        step()
        model.zero_grad()
        return max(memory_timeline(step).bytes) + held

    plain = peak()
    loss = lambda y: y.square().mean()
    options = {"over": "blocks", "select": "*", "loss": loss}
    plan = fit(model, x, budget=int(0.9 * plain), **options)
    plan.apply(model)
    assert 0.6 * plain < peak() <= plan.peak <= 0.9 * plain


# --- Reports ---


BIG = make(64, 64, seed=2)


def body(x):
    return (TRIPLED(x * 1.5).exp() * KEPT(x)).sin()


@pytest.mark.parametrize("higher_order", [False, True])
def test_saved_residuals_list_what_is_kept(higher_order):
    found = saved_residuals(remat(body, higher_order=higher_order), BIG)
    large = [r for r in found if r.nbytes == BIG.nbytes]
    # The input, the cosine, what the kept call saved for its sine, and its result.
    assert len(large) == 4
    assert sum(r.nbytes for r in found) < 4.1 * BIG.nbytes


def test_explain_shows_a_call_by_rules_as_one_operation():
    report = explain(remat(body), BIG)
    names = [op.name for op in report.ops]
    assert names == ["mul", "sin", "exp", "keep(<lambda>)", "mul", "sin"]
    assert report.saved_bytes >= 4 * BIG.nbytes
    assert "keep(<lambda>)" in str(report)
    assert api.custom_vjp is custom_vjp
