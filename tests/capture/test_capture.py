"""Tensors that a function reaches without being passed them are inputs as well."""

import collections
import contextlib
import contextvars
import dataclasses
import enum
import functools
import gc
import operator
import sys
import threading
import types
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from support.zoo import Evaluations
from torch import nn
from torch.func import grad, jvp, vmap

from remat import CaptureError, remat
from remat._capture.search import Search
from remat._transform.call import Call
from remat.testing import assert_same, assert_same_gradients, count_ops


# --- All the ways to reach a tensor ----------------------------------------------


class Point(NamedTuple):
    w: Any


@dataclasses.dataclass
class Data:
    w: Any


class Object:
    def __init__(self, w):
        self.w = w

    def method(self, x):
        return wave(x, self.w)

    @property
    def computed(self):
        return self.w * 1

    def __call__(self, x):
        return wave(x, self.w)


class Slots:
    __slots__ = ("other", "w")

    def __init__(self, w):
        self.w = w


class SubSlots(Slots):
    __slots__ = ("more",)


class Frozen:
    def __init__(self, w):
        self.__dict__["w"] = w

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


class Module(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w  # an attribute, no parameter

    def forward(self, x):
        return wave(x, self.w)


class Buffer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.register_buffer("w", w)

    def forward(self, x):
        return wave(x, self.w)


def wave(x, w):
    return (x * w).sin().exp().sum()


def by_default(w):
    def fn(x, w=w):
        return wave(x, w)

    return fn


def by_keyword_default(w):
    def fn(x, *, w=w):
        return wave(x, w)

    return fn


def by_wrapper(w):
    def scaled(fn):
        @functools.wraps(fn)
        def wrapper(x):
            return fn(x * w)

        return wrapper

    return scaled(lambda x: x.sin().exp().sum())


def by_recursion(w):
    def fn(x, depth=3):
        return wave(x, w) if depth == 0 else fn(x, depth - 1)

    return fn


def by_mutual_recursion(w):
    def even(x, n=4):
        return wave(x, w) if n == 0 else odd(x, n - 1)

    def odd(x, n):
        return even(x * w, n - 1)

    return even


def by_object_that_holds_itself(w):
    o = Object(w)
    o.me = [o]
    return lambda x: wave(x, o.me[0].me[0].w)


def by_two_ways(w):
    o = Object(w)
    return lambda x: wave(x, w * o.w)


def by_slots(cls, w):
    o = cls(w)
    return lambda x: wave(x, o.w)


def by_container(put, get):
    def make(w):
        container = put(w)
        return lambda x: wave(x, get(container))

    return make


def by_method_of_list(w):
    return types.MethodType(lambda ws, x: wave(x, ws[0]), [w])


WAYS = {
    "closure": lambda w: lambda x: wave(x, w),
    "closure of a closure": lambda w: lambda x: (lambda: wave(x, w))(),
    "function in a closure": lambda w: (lambda f: lambda x: f(x))(by_default(w)),
    "default": by_default,
    "keyword default": by_keyword_default,
    "partial": lambda w: functools.partial(lambda w, x: wave(x, w), w),
    "partial keyword": lambda w: functools.partial(wave, w=w),
    "partial of a closure": lambda w: functools.partial(lambda _, x: wave(x, w), 1),
    "decorator": by_wrapper,
    "recursion": by_recursion,
    "mutual recursion": by_mutual_recursion,
    "list": by_container(lambda w: [0, w], operator.itemgetter(1)),
    "tuple": by_container(lambda w: (w,), operator.itemgetter(0)),
    "dict": by_container(lambda w: {"w": w}, operator.itemgetter("w")),
    "set": by_container(lambda w: {w}, lambda ws: next(iter(ws))),
    "frozenset": by_container(lambda w: frozenset([w]), lambda ws: next(iter(ws))),
    "nested": by_container(lambda w: [{"a": (Point(w),)}], lambda t: t[0]["a"][0].w),
    "namedtuple": by_container(Point, operator.attrgetter("w")),
    "dataclass": by_container(Data, operator.attrgetter("w")),
    "namespace": by_container(
        lambda w: types.SimpleNamespace(w=w), operator.attrgetter("w")
    ),
    "list of functions": by_container(lambda w: [lambda: w, len], lambda fns: fns[0]()),
    "object": by_container(Object, operator.attrgetter("w")),
    "object in a list": by_container(lambda w: [Object(w)], lambda t: t[0].w),
    "property": by_container(Object, operator.attrgetter("computed")),
    "object that refuses assignment": by_container(Frozen, operator.attrgetter("w")),
    "slots": functools.partial(by_slots, Slots),
    "inherited slots": functools.partial(by_slots, SubSlots),
    "object that holds itself": by_object_that_holds_itself,
    "two ways at once": by_two_ways,
    "bound self": lambda w: Object(w).method,
    "bound self that is a list": by_method_of_list,
    "callable object": Object,
    "method in a closure": lambda w: (lambda m: lambda x: m(x))(Object(w).method),
    "module attribute": Module,
    "module buffer": Buffer,
    "module in a list": by_container(lambda w: [Module(w)], lambda t: t[0].w),
    "submodule": lambda w: nn.Sequential(nn.Identity(), Module(w)),
    "remat function in a closure": lambda w: (lambda f: lambda x: f(x))(
        remat(lambda x: wave(x, w))
    ),
}
ways = pytest.mark.parametrize("make", WAYS.values(), ids=WAYS.keys())


@ways
def test_a_reached_tensor_gets_its_gradient(make, request):
    w, x = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    with count_ops() as ops:
        want = torch.autograd.grad(make(w)(x), (w, x))
    with count_ops() as more:
        got = torch.autograd.grad(remat(make(w))(x), (w, x))
    assert_same(got, want)
    assert more["sin"] == 2
    assert ops["sin"] == 1 + ("remat" in request.node.callspec.id)


@ways
def test_a_reached_tensor_is_differentiated_alone(make):
    w, x = torch.randn(3), torch.randn(3)
    want = grad(lambda w: make(w)(x))(w)
    with count_ops() as ops:
        got = grad(lambda w: remat(make(w))(x))(w)
    assert_same(got, want)
    assert ops["sin"] > 1


@ways
def test_a_reached_tensor_is_batched(make):
    ws, x = torch.randn(5, 3), torch.randn(3)
    want = vmap(grad(lambda w: make(w)(x)))(ws)
    with count_ops() as ops:
        got = vmap(grad(lambda w: remat(make(w))(x)))(ws)
    assert_same(got, want)
    assert ops["sin"] > 1


@ways
def test_a_reached_tensor_has_a_tangent(make):
    w, x, t = torch.randn(3), torch.randn(3), torch.randn(3)
    assert_same(
        jvp(lambda w: remat(make(w))(x), (w,), (t,)),
        jvp(lambda w: make(w)(x), (w,), (t,)),
    )
    want = jvp(grad(lambda w: make(w)(x)), (w,), (t,))
    with count_ops() as ops:
        got = jvp(grad(lambda w: remat(make(w))(x)), (w,), (t,))
    assert_same(got, want)
    assert ops["sin"] > 2


@ways
def test_a_reached_tensor_may_be_batched_while_only_the_argument_is_differentiated(
    make,
):
    ws, x = torch.randn(5, 3), torch.randn(3)
    want = vmap(lambda w: grad(make(w))(x))(ws)
    with count_ops() as ops:
        got = vmap(lambda w: grad(remat(make(w)))(x))(ws)
    assert_same(got, want)
    assert ops["sin"] > 1


# --- Globals ---------------------------------------------------------------------

GLOBAL = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
TABLE = {"w": [GLOBAL]}
HELPERS = [lambda: GLOBAL]


def reads(x):
    return wave(x, GLOBAL)


def reads_through_a_function(x):
    return reads(x)


def reads_a_container(x):
    return wave(x, TABLE["w"][0])


def reads_through_a_list_of_functions(x):
    return wave(x, HELPERS[0]())


def reads_in_a_comprehension(x):
    return torch.stack([wave(x, GLOBAL) for _ in "a"]).sum()


def reads_in_a_lambda(x):
    return (lambda: wave(x, GLOBAL))()


GLOBAL_READERS = [
    reads,
    reads_through_a_function,
    reads_in_a_comprehension,
    reads_in_a_lambda,
    reads_through_a_list_of_functions,
]


@pytest.mark.parametrize(
    "fn", [*GLOBAL_READERS, reads_a_container], ids=lambda fn: fn.__name__
)
def test_a_global_tensor_gets_its_gradient(fn):
    x = torch.randn(3, requires_grad=True)
    with count_ops() as ops:
        assert_same_gradients(remat(fn), fn, x, wrt=GLOBAL)
    assert ops["sin"] == 1 + 2


@pytest.mark.parametrize("fn", GLOBAL_READERS, ids=lambda fn: fn.__name__)
def test_a_global_is_read_when_called(fn, monkeypatch):
    x, w = torch.randn(3), torch.randn(3)
    wrapped = remat(fn)

    def with_global(w, call):
        monkeypatch.setattr(sys.modules[__name__], "GLOBAL", w)
        return call(x)

    want = grad(with_global)(w, fn)
    with count_ops() as ops:
        got = grad(with_global)(w, wrapped)
    assert_same(got, want)
    assert ops["sin"] == 2


def test_a_recomputation_sees_the_global_of_the_forward(monkeypatch):
    x = torch.randn(3, requires_grad=True)
    want = torch.autograd.grad(reads(x), x)
    with count_ops() as ops:
        y = remat(reads)(x)
        monkeypatch.setattr(sys.modules[__name__], "GLOBAL", torch.zeros(3))
        got = torch.autograd.grad(y, x)
    assert_same(got, want)
    assert ops["sin"] == 2


def test_a_recomputation_sees_the_closure_of_the_forward():
    x, w = torch.randn(3, requires_grad=True), torch.randn(3)

    def fn(x):
        return wave(x, w)

    want = torch.autograd.grad(fn(x), x)
    with count_ops() as ops:
        y = remat(fn)(x)
        w = torch.zeros(3)
        got = torch.autograd.grad(y, x)
    assert_same(got, want)
    assert ops["sin"] == 2


# --- Assigning to what is captured -----------------------------------------------


def test_a_rebound_nonlocal_is_assigned_once():
    def run(transform):
        state, w = torch.zeros(3), torch.ones(3, requires_grad=True)

        def fn(x):
            nonlocal state
            state = state + x.detach()
            return wave(x + state, w)

        x = torch.arange(3.0, requires_grad=True)
        step = transform(fn)
        for _ in range(3):
            step(x).backward()
        return state, x.grad, w.grad

    want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert_same(got, want)
    assert ops["sin"] == 2 * 3


def test_a_rebound_global_is_assigned_once(monkeypatch):
    here = sys.modules[__name__]

    def run(transform):
        monkeypatch.setattr(here, "COUNT", torch.zeros(3))
        x = torch.arange(3.0, requires_grad=True)
        for _ in range(3):
            transform(rebinds_global)(x).backward()
        return COUNT, x.grad

    want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert_same(got, want)
    assert ops["sin"] == 2 * 3


COUNT = torch.zeros(3)


def rebinds_global(x):
    global COUNT
    COUNT = COUNT + 1
    return wave(x, COUNT)


def test_an_attribute_assigned_inside_is_assigned_once():
    def run(transform):
        o = Object(torch.ones(3, requires_grad=True))
        o.seen = torch.zeros(3)

        def fn(x):
            o.seen = o.seen + x.detach()
            o.new = "text"
            return wave(x + o.seen, o.w)

        x = torch.arange(3.0, requires_grad=True)
        for _ in range(2):
            transform(fn)(x).backward()
        return o.seen, o.new, x.grad, o.w.grad

    want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert_same(got, want)
    assert ops["sin"] == 2 * 2


def appends_to_a_container_within(cache):
    def fn(x):
        cache[0].append(x.detach() * 2)
        return wave(x, cache[0][-2])

    return fn


def test_what_a_container_within_a_captured_container_becomes_is_kept():
    def run(transform):
        cache = [[torch.ones(3)]]
        x = torch.linspace(0.1, 1, 3).requires_grad_()
        fn = transform(appends_to_a_container_within(cache))
        (fn(x) + fn(x)).backward()
        return cache, x.grad

    want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert ops["sin"] == 2 * 2
    assert_same(got, want)


def test_a_container_within_a_captured_container_is_changed_once_under_grad():
    def run(transform):
        cache = [[torch.ones(3)]]
        fn = transform(appends_to_a_container_within(cache))
        got = grad(lambda x: fn(x) + fn(x))(torch.linspace(0.1, 1, 3))
        return got, len(cache[0])

    want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert ops["sin"] == 2 * 2
    assert_same(got, want)


@pytest.mark.parametrize("change", ["replace", "pop"])
def test_what_a_captured_container_of_tensors_becomes_is_handed_over(change):
    def run(transform):
        cache = [torch.ones(3), torch.full((3,), 2.0)]

        def fn(x):
            y = wave(x, cache[0])
            if change == "pop":
                cache.pop(0)
            else:
                cache[0] = x.detach() * 2
            return y

        x = torch.linspace(0.1, 1, 3).requires_grad_()
        transform(fn)(x).sum().backward()
        return cache, x.grad

    with count_ops() as ops:
        got = run(remat)
    assert ops["sin"] == 2
    assert_same(got, run(lambda fn: fn))


def test_what_is_added_to_a_captured_container_of_tensors_is_added_once():
    log, seen = [torch.ones(3)], {"first": torch.ones(3)}

    def fn(x):
        log.append(x.detach())
        seen["last"] = x.detach()
        return wave(x, log[0])

    x = torch.randn(3, requires_grad=True)
    with count_ops() as ops:
        for _ in range(2):
            remat(fn)(x).sum().backward()
    assert ops["sin"] == 2 * 2
    assert len(log) == 3
    assert_same(seen["last"], x.detach())


def grows(x, log):
    log.append(x.detach())
    return wave(x, log[0] * len(log))


def test_what_a_container_passed_as_an_argument_becomes_is_kept():
    def run(transform):
        log, x = [], torch.linspace(0.1, 1, 3).requires_grad_()
        (transform(grows)(x, log) + transform(grows)(2 * x, log)).backward()
        return log, x.grad

    want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert ops["sin"] == 2 * 2
    assert_same(got, want)


def test_a_container_passed_as_an_argument_is_changed_once_under_grad():
    def run(transform):
        log, fn = [], transform(grows)
        got = grad(lambda x: fn(x, log) + fn(2 * x, log))(torch.linspace(0.1, 1, 3))
        return got, len(log)

    want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert ops["sin"] == 2 * 2
    assert_same(got, want)


# --- The user's own objects are left alone ---------------------------------------


def test_gradient_hooks_of_captured_tensors_run_once():
    w, x = torch.randn(3, requires_grad=True), torch.randn(3)
    calls = []
    w.register_hook(calls.append)
    w.register_post_accumulate_grad_hook(lambda t: calls.append(t.grad))
    with count_ops() as ops:
        remat(lambda x: wave(x, w))(x).backward()
    assert ops["sin"] == 2
    assert_same(calls, [w.grad, w.grad])


def test_the_function_runs_on_the_users_own_objects():
    o = Object(torch.randn(3, requires_grad=True))
    module, w = Module(o.w), o.w
    seen = Evaluations()

    def fn(x):
        seen.note((id(o), id(module), id(o.w), id(module.w)))
        return wave(x, o.w) + module(x)

    remat(fn)(torch.randn(3)).backward()
    assert [*seen] == [(id(o), id(module), id(w), id(w))] * 2


def test_under_grad_it_runs_on_stand_ins_and_the_originals_stay():
    o = Object(torch.randn(3, requires_grad=True))
    module, w = Module(o.w), o.w
    seen = Evaluations()

    def fn(x):
        seen.note((o.w is module.w, id(o), id(module), id(o.w)))
        return wave(x, o.w) + module(x)

    grad(remat(fn))(torch.randn(3))
    assert len(seen) == 2
    for same, *ids in seen:
        assert same
        assert {id(o), id(module), id(w)}.isdisjoint(ids)
    assert o.w is w
    assert module.w is w


# --- What a search cannot find ---------------------------------------------------

VARIABLE = contextvars.ContextVar("VARIABLE")
LOCAL = threading.local()


class Attribute:
    """Classes are not searched."""


HIDING_PLACES = {
    "context variable": (lambda w: VARIABLE.set(w), lambda: VARIABLE.get()),
    "thread local": (lambda w: setattr(LOCAL, "w", w), lambda: LOCAL.w),
    "class attribute": (lambda w: setattr(Attribute, "w", w), lambda: Attribute.w),
}


@pytest.fixture(params=HIDING_PLACES.values(), ids=HIDING_PLACES.keys())
def hidden(request):
    """A function to hide a tensor, and a new function that uses the hidden one."""
    hide, find = request.param

    def fn(x):
        return wave(x, find())

    # Its own code, as if each test had written the function anew.
    code = fn.__code__.replace(co_name=f"fn_{next(NAMES)}")
    return hide, types.FunctionType(code, globals(), "fn", (), fn.__closure__)


NAMES = iter(range(10**6))


OUT_OF_REACH = {"leaf": lambda w: w, "computed": lambda w: w * 2}
out_of_reach = pytest.mark.parametrize(
    "of", OUT_OF_REACH.values(), ids=OUT_OF_REACH.keys()
)


@out_of_reach
def test_a_tensor_out_of_reach_gets_its_gradient(hidden, of):
    hide, fn = hidden
    w, x = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)

    def gradients(fn):
        hide(of(w))
        return torch.autograd.grad(fn(x), (x, w))

    want = gradients(fn)
    with count_ops() as ops:
        got = gradients(remat(fn))
    assert_same(got, want)
    assert ops["sin"] == 2


