"""What the tests of JAX, Equinox, flax and haiku say of residuals and custom rules.

Numbers are items of the survey of JAX's tests. Those of transforms and loops are rows
of `test_golden.py` and `test_nestings.py`. Values that leave a call (23) and prints are
in `whole/test_docs_limits.py`; layers, state and what goes in and out are programs of
`support.adversarial`.
"""

import torch
from support.compared import points
from torch.autograd import Function

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes


# --- Forwarded values, and cotangents that do not exist ---


def test_a_residual_that_is_also_an_output_is_kept_once_without_a_policy():
    """Remat3Test: exp's result is its own residual; the output is all there is."""
    x = points(1000).requires_grad_()

    def f(x):
        y = x.sin().exp()
        return y, y.exp()

    assert live_bytes(lambda: remat(f)(x)) == 2 * x.nbytes
    assert live_bytes(lambda: f(x)) == 2 * x.nbytes  # sin keeps x, exp its result
    with count_ops() as ops:
        got = torch.autograd.grad(sum(remat(f)(x)).sum(), x)
    assert ops["exp"] == 4
    assert_same(got, torch.autograd.grad(sum(f(x)).sum(), x))


def test_what_is_saved_for_the_backward_is_the_input_itself():
    """lax_control_flow: the residual for `xs` is forwarded, not copied."""
    x = points(3).requires_grad_()
    second = remat(lambda x: x.sin().sin())(x).grad_fn
    (first, _), *_ = second.next_functions
    with count_ops() as ops:
        assert first._saved_self.data_ptr() == x.data_ptr()
    assert ops["sin"] == 0
    with count_ops() as ops:
        saved = second._saved_self
    assert ops["sin"] == 1
    assert_same(saved.detach(), x.detach().sin())


# --- Custom derivatives ---


class TwoOutputs(Function):
    """Its backward is told which cotangent is missing."""

    missing: list[tuple[bool, bool]] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.exp()

    @staticmethod
    def backward(ctx, of_sin, of_exp):
        TwoOutputs.missing.append((of_sin is None, of_exp is None))
        (x,) = ctx.saved_tensors
        return of_sin * x.cos()


def test_a_custom_rule_sees_which_cotangents_do_not_exist():
    """custom_api_test: symbolic zeros."""
    TwoOutputs.missing.clear()
    x = points(3).requires_grad_()
    with count_ops() as ops:
        remat(lambda x: TwoOutputs.apply(x.sin()))(x)[0].sum().backward()
    assert TwoOutputs.missing == [(False, True)]
    assert ops["sin"] == 2 + 2
    assert_same(x.grad, x.detach().sin().cos() * x.detach().cos())
