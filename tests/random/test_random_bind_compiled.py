"""bind in what torch.compile, make_fx and torch.export trace."""

import contextlib

import pytest
import torch
from support.binding import (
    ENCODER,
    FUNCTIONS,
    KEYS,
    LAYERS,
    ONES,
    REFUSED,
    XS,
    X,
    bound,
    first,
    loss,
    per_example,
    unmoved,
)
from support.tables import rows
from torch import nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

from remat import RandomnessError
from remat.random import _bind, bind, key


COMPILED = {
    "dropout": per_example(F.dropout),
    "several": lambda k, x: loss(x.T @ x, k),
    "a transformer": per_example(lambda x: ENCODER(x[None])),
    "normal_": per_example(lambda x: torch.empty(4).normal_()),
}
backends = rows("backend", {"eager": "eager", "aot": "aot_eager"}, fast=("aot",))


@backends
@rows("fn", COMPILED, fast=("several",))
def test_bind_is_compiled_into_one_graph(fn, backend):
    torch._dynamo.reset()
    x = XS[0].clone().requires_grad_()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for k in KEYS:
        torch.testing.assert_close(compiled(k, x), fn(k, x))


@backends
def test_transforms_of_bind_are_compiled_into_one_graph(backend):
    torch._dynamo.reset()
    fn = per_example(lambda x: F.dropout(x).square().sum())
    gradients = vmap(grad(fn, argnums=1))
    compiled = torch.compile(gradients, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(KEYS, XS), gradients(KEYS, XS))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_trace_holds_the_draws_and_takes_another_key(mode):
    def fn(data, x):
        with bind(data):
            return F.dropout(x) * torch.rand(8)

    traced = make_fx(fn, tracing_mode=mode)(KEYS[0].data, XS[0])
    for k in KEYS:
        assert torch.equal(traced(k.data, XS[0]), fn(k.data, XS[0]))
    draws = [n for n in traced.graph.nodes if "remat.uniform" in str(n.target)]
    assert len(draws) == 2


def test_an_exported_module_takes_the_key_as_an_input():
    class Module(nn.Module):
        def forward(self, data, x):
            with bind(data):
                return F.dropout(x)

    args = KEYS[0].data, XS[0]
    exported = torch.export.export(Module(), args).module()
    assert torch.equal(exported(*args), Module()(*args))


# What Dynamo itself does not trace.
UNTRACED = {
    *("rand, a leaf", "a linear layer", "init.trunc_normal_", "init.sparse_"),
    *("svd_lowrank", "pca_lowrank"),
}


def assert_compiled_as_eager(one, x, **options):
    torch._dynamo.reset()
    compiled = torch.compile(one, backend="eager", **options)
    with unmoved():
        for k in KEYS[:2]:
            torch.testing.assert_close(compiled(k, x), one(k, x))


@pytest.mark.slow
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_draw_is_compiled_to_that_of_the_key(name):
    one = per_example(lambda x: FUNCTIONS[name]())
    assert_compiled_as_eager(one, ONES, fullgraph=name not in UNTRACED)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_is_compiled_to_that_of_the_key(name):
    x, fn = LAYERS[name]
    one = per_example(lambda x: first(fn(x)))
    assert_compiled_as_eager(one, x, fullgraph=name not in UNTRACED)


SAMPLE = {
    **{name: FUNCTIONS[name] for name in [*FUNCTIONS][::9] if name not in UNTRACED},
    "dropout2d": lambda: F.dropout2d(X),
}


def test_some_draws_are_compiled_to_those_of_the_key():
    """All at once: each of them alone takes a compilation."""
    draws = [*SAMPLE.values()]
    one = per_example(lambda x: [first(draw()) for draw in draws])
    assert_compiled_as_eager(one, ONES, fullgraph=True)


# Those of torch that the above are made of, where functions of torch.nn have rules.
KERNELS = (
    *("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout"),
    *("dropout_", "alpha_dropout_", "feature_dropout_", "feature_alpha_dropout_"),
)


def kernel(name):
    return lambda x: getattr(torch, name)(x * 1, 0.5, True)


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_compiled_to_that_of_the_key(name):
    assert_compiled_as_eager(per_example(kernel(name)), X, fullgraph=True)


def test_each_rule_is_that_of_a_function_which_is_compiled_here(monkeypatch):
    called = set()

    class Rules(dict):
        def get(self, func):
            called.add(func)
            return dict.get(self, func)

    monkeypatch.setattr(_bind, "_RULES", Rules(_bind._RULES))
    for fn in FUNCTIONS.values():
        bound(0, fn)
    for x, fn in [*LAYERS.values(), *((X, kernel(name)) for name in KERNELS)]:
        bound(0, fn, x)
    for draw in REFUSED.values():  # see below
        with contextlib.suppress(RandomnessError):
            bound(0, draw)
    assert not {f.__name__ for f in {*_bind._RULES} - called}


UNSUPPORTED = REFUSED | {
    "a packet": lambda: torch.ops.aten.poisson(ONES),
    "native_dropout": lambda: torch.ops.aten.native_dropout.default(ONES, 0.5, True),
    "alpha_dropout": lambda: torch.ops.aten.alpha_dropout.default(ONES, 0.5, True),
    "a tagged operation": lambda: torch.ops.remat_test_traced.noisy(ONES),
    "lobpcg": lambda: torch.lobpcg(torch.eye(9), 1)[0],
}
LIBRARY = torch.library.Library("remat_test_traced", "DEF")
LIBRARY.define("noisy(Tensor x) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.define("quiet(Tensor x) -> Tensor")
for name in ("noisy", "quiet"):
    LIBRARY.impl(name, torch.rand_like, "CPU")
    LIBRARY.impl(name, torch.empty_like, "Meta")


# Of Dynamo, about how torch.distributions calls torch.autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@rows("draw", UNSUPPORTED, fast=("rand", "a tagged operation"))
def test_a_draw_without_a_rule_is_refused_when_compiled(draw):
    torch._dynamo.reset()
    one = per_example(lambda x: draw())
    with unmoved(), pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(one, backend="eager", fullgraph=True)(key(0), ONES)


def test_the_compiler_goes_by_the_tag_of_an_operation():
    torch._dynamo.reset()
    one = per_example(torch.ops.remat_test_traced.quiet)
    with pytest.raises(RandomnessError, match="quiet"):
        one(key(0), ONES)
    # As it does when it decides what may be computed twice.
    torch.compile(one, backend="eager", fullgraph=True)(key(0), ONES)


@pytest.mark.filterwarnings("ignore:Dynamo:UserWarning")
def test_draws_go_on_where_they_were_after_a_graph_break():
    def one(x):
        with bind(key(3)):
            a = F.dropout(x)
            torch._dynamo.graph_break()
            return a * torch.rand_like(x)

    torch._dynamo.reset()
    with unmoved():
        assert torch.equal(torch.compile(one, backend="eager")(XS), one(XS))


def test_a_poisson_draw_is_refused_after_a_graph_break():
    torch._dynamo.reset()
    fn = torch.compile(per_example(torch.poisson), backend="eager")
    with unmoved(), pytest.raises(RandomnessError, match="poisson"):
        fn(key(0), ONES)


def test_a_compiled_function_inside_draws_from_the_key():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.dropout(x) * 2, backend="eager")
    want = bound(1, F.dropout, X) * 2
    assert torch.equal(bound(1, compiled, X), want)
    compiled(X)
    assert torch.equal(bound(1, compiled, X), want)
