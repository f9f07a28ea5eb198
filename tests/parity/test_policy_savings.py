"""What JAX's tests say of policies and residuals, restated for eager PyTorch.

Numbers are items of the survey of JAX's tests, letters its list of what users ask for.
JAX's policies see the linearized program, and can save the cosine that a sine is
differentiated with; here the cosine is always computed in the backward.
"""

from functools import partial

import pytest
import torch
from support.policies import (
    BATCH,
    MATRIX,
    assert_runs,
    check_grads,
    dot_sin,
    points,
    settled,
)
from support.rules import SinByRule
from torch.autograd import Function
from torch.func import grad, jacfwd, jvp, linearize, vmap

from remat import checkpoint_name, remat
from remat.policies import (
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    save_only_these_names,
    save_ops,
)
from remat.testing import assert_same


aten = torch.ops.aten
save_sin = save_ops(aten.sin)


# torch's own, of any function under linearize.
# torch's own, of any function under linearize.
LINEARIZE = "ignore:Attempted to insert a get_attr Node:UserWarning"


# --- 26, 27: which values are saved ---


def square(x):
    return x * x


class Squared:
    """The same behind an object, as JAX has it behind a jit."""

    def __call__(self, x):
        return x * x


def sin_squared_sin(square, name=False):
    def fn(x):
        y = square(x.sin()).sin()
        return checkpoint_name(y, "out") if name else y

    return fn


POLICIES = {
    "everything": (everything_saveable, 0),
    "nothing": (nothing_saveable, 1),
    "None": (None, 1),
    "sin": (save_sin, 0),
    "names": (save_only_these_names("out"), 1),
}


