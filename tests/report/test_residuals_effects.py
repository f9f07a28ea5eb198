"""`saved_residuals` is a report: it leaves everything as it was, and keeps nothing."""

import gc
import random
import weakref

import pytest
import torch
from support.kept import leaves
from support.zoo import W, X, make, plainly
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import dropout

from remat import remat as ckpt, saved_residuals


plain_and_remat = pytest.mark.parametrize("wrap", [plainly, ckpt])


# --- What it leaves as it was ---


@plain_and_remat
def test_buffers_and_their_versions_are_as_before(wrap):
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    versions = [b._version for b in module.buffers()]
    addresses = [b.data_ptr() for b in module.buffers()]
    saved_residuals(wrap(module), torch.randn(8, 4))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert [b._version for b in module.buffers()] == versions
    assert [b.data_ptr() for b in module.buffers()] == addresses


@plain_and_remat
def test_random_streams_are_as_before(wrap):
    generator = torch.Generator().manual_seed(3)

    def f(x):
        noise = torch.randn(4, generator=generator) + random.random()
        return dropout(x, 0.5) * noise

    states = torch.get_rng_state(), generator.get_state(), random.getstate()
    saved_residuals(wrap(f), torch.ones(4))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    assert random.getstate() == states[2]


def test_arguments_changed_in_place_are_as_before():
    x, leaf = torch.ones(4), torch.ones(4, requires_grad=True)
    h = leaf.exp()
    node, values = h.grad_fn, h.detach().clone()

    def f(x, h):
        x.add_(1)
        return (h.mul_(2) * x).exp()

    saved_residuals(f, x, h)
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(h, values)
    assert (x._version, h._version, h.grad_fn) == (0, 0, node)
    saved_residuals(f, x, values)  # where nothing requires grad
    assert torch.equal(x, torch.ones(4))


def test_gradients_are_as_before():
    (x,) = leaves((4,))
    y = make(4, seed=3).requires_grad_()
    y.grad = torch.ones_like(y)

    def f(x):
        (x * y).sum().backward()
        return x.sin()

    saved_residuals(f, x)
    assert x.grad is None
    assert torch.equal(y.grad, torch.ones_like(y))


def test_everything_is_put_back_after_an_error():
    x = torch.ones(4)

    def f(x):
        x.add_(torch.rand(4))
        raise ValueError("half-way")

    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="half-way"):
        saved_residuals(f, x)
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_report_keeps_nothing_alive():
    x = torch.ones(4)
    outs = []

    def f(x):
        y = x.sin()
        outs.append(weakref.ref(y))
        return y.sin()

    gc.disable()
    try:
        found = saved_residuals(f, x)
        assert [ref() for ref in outs] == [None]
    finally:
        gc.enable()
    assert len(found) == 2


def test_the_gradient_of_the_user_s_own_graph_is_right_after_a_report():
    (x,) = leaves((4,))
    h = x.sin()
    out = h.exp()
    saved_residuals(lambda h: h.mul_(2).exp(), h)
    (actual,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(actual, x.sin().exp() * x.cos())


# --- Tensors without memory ---


def test_a_larger_model_than_memory_on_meta_tensors():
    with torch.device("meta"):
        model, x = nn.Linear(1 << 20, 1 << 20), torch.empty(64, 1 << 20)
        x.requires_grad_()
    found = saved_residuals(lambda x: model(x).sin(), x)
    weight = next(r for r in found if r.origin == "from the captured `model.weight`")
    assert weight.nbytes == 4 << 40
    assert saved_residuals(lambda x: ckpt(model)(x).sin(), x)[-1].nbytes == 256 << 20


@plain_and_remat
def test_fake_tensors_give_the_same_list(wrap):
    def f(w, x):
        return wrap(lambda w, x: torch.tanh(x @ w) @ w)(w, x).exp()

    real = saved_residuals(f, W, X)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (W, X)]
        assert saved_residuals(f, *fakes) == real


@plain_and_remat
def test_a_module_of_fake_or_meta_tensors_keeps_as_many_bytes(wrap):
    def listed(device):
        with torch.device(device):
            norm, x = nn.BatchNorm1d(4), torch.ones(8, 4)
        found = saved_residuals(lambda x: wrap(norm)(x), x)
        return [(r.shape, r.nbytes) for r in found]

    real = listed("cpu")
    with FakeTensorMode():
        assert listed("cpu") == real
    assert listed("meta") == real