@out_of_reach
def test_in_one_node_a_tensor_out_of_reach_is_refused_with_shape_and_dtype(hidden, of):
    hide, fn = hidden
    w = torch.randn(3, dtype=torch.float64, requires_grad=True)
    hide(of(w))
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(
        CaptureError, match=r"no input of the call: float64\[3\] on cpu"
    ):
        remat(fn, higher_order=True)(x)
    with pytest.raises(
        CaptureError, match=r"no input of the call: float64\[3\] on cpu"
    ):
        grad(remat(fn))(x.detach())


@pytest.mark.parametrize(
    "transform",
    [
        grad,
        lambda f: lambda w: jvp(f, (w,), (w,)),
        lambda f: grad(lambda w: grad(f)(w).sum()),
        lambda f: lambda w: vmap(grad(f))(w.expand(2, 3)),
    ],
    ids=["grad", "jvp", "grad(grad)", "vmap(grad)"],
)
@pytest.mark.parametrize("differentiated", [True, False], ids=["x grad", "x plain"])
def test_a_transformed_tensor_out_of_reach_is_refused(
    hidden, transform, differentiated
):
    hide, fn = hidden
    x = torch.randn(3, requires_grad=True)

    def outer(w):
        hide(w)
        if differentiated:
            return grad(remat(fn))(x.detach())[0]
        return remat(fn)(x)

    with pytest.raises(CaptureError, match=r"no input of the call: float32\[3\]"):
        transform(outer)(torch.randn(3))


