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
    assert_runs,
    chain_of_three,
    check_grads,
    dot_sin,
    points,
    run,
    settled,
)
from support.rules import SinByRule
from torch import nn
from torch.autograd import Function
from torch.func import grad, jacfwd, jvp, vmap
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from remat import checkpoint_name, remat, saved_residuals
from remat._partial.cache import CACHES
from remat.policies import (
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    save_only_these_names,
    save_ops,
)
from remat.testing import assert_same, count_ops, live_bytes


aten = torch.ops.aten
save_sin = save_ops(aten.sin)

# --- 26, 27: which values are saved ---


def square(x):
    return x * x


class Squared:
    """The same behind an object, as JAX has it behind a jit."""

    def __call__(self, x):
        return x * x


def sin_squared_sin(square):
    return lambda x: square(x.sin()).sin()


POLICIES = {
    "everything": (everything_saveable, 0),
    "nothing": (nothing_saveable, 1),
    "None": (None, 1),
    "sin": (save_sin, 0),
    "names": (save_only_these_names("out"), 1),
}


@pytest.mark.filterwarnings("ignore:remat. the policy has the key 'out'")
@pytest.mark.parametrize("inner", [square, Squared()], ids=["function", "object"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_decides_what_is_recomputed(policy, inner):
    """26: the last sine is not read, and no policy makes it be kept."""
    policy, sines = POLICIES[policy]
    plain = sin_squared_sin(inner)
    fn = remat(plain, policy=policy, prune=True)
    assert_runs(fn, plain, points(3), sin=sines, cos=2)
    check_grads(fn, points(3))


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


@pytest.mark.one_in(3)
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


def test_a_policy_may_count():
    """As torchtitan's does, which saves every second product."""
    count = []

    def every_second(ctx, func, *args, **kwargs):
        count.append(func) if func is aten.mm.default else None
        return func is aten.mm.default and len(count) % 2 == 1

    fn = remat(dot_sin, policy=every_second, prune=True)
    with pytest.warns(UserWarning, match="it counts, or remembers"):
        assert_runs(fn, dot_sin, MATRIX, dot=6 + 1, sin=2)
    assert len(count) == 3 + 1  # one is asked about again, which tells that it counts


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


def test_everything_saveable_keeps_no_more_than_plain_and_recomputes_nothing():
    """d7: it is not the same as no remat."""
    plain = run(chain_of_three, MATRIX)[2]
    fn = remat(chain_of_three, policy=everything_saveable)
    assert_runs(fn, chain_of_three, MATRIX, dot=plain["dot"], exp=0, sin=0)
    x = torch.linspace(0, 1, 1 << 12).view(64, 64).requires_grad_()
    kept = live_bytes(lambda: fn(x))
    assert kept <= live_bytes(lambda: chain_of_three(x))


# --- torch's selective checkpointing ---


def must_save_mm(ctx, func, *args, **kwargs):
    """A policy of torch's."""
    assert isinstance(args[0], torch.Tensor)
    assert not ctx.is_recompute
    if func is aten.mm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(
    "policy",
    [must_save_mm, [aten.mm.default], {aten.mm.default}],
    ids=["function", "list", "set"],
)
def test_policies_of_torch_save_the_same(policy):
    fn = remat(dot_sin, policy=policy)
    assert_runs(fn, dot_sin, MATRIX, dot=6, sin=2)


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
