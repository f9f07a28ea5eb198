"""Every kind of policy under every transform: equal, and less work if more is kept.

What is compared to plain code is the third of three calls as well as the first: one
records, and those after it follow the record.
"""

from functools import partial

import pytest
import torch
from support.zoo import (
    ZOO,
    V,
    W,
    X,
    assert_not_vanishing,
    leaves_of,
    make,
    scalar,
)
from torch.autograd import forward_ad
from torch.func import (
    functional_call,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    linearize,
    vjp,
    vmap,
)
from torch.utils.checkpoint import CheckpointPolicy

from remat import checkpoint_name, remat
from remat._partial.cache import CACHES
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


FUNCTIONS = {
    "layers": layers,
    "attention": attention,
    "views_in_place": views_in_place,
    "several": several,
    "normalized": normalized,
    "custom": ZOO["custom"][0],
    "reductions": ZOO["reductions"][0],
    "linear": ZOO["linear"][0],
}

# They are given in this program, if not in each function.
for _name in "abc":
    checkpoint_name(X, _name)


# --- Transforms ---


def backward(loss, w, x):
    w, x = leaves_of(w, x)
    out = loss(w, x)
    out.backward()
    return out, w.grad, x.grad


def retained(loss, w, x):
    w, x = leaves_of(w, x)
    out = loss(w, x)
    out.backward(retain_graph=True)
    out.backward()
    return w.grad, x.grad


def double_backward(loss, w, x):
    w, x = leaves_of(w, x)
    first = torch.autograd.grad(loss(w, x), (w, x), create_graph=True)
    again = torch.autograd.grad(scalar(first), (w, x))
    return [g.detach() for g in first], again


def only_of_one(loss, w, x):
    w, x = leaves_of(w, x)
    return torch.autograd.grad(loss(w, x), x)


def batched_cotangents(loss, w, x):
    w, x = leaves_of(w, x)
    out = loss(w, x)[None]
    cts = torch.tensor([[1.0], [2.0]], dtype=out.dtype)
    return torch.autograd.grad(out, (w, x), cts, is_grads_batched=True)


def two_pulls(loss, w, x):
    out, pull = vjp(loss, w, x)
    return out, pull(torch.ones_like(out)), pull(2 * torch.ones_like(out))


def duals(loss, w, x):
    with forward_ad.dual_level():
        out = loss(forward_ad.make_dual(w, V), x)
        return forward_ad.unpack_dual(out)


def in_batches(fn):
    return lambda w, x: vmap(fn)(torch.stack([w, 2 * w, -w]), torch.stack([x, -x, V]))


FIRST_ORDER = {
    "backward": backward,
    "retained": retained,
    "only_of_one": only_of_one,
    "batched_cotangents": batched_cotangents,
    "grad": lambda loss, w, x: grad(loss, (0, 1))(w, x),
    "grad_and_value": lambda loss, w, x: grad_and_value(loss)(w, x),
    "two_pulls": two_pulls,
    "jacrev": lambda loss, w, x: jacrev(lambda w: loss(w, x)[None])(w),
    "vmap_grad": lambda loss, w, x: in_batches(grad(loss, (0, 1)))(w, x),
    "grad_vmap": lambda loss, w, x: grad(lambda *a: in_batches(loss)(*a).sum(), (0, 1))(
        w, x
    ),
}
SECOND_ORDER = {
    "double_backward": double_backward,
    "grad_grad": lambda loss, w, x: grad(lambda w: scalar(grad(loss)(w, x)))(w),
    "hessian": lambda loss, w, x: hessian(loss)(w, x),
    "jacrev_jacrev": lambda loss, w, x: jacrev(jacrev(loss, 1), 1)(w, x),
    "jacrev_jacfwd": lambda loss, w, x: jacrev(jacfwd(loss, 1), 1)(w, x),
    "jvp_of_grad": lambda loss, w, x: jvp(grad(loss), (w, x), (V, V)),
    "vmap_hessian": lambda loss, w, x: in_batches(hessian(loss))(w, x),
}
FORWARD_MODE = {
    "jvp": lambda loss, w, x: jvp(loss, (w, x), (V, V)),
    "jacfwd": lambda loss, w, x: jacfwd(loss)(w, x),
    "duals": duals,
    "vmap_jvp": lambda loss, w, x: in_batches(lambda w, x: jvp(loss, (w, x), (V, V)))(
        w, x
    ),
}


# Differentiated by base autograd alone, whose graph is plain's: bit for bit.
AT_BASE = {"backward", "retained", "only_of_one", "batched_cotangents"}
AT_BASE |= {"double_backward", "twice_through_vmap"}