def test_a_batched_tensor_out_of_reach_is_used_by_its_batch(hidden):
    hide, fn = hidden
    x, ws = torch.randn(3), torch.randn(5, 3)

    def outer(w, call):
        hide(w)
        return grad(call)(x)

    want = vmap(outer, in_dims=(0, None))(ws, fn)
    with count_ops() as ops:
        got = vmap(outer, in_dims=(0, None))(ws, remat(fn))
    assert_same(got, want)
    assert ops["sin"] == 2


def test_it_is_refused_although_the_function_was_right_before(hidden):
    hide, fn = hidden
    x = torch.randn(3)

    def outer(w):
        hide(w)
        return grad(remat(fn))(x).sum()

    hide(torch.randn(3))
    with count_ops() as ops:
        grad(remat(fn))(x)
    assert ops["sin"] == 2
    with pytest.raises(CaptureError, match=r"no input of the call: float32\[3\]"):
        grad(outer)(torch.randn(3))


def test_a_constant_out_of_reach_is_fine(hidden):
    hide, fn = hidden
    hide(torch.randn(3))
    with count_ops() as ops:
        assert_same_gradients(remat(fn), fn, torch.randn(3, requires_grad=True))
        assert_same(grad(remat(fn))(GLOBAL.detach()), grad(fn)(GLOBAL.detach()))
    assert ops["sin"] == (1 + 2) * 2


