"""Inputs that differ in what a signature might not tell: each call is right anyway.

Shapes, strides, offsets, dtypes, lazy bits, which require grad, which share memory.
"""

import pytest
import torch
from support.pruning import (
    W,
    X,
    assert_exact,
    assert_like_plain,
    assert_not_zero,
    dead_end,
    each_case,
    each_policy,
    given_up,
    nothing_or_everything,
    of_func_grad,
    strikes,
    written,
)
from support.zoo import leaves_of, make, plainly, scalar
from torch import nn

from remat import remat
from remat.testing import assert_same


pytestmark = given_up  # lazily conjugated inputs are of the same signature


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


PROBES = """
elementwise: dead_end((x * 2).exp())
strides are read: h = x.sin() * 2; x.cos() * (h.stride(0) if h.dim() else 7)
strided: h = x.exp() * 2 + 0
    h.as_strided((h.numel() // 2,), (1,), h.storage_offset()) * 3
reshaped: dead_end((x * 2).t().reshape(-1).exp() if x.dim() == 2 else x * 1)
nothing needed: x * 2 + 1
"""


@nothing_or_everything
@pytest.mark.parametrize("kind", INPUTS)
@each_case(written(PROBES, globals()))
def test_an_input_is_of_another_kind(case, kind, policy):
    ours = remat(case.fn, policy=policy, prune=True)
    # In each order, several times: what was recorded is of another one.
    for x in [*INPUTS[kind] * 2, *INPUTS[kind][::-1]]:
        assert_same(gradient_of_view(ours, x), gradient_of_view(case.fn, x))


def gradient_of_view(fn, x):
    """The gradient of an input, as it is strided."""
    x = x.detach().requires_grad_()
    out = fn(x)
    cotangent = torch.linspace(1, 2, out.numel(), dtype=torch.double).view(out.shape)
    return out, torch.autograd.grad(out, x, cotangent.to(out.dtype))


@each_policy
def test_inputs_require_grad_in_some_calls(policy):
    fn = lambda x, w: dead_end((x @ w).exp() * w)
    ours = remat(fn, policy=policy, prune=True)

    def gradients(fn, flags):
        pair = [X.clone().requires_grad_(flags[0]), W.clone().requires_grad_(flags[1])]
        wanted = [t for t in pair if t.requires_grad]
        return torch.autograd.grad(scalar(fn(*pair)), wanted)

    both, first, second = (True, True), (True, False), (False, True)
    for flags in [both, first, second, both, second, first] * 2:
        assert_same(gradients(ours, flags), gradients(fn, flags))


@each_policy
def test_inputs_share_memory_in_some_calls(policy):
    fn = lambda a, b: dead_end(a.exp()) + b * 2
    ours = remat(fn, policy=policy, prune=True)

    def gradients(fn, a, b):
        a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
        return torch.autograd.grad(scalar(fn(a, b)), (a, b))

    def of_the_same(fn, a):
        a = a.detach().requires_grad_()
        return torch.autograd.grad(scalar(fn(a, a)), a)

    base = make(8, 4, seed=3)
    a = base[:4]
    for b in [base[4:], a, base[2:6], base[4:].clone()] * 2:
        assert_same(gradients(ours, a, b), gradients(fn, a, b))
        assert_same(of_the_same(ours, a), of_the_same(fn, a))


def test_some_inputs_are_meta_tensors():
    fn = lambda x: dead_end((x * 2).exp())
    ours = remat(fn, prune=True)
    for _ in range(3):
        x = torch.empty(3, 5, device="meta", requires_grad=True)
        (got,) = torch.autograd.grad(ours(x).sum(), x)
        assert (got.shape, got.device.type) == ((3, 5), "meta")
        assert_like_plain(ours, fn, BIG)
    assert strikes() == [0, 0]


# --- The runner of the pruning cases fails where it should ---


def exp(x):
    return dead_end(x.exp())


def tanh(x, **options):
    return lambda x: dead_end(x.tanh())


def drawn(fn, **options):
    def wrapped(x):
        torch.rand(1)
        return fn(x)

    return wrapped


def in_full(fn, policy, prune):
    return remat(fn, prune=False)


@pytest.mark.parametrize(
    ("wrap", "match"),
    [(tanh, "differs in value"), (drawn, "differs in value"), (in_full, "not pruned")],
)
def test_a_wrong_result_a_moved_stream_or_unpruned_work_is_noticed(wrap, match):
    with pytest.raises(AssertionError, match=match):
        assert_exact(exp, X, pruned=True, wrap=wrap)


def test_a_call_that_is_pruned_is_not_off():
    with pytest.raises(AssertionError, match="not off"):
        assert_exact(exp, X, pruned=False)


def test_more_work_than_a_full_recomputation_is_noticed():
    twice = lambda fn, **options: lambda x: (remat(fn)(x), remat(fn)(x))[0]
    with pytest.raises(AssertionError, match="more than a full recompute"):
        assert_exact(exp, X, wrap=twice, way=of_func_grad)


def test_a_result_that_is_not_plains_is_noticed():
    with pytest.raises(AssertionError, match="differs in value"):
        assert_like_plain(tanh(exp), plainly(exp), X)


def test_zeros_are_noticed():
    with pytest.raises(AssertionError, match="all is zero"):
        assert_not_zero([torch.zeros(2), "text"])


def test_the_loss_of_the_cases_is_curved():
    (x,) = leaves_of(X)
    assert torch.autograd.grad(scalar(x), x)[0].count_nonzero() == x.numel()
