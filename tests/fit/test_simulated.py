"""A simulated step holds the bytes that a real one holds, and nothing is allocated."""

import copy
import random
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from support.fitted import (
    CASES,
    Lm,
    assert_predicted,
    bytes_before,
    measured_peak,
    square,
)
from support.storages import Sample, bytes_not_known, compared
from support.tables import crossed
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import remat
from remat import policies
from remat._fit.simulate import TrainingStep, copied, isolated, simulate
from remat._report.timeline import allocated
from remat._torch.tensors import fake_mode
from remat.testing import count_ops, memory_timeline


CPU = torch.device("cpu")
CHOICES = {
    "plain": None,
    "nothing": policies.nothing_saveable,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
}


def unchanged(step):
    return step


def applied(policy):
    def change(step):
        if policy is not None:
            remat.nn.apply(step.model(), policy=policy)
        return step

    return change


def simulated(model, args=(), kwargs=None, loss=None, change=unchanged, **more):
    step = TrainingStep(model, args, kwargs or {}, loss)
    with isolated():
        return simulate(step, CPU, change, **more)


# --- Against what is measured ---


@crossed("name, choice", CASES, CHOICES)
def test_the_peak_is_the_measured_one(name, choice):
    make, args, kwargs, loss = CASES[name]
    model = make()
    found = simulated(model, args, kwargs, loss, applied(CHOICES[choice]))
    real = copy.deepcopy(model)
    if CHOICES[choice] is not None:
        remat.nn.apply(real, policy=CHOICES[choice])
    assert_predicted(found.peak, measured_peak(real, args, kwargs, loss))
    assert found.resident == bytes_before(model, *args, *kwargs.values())


@pytest.mark.parametrize("predicted", [979, 1051])
def test_a_wrong_prediction_is_noticed(predicted):
    assert_predicted(1000, 1000)
    with pytest.raises(AssertionError, match=str(predicted)):
        assert_predicted(predicted, 1000)


class Op(nn.Module):
    """A module, or a function, on inputs that have a graph."""

    def __init__(self, fn):
        super().__init__()
        self.fn, self.scale = fn, nn.Parameter(torch.ones(()))

    def forward(self, *args):
        return self.fn(*(a * self.scale if a.is_floating_point() else a for a in args))


IMAGE, WIDE = torch.randn(4, 16, 16, 16), torch.randn(128, 64)
Q, PATCHES = torch.randn(2, 4, 64, 16), torch.randn(4, 16 * 9, 256)
BAGS, SIGNS = torch.arange(64 * 64).view(64, 64) % 128, torch.ones(128, 64).long()
HALF = torch.randn(128, 64).bfloat16()
OPS = {
    "conv": (nn.Conv2d(16, 16, 3, padding=1), IMAGE),
    "conv with strides": (nn.Conv2d(16, 32, 3, 2, 1), IMAGE),
    "conv 1x1": (nn.Conv2d(16, 32, 1), IMAGE),
    "conv of one image": (nn.Conv2d(16, 16, 3), torch.randn(1, 16, 8, 8)),
    "conv 1d": (nn.Conv1d(16, 16, 3), torch.randn(4, 16, 128)),
    "conv 3d": (nn.Conv3d(16, 16, 3), torch.randn(2, 16, 8, 8, 8)),
    "conv channels last": (
        nn.Conv2d(16, 16, 3, padding=1),
        IMAGE.to(memory_format=torch.channels_last),
    ),
    "conv of a wide weight": (
        nn.Conv2d(128, 128, 3, padding=1),
        torch.randn(2, 128, 4, 4),
    ),
    "conv by channel": (
        nn.Conv2d(40, 40, 7, padding=3, groups=40),
        torch.randn(2, 40, 8, 8),
    ),
    "conv by channel, last": (
        nn.Conv2d(16, 16, 7, padding=3, groups=16),
        IMAGE.to(memory_format=torch.channels_last),
    ),
    "conv of pixels": (nn.Conv2d(64, 128, 1), torch.randn(4, 64, 1, 1)),
    "conv of groups": (nn.Conv2d(48, 48, 3, groups=12), torch.randn(4, 48, 16, 16)),
    "conv transposed": (nn.ConvTranspose2d(16, 16, 4, 2, 1), IMAGE),
    "batch norm": (nn.BatchNorm2d(16), IMAGE),
    "group norm": (nn.GroupNorm(4, 16), IMAGE),
    "layer norm": (nn.LayerNorm(64), WIDE),
    "max pool": (nn.MaxPool2d(2), IMAGE),
    "bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE),
    "attention": (functional.scaled_dot_product_attention, Q, Q + 1, Q + 2),
    "gelu": (functional.gelu, WIDE),
    "mse": (functional.mse_loss, WIDE, WIDE + 1),
    "cross entropy": (functional.cross_entropy, WIDE, torch.arange(128) % 64),
    "indices": (lambda a, i: a[i].sin(), WIDE, torch.arange(128) % 64),
    "einsum": (lambda a, b: torch.einsum("ik,jk->ij", a, b), WIDE, WIDE + 1),
    "fold": (lambda a: functional.fold(a, (16, 16), 3, padding=1), PATCHES),
    "bag": (lambda a, i: functional.embedding_bag(i, a, mode="sum"), WIDE, BAGS),
    "bag of means": (lambda a, i: functional.embedding_bag(i, a), WIDE, BAGS),
    "bag of most": (
        lambda a, i: functional.embedding_bag(i, a, mode="max"),
        WIDE,
        BAGS,
    ),
    "soft margin": (
        lambda a, i: functional.soft_margin_loss(a, 1.0 * i[:, :64]),
        *(WIDE, SIGNS),
    ),
    "multilabel margin": (
        lambda a, i: functional.multilabel_margin_loss(a, i[:, :64]),
        *(WIDE, SIGNS),
    ),
    "multilabel soft margin": (
        lambda a, i: functional.multilabel_soft_margin_loss(a, i[:, :64]),
        *(WIDE, SIGNS),
    ),
    "most of a row": (lambda a: a.amax(1), WIDE),
    "a mask in a product": (lambda a: a * (WIDE > 0), WIDE),
    "a product of two types": (lambda a: a * HALF, WIDE),
    "spectrum": (lambda a: torch.fft.fft2(a).abs(), WIDE),
    "checkpoint": (
        lambda x: checkpoint(torch.tanh, x, use_reentrant=False).exp(),
        torch.randn(1024, 64),
    ),
    "autocast": (lambda x: autocast(x, WIDE.t() + 1), WIDE),
}