# --- Leaves made inside, and intermediates that get out --------------------------


def test_a_leaf_made_inside_is_no_input():
    def fn(x):
        w = torch.zeros(3, requires_grad=True)
        (g,) = torch.autograd.grad((w - x).sin().sum(), w, create_graph=True)
        return (w - 0.1 * g) * x

    with count_ops() as ops:
        assert_same_gradients(remat(fn), fn, torch.randn(3, requires_grad=True))
    assert ops["sin"] > 2 * 1 + 2


def test_a_module_made_inside_is_no_input():
    def fn(x):
        layer = nn.Linear(3, 3)
        nn.init.ones_(layer.weight)
        nn.init.zeros_(layer.bias)
        return layer(x).sin().exp()

    with count_ops() as ops:
        assert_same_gradients(remat(fn), fn, torch.randn(2, 3, requires_grad=True))
    assert ops["sin"] == 1 + 2


def returns_a_leaf(x):
    return x.sin().exp(), torch.ones(3, requires_grad=True)


def test_a_leaf_made_inside_may_be_returned():
    def run(transform):
        x = torch.linspace(0.1, 1, 3).requires_grad_()
        y, leaf = transform(returns_a_leaf)(x)
        assert leaf.is_leaf
        (y * leaf).sum().backward()
        return x.grad, leaf.grad

    want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert_same(got, want)
    assert ops["sin"] == 2


