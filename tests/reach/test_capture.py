"""Tensors that a function reaches without being passed them are inputs as well."""

import contextvars
import threading
import types

import numpy as np
import pytest
import torch
from support.holders import WAYS, Module, Object, called, use, wrapping
from support.runs import assert_replayed, leaf, replayed
from support.tables import crossed
from support.zoo import Evaluations
from torch import nn
from torch.func import grad, jvp, vmap

from remat import CaptureError, remat
from remat.testing import assert_same, count_ops


# --- All the ways to reach a tensor ----------------------------------------------


class Buffer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.register_buffer("w", w)

    def forward(self, x):
        return use(x, self.w)


def by_two_ways(w):
    o = Object(w)
    return lambda x: use(x, w * o.value)


def by_a_rematerialized_function(w):
    return called(remat(lambda x: use(x, w)))


TENSOR_WAYS = WAYS | {
    "module buffer": wrapping(Buffer),
    "two ways at once": wrapping(by_two_ways),
}
NESTED_WAY = "rematerialized function in a closure"
NESTED = wrapping(by_a_rematerialized_function)
ways = pytest.mark.parametrize(
    "way", [*TENSOR_WAYS.values(), NESTED], ids=[*TENSOR_WAYS, NESTED_WAY]
)


@ways
def test_a_reached_tensor_gets_its_gradient(way):
    program = lambda wrap: torch.autograd.grad(way(wrap, w)(x).sum(), (w, x))
    w, x = leaf(3), leaf(3)
    assert_replayed(program, sin=2)


def derivative(fn):
    return grad(lambda *args: fn(*args).sum())


def by_jvp(f, w, x):
    return jvp(lambda w: f(w, x), (w,), (x,))


def by_vmap(f, w, x):
    return vmap(lambda w: f(w, x))(torch.stack([w, -w]))


# Of a function of the reached tensor and of x; and how many sines that takes, the
# second number with a rematerialized function in the closure.
TRANSFORMS = {
    "grad": (lambda f, w, x: derivative(f)(w, x), 2, 3),
    "vmap(grad)": (lambda f, w, x: by_vmap(derivative(f), w, x), 2, 3),
    # A jvp alone recomputes nothing.
    "jvp and jvp(grad)": (
        lambda f, w, x: (by_jvp(f, w, x), by_jvp(derivative(f), w, x)),
        1 + 3,
        1 + 4,
    ),
    "vmap(grad) in the argument": (
        lambda f, w, x: by_vmap(lambda w, x: derivative(lambda x: f(w, x))(x), w, x),
        2,
        3,
    ),
}


@crossed("transform, name", TRANSFORMS, [*TENSOR_WAYS, NESTED_WAY])
def test_a_reached_tensor_is_transformed(transform, name):
    way = TENSOR_WAYS.get(name, NESTED)
    w, x = torch.randn(3), torch.randn(3)
    run, sines, nested = TRANSFORMS[transform]
    assert_replayed(
        lambda wrap: run(lambda w, x: way(wrap, w)(x), w, x),
        sin=nested if way is NESTED else sines,
    )


# --- The user's own objects are left alone ---------------------------------------


def test_under_grad_too_with_stand_ins_for_what_was_computed():
    o, seen = Object(leaf(3)), Evaluations()
    module, w = Module(o.value), o.value
    o.other = computed = w * 2

    def fn(x):
        same = o.value is module.value
        seen.note((same, id(o), id(module), id(o.value)))
        return use(x, o.value * o.other) + module(x)

    derivative(remat(fn))(torch.randn(3))
    assert [*seen] == [(True, id(o), id(module), id(w))] * 2
    assert o.value is w
    assert o.other is computed
    assert module.value is w


def test_under_grad_a_number_that_is_the_identity_of_what_was_computed_is_refused():
    o = Object(leaf(3))
    o.other = o.value * 2
    identity = id(o.other)

    def fn(x):
        return use(x, o.other) * (2 if id(o.other) == identity else 3)

    with pytest.raises(CaptureError, match=r"asks for the identity \(`id`\)"):
        derivative(remat(fn))(torch.randn(3))