def autocast(x, w):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ w).relu()


@pytest.mark.parametrize("name", OPS)
def test_what_operations_hold_inside_counts(name):
    fn, *args = OPS[name]
    # oneDNN has other kernels for processors without wide vectors, which hold less.
    is_narrow = torch.backends.cpu.get_cpu_capability() != "AVX512"
    at_most = is_narrow and name == "conv by channel, last"
    assert_made(Op(fn), args, square, at_most=at_most)


def test_a_conv_of_patches_holds_columns():
    image = torch.randn(2, 3, 64, 64)
    assert_made(nn.Conv2d(3, 128, 16, 16), (image,), square)


@pytest.mark.parametrize("name", ["conv", "layer norm", "gelu", "einsum", "max pool"])
def test_expanded_gradients_are_copied_inside(name):
    fn, *args = OPS[name]
    assert_made(Op(fn), args, torch.sum)


def assert_made(model, args, loss, *, at_most=False):
    """Assert that what a step makes is predicted: what is there before hides much."""
    found = simulated(model, tuple(args), loss=loss)
    before = bytes_before(model, *args)
    measured = measured_peak(model, args, {}, loss)
    if at_most and measured < found.peak:
        return
    assert_predicted(found.peak - before, measured - before)


def test_sums_of_gradients_are_made_in_place_where_the_engine_does_so():
    def fan(x):
        y = x.exp()
        return y.sin() + y.cos() + y.tanh()

    model = Op(fan)
    found = simulated(model, (WIDE,), loss=torch.sum)
    real = measured_peak(model, (WIDE,), {}, torch.sum)
    assert found.peak == real


def test_a_tied_gradient_is_added_in_place():
    model = Lm(tied=True, words=4000, width=8, count=1)
    ids = torch.arange(16).view(1, 16)
    found = simulated(model, (ids,), loss=torch.sum)
    assert found.peak == measured_peak(model, (ids,), {}, torch.sum)


def test_gradients_that_exist_count():
    model = nn.Linear(64, 64)
    first = simulated(model, (WIDE,))
    model(WIDE).sum().backward()
    assert simulated(model, (WIDE,)).resident == first.resident + 4 * 65 * 64


def test_a_gradient_that_is_a_view_is_copied_alone():
    model = nn.Linear(64, 64, bias=False)
    flat = torch.ones(100, 64, 64)
    model.weight.grad = flat[3]
    step = TrainingStep(model, (WIDE,), {}, None)
    grad = copied(step, nullcontext(), CPU).fn.weight.grad
    assert grad.untyped_storage().nbytes() == 4 * 64 * 64
    assert torch.equal(grad, flat[3])


