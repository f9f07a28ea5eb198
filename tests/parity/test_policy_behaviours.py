"""What JAX's tests say of policies, names and residuals, restated for eager PyTorch.

Numbers are items of the survey of JAX's tests, letters its list of what users ask for.
JAX's policies see the linearized program, and can save the cosine that a sine is
differentiated with; here the cosine is always computed in the backward.
"""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd import Function, gradcheck, gradgradcheck
from torch.func import grad, jacfwd, jacrev, jvp, linearize, vmap
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from remat import checkpoint_name, remat, saved_residuals
from remat._graph import residual as _residual
from remat._offload import offload as _offload
from remat._partial.cache import CACHES
from remat.policies import (
    Decision,
    as_policy,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    offload_dot_with_no_batch_dims,
    register_dot,
    save_and_offload_only_these_names,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_from_both_policies,
    save_larger_than,
    save_names_matching,
    save_only_these_names,
    save_ops,
    save_smaller_than,
)
from remat.testing import assert_same, count_ops, live_bytes


aten = torch.ops.aten
save_sin = save_ops(aten.sin)


def points(*shape, dtype=torch.double):
    size = torch.Size(shape).numel()
    return torch.linspace(0.2, 1.3, size, dtype=dtype).reshape(shape)


DOTS = {"mm", "bmm", "mv", "addmm", "baddbmm"}


def run(fn, *args):
    """Its gradients, and what ran forward and backward; products count as `dot`."""
    leaves = [x.detach().clone().requires_grad_() for x in args]
    with count_ops() as forward:
        out = fn(*leaves)
    with count_ops() as backward:
        grads = torch.autograd.grad(out.sum(), leaves)
    for ops in (forward, backward):
        ops["dot"] = sum(ops[name] for name in DOTS)
    return grads, forward, backward


def assert_runs(fn, plain, *args, calls=3, **counts):
    """`fn` has the gradients of `plain`, and its backward runs what it is said to."""
    expected, *_ = run(plain, *args)
    for call in range(calls):
        actual, _, backward = run(fn, *args)
        assert_same(actual, expected)
        assert {name: backward[name] for name in counts} == counts, call


def check_grads(fn, *args, forward=True):
    """Both orders, both modes, against differences."""
    args = [x.detach().clone().requires_grad_() for x in args]
    assert gradcheck(fn, args, check_forward_ad=forward)
    assert gradgradcheck(fn, args)


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


def sin_by_function(x):
    return SinWithCos.apply(x)[0]


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
        return sin_by_function(square(sin_by_function(x)))

    fn = remat(plain, policy=policy, prune=True)
    assert_runs(fn, plain, points(3), sin=sines, cos=cosines)


# --- 28 to 36: dots ---


def dot_sin(x, dot=torch.matmul):
    for _ in range(3):
        x = (dot(x, x) * 1e-1).sin()
    return x


def by_einsum(equation):
    return partial(torch.einsum, equation)


MATRIX, BATCH = points(2, 2), points(2, 2, 2)


def test_saved_dots_are_not_recomputed():
    """28: two sines, and two products for each of the three."""
    fn = remat(dot_sin, policy=dots_saveable)
    assert_runs(fn, dot_sin, MATRIX, sin=2, cos=3, dot=6)
    check_grads(fn, MATRIX)


def test_dots_without_batch_dimensions_are_saved():
    """29."""
    plain = partial(dot_sin, dot=by_einsum("ij,jk->ik"))
    fn = remat(plain, policy=dots_with_no_batch_dims_saveable)
    assert_runs(fn, plain, MATRIX, sin=2, dot=6)
    check_grads(fn, MATRIX)


@pytest.mark.parametrize(
    ("policy", "products"),
    [(dots_with_no_batch_dims_saveable, 9), (dots_saveable, 6), (None, 9)],
    ids=["no_batch_dims", "dots", "None"],
)
def test_dots_with_batch_dimensions_are_recomputed(policy, products):
    """30."""
    plain = partial(dot_sin, dot=by_einsum("nij,njk->nik"))
    fn = remat(plain, policy=policy, prune=True)
    assert_runs(fn, plain, BATCH, sin=2, dot=products)
    check_grads(fn, BATCH)


