"""Every kind of policy under every transform: equal, and less work if more is kept.

What is compared to plain code is the third of three calls as well as the first: one
records, and those after it follow the record.
"""

from functools import partial

import pytest
import torch
from support.pruning import call_caches, forget_calls, strikes
from support.tables import crossed, rows
from support.transforms import ALL, some
from support.zoo import (
    ZOO,
    W,
    X,
    assert_not_vanishing,
    leaves_of,
    make,
    plainly,
    scalar,
)
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jvp, vmap
from torch.utils.checkpoint import CheckpointPolicy

from remat import checkpoint_name, policies, remat
from remat.policies import (
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    everything_saveable,
    nothing_saveable,
    save_any_names_but_these,
    save_anything_except_these_names,
    save_larger_than,
    save_names_matching,
    save_only_these_names,
    save_ops,
    save_smaller_than,
    within,
)
from remat.testing import assert_same, count_ops


aten = torch.ops.aten


# --- Policies, and functions of two 4x4 matrices that they have something to say of ---


def of_torch(ctx, func, *args, **kwargs):
    return (
        CheckpointPolicy.MUST_SAVE
        if func in (aten.mm.default, aten.exp.default)
        else CheckpointPolicy.PREFER_RECOMPUTE
    )


POLICIES = {
    "None": None,
    "nothing": nothing_saveable,
    "everything": everything_saveable,
    "dots": dots_saveable,
    "dots_no_batch": dots_with_no_batch_dims_saveable,
    "names": save_only_these_names("a", "b"),
    "but_names": save_any_names_but_these("a"),
    "except_names": save_anything_except_these_names("a"),
    "matching": save_names_matching("a|c"),
    "ops": save_ops(aten.sin, aten.mm.default, aten.tanh),
    "large": save_larger_than(4 * 4 * 8 - 1),
    "small": save_smaller_than(4 * 4 * 8),
    "union": dots_saveable | save_only_these_names("a"),
    "intersection": everything_saveable & save_larger_than(100),
    "complement": ~dots_saveable,
    "difference": everything_saveable - save_only_these_names("b"),
    "function": lambda op: op.packet in (aten.exp, aten.bmm),
    "torch": of_torch,
    "list": [aten.mm.default, aten.addmm.default],
}
BUDGETS = {
    "budget": within(2**8),
    "budget of few": within(2**8) & dots_saveable,
    "budget and names": within(2**10) | save_only_these_names("b"),
}


def layers(w, x):
    h = checkpoint_name(x @ w, "a").tanh()
    h = checkpoint_name(h.sin(), "b") @ w
    return checkpoint_name(h.exp(), "c").sin()


def attention(w, x):
    q, k, v = ((x * s) @ w for s in (0.5, 1.0, 1.5))
    scores = checkpoint_name(q @ k.mT, "a").softmax(-1)
    return checkpoint_name(scores @ v, "b").tanh() @ w


def views_in_place(w, x):
    h = checkpoint_name((x @ w).view(2, 8), "a").sin()
    out = torch.zeros_like(h)
    out[:, ::2] = h[:, 1::2].exp()
    out[0] += checkpoint_name(h[1] * 2, "b")
    return out.unflatten(1, (2, 4)).transpose(0, 1).exp()


def several(w, x):
    value, index = checkpoint_name((x @ w).exp().topk(2), "a")
    return {"top": value.sin(), "rest": [(w @ x).sin().exp(), index, None]}


def normalized(w, x):
    h = torch.nn.functional.layer_norm(checkpoint_name(x @ w, "a"), (4,))
    return checkpoint_name(torch.nn.functional.gelu(h), "b").softmax(-1) @ x


def changed_view(w, x):
    unused = w.clone()
    unused[:2].mul_(2)
    unused[1] = x[1].sin()
    return (x * w).exp(), unused.detach()


FUNCTIONS = {
    "layers": layers,
    "attention": attention,
    "views_in_place": views_in_place,
    "several": several,
    "normalized": normalized,
    "custom": ZOO["custom"][0],
    "reductions": ZOO["reductions"][0],
    "linear": ZOO["linear"][0],
    "changed_view": changed_view,
}

# They are given in this program, if not in each function.
for _name in "abc":
    checkpoint_name(X, _name)


FIRST = some("backward", "retained", "of_one", "batched_cotangents", "grad", "jacrev")
FIRST |= some("grad_and_value", "two_pulls", "vmap_grad", "grad_vmap", "accumulated")
FIRST |= some("vjp", "vmap_grad_of_last")
SECOND = some("twice", "grad_grad", "hessian", "jacrev_jacrev", "jacrev_jacfwd")
SECOND |= some("jvp_grad", "vmap_hessian")
FORWARD = some("jvp", "jacfwd", "duals", "vmap_jvp")


def is_reassociated(transform):
    """Not of first order: no input is used both in the call and beside it."""
    return transform.order > 1 and not transform.at_base