def test_in_one_node_returning_a_leaf_made_inside_is_refused():
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(CaptureError, match="a leaf that requires grad is returned"):
        remat(returns_a_leaf, higher_order=True)(x)
    with pytest.raises(CaptureError, match="a leaf that requires grad is returned"):
        grad(lambda x: remat(returns_a_leaf)(x)[0].sum())(x.detach())


def escapes(keep):
    """Ways in which an intermediate value gets out of a function."""
    last = None

    def by_nonlocal(x):
        nonlocal last
        last = x.sin()
        return last.exp().sum()

    def by_list(x):
        keep.append(x.sin())
        return keep[-1].exp().sum()

    def by_attribute(x):
        holder.last = x.sin()
        return holder.last.exp().sum()

    holder = types.SimpleNamespace()
    return {
        "nonlocal": (by_nonlocal, lambda: last),
        "list": (by_list, lambda: keep[-1]),
        "attribute": (by_attribute, lambda: holder.last),
    }


@pytest.mark.parametrize("way", ["nonlocal", "list", "attribute"])
def test_an_intermediate_that_got_out_is_differentiated(way):
    def run(transform):
        fn, escaped = escapes([])[way]
        x = torch.linspace(0.1, 1, 3).requires_grad_()
        y = transform(fn)(x)
        (y + escaped().square().sum()).backward()
        return x.grad

    want = run(lambda fn: fn)
    with count_ops() as ops:
        got = run(remat)
    assert_same(got, want)
    assert ops["sin"] == 2


