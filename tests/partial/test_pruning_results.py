"""What goes in and out under `prune=True`: every kind of tensor, any shape of results.

Sparse, complex, quantized and integer tensors, of no elements or dimensions; results
that are inputs, views, nested or none, used in any combination and changed in place.
"""

import pytest
import torch
from support.pruning import (
    Cases,
    W,
    X,
    assert_exact,
    dead_end,
    each_case,
    each_policy,
    each_policy_and_way,
    strikes,
    total,
)
from support.tables import rows
from support.zoo import leaves_of, make, ops_of, scalar

from remat import remat
from remat.testing import assert_same, count_ops


# --- Tensors that are no strided floating-point numbers ---


class Kinds(Cases, pruned=True):
    def complex_views(x):
        z = torch.view_as_complex(x.view(4, 2, 2) * 1)
        z.mul_(2j)
        return dead_end(torch.view_as_real(z.exp()))

    def integers(x):
        index = (x.detach() * 10).long()
        order = index.flatten().argsort()
        return dead_end(x.flatten()[order].exp() * torch.arange(16)), order, index > 0

    def no_dimensions(x):
        h = x.sum().sin() * 2
        return dead_end(x * h), dead_end(h.exp())

    def low_precision(x):
        h = x.to(torch.bfloat16)
        return dead_end((h.float() @ h.half().float()).exp().double() * x)

    def linear_algebra(x):
        a = x @ x.mT + 3 * torch.eye(4, dtype=x.dtype)
        return dead_end(torch.linalg.cholesky(a).exp() @ torch.linalg.inv(a))

    def sorts(x):
        values, order = x.sin().sort(1)
        best, where = values.topk(2)
        return dead_end(values.exp() + order) * best.sum(), where, x.max(0)


class KindsPerhapsNotPruned(Cases):
    def sparse_inside(x):
        s = torch.eye(4, dtype=x.dtype).to_sparse()
        h = torch.sparse.mm(s, x.sin())
        return dead_end((h * x).exp())

    def sparse_of_the_input(x):
        s = (x * 2).to_sparse()
        return dead_end(torch.sparse.sum(s, 1).to_dense().exp() * x)

    def sparse_csr(x):
        s = torch.eye(4, dtype=x.dtype).to_sparse_csr()
        return dead_end(((s @ x.sin()) * x).exp())

    def complex_with_lazy_conj(x):
        z = torch.complex(x, x.sin())
        h = z.conj() * z.exp() + (z @ z.mH)
        return dead_end(h.real.exp() + h.imag + h.abs())

    def lazy_negative(x):
        z = torch.complex(x, x.cos()).conj()
        return dead_end((z.imag * x).exp() + z.imag)

    def quantized(x):
        q = torch.quantize_per_tensor(x.detach().float(), 0.1, 0, torch.qint8)
        return dead_end((x * q.dequantize()).exp())

    def empty(x):
        nothing = x[:0].sin() * 2
        return dead_end(torch.cat([nothing, x]).exp()), nothing.sum(), nothing


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@each_policy
@each_case(Kinds, KindsPerhapsNotPruned)
def test_tensors_are_no_strided_numbers(case, policy):
    case.check(policy)


@each_policy
def test_an_input_is_sparse(policy):
    fn = lambda s, x: dead_end((torch.sparse.mm(s, x) * x).exp())
    ours = remat(fn, policy=policy, prune=True)

    def gradients(fn, call):
        s = make(4, 4, seed=call).relu().to_sparse().requires_grad_(call % 2 == 0)
        (x,) = leaves_of(X)
        wanted = (s, x) if s.requires_grad else (x,)
        return [g.to_dense() for g in torch.autograd.grad(fn(s, x).sum(), wanted)]

    for call in range(5):
        assert_same(gradients(ours, call), gradients(fn, call))


@each_policy
def test_an_input_is_complex(policy):
    fn = lambda z: dead_end((z.conj() * z.exp()).abs() + z.imag)

    def gradient(fn, z):
        leaf = z.detach().clone().requires_grad_()
        view = leaf.conj() if z.is_conj() else leaf
        return torch.autograd.grad(scalar(fn(view)), leaf)

    z = torch.complex(X, W)
    for at in (z, z.conj(), z.mH):
        ours = remat(fn, policy=policy, prune=True)
        for _ in range(4):
            assert_same(gradient(ours, at), gradient(fn, at))


# --- Results ---


def results(x, w):
    h = x.sin() * w
    return {
        "input": x,
        "view": w.t(),
        "views": h.split(2),
        "none": None,
        "list": [h.exp().sin(), [dead_end(h)]],
        "integers": (h.argmax(), 3, "text"),
        "detached": h.detach(),
        "empty": h[:0],
        "again": h,
        "constant": torch.ones(2),
    }


@each_policy_and_way
def test_results_are_of_every_kind(policy, way):
    assert_exact(results, X, W, policy=policy, way=way)


def several(x, w):
    """Results that need different inputs and values."""
    a = torch.tanh(x @ w)
    return a.exp(), dead_end(a), x * 2, w.sin().sin(), (x + w) @ W


SUBSETS = [(0,), (1,), (2,), (3,), (4,), (0, 3), (1, 2), (2, 4), (0, 1, 2, 3, 4)]
ORDERS = {
    "as listed": SUBSETS,
    "reversed": SUBSETS[::-1],
    "rotated": SUBSETS[4:] + SUBSETS[:4],
}


@pytest.mark.one_in(3)
@rows("subsets", ORDERS)
@each_policy
def test_results_are_used_in_different_combinations(policy, subsets):
    ours = remat(several, policy=policy, prune=True)

    def gradients(fn, used):
        x, w = leaves_of(X, W)
        outs = fn(x, w)
        loss = sum(outs[j].sin().sum() for j in used)
        return torch.autograd.grad(loss, (x, w), allow_unused=True)

    for used in subsets * 3:
        with count_ops() as ops:
            got = gradients(ours, used)
        assert_same(got, gradients(several, used))
    full = ops_of(lambda: gradients(remat(several, prune=False), subsets[-1]))
    assert total(ops) < total(full)
    assert strikes() == [0]


@each_policy
def test_two_backwards_run_over_one_call(policy):
    ours = remat(several, policy=policy, prune=True)

    def gradients(fn):
        x, w = leaves_of(X, W)
        how = {"retain_graph": True, "allow_unused": True}
        losses = [out.sin().sum() for out in fn(x, w)]
        return [
            torch.autograd.grad(losses[j], (x, w), **how) for j in (0, 1, 2, 3, 4, 0)
        ]

    for _ in range(4):
        assert_same(gradients(ours), gradients(several))
