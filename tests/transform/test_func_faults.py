"""Faults of `torch.func`, and of calls that are recorded and replayed."""

import functools
import operator
from typing import ClassVar

import pytest
import torch
from support.zoo import (
    XS,
    Cubed,
    Evaluations,
    W,
    X,
    assert_not_vanishing,
    assert_rematerialized,
    counted,
    leaves_of,
    make,
    scalar,
)
from torch.autograd import functional
from torch.autograd.function import once_differentiable
from torch.func import grad, jacrev, vjp, vmap
from torch.utils.flop_counter import FlopCounterMode

from remat import CaptureError, RecomputeError, explain, policies, remat
from remat._partial.match import statics_of
from remat.testing import assert_same, count_ops


A = make(6, 3, seed=21)
Z = torch.complex(make(6, 3, seed=22), make(6, 3, seed=23))
B = torch.complex(make(6, 2, seed=24), make(6, 2, seed=25))


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
    expected = grad(fn)(Z)
    wrapped = remat(fn, policy=policy, prune=True)
    # The first call is recorded, the others follow the record.
    for _ in range(3):
        with count_ops() as ops:
            actual = grad(wrapped)(Z)
        assert torch.equal(actual, expected)
        again = policy is not policies.everything_saveable or fn is residuals
        assert ops["linalg_pinv"] + ops["linalg_lstsq"] == 1 + again
    assert_not_vanishing(expected)


def test_counting_does_not_change_complex_kernels():
    with count_ops() as ops:
        counted = torch.linalg.pinv(Z)
    assert torch.equal(counted, torch.linalg.pinv(Z))
    assert ops["linalg_pinv"] == 1


# --- Constants that were left to their defaults when the call was recorded ---


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_an_argument_may_be_given_that_was_left_to_its_default(policy):
    over: list[int] = []

    def fn(x):
        h = x.sin()
        return h.exp(), torch.amax(h, over)

    def gradient(f):
        return grad(lambda x: f(x)[0].sum())(A)

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
        def loss(w):
            return torch.nn.functional.conv2d(x, w, bias).tanh().sum()

        return grad(loss)(w)

    def gradient(f):
        return grad(lambda w: f(w).square().sum())(w)

    w = make(4, 3, 3, 3, seed=28)
    expected = gradient(fn)
    assert_not_vanishing(expected)
    wrapped = remat(fn)  # "auto" asks what is saved by leaving it out
    for _ in range(2):
        with count_ops() as ops:
            assert torch.equal(gradient(wrapped), expected)
        # That of the forward, and that of the second order: none is recomputed.
        assert ops["convolution_backward"] == 2
        assert ops["tanh"] == 2
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

    wrapped = remat(fn, prune=True)
    expected = gradient(fn)
    sines = []
    for _ in range(6):
        with count_ops() as ops:
            assert torch.equal(gradient(wrapped), expected)
        assert ops["cumsum"] == 2
        sines.append(ops["sin"])
    # Nobody knows which value was read: the replay begins anew, and is given up then.
    assert sines[0] == 3
    assert sines[-1] == 2
    assert_not_vanishing(expected)


# --- A backward in which nothing is differentiated at its level ---


@pytest.mark.parametrize("policy", [None, policies.everything_saveable])
def test_dropout_whose_input_is_let_go(policy):
    x = make(300, 300, seed=29)

    def fn(x):
        return torch.nn.functional.dropout(x, 0.5) * 2

    def gradient(f, call):
        torch.manual_seed(call)
        return grad(lambda x: f(x.sin()).sum())(x)

    wrapped = remat(fn, policy=policy, prune=True)
    for call in range(5):
        expected = gradient(fn, call)
        with count_ops() as ops:
            actual = gradient(wrapped, call)
        assert torch.equal(actual, expected)
        assert_not_vanishing(expected)
        # The mask is drawn again; what it is multiplied with is not read, nor kept.
        assert (ops["bernoulli_"], ops["mul"]) == (2, 5)


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
    def fn(x, scale):
        return x.exp() * scale.detach()

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


def lost_in_vmap_grad(f):
    return vmap(grad(lambda w, x: f(w, x).sum(), (0, 1)))(W, X)


def lost_in_grad_vmap(f):
    return grad(lambda w, x: vmap(f)(w, x).sum(), (0, 1))(W, X)


def lost_in_second_order(f):
    inner = grad(lambda w, x: f(w, x).sum(), (0, 1))
    return grad(lambda w: inner(w, X)[1].sum())(W)


