"""Programs whose recomputation could be another function: right, or refused."""

import pytest
import torch
from torch import nn
from torch.func import grad, jacrev
from torch.nn.utils import parametrize

from remat import CaptureError, MutationError, remat
from remat.testing import assert_same, count_ops


SCALE = 1.0


def leaf():
    return torch.linspace(0.1, 1.0, 3).requires_grad_()


# --- Values are those of the call ---


def test_a_loop_variable_is_that_of_the_call():
    x = leaf()
    with count_ops() as ops:
        ys = [remat(lambda x: x.sin() * s)(x) for s in (1.0, 2.0, 3.0)]  # noqa: B023
        got = torch.autograd.grad(sum(y.sum() for y in ys), x)[0]
    assert ops["sin"] == 2 * 3
    assert_same(got, 6 * x.detach().cos(), reassociated=True)


def test_a_global_constant_is_that_of_the_call():
    def fn(x):
        return x.sin() * SCALE

    x = leaf()
    y = remat(fn)(x)
    globals()["SCALE"] = 5.0
    try:
        with count_ops() as ops:
            got = torch.autograd.grad(y.sum(), x)[0]
    finally:
        globals()["SCALE"] = 1.0
    assert ops["sin"] == 1
    assert_same(got, x.detach().cos())


def test_the_mode_of_a_module_is_that_of_the_call():
    module = nn.Sequential(nn.Linear(3, 64), nn.Dropout(0.5))
    x = leaf()

    def gradient(transform, between):
        torch.manual_seed(3)
        y = transform(module)(x)
        between()
        with count_ops() as ops:
            g = torch.autograd.grad(y.square().sum(), x)[0]
        module.train()
        return g, ops["addmm"]

    want, _ = gradient(lambda fn: fn, module.train)
    got, linears = gradient(remat, module.eval)
    assert linears == 1
    assert_same(got, want)


# --- Memory shared by outputs ---


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view, torch.adjoint])
def test_a_view_that_only_flips_a_bit_keeps_its_value(view):
    x = torch.randn(3, 3, dtype=torch.cfloat, requires_grad=True)
    with count_ops() as ops:
        y = remat(lambda x: (view(x), x.sin()))(x)
        y[1].abs().sum().backward()
    assert ops["sin"] == 2
    assert torch.equal(y[0], view(x))


@pytest.mark.parametrize("part", [torch.real, torch.view_as_real])
def test_a_real_view_of_a_complex_input_may_not_be_changed(part):
    z = torch.ones(3, dtype=torch.cfloat, requires_grad=True) * 1
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        remat(part)(z).mul_(2)


def test_outputs_that_share_memory_may_not_be_changed():
    def fn(x):
        y = x.sin()
        return y, y.view(-1)

    a, b = remat(fn)(leaf())
    assert a.data_ptr() == b.data_ptr()
    with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
        a.mul_(2)


# --- Tensors that leave, or are kept, other than by being returned ---


@pytest.mark.parametrize(
    "make",
    [lambda x: torch.distributions.Normal(x.sin(), x.exp()), lambda x: (yield x.sin())],
    ids=["an object", "a generator"],
)
def test_a_result_that_hides_tensors_is_refused(make):
    with pytest.raises(CaptureError, match="holds or makes tensors"):
        remat(make)(leaf())


def test_a_kept_intermediate_is_refused_under_func_grad():
    kept = []

    def fn(x):
        kept.append(x.sin())
        return x.cos()

    with pytest.raises(CaptureError, match=r"Under torch\.func its gradient would be"):
        grad(lambda x: (remat(fn)(x) + kept[-1]).sum())(torch.ones(3))


def test_a_tensor_that_an_argument_hides_is_refused():
    class Settings:
        weight = leaf()

    def fn(x, settings):
        return x.sin() * settings.weight

    with pytest.raises(CaptureError, match="used but is no input of the call"):
        remat(fn)(leaf(), Settings())