MARKS = {
    "grad_fn": lambda x: x.grad_fn is None,
    "is_leaf": lambda x: x.is_leaf,
    "_base": lambda x: x._base is None,
    "output_nr": lambda x: x.output_nr == 0,
}


@pytest.mark.parametrize("mark", MARKS)
def test_under_grad_a_mark_of_a_computed_tensor_is_refused(mark):
    ask = MARKS[mark]

    def fn(x):
        return x.sin() * (1 if ask(x) else 2)

    x = torch.randn(3)
    with pytest.raises(CaptureError, match=rf"asks for `{mark}` of `x`.*pass the ans"):
        derivative(lambda x: remat(fn)(x.chunk(2)[1]))(x)
    # Those of a leaf of the level are those of what stands in for it, too.
    assert torch.equal(derivative(remat(fn))(x), derivative(fn)(x))


def test_under_grad_a_policy_is_not_followed_where_views_are_told_apart():
    v = torch.eye(4)[2:]

    def fn(x, v):
        return x.sin() * (2 if v._is_view() else 3)

    x, run = torch.randn(3), remat(fn, prune=True)
    with pytest.warns(UserWarning, match="it asks whether a tensor is a view"):
        gradient = derivative(lambda x: run(x, v))(x)
    assert torch.equal(gradient, derivative(lambda x: fn(x, v))(x))


# --- What a search cannot find ---------------------------------------------------

VARIABLE = contextvars.ContextVar("VARIABLE")
LOCAL = threading.local()


class Attribute:
    """A class of the user's."""


TENSOR = torch.zeros(1)

PLACES = {
    "context variable": (lambda w: VARIABLE.set(w), lambda: VARIABLE.get()),
    "thread local": (lambda w: setattr(LOCAL, "w", w), lambda: LOCAL.w),
    "class attribute": (lambda w: setattr(Attribute, "w", w), lambda: Attribute.w),
    "attribute of a tensor": (lambda w: setattr(TENSOR, "w", w), lambda: TENSOR.w),
}
HIDING_PLACES = {
    "attribute of a package": (lambda w: setattr(np, "w", w), lambda: np.w)
}
NAMES = iter(range(10**6))


@pytest.fixture(params=HIDING_PLACES.values(), ids=HIDING_PLACES.keys())
def hidden(request):
    """A function to hide a tensor, and a new function that uses the hidden one."""
    return placed(request.param)


@pytest.fixture(params=PLACES.values(), ids=PLACES.keys())
def found(request):
    """The same, of a place that is searched."""
    return placed(request.param)


def placed(place):
    hide, find = place

    def fn(x):
        return use(x, find()).sum()

    # Its own code, as if each test had written the function anew.
    code = fn.__code__.replace(co_name=f"fn_{next(NAMES)}")
    return hide, types.FunctionType(code, globals(), "fn", (), fn.__closure__)


OUT_OF_REACH = {"leaf": lambda w: w, "computed": lambda w: w * 2}
out_of_reach = pytest.mark.parametrize(
    "of", OUT_OF_REACH.values(), ids=OUT_OF_REACH.keys()
)


@out_of_reach
@replayed(sin=2)
def test_a_tensor_out_of_reach_gets_its_gradient(wrap, hidden, of):
    (hide, fn), w, x = hidden, leaf(3), leaf(3)
    hide(of(w))
    return torch.autograd.grad(wrap(fn)(x), (x, w))


@pytest.mark.parametrize(
    "call",
    [
        lambda fn, x: remat(fn, higher_order=True)(x),
        lambda fn, x: grad(remat(fn))(x.detach()),
    ],
    ids=["higher_order", "grad"],
)
@out_of_reach
def test_in_one_node_a_tensor_out_of_reach_is_refused_with_shape_and_dtype(
    hidden, of, call
):
    hide, fn = hidden
    w = torch.randn(3, dtype=torch.double, requires_grad=True)
    hide(of(w))
    with pytest.raises(
        CaptureError, match=r"no input of the call: float64\[3\] on cpu"
    ):
        call(fn, leaf(3))