@pytest.mark.parametrize("way", ["nonlocal", "list", "attribute"])
def test_in_one_node_an_intermediate_that_got_out_is_refused(way):
    fn, _ = escapes([])[way]
    x = torch.randn(3, requires_grad=True)
    with pytest.raises(CaptureError, match="left it other than by being returned"):
        remat(fn, higher_order=True)(x)
    with pytest.raises(CaptureError, match="left it other than by being returned"):
        grad(remat(fn))(x.detach())


@pytest.mark.parametrize("way", ["nonlocal", "list", "attribute"])
def test_an_intermediate_that_got_out_may_be_looked_at(way):
    fn, escaped = escapes([])[way]
    x = torch.randn(3, requires_grad=True)
    with count_ops() as ops:
        y = remat(fn)(x)
        assert_same(escaped().detach(), x.detach().sin())
        y.backward()
    assert ops["sin"] == 3
    assert_same(x.grad, x.detach().sin().exp() * x.detach().cos())


@pytest.fixture
def scripted():
    with pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.script"):
        return torch.jit.script(nn.Linear(2, 2))


def test_a_scripted_module_gets_its_gradients(scripted):
    def fn(x):
        return scripted(x).sin().exp()

    x = torch.randn(2, requires_grad=True)
    with count_ops() as ops:
        assert_same_gradients(remat(fn), fn, x, wrt=[*scripted.parameters()])
        assert_same_gradients(remat(scripted), scripted, x)
    assert ops["sin"] == 1 + 2


def test_a_scripted_module_is_refused_under_grad(scripted):
    with pytest.raises(CaptureError, match="Linear is a TorchScript module"):
        grad(lambda x: remat(scripted)(x).sum())(torch.randn(2))


# --- Objects that are no concern of remat's ----------------------------------------


class Proxy:
    """As web frameworks have them: outside of a request everything raises."""

    @property
    def __class__(self):
        raise RuntimeError("outside of a request")

    def __getattr__(self, name):
        raise RuntimeError("outside of a request")


