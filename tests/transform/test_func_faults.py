"""Faults of `torch.func`, and of calls that are recorded and replayed."""

import functools
import operator
from typing import ClassVar

import pytest
import torch
from support.zoo import (
    XS,
    Evaluations,
    W,
    X,
    assert_not_vanishing,
    assert_rematerialized,
    counted,
    leaves_of,
    make,
)
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

from remat import RecomputeError, explain, policies, remat
from remat._partial.runnable import statics_of
from remat.testing import assert_same, count_ops


A = make(6, 3, seed=21)
Z = torch.complex(make(6, 3, seed=22), make(6, 3, seed=23))
B = torch.complex(make(6, 2, seed=24), make(6, 2, seed=25))


def assert_over_calls(gradient, fn, wrapped, count, counts):
    """`gradient(wrapped)` is that of `fn` in each call, with so many operations."""
    expected = gradient(fn)
    assert_not_vanishing(expected)
    found = []
    for _ in counts:
        with count_ops() as ops:
            actual = gradient(wrapped)
        assert_same(actual, expected)
        found.append(count(ops))
    assert found == counts


def test_the_comparison_over_calls_fails_for_another_value_or_count():
    gradient = lambda f: f(A)
    assert_over_calls(gradient, torch.sin, torch.sin, lambda ops: ops["sin"], [1])
    for fn, counts in (torch.cos, [0]), (torch.sin, [2]):
        with pytest.raises(AssertionError, match="assert"):
            assert_over_calls(gradient, torch.sin, fn, lambda ops: ops["sin"], counts)


# --- Kernels that conjugate lazily, below a dispatch mode ---


def pinv(z):
    return torch.linalg.pinv(z).abs().square().sum()


def residuals(z):
    return torch.linalg.lstsq(z, B, driver="gelsd").residuals.sum() * z.abs().sum()


@pytest.mark.parametrize("fn", [pinv, residuals])
@pytest.mark.parametrize(
    "policy", [None, policies.dots_saveable, policies.everything_saveable]
)
def test_complex_kernels_are_right_below_our_modes(fn, policy):
    again = policy is not policies.everything_saveable or fn is residuals
    # The first call is recorded, the others follow the record.
    assert_over_calls(
        lambda f: grad(f)(Z),
        fn,
        remat(fn, policy=policy, prune=True),
        lambda ops: ops["linalg_pinv"] + ops["linalg_lstsq"],
        [1 + again] * 3,
    )


# --- Constants that were left to their defaults when the call was recorded ---


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_an_argument_may_be_given_that_was_left_to_its_default(policy):
    over: list[int] = []

    def fn(x):
        h = x.sin()
        return h.exp(), torch.amax(h, over)

    gradient = lambda f: grad(lambda x: f(x)[0].sum())(A)
    wrapped = remat(fn, policy=policy, prune=True)
    expected = gradient(fn)
    for over[:] in [], [0], [], [1], [0, 1]:
        with count_ops() as ops:
            assert torch.equal(gradient(wrapped), expected)
        # It is recomputed only where the record turns out not to fit.
        assert ops["amax"] == (2 if over in ([0], [1]) else 1)
    assert_not_vanishing(expected)


def test_constants_are_told_apart_by_name():
    assert statics_of((A,), {"alpha": 2}) != statics_of((A,), {"beta": 2})
    assert statics_of((A, [A, None]), None) == []


# --- A result that is None is a place among the results ---


def test_the_cost_of_a_convolutions_backward_without_an_input_gradient():
    x, bias = make(2, 3, 80, 80, seed=26), make(4, seed=27)

    def fn(w):
        return grad(lambda w: torch.nn.functional.conv2d(x, w, bias).tanh().sum())(w)

    gradient = lambda f: grad(lambda w: f(w).square().sum())(w)
    w = make(4, 3, 3, 3, seed=28)
    wrapped = remat(fn)  # "auto" asks what is saved by leaving it out
    # That of the forward, and that of the second order: none is recomputed.
    count = lambda ops: (ops["convolution_backward"], ops["tanh"])
    assert_over_calls(gradient, fn, wrapped, count, [(2, 2)] * 2)
    with FlopCounterMode(display=False) as counter:
        fn(w)
    report = explain(wrapped, w.requires_grad_())
    assert report.flops == counter.get_total_flops() > 0