def test_each_run_has_its_own_cache_of_parametrizations():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, weight):
            return weight * self.scale

    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", Scaled())
    scale = linear.parametrizations.weight[0].scale
    x = torch.randn(2, 4)

    def gradient(transform):
        with parametrize.cached():
            y = transform(linear)(transform(linear)(x).sin()).sin()
        return torch.autograd.grad(y.sum(), scale)[0]

    with count_ops() as plain:
        want = gradient(lambda fn: fn)
    with count_ops() as ops:
        got = gradient(remat)
    assert ops["addmm"] == 2 * plain["addmm"]
    # Cast once for each call, where plain code shares it: the sum is another.
    assert_same(got, want, reassociated=True)


def test_backward_inside_is_refused():
    w = leaf()

    def fn(x):
        (x.detach().sin() * w).sum().backward()
        return x * 2

    with pytest.raises(CaptureError, match="calls backward"):
        remat(fn)(leaf())


def test_an_assignment_to_data_is_refused():
    class Renormed(nn.Linear):
        def forward(self, x):
            self.weight.data = self.weight.data / 2
            return super().forward(x)

    with pytest.raises(MutationError, match="`weight` was changed in place inside"):
        remat(Renormed(3, 3))(leaf())


def test_a_lazy_module_is_refused_until_it_ran():
    module = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(CaptureError, match=r"`0\.weight` is not initialized yet"):
        remat(module)(leaf())
    module(leaf())
    with count_ops() as ops:
        remat(module)(leaf()).sum().backward()
    assert ops["addmm"] == 2


# --- Tensors of unusual kinds ---


def test_an_inference_tensor_may_be_an_input():
    with torch.inference_mode():
        c = torch.ones(3)
    x = leaf()
    with count_ops() as ops:
        remat(lambda c, x: (c + x).sin())(c, x).sum().backward()
    assert ops["sin"] == 2
    assert_same(x.grad, (c + x.detach()).cos())


def test_under_inference_mode_func_grad_is_right():
    x = torch.ones(3)
    with torch.inference_mode(), count_ops() as ops:
        got = grad(lambda x: remat(torch.sin)(x).sum())(x)
    assert ops["sin"] == 2
    assert torch.equal(got, x.cos())


def test_a_parameter_is_a_parameter_inside():
    p = nn.Parameter(torch.ones(3))
    p.tag = "mine"
    seen = []

    def fn(p):
        seen.append((type(p), p.tag))
        return p.sin()

    remat(fn)(p).sum().backward()
    assert seen == [(nn.Parameter, "mine")] * 2


# --- A batch of cotangents ---


def test_jacrev_recomputes_once_with_the_draws_of_the_forward():
    def fn(x):
        return nn.functional.dropout(x.sin(), 0.5).cumsum(0)

    def jacobian(transform):
        torch.manual_seed(3)
        return jacrev(transform(fn))(torch.ones(16))

    want = jacobian(lambda fn: fn)
    with count_ops() as ops:
        got = jacobian(remat)
    assert ops["sin"] == 2
    assert_same(got, want)


# --- Kernels that depend on grad mode ---

LSTM = nn.LSTM(10, 10)
MODAL = {
    "silu": nn.functional.silu,
    "mish": nn.functional.mish,
    "group norm": lambda x: nn.functional.group_norm(x.view(2, 5, -1), 5) ** 3,
    "gelu": nn.functional.gelu,
    "weight norm": lambda x: torch._weight_norm(
        x.view(10, -1), x.detach().view(10, -1).norm(dim=1, keepdim=True), 0
    ),
    "lstm": lambda x: LSTM(x.view(2, 50, 10))[0],
}


@pytest.mark.parametrize("fn", MODAL.values(), ids=MODAL)
def test_func_grad_uses_the_kernels_of_plain_code(fn):
    x = torch.randn(1000)
    want = grad(lambda x: fn(x.sin()).sum())(x)
    with count_ops() as ops:
        got = grad(lambda x: remat(lambda x: fn(x.sin()))(x).sum())(x)
    assert ops["sin"] == 2
    assert_same(got, want)