@pytest.mark.parametrize(
    "call",
    [
        lambda wrap, fn, x: wrap(fn, higher_order=True)(x),
        lambda wrap, fn, x: grad(wrap(fn))(x.detach()).sum(),
    ],
    ids=["higher_order", "grad"],
)
@out_of_reach
def test_in_one_node_a_tensor_of_any_place_gets_its_gradient(found, of, call):
    (hide, fn), x = found, leaf(3)
    w = leaf(3)
    plain = lambda fn, **_: fn
    hide(of(w))
    expected = torch.autograd.grad(call(plain, fn, x), w)
    hide(of(w))
    with count_ops() as ops:
        assert_same(torch.autograd.grad(call(remat, fn, x), w), expected)
    assert ops["sin"] >= 2


over_transforms = pytest.mark.parametrize(
    "transform",
    [
        grad,
        lambda f: lambda w: jvp(f, (w,), (w,)),
        lambda f: grad(lambda w: grad(f)(w).sum()),
        lambda f: lambda w: vmap(grad(f))(w.expand(2, 3)),
    ],
    ids=["grad", "jvp", "grad(grad)", "vmap(grad)"],
)
over_x = pytest.mark.parametrize(
    "differentiated", [True, False], ids=["x grad", "x plain"]
)


@over_transforms
@over_x
def test_a_transformed_tensor_out_of_reach_is_refused(
    hidden, transform, differentiated
):
    (hide, fn), x = hidden, leaf(3)

    def outer(w):
        hide(w)
        if differentiated:
            return grad(remat(fn))(x.detach())[0]
        return remat(fn)(x)

    with pytest.raises(CaptureError, match=r"no input of the call: float32\[3\]"):
        transform(outer)(torch.randn(3))


@replayed(sin=2)
def test_a_batched_tensor_out_of_reach_is_used_by_its_batch(wrap, hidden):
    (hide, fn), x, ws = hidden, torch.randn(3), torch.randn(5, 3)

    def of_example(w):
        hide(w)
        return grad(wrap(fn))(x)

    return vmap(of_example)(ws)


# ---


def returns_a_leaf(x):
    return x.sin().exp(), torch.ones(3, requires_grad=True)


@replayed(sin=2)
def test_a_leaf_made_inside_may_be_returned(wrap):
    x = leaf(3)
    y, made = wrap(returns_a_leaf)(x)
    assert made.is_leaf
    return torch.autograd.grad((y * made).sum(), (x, made))


# Ways of differentiating in which a call is one node of the graph.
ONE_NODE = {
    "higher_order": lambda fn, x: remat(fn, higher_order=True)(x),
    "grad": lambda fn, x: grad(lambda x: first(remat(fn)(x)).sum())(x.detach()),
}
in_one_node = pytest.mark.parametrize("call", ONE_NODE.values(), ids=ONE_NODE.keys())


def first(out):
    return out[0] if isinstance(out, tuple) else out


@in_one_node
def test_in_one_node_returning_a_leaf_made_inside_is_refused(call):
    with pytest.raises(CaptureError, match="a leaf that requires grad is returned"):
        call(returns_a_leaf, leaf(3))


# --- TorchScript -------------------------------------------------------------------


@pytest.fixture
def scripted():
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        return torch.jit.script(nn.Linear(2, 2))


def test_a_scripted_module_with_other_parameters_is_refused_under_grad(scripted):
    scripted.weight.register_hook(lambda g: g * 2)  # it is not used itself
    with pytest.raises(CaptureError, match="Linear is a TorchScript module"):
        grad(lambda x: remat(scripted)(x).sum())(torch.randn(2))