# Every policy on one function, and every function under a few policies.
FEW = ("None", "everything", "union")
CASES = [(policy, "layers") for policy in POLICIES]
CASES += [(policy, case) for policy in FEW for case in FUNCTIONS if case != "layers"]
CASES += [(policy, "layers") for policy in BUDGETS]
POLICIES |= BUDGETS


# Bookkeeping: how a shape is reached, and what autograd detaches.
FREE = {"detach", "alias", "view", "_unsafe_view", "expand", "t", "transpose"}
FREE |= {"unsqueeze", "squeeze", "permute", "select", "slice", "as_strided"}


def measured(transform, fn):
    """The result, and how many kernels ran."""
    loss = lambda w, x=X: scalar(fn(w, x))
    with count_ops() as ops:
        result = transform(loss, *((W,) if is_reassociated(transform) else (W, X)))
    return result, sum(count for name, count in ops.items() if name not in FREE)


def assert_same_thrice(transform, case, policy, prune=True):
    """Return how many kernels plain code runs, and each of the three calls."""
    fn = FUNCTIONS[case]
    expected, plain = measured(transform, fn)
    rematerialized = remat(fn, policy=POLICIES[policy], prune=prune)
    work = []
    for _ in range(3):
        actual, kernels = measured(transform, rematerialized)
        assert_same(actual, expected, reassociated=is_reassociated(transform))
        work.append(kernels)
    assert_not_vanishing(expected)
    return plain, work


@crossed("policy, case, how", CASES, FIRST, each=2)
def test_a_first_derivative(policy, case, how):
    plain, work = assert_same_thrice(FIRST[how], case, policy)
    assert work[1] == work[2]
    if policy in ("None", "nothing") and case != "linear":
        assert work[2] > plain, "it recomputes"


@crossed("policy, case, how", CASES, SECOND)
def test_a_second_derivative(policy, case, how):
    assert_same_thrice(SECOND[how], case, policy)


@crossed("policy, case, how", CASES, FORWARD)
def test_forward_mode_runs_what_plain_code_runs(policy, case, how):
    """There is no backward to save for: nothing is recorded, kept or recomputed."""
    assert_same_thrice(FORWARD[how], case, policy)
    assert not call_caches()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize("how", ["backward", "jacrev", "vmap_grad"])
def test_a_policy_that_saves_more_recomputes_less(how, case):
    """Down to what plain code runs, for the policy that saves all."""

    def work(policy):
        forget_calls()
        return assert_same_thrice(FIRST[how], case, policy)[1]

    of_policies = map(work, ("everything", "union", "dots", "None"))
    for of_a_call in zip(*of_policies, strict=True):
        assert [*of_a_call] == sorted(of_a_call)


@crossed("policy, case, how", CASES, ["backward", "vmap_grad", "twice"])
def test_values_without_pruning(policy, case, how):
    assert_same_thrice(ALL[how], case, policy, prune=False)


@pytest.mark.parametrize(
    ("inner", "outer"),
    [
        *(("None", "dots"), ("dots", "names"), ("names", "everything")),
        *(("everything", "None"), ("names", "names")),
    ],
)
@pytest.mark.one_in(3)
def test_calls_are_nested_under_two_policies(inner, outer):
    def nested(wrap_inner, wrap_outer):
        one = wrap_inner(layers)
        return wrap_outer(lambda w, x: one(w, one(w, x)).exp())

    wrap = lambda policy: partial(remat, policy=POLICIES[policy], prune=True)
    plain, fn = nested(plainly, plainly), nested(wrap(inner), wrap(outer))
    for how, transform in (FIRST | SECOND).items():
        if how == "vmap_hessian":
            continue
        expected, _ = measured(transform, plain)
        for _ in range(2):
            actual, _ = measured(transform, fn)
            assert_same(actual, expected, reassociated=not transform.at_base)


@pytest.mark.parametrize("policy", ["None", "everything"])
@pytest.mark.parametrize("how", ["backward", "batched_cotangents", "grad", "grad_vmap"])
def test_a_value_that_nobody_needs_is_changed_through_a_view(how, policy):
    """Autograd makes such a view again, by an operation that the forward has not."""
    assert_same_thrice(FIRST[how], "changed_view", policy)
    assert not any(strikes())


@pytest.mark.parametrize("policy", ["None", "everything", "complement"])
@pytest.mark.parametrize("how", SECOND | some("twice_grad", "twice_vmap"))
def test_a_kept_value_is_differentiated_to_inputs_that_are_not_read(how, policy):
    """Intermediate values go in, and a kept product is all that depends on them."""
    transform = ALL[how]
    product = lambda w, x: (w * x).exp()
    wrapped = remat(product, policy=POLICIES[policy], prune=True)
    expected, _ = measured(transform, lambda w, x: product(w.cos(), x.sin()))
    for _ in range(4):
        actual, _ = measured(transform, lambda w, x: wrapped(w.cos(), x.sin()))
        assert_same(actual, expected, reassociated=not transform.at_base)


