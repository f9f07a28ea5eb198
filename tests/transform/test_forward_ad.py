"""Forward mode of plain autograd: `torch.autograd.forward_ad`."""

import pytest
import torch
from support.zoo import (
    BIG,
    DEPTH,
    ZOO,
    V,
    W,
    X,
    and_backward,
    assert_rematerialized,
    assert_zoo_rematerialized,
    block,
    counted,
    evaluations_at_base,
    leaves_of,
    matmul,
)
from torch.autograd.forward_ad import dual_level, make_dual, unpack_dual

from remat import remat
from remat.testing import count_ops, live_bytes


def parts(dual):
    primal, tangent = unpack_dual(dual)
    return primal, tangent


def forward(loss, w, x):
    with dual_level():
        return parts(loss(make_dual(w, V), make_dual(x, W)))


def forward_one_tangent(loss, w, x):
    with dual_level():
        return parts(loss(w, make_dual(x, V)))


def forward_without_grad_mode(loss, w, x):
    with dual_level(), torch.no_grad():
        return parts(loss(make_dual(w, V), x))


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize(
    "transform",
    [forward, forward_one_tangent, forward_without_grad_mode],
    ids=["both", "one", "no_grad"],
)
def test_forward_mode_evaluates_once(transform, case):
    assert_zoo_rematerialized(
        and_backward(transform),
        case,
        plain=1 + 1,
        evaluations=1 + evaluations_at_base(case),
    )


def forward_over_reverse(loss, w, x):
    w, x = leaves_of(w, x)
    with dual_level():
        value = loss(make_dual(w, V), make_dual(x, V))
        grads = torch.autograd.grad(value, (w, x))
        return parts(value), [parts(g) for g in grads]


def reverse_of_the_value(loss, w, x):
    w, x = leaves_of(w, x)
    with dual_level():
        value, _ = parts(loss(make_dual(w, V), x))
        value.backward()
        return w.grad, x.grad


# Evaluations: the value and its tangent; then the gradient and, where it has one, its
# tangent, from one recomputation on dual numbers.
OVERS = {
    "forward_over_reverse": (forward_over_reverse, 3),
    "reverse_of_the_value": (reverse_of_the_value, 3),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", OVERS)
def test_with_a_backward(how, case):
    transform, evaluations = OVERS[how]
    assert_zoo_rematerialized(transform, case, evaluations=evaluations)


# In plain torch the tangents of softmax, logsumexp and layer_norm change in place what
# their own backward reads, and a backward through them raises.
@pytest.mark.parametrize("case", [c for c in ZOO if c not in ("reductions", "network")])
def test_reverse_over_forward(case):
    def transform(loss, w, x):
        w, x = leaves_of(w, x)
        with dual_level():
            _, tangent = parts(loss(make_dual(w, V), make_dual(x, V)))
            return torch.autograd.grad(tangent, (w, x))

    # The value, the tangent, and one recomputation of each. Reassociated: second order.
    assert_zoo_rematerialized(transform, case, evaluations=4, reassociated=True)


def test_outputs_without_a_tangent():
    def transform(f):
        x, y = leaves_of(W, X)
        with dual_level():
            outs = f(make_dual(x, V), y)
            first, *others = [parts(t)[1] for t in outs]
            # Where plain has none, a call may give zero.
            assert all(t is None or not t.any() for t in others)
            outs[1].sum().backward()
            # Detached: a constant output of a call that is recorded may require grad.
            return [out.detach() for out in outs], first, x.grad, y.grad

    def fn(x, y):
        return x.sin(), y.exp(), x.argmax(), y.detach().cos()

    assert_rematerialized(transform, fn, evaluations=3)


def test_an_input_without_a_tangent_within_a_dual_level():
    def transform(f):
        w, x = leaves_of(W, X)
        with dual_level():
            out = f(w, x)
            assert unpack_dual(out).tangent is None
            out.sum().backward()
        return w.grad, x.grad

    assert_rematerialized(transform, matmul, evaluations=2)


def test_a_dual_level_that_is_gone():
    def transform(f):
        w, x = leaves_of(W, X)
        with dual_level():
            out = f(make_dual(w, V), x)
        out.sum().backward()
        return w.grad, x.grad

    assert_rematerialized(transform, matmul, evaluations=3)


def test_an_input_returned_as_it_is():
    def transform(f):
        w, x = leaves_of(W, X)
        with dual_level():
            outs = f(make_dual(w, V), make_dual(x, V))
            got = [parts(t) for t in outs]
            (outs[0] * outs[1]).sum().backward()
        return got, w.grad

    assert_rematerialized(transform, lambda w, x: (w, w.sin() * x), evaluations=3)


def test_captured_tensors():
    def transform(f):
        w, x = leaves_of(W, X)
        with dual_level():
            dual = make_dual(w, V)
            out = f(lambda x: (x @ dual).tanh(), x)
            got = parts(out)
            out.sum().backward()
        return got, w.grad, x.grad

    assert_rematerialized(transform, lambda g, x: g(x), evaluations=3)


def test_ops_of_forward_over_reverse():
    def ops_of(fn):
        (x,) = leaves_of(X)
        with dual_level(), count_ops() as ops:
            torch.autograd.grad(fn(make_dual(x, V)).sum(), x)
        return ops["sin"]

    def fn(x):
        return x.cos().sin()

    plain, ours = ops_of(fn), ops_of(remat(fn, prune=False))
    assert ours > plain


def test_after_the_forward_only_inputs_and_tangents_are_alive():
    def keep(fn):
        (x,) = leaves_of(BIG)
        with dual_level():
            return unpack_dual(fn(make_dual(x, BIG.cos())))

    one = BIG.nbytes
    assert live_bytes(lambda: keep(block)) > DEPTH * one
    # The input and its tangent, twice the primals and tangents of the output.
    assert live_bytes(lambda: keep(remat(block))) <= 5 * one


def test_the_level_of_the_caller_is_left_as_it_was():
    fn, calls = counted(matmul)
    w, x = leaves_of(W, X)
    with dual_level():
        dual = make_dual(w, V)
        remat(fn)(dual, x).sum().backward()
        assert unpack_dual(dual).tangent is V
        with pytest.raises(RuntimeError, match="Nested forward mode AD is not supp"):
            dual_level().__enter__()
    assert len(calls) == 3
    assert torch.autograd.forward_ad._current_level == -1