def loss_of(fn):
    return lambda w, x: scalar(fn(w, x))


# Every policy meets every transform on one function, and every function meets every
# transform under a few policies.
FEW = ("None", "everything", "union")
CASES = [(policy, "layers") for policy in POLICIES]
CASES += [(policy, case) for policy in FEW for case in FUNCTIONS if case != "layers"]
each_case = pytest.mark.parametrize(("policy", "case"), CASES)


# Bookkeeping: how a shape is reached, and what autograd detaches.
FREE = {"detach", "alias", "view", "_unsafe_view", "expand", "t", "transpose"}
FREE |= {"unsqueeze", "squeeze", "permute", "select", "slice", "as_strided"}


def measured(transform, fn):
    """The result, and how many kernels ran."""
    with count_ops() as ops:
        result = transform(loss_of(fn), W, X)
    return result, sum(count for name, count in ops.items() if name not in FREE)


def assert_same_thrice(transform, fn, policy, *, reassociated, prune=True):
    """Return how many kernels plain code runs, and each of the three calls."""
    expected, plain = measured(transform, fn)
    rematerialized = remat(fn, policy=policy, prune=prune)
    work = []
    for _ in range(3):
        actual, kernels = measured(transform, rematerialized)
        assert_same(actual, expected, reassociated=reassociated)
        work.append(kernels)
    assert_not_vanishing(expected)
    return plain, work


@each_case
@pytest.mark.parametrize("how", FIRST_ORDER)
def test_first_order(how, policy, case):
    """Bit for bit: no input is used both in the call and beside it."""
    plain, work = assert_same_thrice(
        FIRST_ORDER[how], FUNCTIONS[case], POLICIES[policy], reassociated=False
    )
    assert work[1] == work[2]
    if policy in ("None", "nothing") and case != "linear":
        assert work[2] > plain, "it recomputes"


@each_case
@pytest.mark.parametrize("how", SECOND_ORDER)
def test_second_order(how, policy, case):
    assert_same_thrice(
        SECOND_ORDER[how],
        FUNCTIONS[case],
        POLICIES[policy],
        reassociated=how not in AT_BASE,
    )


@each_case
@pytest.mark.parametrize("how", FORWARD_MODE)
def test_forward_mode_runs_what_plain_code_runs(how, policy, case):
    """There is no backward to save for: nothing is recorded, kept or recomputed."""
    assert_same_thrice(
        FORWARD_MODE[how], FUNCTIONS[case], POLICIES[policy], reassociated=False
    )
    assert len(CACHES) == 0


@pytest.mark.parametrize("case", FUNCTIONS)
@pytest.mark.parametrize("how", FIRST_ORDER)
def test_who_saves_more_recomputes_less(how, case):
    """Down to what plain code runs, for the policy that saves all."""

    def work(policy):
        CACHES.clear()
        run = partial(assert_same_thrice, FIRST_ORDER[how], FUNCTIONS[case])
        return run(POLICIES[policy], reassociated=False)

    _, everything = work("everything")
    _, dots = work("dots")
    _, union = work("union")
    _, nothing = work("None")
    for call in range(3):
        assert everything[call] <= union[call] <= dots[call] <= nothing[call]


@each_case
def test_without_pruning_the_same_values(policy, case):
    for how in ("backward", "vmap_grad", "double_backward"):
        transform = {**FIRST_ORDER, **SECOND_ORDER}[how]
        assert_same_thrice(
            transform,
            FUNCTIONS[case],
            POLICIES[policy],
            reassociated=False,
            prune=False,
        )


@pytest.mark.parametrize("policy", POLICIES)
def test_one_record_serves_all_transforms_in_any_order(policy):
    """A record is of a function and of what it is called on, whoever calls."""
    fn = remat(layers, policy=POLICIES[policy], prune=True)
    everything = {**FIRST_ORDER, **SECOND_ORDER, **FORWARD_MODE}
    expected = {how: measured(f, layers)[0] for how, f in everything.items()}
    for order in (everything, [*everything][::-1], sorted(everything)):
        for how in order:
            actual, _ = measured(everything[how], fn)
            assert_same(
                actual,
                expected[how],
                reassociated=how in SECOND_ORDER and how not in AT_BASE,
            )
    assert all(trace.misfits == 0 for trace in CACHES._caches.values())