class Slotted:
    __slots__ = ("set", "unset")

    def __init__(self):
        self.set = 1

    def __getattr__(self, name):
        return getattr(self.unset, name)


class Permissive(type):
    def __getattr__(cls, name):
        return 3


class HasPermissiveClass(metaclass=Permissive):
    pass


class PretendsNoDict:
    @property
    def __dict__(self):
        raise RuntimeError("outside of a request")


class FromNowhere:
    __module__ = None


ODD = {
    "namespace of operators": lambda: torch.ops.aten,
    "all operators": lambda: torch.ops,
    "operator": lambda: torch.ops.aten.sin,
    "overload": lambda: torch.ops.aten.sin.default,
    "proxy": lambda: Proxy(),
    "slots": lambda: Slotted(),
    "metaclass": lambda: HasPermissiveClass(),
    "no dict": lambda: PretendsNoDict(),
    "no module": lambda: FromNowhere(),
    "lock": lambda: threading.Lock(),
    "class": lambda: Slotted,
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD.keys())
def test_an_odd_object_is_no_obstacle(make):
    odd, x = make(), torch.randn(3, requires_grad=True)

    def fn(x):
        assert odd is not None
        return torch.ops.aten.exp(x)

    with count_ops() as ops:
        (got,) = torch.autograd.grad(remat(fn)(x).sum(), x)
    assert ops["exp"] == 2
    assert_same(got, x.detach().exp())


LONG = {
    "list": list(range(10**5)),
    "dict": dict.fromkeys(range(10**5), "word"),
    "deque": collections.deque(range(10**5)),
    "counter": collections.Counter(range(10**5)),
}


@pytest.mark.parametrize("words", LONG.values(), ids=LONG.keys())
def test_a_long_list_of_words_is_not_walked_one_by_one(words, monkeypatch):
    x = torch.randn(3, requires_grad=True)
    visited = []
    right = Search.visit
    monkeypatch.setattr(
        Search, "visit", lambda *args: visited.append(args[1]) or right(*args)
    )
    with count_ops() as ops:
        remat(lambda x: x.exp() * len(words))(x).sum().backward()
    assert any(value is words for value in visited)
    assert len(visited) < 10
    assert ops["exp"] == 2


# --- What is told of the code that a call reaches ----------------------------------


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *_args, **_kwargs):
        for layer in self.layers:
            x = layer(x)
        return x


def call_of(fn, *args, **kwargs):
    return Call(fn, "f", args, kwargs).snapshot


def signature_of(fn, *args, **kwargs):
    signature = call_of(fn, *args, **kwargs).signature
    assert {signature: 1}[signature] == 1
    return signature


def of_width(n):
    return Layers(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 3))


def closes_over(value):
    return lambda x: (x * value).sum()


def sine(x, *_args, **_kwargs):
    return x.sin()


def cosine(x, *_args, **_kwargs):
    return x.cos()


class Choice(enum.Enum):
    ONE = 1
    TWO = 2


class Holder:
    def __init__(self, w):
        self.w = w

    def __call__(self, x, *_args):
        return x * self.w


X = torch.ones(3)
CONSTANTS = (X, 1, "a", None, Choice.ONE, torch.tanh)
SAME_CODE = {
    "function": (lambda: sine, X, X + 1),
    "closure": (lambda: closes_over(X + 1), X, X),
    "module": (lambda: of_width(4), X, X),
    "constants": (lambda: sine, CONSTANTS, CONSTANTS),
    "tree": (lambda: of_width(2), (X, {"a": [X, 2.0]}), (X, {"a": [X + 1, 2.0]})),
    "object": (lambda: Holder(X + 1), X, X),
    "passed": (lambda: sine, (X, Holder(X)), (X, Holder(X + 1))),
    "generator": (lambda: sine, (X, torch.Generator()), (X, torch.Generator())),
}


@pytest.mark.parametrize("case", SAME_CODE)
def test_calls_of_the_same_code_have_one_signature(case):
    make, first, second = SAME_CODE[case]
    a, b = (args if isinstance(args, tuple) else (args,) for args in (first, second))
    assert signature_of(make(), *a) == signature_of(make(), *b)


def in_evaluation(module):
    module.layers[1].eval()
    return module


def with_global():
    return lambda x: _helper(x)