@pytest.mark.filterwarnings("ignore:remat. the policy names 'out'")
@pytest.mark.parametrize("inner", [square, Squared()], ids=["function", "object"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_decides_what_is_recomputed(policy, inner):
    """26: the last sine is not read, and no policy makes it be kept."""
    policy, sines = POLICIES[policy]
    plain = sin_squared_sin(inner)
    fn = remat(plain, policy=policy, prune=True)
    assert_runs(fn, plain, points(3), sin=sines, cos=2)
    check_grads(fn, points(3))


@pytest.mark.filterwarnings(LINEARIZE)
@pytest.mark.parametrize("policy", POLICIES)
def test_forward_mode_under_a_policy(policy):
    """26: what `linearize` and `jvp` give is what they give of the plain function."""
    plain = sin_squared_sin(square, name=True)
    fn = remat(plain, policy=POLICIES[policy][0], prune=True)
    x, v = points(3), points(3).flip(0)
    assert_same(jvp(fn, (x,), (v,)), jvp(plain, (x,), (v,)))
    assert_same(jacfwd(fn)(x), jacfwd(plain)(x))
    (actual, push), (expected, plain_push) = linearize(fn, x), linearize(plain, x)
    assert_same((actual, push(v)), (expected, plain_push(v)))


class SinWithCos(Function):
    """A sine that makes its coefficient in the forward, for a policy to save."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin(), checkpoint_name(x.cos(), "cos")

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[1])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, cotangent, _):
        return cotangent * ctx.saved_tensors[0]


@pytest.mark.parametrize(
    ("policy", "sines", "cosines"),
    [
        (save_only_these_names("cos"), 1, 0),
        (save_only_these_names("cos") | save_sin, 0, 0),
        (None, 1, 2),
        (everything_saveable, 0, 0),
        (save_sin, 0, 2),
    ],
    ids=["cos", "both", "None", "everything", "sin"],
)
def test_a_coefficient_named_in_a_custom_rule_is_saved(policy, sines, cosines):
    """27, and `Remat3Test`: by the name that the forward of a custom rule gives it."""

    def plain(x):
        return SinWithCos.apply(square(SinWithCos.apply(x)[0]))[0]

    fn = remat(plain, policy=policy, prune=True)
    assert_runs(fn, plain, points(3), sin=sines, cos=cosines)


# --- 28 to 36: dots ---


def dots_by(equation):
    return partial(dot_sin, dot=partial(torch.einsum, equation))


no_batch = dots_with_no_batch_dims_saveable
# The function, its argument and its policy, and how many products the backward runs.
DOTS = {
    "dots (28)": (dot_sin, MATRIX, dots_saveable, 6),
    "dots without a batch (29)": (dots_by("ij,jk->ik"), MATRIX, no_batch, 6),
    "no_batch_dims (30)": (dots_by("nij,njk->nik"), BATCH, no_batch, 9),
    "dots (30)": (dots_by("nij,njk->nik"), BATCH, dots_saveable, 6),
    "None (30)": (dots_by("nij,njk->nik"), BATCH, None, 9),
}


@pytest.mark.parametrize(
    ("plain", "x", "policy", "products"), DOTS.values(), ids=list(DOTS)
)
def test_saved_dots_are_not_recomputed(plain, x, policy, products):
    """28 to 30: two sines, and two products for each of the three."""
    fn = remat(plain, policy=policy, prune=policy != dots_saveable or "auto")
    assert_runs(fn, plain, x, sin=2, cos=3, dot=products)
    check_grads(fn, x)


@pytest.mark.parametrize(
    ("policy", "dims", "products"),
    [(no_batch, 0, 3), (dots_saveable, 0, 2), (no_batch, (None, 0), 2)],
    ids=["no_batch_dims", "dots", "no_batch_dims, one batched"],
)
def test_under_vmap_a_product_becomes_one_with_a_batch(policy, dims, products):
    """17 of the features: policies see the operations that run, as in JAX."""

    def fn(w, x):
        return (w @ x).sin().sum(0)

    w, x = points(3, 2, 2), points(3, 2, 2).flip(0)
    given = (w, x) if dims == 0 else (w[0], x)
    batched = vmap(remat(fn, policy=policy, prune=True), dims)
    assert_runs(batched, vmap(fn, dims), *given, dot=products)


@pytest.mark.parametrize(
    ("policy", "products"), [(dots_saveable, 8), (nothing_saveable, 12)], ids=repr
)
def test_a_loop_of_bodies_under_a_policy(policy, products):
    """32: two bodies, each of which recomputes its one sine that is read inside."""

    def body(x):
        for _ in range(2):
            x = (x @ x * 1e-1).sin()
        return x

    def loop(fn):
        return lambda x: fn(fn(x))

    fn = loop(remat(body, policy=policy, prune=True))
    assert_runs(fn, loop(body), MATRIX, sin=2, cos=4, dot=products)
    check_grads(fn, MATRIX)


class SinInReverse(Function):
    """A sine with a rule in reverse mode only, written the old way."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0].cos()


@pytest.mark.parametrize("rule", [SinByRule, SinInReverse])
def test_custom_rules_between_saved_dots(rule):
    """33 and 34: the policy sees the operations in the rules and those around."""

    def plain(x):
        for _ in range(3):
            x = rule.apply(checkpoint_name(x @ x * 1e-1, "scaled"))
        return x

    fn = remat(plain, policy=dots_saveable)
    assert_runs(fn, plain, MATRIX, sin=2, cos=3, dot=6, mul=3 + 3 + 3)
    fn = remat(plain, policy=dots_saveable | save_only_these_names("scaled"))
    assert_runs(fn, plain, MATRIX, sin=2, cos=3, dot=6, mul=3 + 3)
    check_grads(fn, MATRIX, forward=rule is SinByRule)


def test_a_gradient_inside_with_an_output_that_is_dropped():
    """35."""

    def energy(w, x):
        return (w @ x).tanh().sum(), x.exp()

    def plain(w, x):
        force, _ = grad(energy, 1, has_aux=True)(w, x)
        return (force @ w).sin()

    fn = remat(plain, policy=dots_saveable)
    assert_runs(fn, plain, MATRIX, points(2, 2).flip(0), exp=0)
    check_grads(fn, MATRIX, points(2, 2).flip(0), forward=False)


def test_a_linear_rule_under_a_policy():
    """36: a sum, which saves nothing."""

    class Sum(Function):
        @staticmethod
        def forward(ctx, x):
            ctx.shape = x.shape
            return x.sum()

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent.expand(ctx.shape)

    fn = remat(Sum.apply, policy=dots_saveable, prune=True)
    assert_runs(fn, Sum.apply, MATRIX)
    assert settled(fn, MATRIX) == []
