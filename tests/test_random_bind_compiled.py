"""bind in what torch.compile, make_fx and torch.export trace."""

import pytest
import torch
from bind_helpers import (
    ENCODER,
    KEYS,
    ONES,
    XS,
    Unmoved,
    X,
    bound,
    loss,
    per_example,
)
from torch import nn
from torch.func import (
    grad,
    vmap,
)
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F  # noqa: N812

from remat import RandomnessError
from remat.random import bind, key


COMPILED = {
    "dropout": per_example(F.dropout),
    "several": lambda k, x: loss(x.T @ x, k),
    "a transformer": per_example(lambda x: ENCODER(x[None])),
    "normal_": per_example(lambda x: torch.empty(4).normal_()),
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("fn", COMPILED.values(), ids=COMPILED.keys())
def test_bind_is_compiled_into_one_graph(fn, backend):
    torch._dynamo.reset()
    x = XS[0].clone().requires_grad_()
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    for k in KEYS:
        torch.testing.assert_close(compiled(k, x), fn(k, x))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_transforms_of_bind_are_compiled_into_one_graph(backend):
    torch._dynamo.reset()
    fn = per_example(lambda x: F.dropout(x).square().sum())
    gradients = vmap(grad(fn, argnums=1))
    compiled = torch.compile(gradients, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(KEYS, XS), gradients(KEYS, XS))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_trace_has_the_draws_and_takes_another_key(mode):
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


def test_another_draw_is_refused_when_compiled():
    torch._dynamo.reset()
    fn = torch.compile(per_example(torch.poisson), backend="eager", fullgraph=True)
    with Unmoved(), pytest.raises(torch._dynamo.exc.Unsupported, match="Randomness"):
        fn(key(0), ONES)
    fn = torch.compile(per_example(torch.poisson), backend="eager")
    with Unmoved(), pytest.raises(RandomnessError, match="poisson"):
        fn(key(0), ONES)


def test_a_compiled_function_inside_draws_from_the_key():
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: F.dropout(x) * 2, backend="eager")
    want = bound(1, F.dropout, X) * 2
    assert torch.equal(bound(1, compiled, X), want)
    compiled(X)
    assert torch.equal(bound(1, compiled, X), want)
