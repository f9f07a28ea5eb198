"""Modules whose weights are computed, cached or made late; over steps."""

import pytest
import torch
from support.as_plain import assert_as_plain, assert_recomputed, leaf, trained
from support.zoo import make, plainly
from torch import nn
from torch.nn.utils import (
    parametrizations,
    parametrize,
    spectral_norm,
    weight_norm,
)

from remat import policies, remat
from remat.testing import assert_same, count_ops


def normed(norm):
    return lambda: nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh()).double()


MODULES = {
    "weight_norm": normed(weight_norm),
    "spectral_norm": normed(spectral_norm),
    "parametrization": normed(parametrizations.spectral_norm),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@pytest.mark.parametrize("kind", MODULES)
def test_norms_of_weights_over_steps(kind):
    def program(wrap, note):
        model = MODULES[kind]()
        model[0].register_forward_pre_hook(lambda *_: note(None))
        return trained(model, make(3, 4, seed=2), wrap(model))

    assert_as_plain(program, evaluations=6, plain=3)


def test_parameters_are_unfrozen_between_steps_and_before_a_backward():
    def program(wrap, note):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model[0].register_forward_pre_hook(lambda *_: note(None))
        model[0].requires_grad_(False)
        call, x = wrap(model), make(3, 4, seed=2)
        first = call(x).tanh().sum()
        model[0].requires_grad_(True)
        first.backward()
        frozen = model[0].weight.grad
        call(x).tanh().sum().backward()
        assert frozen is None
        return [p.grad for p in model.parameters()]

    assert_as_plain(program, evaluations=4, plain=2)


class LateParameter(nn.Module):
    """Makes a parameter when it first sees an input."""

    def __init__(self, note):
        super().__init__()
        self.weight, self.note = None, note

    def forward(self, x):
        self.note(None)
        if self.weight is None:
            self.weight = nn.Parameter(torch.full((x.shape[-1],), 0.5).double())
        return (x * self.weight).sin().exp()


def test_a_parameter_that_the_forward_makes():
    def program(wrap, note):
        model, x = LateParameter(note), leaf(2)
        y = wrap(model)(x)
        made = model.weight
        y.sum().backward()
        assert model.weight is made
        return x.grad, made.grad

    assert_as_plain(program)


def test_a_lazy_module():
    def program(wrap, note):
        model = nn.Sequential(nn.LazyLinear(4), nn.Tanh()).double()
        call, x = wrap(model), leaf(2)
        call(x).sum().backward()
        model[0].register_forward_pre_hook(lambda *_: note(None))
        call(x).exp().sum().backward()
        return x.grad, [p.grad for p in model.parameters()]

    assert_as_plain(program)


def test_a_lazy_module_runs_as_it_is_until_it_ran():
    module = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.Linear(3, 3))
    for again in (0, 1):
        x = torch.linspace(0.1, 1.0, 3).requires_grad_()
        with count_ops() as ops:
            remat(module)(x).sum().backward()
        assert ops["tanh"] == 1 + again
        assert_same(x.grad, torch.autograd.grad(module(x).sum(), x)[0])


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_statistics_of_many_features_are_updated_once(policy):
    norms = [nn.BatchNorm1d(2**14 + 1, affine=False).double() for _ in range(2)]
    for norm, wrap in zip(norms, (plainly, remat), strict=True):
        options = {"policy": policy} if wrap is remat else {}
        kept = [norm.running_mean]  # found first, and as something else

        def called(x, norm=norm, kept=kept):
            return norm(x.sin()).tanh() + 0 * kept[0].detach()

        fn = wrap(called, **options)
        x = leaf(shape=(3, 2**14 + 1))
        with count_ops() as ops:
            fn(x).square().sum().backward()
        assert ops["native_batch_norm"] == (1 if wrap is plainly else 2)
        assert x.grad.any()
    assert_same(*([*norm.buffers()] for norm in norms))


def test_a_batch_norm_that_is_passed_as_an_argument():
    def program(wrap, note):
        norm, x = nn.BatchNorm1d(4).double(), leaf(2)

        def fn(norm, x):
            note(None)
            return norm(x.sin()).exp()

        wrap(fn)(norm, x).sum().backward()
        return x.grad, norm.weight.grad, norm.running_mean, norm.num_batches_tracked

    assert_as_plain(program)


# --- Parametrizations that are cached ---


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight):
        return weight * self.scale


def test_parametrizations_are_cached_in_a_recomputation_as_they_were():
    """The second call finds what the first computed, which its recompute does."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    parametrize.register_parametrization(layer[0], "weight", Scaled())
    scale = layer[0].parametrizations.weight[0].scale
    x = torch.randn(2, 4)

    def run(wrap):
        with count_ops() as ops:
            with parametrize.cached():
                y = wrap(layer)(wrap(layer)(x).sin()).sin()
            gradient = torch.autograd.grad(y.sum(), scale)
        return gradient, ops["addmm"]

    assert_recomputed(run, 2, 2 * 2)


def test_parametrizations_are_computed_in_a_recomputation_if_they_were():
    """Though the backward runs where others are cached."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    parametrizations.weight_norm(layer[0])
    x, weights = torch.randn(2, 4), [*layer.parameters()]
    want = torch.autograd.grad(layer(x).sum(), weights)
    y = remat(layer)(x).sum()
    with parametrize.cached(), count_ops() as ops:
        layer(x)
        got = torch.autograd.grad(y, weights)
    assert_same(got, want)
    assert ops["_weight_norm_interface"] == 1 + 1