def test_under_vmap_a_product_becomes_one_with_a_batch():
    """17 of the features: policies see the operations that run, as in JAX."""

    def fn(w, x):
        return (w @ x).sin().sum(0)

    w, x = points(3, 2, 2), points(3, 2, 2).flip(0)
    for policy, dims, products in (
        (dots_with_no_batch_dims_saveable, 0, 3),
        (dots_saveable, 0, 2),
        (dots_with_no_batch_dims_saveable, (None, 0), 2),
    ):
        rematerialized = remat(fn, policy=policy, prune=True)
        given = (w, x) if dims == 0 else (w[0], x)
        batched = vmap(rematerialized, dims)
        assert_runs(batched, vmap(fn, dims), *given, dot=products)


@pytest.mark.parametrize("policy", [dots_saveable, nothing_saveable], ids=repr)
def test_a_loop_of_bodies_under_a_policy(policy):
    """32: two bodies, each of which recomputes its one sine that is read inside."""

    def body(x):
        for _ in range(2):
            x = (x @ x * 1e-1).sin()
        return x

    def loop(fn):
        return lambda x: fn(fn(x))

    kept = policy == dots_saveable
    fn = loop(remat(body, policy=policy, prune=True))
    assert_runs(fn, loop(body), MATRIX, sin=2, cos=4, dot=8 if kept else 12)
    check_grads(fn, MATRIX)


