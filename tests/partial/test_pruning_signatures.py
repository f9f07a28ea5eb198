"""Inputs that differ in what a signature might not tell: each call is right anyway.

Shapes, strides, offsets, dtypes, lazy bits, which require grad, which share memory.
"""

import pytest
import torch
from support.pruning import POLICIES, W, X, dead_end, of_backward, traces
from support.zoo import leaves_of, make, scalar
from torch import nn

from remat import policies, remat
from remat.testing import assert_same, count_ops


# Inputs that are lazily conjugated now and then are of one signature.
pytestmark = pytest.mark.filterwarnings("ignore:.* is not followed any more")


everything = policies.everything_saveable


# --- Inputs that differ in what a signature might not tell ---


BIG = make(8, 8, seed=31)
INPUTS = {
    "shape": [BIG[:4, :4].contiguous(), BIG[:2, :6].contiguous(), BIG.clone()],
    "stride": [BIG[:4, :4].contiguous(), BIG[:4, :4], BIG[::2, ::2], BIG[:4, :4].t()],
    "not contiguous": [BIG[:4, :6].clone().t(), BIG[:6, ::2], BIG[:6, 4:]],
    "offset": [BIG[:4], BIG[4:], BIG[1:5], BIG[2:6]],
    "expanded": [
        BIG[:4, :4].clone(),
        BIG[0, :4].expand(4, 4),
        BIG[:4, :1].expand(4, 4),
    ],
    "dtype": [BIG, BIG.float(), BIG.bfloat16(), BIG.to(torch.cfloat)],
    "conj": [BIG.to(torch.cdouble), BIG.to(torch.cdouble).conj() * 1],
    "lazy conj": [BIG.to(torch.cdouble), BIG.to(torch.cdouble).conj()],
    "negative bit": [BIG, torch._neg_view(BIG), BIG],
    "empty": [BIG, BIG[:0], BIG[:, :0]],
    "no dimensions": [BIG[0, 0].clone(), BIG[0, 1], BIG[0, :1].clone()],
    "parameter": [BIG, nn.Parameter(BIG.clone()), BIG],
    "the same numbers": [BIG, BIG, BIG],
}


def elementwise(x):
    return dead_end((x * 2).exp())


def strides_are_read(x):
    h = x.sin() * 2
    return x.cos() * (h.stride(0) if h.dim() else 7)


def strided(x):
    h = x.exp() * 2 + 0
    return h.as_strided((h.numel() // 2,), (1,), h.storage_offset()) * 3


def reshaped(x):
    return dead_end((x * 2).t().reshape(-1).exp() if x.dim() == 2 else x * 1)


def nothing_needed(x):
    return x * 2 + 1


PROBES = [elementwise, strides_are_read, strided, reshaped, nothing_needed]


@pytest.mark.parametrize("policy", ["nothing", "everything"])
@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("fn", PROBES, ids=lambda fn: fn.__name__)
def test_inputs_of_another_kind(fn, kind, policy):
    ours = remat(fn, policy=POLICIES[policy], prune=True)
    # In each order, several times: what was recorded is of another one.
    for x in [*INPUTS[kind] * 3, *INPUTS[kind][::-1] * 2]:
        with count_ops() as ops:
            got = gradient_of_view(ours, x)
        assert_same(got, gradient_of_view(fn, x))
    assert total_of(ops) >= 1


def total_of(ops):
    return sum(ops.values())


def gradient_of_view(fn, x):
    """The gradient of an input, as it is strided."""
    x = x.detach()
    if not x.is_inference():
        x = x.requires_grad_()
    out = fn(x)
    cotangent = torch.linspace(1, 2, out.numel(), dtype=torch.double).view(out.shape)
    return out, torch.autograd.grad(out, x, cotangent.to(out.dtype))


@pytest.mark.parametrize("policy", POLICIES)
def test_which_inputs_require_grad(policy):
    def fn(x, w):
        return dead_end((x @ w).exp() * w)

    ours = remat(fn, policy=POLICIES[policy], prune=True)
    for flags in [(1, 1), (1, 0), (0, 1), (1, 1), (0, 1), (1, 0)] * 2:
        results = []
        for f in (fn, ours):
            pair = [
                t.clone().requires_grad_(bool(flag))
                for t, flag in zip((X, W), flags, strict=True)
            ]
            wanted = [t for t in pair if t.requires_grad]
            results.append(torch.autograd.grad(scalar(f(*pair)), wanted))
        assert_same(results[1], results[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_inputs_that_share_memory_in_some_calls(policy):
    def fn(a, b):
        return dead_end(a.exp()) + b * 2

    ours = remat(fn, policy=POLICIES[policy], prune=True)
    base = make(8, 4, seed=3)
    pairs = [
        (base[:4], base[4:]),
        (base[:4], base[:4]),
        (base[:4], base[2:6]),
        (base[:4], base[4:].clone()),
    ]
    for a, b in pairs * 3:
        results = []
        for f in (fn, ours):
            a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
            results.append(torch.autograd.grad(scalar(f(a, b)), (a, b)))
        assert_same(results[1], results[0])
        same = a.detach().requires_grad_()
        results = [torch.autograd.grad(scalar(f(same, same)), same) for f in (fn, ours)]
        assert_same(results[1], results[0])


@pytest.mark.parametrize("policy", POLICIES)
def test_training_mode_and_autocast(policy):
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Tanh(), nn.Linear(8, 4))
    ours = remat(module, policy=POLICIES[policy], prune=True)
    x = X.float()
    for call in range(10):
        module.train(call % 2 == 0)
        results = []
        for f in (module, ours):
            torch.manual_seed(call)
            leaf = leaves_of(x)[0]
            with torch.autocast("cpu", torch.bfloat16, enabled=call % 3 == 0):
                out = f(leaf)
            results.append(torch.autograd.grad(scalar(out), leaf))
        assert_same(results[1], results[0])
    module.train()


def test_meta_tensors():
    def fn(x):
        return dead_end((x * 2).exp())

    ours = remat(fn, prune=True)
    for _ in range(3):
        x = torch.empty(3, 5, device="meta", requires_grad=True)
        (got,) = torch.autograd.grad(ours(x).sum(), x)
        assert (got.shape, got.device.type) == ((3, 5), "meta")
        assert_same(of_backward(ours, (BIG,)), of_backward(fn, (BIG,)))
    assert [t.misfits for t in traces()] == [0, 0]