def _helper(x):
    return closes_over(X)(x)


KEPT = remat(sine, rng="error")
OTHER_CODE = {
    "function": (call_of, (sine, X), (cosine, X)),
    "arity": (call_of, (sine, X), (sine, X, X)),
    "closure": (call_of, (closes_over(X), X), (Holder(X), X)),
    "captured function": (call_of, (closes_over(sine), X), (closes_over(cosine), X)),
    "passed function": (call_of, (sine, X, sine), (sine, X, cosine)),
    "passed builtin": (call_of, (sine, X, torch.sin), (sine, X, torch.cos)),
    "passed object": (call_of, (sine, X, Holder(X)), (sine, X, Slots(X))),
    "enumeration": (call_of, (sine, X, Choice.ONE), (sine, X, Choice.TWO)),
    "flag": (call_of, (sine, X, True), (sine, X, False)),
    "number": (call_of, (sine, X, 1), (sine, X, 1.0)),
    "tree": (call_of, (sine, [X]), (sine, (X,))),
    "training": (call_of, (of_width(2), X), (in_evaluation(of_width(2)), X)),
    "layer": (call_of, (Layers(nn.Tanh()), X), (Layers(nn.ReLU()), X)),
    "depth": (call_of, (Layers(nn.Tanh()), X), (Layers(nn.Tanh(), nn.Tanh()), X)),
    "global": (call_of, (with_global(), X), (_helper, X)),
    "builtin": (call_of, (closes_over(torch.sin), X), (closes_over(torch.cos), X)),
    "options": (call_of, (closes_over(remat(sine)), X), (closes_over(KEPT), X)),
}


@pytest.mark.parametrize("case", OTHER_CODE)
def test_calls_of_other_code_have_other_signatures(case):
    call, first, second = OTHER_CODE[case]
    assert call(*first).signature != call(*second).signature


def test_a_keyword_is_part_of_the_signature():
    signatures = {signature_of(sine, X, way=way) for way in ("a", "b", "a")}
    assert len(signatures) == 2
    assert signature_of(sine, X) not in signatures


@contextlib.contextmanager
def without_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_signature_holds_nothing_of_the_users():
    with without_collection():
        x, w, module = torch.ones(3), torch.ones(3), of_width(2)

        class Local(Holder):
            """Made in a notebook's cell, say."""

        held = Local(w)
        fn = closes_over(w)
        refs = [weakref.ref(v) for v in (x, w, module, held, fn)]
        signatures = [
            signature_of(sine, x, held),
            signature_of(fn, x),
            signature_of(held, [x]),
            signature_of(module, x),
        ]
        refs.append(weakref.ref(Local))
        del x, w, module, held, fn, Local
        gc.collect()  # a class is in a cycle
        assert [r() for r in refs] == [None] * len(refs)
    assert len({*signatures}) == 4


COMPILED = {
    "function": lambda: torch.compile(sine, backend="eager"),
    "module": lambda: torch.compile(nn.Linear(3, 3), backend="eager"),
    "closure": lambda: closes_over_call(torch.compile(sine, backend="eager")),
    "attribute": lambda: Layers(torch.compile(nn.Linear(3, 3), backend="eager")),
    "in place": lambda: Layers(compiled_in_place(nn.Linear(3, 3))),
    "method": lambda: WithCompiledMethod(),
    "global of a method": lambda: WithCompiledGlobal(),
    "script": lambda: closes_over_call(torch.jit.script(nn.functional.hardswish)),
}


def closes_over_call(fn):
    return lambda x: fn(x)


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


class WithCompiledMethod(nn.Module):
    @functools.partial(torch.compile, backend="eager")
    def forward(self, x):
        return x.sin()


compiled_global = torch.compile(sine, backend="eager")


class WithCompiledGlobal(nn.Module):
    def forward(self, x):
        return compiled_global(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_is_noticed(case):
    fn = COMPILED[case]()
    assert call_of(fn, X).compiled
    assert call_of(lambda x: fn(x), X).compiled
    assert call_of(sine, X, fn).compiled


@pytest.mark.parametrize("case", SAME_CODE)
def test_other_code_is_not_taken_for_compiled(case):
    make, first, _ = SAME_CODE[case]
    args = first if isinstance(first, tuple) else (first,)
    assert not call_of(make(), *args).compiled