class SinByRule(Function):
    """A sine with rules of its own, in reverse and in forward mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.sin()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.saved_tensors[0].cos()

    @staticmethod
    def jvp(ctx, tangent):
        return tangent * ctx.saved_tensors[0].cos()


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


# --- 37 to 41: lists of residuals ---


def origins(fn, *args):
    return [r.origin for r in saved_residuals(fn, *args)]


def settled(fn, *args):
    """The residuals of a call whose inputs may be dropped: after a recomputation."""
    for _ in range(2):
        leaves = [x.detach().clone().requires_grad_() for x in args]
        torch.autograd.grad(fn(*leaves).sum(), leaves)
    return origins(fn, *args)


@pytest.mark.parametrize(
    ("fn", "kept"),
    [
        (lambda x: torch.einsum("ii->i", x), []),
        (lambda x: torch.zeros_like(x) * x, []),
        (lambda x: torch.zeros_like(x) * x.sin(), ["from the argument x"]),
        (lambda x: torch.arange(3.0) * x, []),
    ],
    ids=["diagonal", "zeros", "zeros_sin", "arange"],
)
@pytest.mark.parametrize("policy", [None, nothing_saveable, dots_saveable], ids=repr)
def test_constants_are_made_again(fn, kept, policy):
    """37."""
    assert settled(remat(fn, policy=policy, prune=True), points(3, 3)) == kept


def test_a_named_value_is_listed_by_its_name():
    """38: the value named is the product; its square saves it, and nothing more."""

    @partial(remat, policy=save_ops(aten.mul))
    def fn(x):
        x = checkpoint_name(x * x, "foo")
        return x * x

    first, second = origins(fn, points(3))
    assert first == "from the argument x"
    assert second == "named 'foo'"


def test_naming_a_pytree_names_its_leaves():
    """39."""

    @partial(remat, policy=save_only_these_names("both"))
    def fn(x):
        both = checkpoint_name({"sin": x.sin(), "cos": (x.cos(), None, 3)}, "both")
        return (both["sin"] * both["cos"][0]).exp()

    assert origins(fn, points(3)) == ["from the argument x"] + 2 * ["named 'both'"]


def constants(x):
    """Three constants with names and one without."""
    y = checkpoint_name(torch.full((3,), 2.0).double() * 2, "y")
    z = checkpoint_name(torch.full((3,), 3.0).double() * 2, "z")
    w = checkpoint_name(torch.full((3,), 4.0).double() * 2, "w")
    u = torch.full((3,), 5.0).double() * 2
    return x * y * z * w * u


@pytest.mark.parametrize("names", ["", "y", "yz", "yzw"])
def test_names_that_are_not_saved(names):
    """40: what has no name is never kept."""
    fn = remat(constants, policy=save_any_names_but_these(*names), prune=True)
    expected = [f"named '{name}'" for name in "yzw" if name not in names]
    assert settled(fn, points(3)) == expected
    assert_runs(fn, constants, points(3), full=len(names) + 1)


@pytest.mark.parametrize("names", ["", "y", "yz", "yzw"])
def test_names_that_are_saved(names):
    """41."""
    fn = remat(constants, policy=save_only_these_names(*names), prune=True)
    assert settled(fn, points(3)) == [f"named '{name}'" for name in names]
    assert_runs(fn, constants, points(3), full=4 - len(names))


def test_names_under_vmap():
    """42."""

    def plain(x):
        return checkpoint_name(x.sin(), "sin").sin().sum()

    xs = points(4, 3)
    for policy in (save_only_these_names("sin"), None, everything_saveable):
        fn = remat(plain, policy=policy, prune=True)
        assert_same(vmap(fn)(xs), vmap(plain)(xs))
        with count_ops() as ops:
            actual = vmap(grad(fn))(xs)
        assert_same(actual, vmap(grad(plain))(xs))
        assert ops["sin"] == (3 if policy is None else 2)


# --- 54: nested, and what is kept of it ---


def test_only_the_named_value_is_kept_across_nested_calls():
    """54: two calls read it, and it is there once."""
    policy = save_only_these_names("y")

    def plain(wrap, x):
        def inner(y):
            return y.sin().sin()

        def outer(x):
            y = checkpoint_name(x.exp(), "y")
            return wrap(inner)(y) + wrap(inner)(2 * y)

        return wrap(outer)(x)

    wrap = partial(remat, policy=policy, prune=True)
    fn, plain = partial(plain, wrap), partial(plain, lambda fn: fn)
    assert_runs(fn, plain, points(3), exp=0)
    # The constant is the number 2, which torch saves past hooks: 8 bytes.
    assert settled(fn, points(3)) == ["from a constant", "named 'y'"]


def test_a_result_that_is_also_an_output_is_kept_once():
    """`Remat3Test`: what the graph around keeps is not kept again."""

    def fn(x):
        y = checkpoint_name(x.exp(), "y")
        return y, y.sin()

    def live(wrap):
        x = torch.linspace(0, 1, 1 << 12).requires_grad_()
        return live_bytes(lambda: wrap(fn)(x)) // (4 << 12)

    wrap = partial(remat, policy=save_only_these_names("y"))
    assert live(wrap) == 2
    assert_runs(lambda x: sum(wrap(fn)(x)), lambda x: sum(fn(x)), points(3), exp=0)


# --- When and how a policy is asked ---


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


def chain_of_three(x):
    return (x @ x).sin().exp()


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
    """And again about what has got a name since."""
    policy = Asked(True)

    def plain(x):
        y = (x @ x).sin()
        return checkpoint_name(y.exp(), "name")

    fn = remat(plain, policy=policy)
    run(fn, MATRIX)
    asked = [(op.packet.__name__, *op.names) for op in policy.ops]
    assert asked == [("mm",), ("sin",), ("exp",), ("exp", "name")]
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
    assert_runs(fn, dot_sin, MATRIX, dot=6 + 1, sin=2)
    assert len(count) == 3


def test_a_policy_is_told_what_there_is_to_know():
    policy = Asked()

    def fn(x):
        return checkpoint_name(x @ x, "product").sum(0).exp()

    run(remat(fn, policy=policy), MATRIX)
    *_, product = [op for op in policy.ops if op.packet is aten.mm]
    (total,) = [op for op in policy.ops if op.packet is aten.sum]
    assert product.func is aten.mm.default
    assert [v.shape for v in product.inputs] == [(2, 2), (2, 2)]
    assert (product.outputs[0].shape, product.outputs[0].dtype) == (
        (2, 2),
        torch.double,
    )
    assert product.nbytes == 32
    assert product.names == {"product"}
    assert "test_policy_behaviours.py" in product.source
    assert "in fn" in product.source
    assert total.args[1] == (0,)
    assert total.names == frozenset()


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


@pytest.mark.parametrize("answer", [None, 1, "save", torch.ones(())], ids=type)
def test_an_answer_that_is_none_is_refused_with_the_line_it_is_about(answer):
    fn = remat(chain_of_three, policy=lambda op: answer)
    message = (
        rf"returned .*a {type(answer).__name__}, for aten\.mm\.default at "
        r".*test_policy_behaviours\.py:\d+, in chain_of_three"
    )
    with pytest.raises(TypeError, match=message):
        fn(MATRIX.clone().requires_grad_())


@pytest.mark.parametrize("policy", ["dots", 3, True, object(), save_ops], ids=type)
def test_what_is_no_policy_is_refused_when_it_is_given(policy):
    """d7: remat3 takes them, and recomputes all."""
    with pytest.raises(TypeError, match=r"remat: not a policy: .*A policy is one of"):
        remat(chain_of_three, policy=policy)
    with pytest.raises(TypeError, match=r"remat: not a policy: .*A policy is one of"):
        remat(policy=policy)


# --- d5, d6: policies that combine, and products of others ---


def names_and_dots(x, u):
    h = checkpoint_name((x @ u).sin(), "h")
    return checkpoint_name((h @ u.mT).exp(), "out").sin()


@pytest.mark.parametrize(
    ("policy", "dot", "sin", "exp"),
    [
        (None, 2, 1, 1),
        (dots_saveable, 0, 1, 1),
        (save_only_these_names("h"), 2, 0, 1),
        (dots_saveable | save_only_these_names("h"), 0, 0, 1),
        (save_from_both_policies(dots_saveable, save_only_these_names("h")), 0, 0, 1),
        (everything_saveable - save_only_these_names("out"), 0, 0, 1),
        (~dots_saveable, 1, 0, 0),
        (dots_saveable & save_smaller_than(40), 1, 1, 1),
        (save_larger_than(40), 1, 0, 1),
        (save_names_matching("h|o.*"), 1, 0, 0),
        (save_any_names_but_these("h"), 1, 1, 0),
        (save_anything_except_these_names("h"), 0, 1, 0),
        ([aten.mm, aten.sin.default], 0, 0, 1),
        (lambda op: op.packet is aten.exp, 1, 1, 0),
        (Decision.SAVE, 0, 0, 0),
    ],
    ids=[
        "None",
        "dots",
        "h",
        "dots|h",
        "both",
        "everything-out",
        "not_dots",
        "small_dots",
        "large",
        "matching",
        "but_h",
        "except_h",
        "operators",
        "function",
        "SAVE",
    ],
)
@pytest.mark.parametrize("prune", ["auto", True])
def test_combinations_save_what_they_say(prune, policy, dot, sin, exp):
    """Beside what is recomputed there are four products of cotangents."""
    if policy is None and prune == "auto":
        pytest.skip("nothing is recorded of so small a call")
    fn = remat(names_and_dots, policy=policy, prune=prune)
    args = MATRIX, points(2, 3)
    assert_runs(fn, names_and_dots, *args, dot=4 + dot, sin=sin, exp=exp)


def test_an_operator_of_the_users_becomes_a_dot():
    """d6: policies for dots know custom products once they are registered."""

    @torch.library.custom_op("remat_golden::product", mutates_args=())
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    product.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))

    def backward_of_product(ctx, cotangent):
        a, b = ctx.saved_tensors
        return cotangent @ b.mT, a.mT @ cotangent

    def save(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    product.register_autograd(backward_of_product, setup_context=save)

    def plain(x):
        return product(x.sin(), x).exp()

    name = "remat_golden::product"
    fn = remat(plain, policy=dots_saveable, prune=True)
    assert_runs(fn, plain, MATRIX, **{name: 1})
    CACHES.clear()
    register_dot(torch.ops.remat_golden.product)
    assert_runs(fn, plain, MATRIX, **{name: 0})


# --- d7: what does nothing says so ---


def test_a_name_that_nothing_has_is_a_warning_once():
    policy = save_only_these_names("nobody is called so", "nor so")
    fn = remat(chain_of_three, policy=policy)
    with pytest.warns(UserWarning, match="the policy names 'nobody is .*', 'nor so'"):
        run(fn, MATRIX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(fn, MATRIX)


def test_a_name_that_another_function_gives_is_no_mistake():
    """One policy for a whole model is asked about each of its parts."""
    run(remat(lambda x: checkpoint_name(x.sin(), "elsewhere").sin()), MATRIX)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(remat(chain_of_three, policy=save_only_these_names("elsewhere")), MATRIX)


def test_none_and_nothing_saveable_are_the_same_and_are_no_remat_neither():
    """d7: and everything_saveable is not the same as no remat, but keeps as much."""
    plain = run(chain_of_three, MATRIX)[2]
    for policy in (None, nothing_saveable, Decision.RECOMPUTE, as_policy(None)):
        CACHES.clear()
        _, _, ops = run(remat(chain_of_three, policy=policy, prune=True), MATRIX)
        assert ops["dot"] == plain["dot"] + 1
        assert ops["exp"] == plain["exp"] + 1
    CACHES.clear()
    fn = remat(chain_of_three, policy=everything_saveable)
    assert_runs(fn, chain_of_three, MATRIX, dot=plain["dot"], exp=0, sin=0)
    x = torch.linspace(0, 1, 1 << 12).view(64, 64).requires_grad_()
    kept = live_bytes(lambda: fn(x))
    assert kept <= live_bytes(lambda: chain_of_three(x))


def test_saved_names_and_offloaded_names_do_not_overlap():
    """55."""
    with pytest.raises(ValueError, match="'y' can be saved and can be offloaded"):
        save_and_offload_only_these_names(
            names_which_can_be_saved=["x", "y"], names_which_can_be_offloaded=["y"]
        )


# --- d8: what is inside a call that saves nothing ---


def test_the_outer_policy_decides_what_crosses():
    """d8, the golden table: an inner policy rules what is recomputed, and no more."""
    inner = remat(chain_of_three, policy=everything_saveable)
    none_outside = remat(lambda x: inner(x).sin(), policy=None, prune=True)
    assert settled(none_outside, MATRIX) == ["from the argument x"]
    CACHES.clear()
    inner = remat(chain_of_three, prune=True)
    outside = remat(lambda x: inner(x).sin(), policy=everything_saveable, prune=True)
    assert "output of exp" in settled(outside, MATRIX)


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


# --- 55, 57: what is offloaded ---


class Store:
    """Counts what goes away, and what of that is asked back."""

    def __init__(self, monkeypatch):
        self.away, self.back, self._stored = [], [], []
        take = _offload.Fetched.take

        def counting(put):
            def counted(tensor):
                self.away.append(tuple(tensor.shape))
                self._stored.append(put(tensor))
                return self._stored[-1]

            return counted

        def counted_take(fetched, k):
            known = [t.untyped_storage().data_ptr() for t in self._stored]
            tensor = take(fetched, k)
            if tensor.untyped_storage().data_ptr() in known:
                self.back.append(tuple(tensor.shape))
            return tensor

        for decision, put in [*_residual.PUT.items()]:
            monkeypatch.setitem(_residual.PUT, decision, counting(put))
        monkeypatch.setattr(_offload.Fetched, "take", counted_take)

    def taken(self):
        result = self.away, self.back
        self.away, self.back = [], []
        return result


@pytest.fixture
def store(monkeypatch, tmp_path):
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(tmp_path))
    return Store(monkeypatch)


def three_names(x):
    y = checkpoint_name(x.exp(), "y")
    z = checkpoint_name(y[:2].tanh(), "z")
    return checkpoint_name((z @ y.mT).tanh(), "w").sum()


def saved_and_offloaded(saved, offloaded, to):
    return save_and_offload_only_these_names(
        names_which_can_be_saved=saved,
        names_which_can_be_offloaded=offloaded,
        offload_dst=to,
    )


@pytest.mark.parametrize("to", ["disk", "pinned_host"])
def test_what_is_offloaded_is_copied_once_and_brought_back_once(store, to):
    """55: each value goes and comes back once; one that is saved is not copied."""
    fn = remat(three_names, policy=saved_and_offloaded(["y"], ["z"], to))
    x = points(3, 4)
    for _ in range(3):
        assert_runs(fn, three_names, x, calls=1, exp=0, tanh=1)
        assert store.taken() == ([(2, 4)], [(2, 4)])
    CACHES.clear()
    fn = remat(three_names, policy=saved_and_offloaded([], ["y", "z", "w"], to))
    for _ in range(3):
        assert_runs(fn, three_names, x, calls=1, exp=0, tanh=0)
        away, back = store.taken()
        assert away == [(3, 4), (2, 4), (2, 3)]
        assert sorted(back) == sorted(away)


@pytest.mark.parametrize("to", ["disk", "pinned_host"])
@pytest.mark.parametrize("how", ["grad", "vmap_grad", "grad_vmap", "jacrev", "twice"])
def test_offloaded_values_come_back_under_transforms(store, how, to):
    """56: under vmap the batch is one value."""
    xs = points(2, 3, 4)

    def twice(fn):
        x = xs[0].clone().requires_grad_()
        (first,) = torch.autograd.grad(fn(x), x, create_graph=True)
        return torch.autograd.grad(first.sin().sum(), x)[0]

    transforms = {
        "grad": lambda fn: grad(fn)(xs[0]),
        "vmap_grad": lambda fn: vmap(grad(fn))(xs),
        "grad_vmap": lambda fn: grad(lambda xs: vmap(fn)(xs).sum())(xs),
        "jacrev": lambda fn: jacrev(lambda x: fn(x)[None])(xs[0]),
        "twice": twice,
    }
    transform = transforms[how]
    fn = remat(three_names, policy=saved_and_offloaded(["z"], ["y"], to))
    batch = (2,) if "vmap" in how else ()
    for _ in range(3):
        assert_same(transform(fn), transform(three_names))
        away, back = store.taken()
        assert away == [(*batch, 3, 4)]
        assert {*back} == {*away}


def test_dots_without_a_batch_are_offloaded_and_others_recomputed(store):
    """57."""

    def plain(x):
        y = (x @ x).sin()
        stack = torch.stack([y, 2 * y])
        return (stack @ stack.mT).sin()

    fn = remat(plain, policy=offload_dot_with_no_batch_dims(offload_dst="disk"))
    for _ in range(3):
        assert_runs(fn, plain, MATRIX, calls=1, mm=2, bmm=3, sin=1)
        assert store.taken() == ([(2, 2)], [(2, 2)])


def test_without_a_backward_nothing_comes_back(store):
    fn = remat(three_names, policy=saved_and_offloaded([], ["y"], "disk"))
    x = points(3, 4)
    fn(x)
    jvp(fn, (x,), (x,))
    assert store.taken() == ([], [])
    fn(x.requires_grad_())
    assert store.taken() == ([(3, 4)], [])


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@needs_cuda
def test_on_a_device_the_copies_are_one_each_way():
    """55, by what the profiler sees."""
    fn = remat(three_names, policy=saved_and_offloaded([], ["y"], "pinned_host"))
    x = points(300, 400).cuda().requires_grad_()
    fn(x).backward()
    with torch.profiler.profile() as profiler:
        fn(x).backward()
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events()]
    assert sum("Memcpy DtoH" in name for name in names) == 1
    assert sum("Memcpy HtoD" in name for name in names) == 1
