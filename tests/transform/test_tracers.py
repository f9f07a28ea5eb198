"""TorchScript and symbolic torch.fx: a trace inlines remat, a compiler refuses it.

Graphs of dispatched operations hold a recompute: see test_traced_graphs.
"""

import warnings

import pytest
import torch
from support.zoo import assert_not_vanishing, leaves_of, make, ops_of
from torch import nn

from remat import remat
from remat.testing import assert_same, count_ops


X = make(3, 4, seed=31).float()

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")


def sine(x):
    return x.sin().exp()


rematerialized = remat(sine)


def calls_it(x):
    return rematerialized(x) * 2


class Decorated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    @remat
    def forward(self, x):
        return self.layer(x).sin().exp()


class WithMethod(Decorated):
    @remat
    def body(self, x):
        return self.layer(x).sin().exp()

    def forward(self, x):
        return self.body(x)


class WithAttribute(Decorated):
    def __init__(self):
        super().__init__()
        self.block = remat(self.layer)

    def forward(self, x):
        return self.block(x).sin().exp()


class WithGlobal(Decorated):
    def forward(self, x):
        return rematerialized(self.layer(x))


class Wrapping(Decorated):
    def forward(self, x):
        return remat(self.layer)(x).sin().exp()


class Assigned(Decorated):
    def __init__(self):
        super().__init__()
        self.layer.forward = remat(self.layer.forward)

    def forward(self, x):
        return self.layer(x).sin().exp()


MODULES = [Decorated, WithMethod, WithAttribute, WithGlobal, Wrapping, Assigned]


def assert_runs_like(traced, plain, *, recomputes):
    """Values and gradients are the same; the sine runs twice if it is recomputed."""
    results = []
    for f, sines in ((plain, 1), (traced, 1 + recomputes)):
        (x,) = leaves_of(X)
        with count_ops() as ops:
            value = f(x)
            value.sum().backward()
        assert ops["sin"] == sines
        results.append((value.detach(), x.grad))
    assert_same(results[1], results[0])
    assert_not_vanishing(results)


def plainly(module):
    return lambda x: nn.functional.linear(x, *module.layer.parameters()).sin().exp()


# --- Traces ---


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("make_module", MODULES)
def test_a_torchscript_trace_inlines_remat(make_module, requires_grad):
    module = make_module()
    example = X.clone().requires_grad_(requires_grad)
    traced = torch.jit.trace(module, (example,))
    assert "aten::sin" in str(traced.inlined_graph)
    assert "Remat" not in str(traced.inlined_graph)
    assert_runs_like(traced, plainly(module), recomputes=False)


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("fn", [rematerialized, calls_it])
def test_a_torchscript_trace_of_a_function_inlines_remat(fn, requires_grad):
    traced = torch.jit.trace(fn, (X.clone().requires_grad_(requires_grad),))
    assert next(node.kind() for node in traced.graph.nodes()) == "aten::sin"
    factor = 2 if fn is calls_it else 1
    assert_runs_like(traced, lambda x: sine(x) * factor, recomputes=False)


@pytest.mark.parametrize("make_module", MODULES[1:])
def test_a_symbolic_trace_inlines_remat(make_module):
    module = make_module()
    traced = torch.fx.symbolic_trace(module)
    assert_runs_like(traced, plainly(module), recomputes=False)
    assert_runs_like(
        torch.fx.symbolic_trace(calls_it), lambda x: sine(x) * 2, recomputes=False
    )


@pytest.mark.parametrize("make_root", [lambda: rematerialized, Decorated])
def test_a_symbolic_trace_of_a_remat_function_is_refused(make_root):
    message = r"torch.fx cannot trace `\S+` .* Trace the function without remat"
    with pytest.raises(TypeError, match=message):
        torch.fx.symbolic_trace(make_root())
    # Nothing of the trace is left.
    (x,) = leaves_of(X)
    assert ops_of(lambda: rematerialized(x).sum().backward())["sin"] == 2


# --- Compilation ---


REFUSED = {
    "function": lambda: rematerialized,
    "remat(module)": lambda: remat(nn.Linear(4, 4)),
    "forward": Decorated,
    "method": WithMethod,
    "wrapped inside": Wrapping,
    "assigned forward": Assigned,
    "attribute": WithAttribute,
}


@pytest.mark.parametrize("case", REFUSED)
def test_torchscript_refuses_to_compile_a_remat_function(case):
    message = "remat: TorchScript cannot compile a rematerialized function. Script"
    with pytest.raises((TypeError, AttributeError, RuntimeError), match=message):
        torch.jit.script(REFUSED[case]())


def test_torchscript_calls_a_remat_function_that_is_a_global_in_python():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(calls_it)
    assert_runs_like(scripted, lambda x: sine(x) * 2, recomputes=True)