# --- Kernels that read memory past operations ---


@pytest.mark.filterwarnings("ignore:.* is not followed any more")
def test_a_read_in_cpp_of_what_was_left_out_is_noticed():
    def fn(x):
        # Where to split is read without an operation, and no derivative reads it.
        where = torch.ones(2, dtype=torch.long).cumsum(0)
        first, _, rest = x.sin().tensor_split(where)
        return first.exp().sum() * rest.square().sum()

    def gradient(f):
        (x,) = leaves_of(A)
        # Not by torch.func, under which plain torch refuses this read.
        return torch.autograd.grad(f(x), x)[0]

    sines = []

    def cumsums(ops):
        sines.append(ops["sin"])
        return ops["cumsum"]

    assert_over_calls(gradient, fn, remat(fn, prune=True), cumsums, [2] * 6)
    # Nobody knows which value was read: the replay begins anew, and is given up then.
    assert sines[0] == 3
    assert sines[-1] == 2


# --- A backward in which nothing is differentiated at its level ---


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_dropout_whose_input_is_let_go(policy):
    x = make(300, 300, seed=29)
    fn = lambda x: torch.nn.functional.dropout(x, 0.5) * 2

    def gradient(f, call):
        torch.manual_seed(call)
        return grad(lambda x: f(x.sin()).sum())(x)

    wrapped = remat(fn, policy=policy, prune=True)
    # The mask is drawn again; what it is multiplied with is not read, nor kept.
    count = lambda ops: (ops["bernoulli_"], ops["mul"])
    for call in range(5):
        of_call = functools.partial(gradient, call=call)
        assert_over_calls(of_call, fn, wrapped, count, [(2, 5)])


def test_what_has_no_edge_at_a_level_is_evaluated_below_it():
    """As the forward was, and not in a level of its own."""
    levels = Evaluations()
    note = levels.note

    def fn(x):
        note(torch._C._functorch.maybe_current_level())
        return x * 2

    wrapped = remat(fn, prune=True)
    for _ in range(3):
        result = grad(lambda x: wrapped(x.sin()).sum())(A)
        assert torch.equal(result, 2 * A.cos())
    assert [*levels] == [None] * 6


# --- Edges: to the leaves that the results depend on, and to no others ---


class Watched(torch.autograd.Function):
    """A copy that notes when a gradient comes by."""

    seen: ClassVar[list[None]] = []

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        Watched.seen.append(None)
        return cotangent


@pytest.mark.parametrize("prune", [False, True])
def test_what_leads_to_an_input_that_is_only_read_gets_no_gradient(prune):
    fn = lambda x, scale: x.exp() * scale.detach()

    def transform(f):
        Watched.seen.clear()
        result = grad(lambda x: f(x.sin(), Watched.apply(x)).sum())(A)
        return result, len(Watched.seen)

    wrap = functools.partial(remat, prune=prune)
    assert_rematerialized(transform, fn, evaluations=2, wrap=wrap)
    assert transform(remat(fn))[1] == 0


def test_results_that_depend_on_no_input_of_a_level_are_constants_there():
    fn, calls = counted(lambda w, x: (w.detach() * x.sin()).sum())
    (x,) = leaves_of(A)

    def loss(w):
        value = remat(fn)(w, x)
        assert not value.requires_grad
        return value * w.sum()

    result = grad(loss)(A)
    assert torch.equal(result, torch.full_like(A, (A * A.sin()).sum().item()))
    # The level below still differentiates them.
    (below,) = torch.autograd.grad(result.sum(), x)
    assert torch.allclose(below, A * A.cos() * A.numel())
    assert len(calls) == 2