@pytest.mark.parametrize("outer", ["None", "dots", "everything", "names"])
@pytest.mark.parametrize("inner", ["None", "dots", "everything", "names"])
def test_nested_under_two_policies(inner, outer):
    def nested(wrap_inner, wrap_outer):
        one = wrap_inner(layers)
        return wrap_outer(lambda w, x: one(w, one(w, x)).exp())

    def wrap(policy):
        return partial(remat, policy=POLICIES[policy], prune=True)

    plain = nested(lambda fn: fn, lambda fn: fn)
    fn = nested(wrap(inner), wrap(outer))
    for how, transform in {**FIRST_ORDER, **SECOND_ORDER}.items():
        if how == "vmap_hessian":
            continue
        expected, _ = measured(transform, plain)
        for _ in range(2):
            actual, _ = measured(transform, fn)
            assert_same(actual, expected, reassociated=how not in AT_BASE)


HELPERS = {"mm": lambda a, b: a @ b}


def test_nested_calls_whose_helpers_are_in_a_container():
    """What they leave behind is looked for after the forward; records hold nothing."""
    inner = remat(lambda w, x: HELPERS["mm"](w, x).sin(), prune=True)

    def fn(w, x):
        return w.cos() + inner(w, x.sin())

    for how, transform in FIRST_ORDER.items():
        expected, _ = measured(transform, fn)
        for policy in ("dots", "everything", "None"):
            wrapped = remat(fn, policy=POLICIES[policy], prune=True)
            actual, _ = measured(transform, wrapped)
            assert_same(actual, expected, reassociated=how not in AT_BASE)


@pytest.mark.parametrize("policy", ["None", "everything"])
def test_a_change_through_a_view_of_what_nobody_needs(policy):
    """Autograd makes such a view again, by an operation that the forward has not."""

    def fn(w, x):
        unused = w.clone()
        unused[:2].mul_(2)
        unused[1] = x[1].sin()
        return (x * w).exp(), unused.detach()

    for transform in FIRST_ORDER.values():
        assert_same_thrice(transform, fn, POLICIES[policy], reassociated=False)
    assert all(trace.misfits == 0 for trace in CACHES._caches.values())


def mixed_grad(loss, w, x):
    (w,) = leaves_of(w)
    first = grad(loss)(w, x)
    return torch.autograd.grad(scalar(first), w)


def twice_through_vmap(loss, w, x):
    w, x = leaves_of(w, x)
    out = in_batches(loss)(w, x).sum()
    first = torch.autograd.grad(out, w, create_graph=True)
    return torch.autograd.grad(scalar(first), (w, x))


@pytest.mark.parametrize("policy", ["None", "everything", "dots", "ops", "complement"])
@pytest.mark.parametrize(
    "how",
    {
        **SECOND_ORDER,
        "mixed_grad": mixed_grad,
        "twice_through_vmap": twice_through_vmap,
    },
)
def test_a_kept_value_is_differentiated_to_inputs_that_are_not_read(how, policy):
    """Intermediate values go in, and a kept product is all that depends on them."""
    added = {"mixed_grad": mixed_grad, "twice_through_vmap": twice_through_vmap}
    transform = {**SECOND_ORDER, **added}[how]

    def product(w, x):
        return (w * x).exp()

    wrapped = remat(product, policy=POLICIES[policy], prune=True)
    expected, _ = measured(transform, lambda w, x: product(w.cos(), x.sin()))
    for _ in range(4):
        actual, _ = measured(transform, lambda w, x: wrapped(w.cos(), x.sin()))
        assert_same(actual, expected, reassociated=how not in AT_BASE)


@pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node:UserWarning"  # torch's, of any function
)
@pytest.mark.parametrize("policy", POLICIES)
def test_linearize(policy):
    loss = loss_of(layers)
    expected, plain_push = linearize(loss, W, X)
    fn = loss_of(remat(layers, policy=POLICIES[policy], prune=True))
    for _ in range(2):
        actual, push = linearize(fn, W, X)
        assert_same((actual, push(V, V)), (expected, plain_push(V, V)))


@pytest.mark.parametrize("policy", POLICIES)
def test_functional_call_with_the_backward_outside(policy):
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4)
    ).double()
    params = {name: make(*p.shape, seed=9) for name, p in module.named_parameters()}

    class Around(torch.nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.inner, self.wrap = module, wrap

        def forward(self, x):
            return self.wrap(self.inner)(x).sin().sum()

    def run(wrap):
        leaves = {f"inner.{n}": leaves_of(p)[0] for n, p in params.items()}
        out = functional_call(Around(wrap), leaves, (X,))
        return torch.autograd.grad(out, [*leaves.values()])

    wrap = partial(remat, policy=POLICIES[policy], prune=True)
    for _ in range(3):
        assert_same(run(wrap), run(lambda fn: fn))