LOST = {
    "grad": lambda f: grad(lambda w, x: f(w, x).sum(), (0, 1))(W, X),
    "vmap_grad": lost_in_vmap_grad,
    "grad_vmap": lost_in_grad_vmap,
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


def test_an_input_may_be_reached_and_get_no_gradient():
    def transform(f):
        def loss(w, x):
            first, _ = f(w, x)
            return first.sum()

        return grad(loss, (0, 1))(W, X)

    assert_rematerialized(transform, lambda w, x: (x.sin(), w.exp()), evaluations=2)


# --- Formulas that choose other kernels where grad mode is on ---


MODAL = {
    "silu": torch.nn.functional.silu,
    "mish": torch.nn.functional.mish,
    "group_norm": lambda x: torch.nn.functional.group_norm(x, 2),
    "logit": lambda x: (x.sigmoid() / 2).logit(),
    "cumprod": lambda x: x.cumprod(-1),
    "solve": lambda x: torch.linalg.solve(x[..., :4] + 3 * torch.eye(4), x),
    "det": lambda x: torch.linalg.det(x[..., :4] + torch.eye(4)),
}


@pytest.mark.parametrize("case", MODAL)
def test_vmap_of_grad_chooses_the_same_kernels(case):
    xs = make(3, 5, 4, 6, seed=30).float()

    def transform(f):
        return vmap(grad(lambda x: f(x.sin()).square().sum()))(xs)

    assert_rematerialized(transform, MODAL[case], evaluations=2)


# --- Comparisons, of which Python tries the reflected one on what is absent first ---


COMPARISONS = ("eq", "ge", "gt", "le", "lt", "ne")


@pytest.mark.parametrize("shape", [(4, 4), (4, 1)])
@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_with_what_was_left_out(name, shape):
    w = W[:, : shape[1]]

    def fn(w, x):
        mask = getattr(operator, name)(w, x.sin())  # of which only the mask is read
        return torch.where(mask, x.exp(), x.cos()).square().sum() * w.sum()

    def gradient(f):
        return grad(lambda w, x: f(w, x.exp()), (0, 1))(w, X)

    expected = gradient(fn)
    wrapped = remat(fn, policy=policies.everything_saveable, prune=True)
    for _ in range(5):
        with count_ops() as ops:
            actual = gradient(wrapped)
        assert_same(actual, expected)
        assert sum(map(ops.__getitem__, COMPARISONS)) == 1  # it is kept
        assert ops["sin"] == 2  # of the forward, and the derivative of cos
    assert_not_vanishing(expected)


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
    def gradient(f):
        return grad(lambda x: f(x.sin())[0])(X)

    expected = gradient(fn)
    wrapped = remat(fn, policy=policy, prune=True)
    for _ in range(4):
        with count_ops() as ops:
            actual = gradient(wrapped)
        assert torch.equal(actual, expected)
        # Where a replay did not fit it would be run three times, as exp would be.
        assert ops["addbmm_"] + ops["add"] == 2
        assert ops["exp"] == (2 if policy is None else 1)
    assert_not_vanishing(expected)


# --- Sizes as arguments ---


SIZES = {
    "positional": lambda f, x, size: f(x, size),
    "keyword": lambda f, x, size: f(x, size=size),
    "in_a_dict": lambda f, x, size: f({"x": x, "size": size}),
}


def reshaped(x, size=None):
    if size is None:
        x, size = x["x"], x["size"]
    assert type(size) is torch.Size
    return x.sin().exp().reshape(size).cumsum(0), size


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("how", SIZES)
def test_a_size_is_an_argument_like_any_other(how, prune):
    def transform(f):
        def gradient(*shape):
            size = torch.Size(shape)  # of an argument torch.func makes a tuple

            def loss(x):
                value, returned = SIZES[how](f, x, size)
                assert returned == size
                assert type(returned) is torch.Size
                return scalar(value)

            return grad(loss)(A)

        return gradient(3, 6), gradient(2, 9), gradient(3, 6)

    wrap = functools.partial(remat, prune=prune)
    assert_rematerialized(transform, reshaped, plain=3, evaluations=6, wrap=wrap)


def test_a_size_is_an_argument_under_backward():
    def transform(f):
        (x,) = leaves_of(A)
        scalar(f(x, torch.Size((3, 6)))[0]).backward()
        return x.grad

    assert_rematerialized(transform, reshaped, evaluations=2)


# --- Graphs that were made outside of the call ---


def pulled(f, x):
    """A call that holds a pullback: of the gradient of a cube, say."""
    y, pull = vjp(lambda x: x**3, x)
    return f(lambda ct: pull(ct)[0].sin())(y)


def pulled_below(f, x):
    (below,) = leaves_of(A)
    _, pull = vjp(lambda y: y * below, below)
    result = grad(lambda x: scalar(f(lambda ct: pull(ct)[0])(x)))(x)
    return result, torch.autograd.grad(result.sum(), below)


PULLED = {
    "grad": lambda f: grad(lambda x: scalar(pulled(f, x)))(A),
    "vmap_grad": lambda f: vmap(grad(lambda x: scalar(pulled(f, x))))(A),
    "grad_grad": lambda f: grad(
        lambda x: scalar(grad(lambda x: scalar(pulled(f, x)))(x))
    )(A),
    "base": lambda f: pulled_below(f, A),
}


@pytest.mark.parametrize("how", PULLED)
def test_a_call_that_holds_a_pullback_is_called_as_it_is(how):
    with pytest.warns(UserWarning, match="holds a pullback of torch.func.vjp"):
        actual = PULLED[how](remat)
    assert_same(actual, PULLED[how](lambda f: f))
    assert_not_vanishing(actual)


def test_a_pullback_made_inside_is_recomputed():
    def fn(x):
        y, pull = vjp(lambda x: x**3, x)
        return pull(y)[0]

    assert_rematerialized(lambda f: grad(lambda x: scalar(f(x)))(A), fn, evaluations=2)


def test_a_tensor_left_over_from_another_level_holds_no_graph():
    kept = []

    def noting(x):
        kept.append(x.sin())
        return x.sum()

    grad(noting)(A)
    # Plain code takes it for the constant that it is by now.
    assert_rematerialized(
        lambda f: grad(lambda x: scalar(f(x)))(A),
        lambda x: x.exp() * kept[0],
        evaluations=2,
    )


def derivative_of(h, x):
    (result,) = torch.autograd.grad(h.sum(), x, create_graph=True, allow_unused=True)
    return 0 * x if result is None else result


def partly_of(h, x):
    return derivative_of(h * x, x)


def edge_of(h, x):
    edge = torch.autograd.graph.get_gradient_edge(h)
    return lambda y: torch.autograd.grad(edge, x, y.sin(), create_graph=True)[0]


@pytest.mark.parametrize("fn", [derivative_of, partly_of])
@pytest.mark.parametrize("lower", [lambda f: f, vmap])
def test_a_derivative_of_what_was_computed_outside_is_refused(fn, lower):
    def loss(f):
        return lambda x: scalar(f(x.sin() * x, x))

    assert_not_vanishing(lower(grad(loss(fn)))(A))  # which plain code gives
    with pytest.raises(CaptureError, match="`h` was computed outside of the function"):
        lower(grad(loss(remat(fn))))(A)


def test_a_captured_edge_of_a_graph_is_refused():
    def loss(wrap):
        return lambda x: scalar(wrap(edge_of(x.sin() * x, x))(x))

    with pytest.raises(CaptureError, match="a GradientEdge was computed outside"):
        grad(loss(remat))(A)
    assert_not_vanishing(grad(loss(lambda f: f))(A))


def test_a_derivative_of_what_was_computed_inside_is_recomputed():
    def fn(h, x):
        return derivative_of((h * x).sin(), h) + derivative_of(x.exp(), x)

    def transform(f):
        return grad(lambda x: scalar(f(x.sin(), x.cos())))(A)

    assert_rematerialized(transform, fn, evaluations=2, reassociated=True)


def jacobian_of(x):
    return torch.autograd.functional.jacobian(torch.sin, x)


def jacobian_by_name(x):
    return functional.jacobian(torch.sin, x)


FUNCTIONAL = {
    "jacobian": lambda x: torch.autograd.functional.jacobian(torch.sin, x),
    "vjp": lambda x: torch.autograd.functional.vjp(torch.sin, x, x.detach())[1],
    "hessian": lambda x: torch.autograd.functional.hessian(lambda x: x.sin().sum(), x),
    "requires_grad_": lambda x: derivative_of(*2 * (x.detach().requires_grad_(),)),
}


@pytest.mark.parametrize("case", FUNCTIONAL)
def test_what_torch_refuses_under_its_transforms_is_refused(case):
    fn, calls = counted(FUNCTIONAL[case])
    messages = "You are attempting to call Tensor", "remat: Tensor"
    for f, message in zip((fn, remat(fn)), messages, strict=True):
        with pytest.raises(RuntimeError, match=rf"^{message}.requires_grad_\(\)"):
            grad(lambda x, f=f: scalar(f(x.sin())))(A)
    assert len(calls) == 2


@pytest.mark.parametrize("fn", [jacobian_of, jacobian_by_name])
def test_it_is_refused_also_where_a_function_refers_to_nothing_else(fn):
    with pytest.raises(RuntimeError, match=r"^remat: Tensor.requires_grad_\(\)"):
        grad(lambda x: scalar(remat(fn)(x.sin())))(A)


def test_autograds_functional_transforms_that_record_are_recomputed():
    def fn(x):
        return torch.autograd.functional.jacobian(torch.sin, x, create_graph=True)

    assert_rematerialized(
        lambda f: grad(lambda x: scalar(f(x)))(A[0]), fn, evaluations=2
    )


# --- Hooks, which run after the recomputation has ended ---


@pytest.mark.parametrize("prune", [False, True])
def test_hooks_set_inside_refer_to_variables_of_functions_around(prune):
    factor, shift = 3.0, make(6, 3, seed=31)

    def fn(x):
        h = x.sin()
        h.register_hook(lambda g: g * factor + shift)
        return h.exp()

    def transform(f):
        return grad(lambda x: scalar(f(x)))(A)

    # No operation of the forward reads the shift: a replay learns of it from the hook.
    wrap = functools.partial(remat, prune=prune)
    assert_rematerialized(transform, fn, evaluations=3 if prune else 2, wrap=wrap)


# --- Functions that are to be differentiated once ---


class Once(torch.autograd.Function):
    """A cube, as torch.func takes it."""

    @staticmethod
    def forward(x):
        return x**3

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    @once_differentiable
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * cotangent


class OnceAtBase(Once):
    """The same, as torch.func does not take it."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    setup_context = torch.autograd.Function.setup_context


def backward_over_grad(f):
    (x,) = leaves_of(A)
    scalar(grad(lambda x: scalar(f(x)))(x)).backward()
    return x.grad


def grad_over_grad(f):
    return grad(lambda x: scalar(grad(lambda x: scalar(f(x)))(x)))(A)


def backward_over_backward(f):
    (x,) = leaves_of(A)
    (first,) = torch.autograd.grad(scalar(f(x)), x, create_graph=True)
    scalar(first).backward()
    return x.grad


REFUSED = {
    # What torch finds in its way differs.
    "backward_grad": (backward_over_grad, Once, "does not require grad"),
    "backward_grad_old": (backward_over_grad, OnceAtBase, "setup_context"),
    "grad_grad_old": (grad_over_grad, OnceAtBase, "setup_context"),
    "backward_backward": (backward_over_backward, Once, "@once_differentiable"),
}


@pytest.mark.parametrize("after", [torch.sin, lambda y: 2 * y])
@pytest.mark.parametrize("case", REFUSED)
def test_a_second_derivative_that_torch_refuses_is_not_dropped(case, after):
    transform, function, of_torch = REFUSED[case]
    # What it saves is no input of the call, and so recomputed at base, too.
    fn, calls = counted(lambda x: after(function.apply(1 * x)))
    with pytest.raises(RuntimeError, match=of_torch):
        transform(fn)
    calls.clear()
    with pytest.raises(RuntimeError, match="marked with @once_differentiable"):
        transform(remat(fn))
    assert len(calls) >= 2


def test_the_first_derivative_is_not_refused():
    for function in Once, OnceAtBase:
        fn, calls = counted(function.apply)
        assert torch.equal(grad(lambda x, f=fn: remat(f)(x).sum())(A), 3 * A**2)
        assert len(calls) == 2


def test_second_derivatives_beside_it_are_not_refused():
    for function in Once, OnceAtBase:
        x, y = leaves_of(A, 2 * A)
        fn, calls = counted(lambda x, y, f=function: f.apply(x) * 2 + y**3)
        by_y = grad(lambda x, y, f=fn: remat(f)(x, y).sum(), 1)
        (result,) = torch.autograd.grad(by_y(x, y).sum(), y)
        assert torch.equal(result, 6 * y)
        assert len(calls) == 3


def test_functions_that_torch_batches_are_looked_into():
    """Under vmap torch makes a Function around that of the user, and one around it."""

    def transform(f):
        return jacrev(jacrev(lambda x: scalar(f(x))))(A)

    assert_rematerialized(
        transform, lambda x: Cubed.apply(x.sin()), evaluations=4, reassociated=True
    )


@pytest.mark.parametrize("transform", [grad_over_grad, backward_over_grad])
def test_where_torch_drops_it_the_values_are_those_of_torch(transform):
    def fn(x):
        return Once.apply(x) * 2 + x.exp()

    assert_rematerialized(transform, fn, evaluations=4, reassociated=True)