def lost_in_second_order(f):
    inner = grad(lambda w, x: f(w, x).sum(), (0, 1))
    return grad(lambda w: inner(w, X)[1].sum())(W)


LOST = {
    "grad": lambda f: grad(lambda w, x: f(w, x).sum(), (0, 1))(W, X),
    "vmap_grad": lambda f: vmap(grad(lambda w, x: f(w, x).sum(), (0, 1)))(W, X),
    "grad_vmap": lambda f: grad(lambda w, x: vmap(f)(w, x).sum(), (0, 1))(W, X),
    "grad_grad": lost_in_second_order,
}


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("how", LOST)
def test_an_input_that_the_recompute_does_not_reach_is_an_error(how, prune):
    calls = Evaluations()

    def fn(weight, x):
        calls.note(None)
        return x.sin() * (weight if len(calls) == 1 else weight.detach())

    with pytest.raises(RecomputeError, match="do not depend on `weight`"):
        LOST[how](remat(fn, prune=prune))
    assert len(calls) >= 2


# --- Comparisons, of which Python tries the reflected one on what is absent first ---


COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")


@pytest.mark.parametrize("shape", [(4, 4), (4, 1)])
@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_with_what_was_left_out(name, shape):
    w = W[:, : shape[1]]

    def fn(w, x):
        mask = getattr(operator, name)(w, x.sin())  # of which only the mask is read
        return torch.where(mask, x.exp(), x.cos()).square().sum() * w.sum()

    gradient = lambda f: grad(lambda w, x: f(w, x.exp()), (0, 1))(w, X)
    count = lambda ops: (sum(map(ops.__getitem__, COMPARISONS)), ops["sin"])
    wrapped = remat(fn, policy=policies.everything_saveable, prune=True)
    # It is kept; the sines are those of the forward, and of the derivative of cos.
    assert_over_calls(gradient, fn, wrapped, count, [(1, 2)] * 5)


# --- Operations that resize what they write to ---


def resized_in_place(x):
    total = torch.ones(4, dtype=torch.double)
    total.addbmm_(XS, XS)  # it has one row now for each of theirs
    return (x.exp() * 2).sum() * len(total), total


def resized_as_out(x):
    shifted = torch.empty(0, dtype=torch.double)
    torch.add(X, 1, out=shifted)
    return (x.exp() * 2).sum() * len(shifted), shifted


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
@pytest.mark.parametrize("fn", [resized_in_place, resized_as_out])
def test_an_operation_that_resizes_is_run_again(fn, policy):
    gradient = lambda f: grad(lambda x: f(x.sin())[0])(X)
    # Where a replay did not fit it would be run three times, as exp would be.
    count = lambda ops: (ops["addbmm_"] + ops["add"], ops["exp"])
    wrapped = remat(fn, policy=policy, prune=True)
    expected = (2, 2 if policy is None else 1)
    assert_over_calls(gradient, fn, wrapped, count, [expected] * 4)


# --- Sizes as arguments ---


def test_a_function_of_the_users_may_be_named_as_the_node_of_a_call():
    class Remat(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return x.sin()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent * ctx.saved_tensors[0].cos()

    def loss(wrap):
        return lambda x: wrap(lambda x: Remat.apply(x * 2).exp())(x).sum()

    x = torch.linspace(0, 1, 4)
    with count_ops() as ops:
        got = grad(loss(remat))(x)
    assert_same(got, grad(loss(lambda fn: fn))(x))
    assert ops["sin"] == 2


def within_calls(fn, depth):
    for _ in range(depth):
        fn = remat(lambda x, inner=fn: inner(x).sin())
    return fn


def test_calls_nested_too_deep_for_python_say_so():
    derivative = grad(lambda x: within_calls(torch.cos, 60)(x).sum())
    with pytest.raises(RecursionError, match="maximum recursion depth") as info:
        derivative(torch.ones(3))
    (told,) = info.value.__notes__
    assert "calls of remat are in one another" in told
    assert "call sys.setrecursionlimit" in told