def test_storages_are_counted_once():
    model = nn.Bilinear(64, 64, 4, bias=False)
    base = torch.randn(256, 64)
    found = simulated(model, (base[:128], base[128:]))
    assert found.resident == base.nbytes + 4 * 64 * 64 * 4


def test_a_model_that_was_not_passed_is_refused():
    model = nn.Linear(64, 64)
    with pytest.raises(remat.CaptureError, match=r"t reads float32\[64, 64\] on cpu"):
        simulated(lambda x: model(x), (WIDE,))
    assert model.weight.grad is None


def test_an_accelerator_allocates_blocks():
    assert allocated(1, torch.device("cuda")) == 512
    assert allocated(513, torch.device("cuda")) == 1024
    assert allocated(513, CPU) == 513


# --- Where the peak is ---


def test_the_peak_is_in_a_block():
    make, args, kwargs, loss = CASES["mlps"]
    found = simulated(make(), args, kwargs, loss, blocks=["1.4", "1.5"])
    assert found.peak_at == "in threshold_backward in the backward of 1.5"


# --- What is left as it was ---


def test_nothing_is_allocated_and_nothing_changes():
    make, args, kwargs, loss = CASES["resnet"]
    model = make()
    before = copy.deepcopy(model.state_dict())
    python, torchs = random.getstate(), torch.get_rng_state()
    timeline = memory_timeline(simulated, model, args, kwargs, loss)
    assert timeline.peak < 100_000  # states of random streams
    assert random.getstate() == python
    assert torch.equal(torch.get_rng_state(), torchs)
    assert all(p.grad is None for p in model.parameters())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_draws_of_python_are_undone():
    def layer_drop(x):
        return x.sin() if random.random() < 2 else x

    state = random.getstate()
    simulated(Op(layer_drop), (WIDE,))
    assert random.getstate() == state


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", ["meta", "fake"])
def test_a_model_without_memory(where):
    make, args, kwargs, loss = CASES["lm"]
    with torch.device("meta") if where == "meta" else fake_mode():
        model = make()
    expected = simulated(make(), args, kwargs, loss)
    found = simulated(model, args, kwargs, loss)
    assert (found.peak, found.resident) == (expected.peak, expected.resident)


# --- Results of fake kernels, of which `test_opinfo_storages.py` compares all ---


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


MASK = torch.arange(128 * 64).view(128, 64) % 3 > 0
ROWS = MASK[:, 1].clone()
# Larger than those of the database.
LARGE = {
    "a mask": (lambda x: x[MASK], (leaf(128, 64),)),
    "rows of a mask": (lambda x: x[ROWS], (leaf(128, 64),)),
    "what a mask fills": (
        lambda x: x.clone().index_put((MASK,), torch.zeros(())),
        (leaf(128, 64),),
    ),
    "var_mean": (lambda x: torch.var_mean(x, -1), (leaf(128, 64),)),
}


TARGET = torch.full((8, 4), 0.5)
# Each computes all terms, and a scalar in a storage of their size.
LOSSES = {
    "mse_loss": leaf(8, 4),
    "binary_cross_entropy": leaf(8, 4).detach().sigmoid().requires_grad_(),
    "smooth_l1_loss": leaf(8, 4),
    "soft_margin_loss": leaf(8, 4),
}


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", LOSSES)
def test_sums_of_losses_are_as_large_as_fit_knows(name, reduction):
    loss = lambda *args: getattr(functional, name)(*args, reduction=reduction)
    comparing = compared(SimpleNamespace(op=loss), [Sample(LOSSES[name], TARGET)])
    assert not comparing.differ
    assert any(name in seen for seen in comparing.seen)


@pytest.mark.parametrize("name", LARGE)
def test_what_large_operations_hold_is_known(name):
    fn, leaves = LARGE[name]
    assert abs(bytes_not_known(SimpleNamespace(op=fn), Sample(*leaves))) <= 200


def test_an_empty_batch_holds_nothing():
    layer = Sample(leaf(0, 4, 4), leaf(0, 4, 4))
    assert bytes_not_known(SimpleNamespace(op=torch.bmm), layer) == 0


# --- On fake tensors a recompute follows its plan, also past the updates of buffers ---


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_batch_normalization_is_replayed(policy):
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        fn = remat.remat(model, policy=policy)
        x = torch.randn(2, 3, 8, 8, requires_grad=True)
        fn(x).sum().backward()  # is recorded
        with count_ops() as ops:
            fn(x).sum().backward()
    assert ops["convolution"] == (2 if policy is None else 1)
    assert ops["native_batch_norm"] == 2