# --- Forward mode inside of reverse mode, and around it ---


WS, Y = (make(4, 4, seed=5), make(4, 4, seed=6)), make(3, 4, seed=7)
PRODUCTS = "mm", "bmm", "addmm"


def block(w, x):
    """The second product is read by no derivative, nor is its tangent."""
    return x + checkpoint_name(torch.tanh(x @ w[0]), "inner") @ w[1]


def network(wrap):
    wrapped = wrap(block)
    return lambda w, x: wrapped(w, wrapped(w, x)).sin()


def push(fn, v):
    return lambda x: jvp(fn, (x,), (v,))[1]


def score(f):
    """A gradient of a value and of a tangent."""

    def loss(w):
        value, along = jvp(lambda x: f(w, x), (Y,), (Y.cos(),))
        return value.square().sum() + (along * Y).sum()

    return grad(loss)(WS)


def score_of_each(f):
    def loss(w, x):
        value, along = jvp(lambda x: f(w, x), (x,), (x.cos(),))
        return value.square().sum() + along.sin().sum()

    return vmap(grad(loss), (None, 0))(WS, torch.stack([Y, 2 * Y]))


def gradient_of_each_tangent(f):
    def loss(w):
        tangents = vmap(push(lambda x: f(w, x[None]), Y[0]))
        return tangents(Y).sin().sum()

    return grad(loss)(WS)


def backward_of_jvp(f):
    w = leaves_of(*WS)
    value, along = jvp(lambda x: f(w, x), (Y,), (Y.cos(),))
    (value.square().sum() + along.sin().sum()).backward()
    return [t.grad for t in w]


def grad_of_jacfwd(f):
    return grad(lambda w: jacfwd(lambda x: f(w, x))(Y[:1]).sin().sum())(WS)


# What recomputes values and tangents has a record of both.
INSIDE = {
    "score": score,
    "vmap of score": score_of_each,
    "grad of vmap of jvp": gradient_of_each_tangent,
    "backward of jvp": backward_of_jvp,
    "grad of jacfwd": grad_of_jacfwd,
    "grad of jvp of jvp": lambda f: grad(
        lambda w: push(push(lambda x: f(w, x), Y), Y.cos())(Y).sum()
    )(WS),
}


def dual_around_backward(f):
    w = leaves_of(*WS)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(w[0], w[0].detach().cos())
        out = f((dual, w[1]), Y).square().sum()
        return forward_ad.unpack_dual(torch.autograd.grad(out, w[1])[0]).tangent


# A node of values alone is recomputed with tangents that its record does not have.
AROUND = {
    "jvp of grad": lambda f: push(grad(lambda x: f(WS, x).sum()), Y.cos())(Y),
    "hessian": lambda f: hessian(lambda x: f(WS, x).sum())(Y),
    "jvp of grad of jvp": lambda f: push(
        grad(lambda x: push(lambda x: f(WS, x), Y)(x).sum()), Y.cos()
    )(Y),
    "a dual level around a backward": dual_around_backward,
}
SAVES = {
    "dots": {"policy": policies.dots_saveable},
    "everything": {"policy": policies.everything_saveable},
    "names": {"policy": policies.save_only_these_names("inner")},
}


def run(transform, **options):
    """Return derivatives of the second call of its kind, and what it evaluated."""
    f = network(lambda fn: remat(fn, **options))
    transform(f)
    with count_ops() as ops:
        found = transform(f)
    return found, ops["tanh"], sum(ops[name] for name in PRODUCTS)


def plain(transform):
    with count_ops() as ops:
        found = transform(network(lambda fn: fn))
    assert_not_vanishing(found)
    return found, ops["tanh"], sum(ops[name] for name in PRODUCTS)


@pytest.mark.one_in(3)
@rows("transform", INSIDE)
def test_inside_of_reverse_mode_policies_save_values_and_tangents(transform):
    want, tanhs, products = plain(transform)
    _, again, more = run(transform)
    assert again == 2 * tanhs
    assert more > products
    for name, options in SAVES.items():
        found, ours, ours_products = run(transform, **options)
        assert_same(found, want, reassociated=True)
        assert ours == (2 * tanhs if name == "dots" else tanhs), name
        assert (ours_products == products) == (name != "names"), name


@rows("transform", INSIDE)
def test_inside_of_reverse_mode_dead_products_are_left_out(transform):
    want, tanhs, products = plain(transform)
    _, _, all_products = run(transform)
    found, again, ours = run(transform, prune=True)
    assert_same(found, want, reassociated=True)
    assert again == 2 * tanhs
    assert products < ours < all_products


@rows("transform", AROUND)
@pytest.mark.parametrize("options", [*SAVES.values(), {"prune": True}], ids=str)
def test_around_reverse_mode_all_is_recomputed(transform, options):
    want, tanhs, _ = plain(transform)
    found, again, _ = run(transform, **options)
    assert_same(found, want, reassociated=True)
    assert again >= 2 * tanhs
