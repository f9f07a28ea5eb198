"""What JAX's tests say of policies and residuals, restated for eager PyTorch.

Numbers are items of the survey of JAX's tests, letters its list of what users ask for.
JAX's policies see the linearized program, and can save the cosine that a sine is
differentiated with; here the cosine is always computed in the backward.
"""

import warnings
from functools import partial

import pytest
import torch
from support.policies import (
    BATCH,
    MATRIX,
    chain_of_three,
    points,
    run,
)
from torch import nn
from torch.autograd import Function
from torch.func import grad, jacfwd, jvp, vmap
from torch.utils.checkpoint import (
    checkpoint,
    create_selective_checkpoint_contexts,
)

from remat import checkpoint_name, remat, saved_residuals
from remat._partial.decide import CACHES
from remat.policies import (
    dots_saveable,
    save_only_these_names,
)
from remat.testing import assert_same, count_ops, live_bytes


aten = torch.ops.aten


# --- When and how a policy is asked, what it is told, what is refused ---


class Asked:
    """A policy that notes what it is asked about."""

    def __init__(self, answer=False):
        self.answer, self.ops = answer, []

    def __call__(self, op):
        self.ops.append(op)
        return self.answer(op) if callable(self.answer) else self.answer

    def take(self):
        names = [op.packet.__name__ for op in self.ops]
        self.ops.clear()
        return names


def test_without_differentiation_a_policy_is_never_asked():
    def raises(op):
        raise ValueError

    fn = remat(chain_of_three, policy=raises)
    x = MATRIX.clone().requires_grad_()
    assert_same(fn(MATRIX), chain_of_three(MATRIX))
    with torch.no_grad():
        assert_same(fn(x), chain_of_three(MATRIX))
    assert_same(vmap(fn)(BATCH), vmap(chain_of_three)(BATCH))
    with pytest.raises(ValueError, match=r"^$"):
        fn(x)


def test_under_forward_mode_a_policy_is_never_asked():
    policy = Asked()
    fn = remat(chain_of_three, policy=policy)
    jacfwd(fn)(MATRIX)
    jvp(fn, (MATRIX,), (MATRIX,))
    assert policy.take() == []


def test_a_policy_is_asked_once_about_each_operation():
    """And of later calls with the same signature not at all."""
    policy = Asked()
    fn = remat(chain_of_three, policy=policy)
    for expected in (["mm", "sin", "exp"], [], []):
        run(fn, MATRIX)
        assert policy.take() == expected
    run(fn, points(3, 3))
    assert policy.take() == ["mm", "sin", "exp"]


def test_a_policy_is_asked_once_about_what_it_saves_too():
    """Once more if it is the user's code, which may count; and about a new name."""
    policy = Asked(True)

    def plain(x):
        y = (x @ x).sin()
        return checkpoint_name(y.exp(), "name")

    fn = remat(plain, policy=policy)
    run(fn, MATRIX)
    asked = [(op.packet.__name__, *op.names) for op in policy.ops]
    once = [("mm",), ("sin",), ("exp",)]
    assert asked[:3] == once
    assert {*asked} == {*once, ("exp", "name")}
    policy.take()
    run(fn, MATRIX)
    assert policy.take() == []


def test_a_policy_is_told_what_there_is_to_know():
    policy = Asked()

    def fn(x):
        return checkpoint_name(x @ x, "product").sum(0).exp()

    run(remat(fn, policy=policy), MATRIX)
    *_, product = [op for op in policy.ops if op.packet is aten.mm]
    (total,) = [op for op in policy.ops if op.packet is aten.sum]
    assert product.func is aten.mm.default
    assert [v.shape for v in product.inputs] == [(2, 2), (2, 2)]
    (output,) = product.outputs
    assert (output.shape, output.dtype) == ((2, 2), torch.double)
    assert (product.nbytes, product.names) == (32, {"product"})
    assert "test_policy_savings.py" in product.source
    assert "in fn" in product.source
    assert (total.args[1], total.names) == ((0,), frozenset())


@pytest.mark.parametrize("how", ["backward", "grad", "vmap_grad"])
def test_an_exception_of_a_policy_is_the_users(how):
    def fails(op):
        if op.packet is aten.sin:
            raise ZeroDivisionError("of mine")
        return False

    fn = remat(lambda x: chain_of_three(x).sum(), policy=fails)
    transforms = {
        "backward": lambda: fn(MATRIX.clone().requires_grad_()),
        "grad": lambda: grad(fn)(MATRIX),
        "vmap_grad": lambda: vmap(grad(fn))(BATCH),
    }
    with pytest.raises(ZeroDivisionError, match="of mine"):
        transforms[how]()
    assert_same(grad(remat(fn.__wrapped__))(MATRIX), grad(fn.__wrapped__)(MATRIX))


# --- d7: what does nothing says so ---


def test_a_name_that_another_function_gives_is_no_mistake():
    """One policy for a whole model is asked about each of its parts."""
    run(remat(lambda x: checkpoint_name(x.sin(), "elsewhere").sin()), MATRIX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(remat(chain_of_three, policy=save_only_these_names("elsewhere")), MATRIX)


# --- torch's selective checkpointing ---


class Mlp(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def selective(fn, x):
    """torch's selective checkpointing, of the operations that dots_saveable saves."""
    ops = [aten.addmm.default, aten.mm.default]
    contexts = partial(create_selective_checkpoint_contexts, ops)
    return checkpoint(
        fn, x, use_reentrant=False, context_fn=contexts, preserve_rng_state=False
    )


def test_an_mlp_keeps_its_first_product_and_not_its_second():
    """A sum reads nothing of what it adds up; torch's own checkpoint keeps it."""
    torch.manual_seed(0)
    mlp = Mlp()
    x = torch.randn(64, 32, requires_grad=True)
    fn = remat(mlp, policy=dots_saveable)
    for _ in range(2):
        expected = torch.autograd.grad(mlp(x).sin().sum(), [x, *mlp.parameters()])
        with count_ops() as forward:
            out = fn(x).sin().sum()
        with count_ops() as backward:
            actual = torch.autograd.grad(out, [x, *mlp.parameters()])
        assert_same(actual, expected)
        assert forward["addmm"] == 2
        assert backward["addmm"] == 0
        assert backward["mm"] == 4
        assert backward["gelu"] == 1
    kept = [r for r in saved_residuals(fn, x) if "output of" in r.origin]
    assert [(r.origin, r.shape) for r in kept] == [("output of addmm", (64, 128))]
    assert kept[0].source.endswith("in forward")
    result, up, down = 64 * 32 * 4, 64 * 128 * 4, 64 * 32 * 4
    CACHES.clear()
    for _ in range(3):
        assert live_bytes(lambda: fn(x)) == result + up
    assert live_bytes(lambda: selective(mlp, x)) == result + up + down


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
