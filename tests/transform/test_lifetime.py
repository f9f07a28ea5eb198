"""Lifetime: everything a remat call touches is freed by reference counting alone.

The collector is off in every test here. `Watch` notes what a body makes and what a call
is given; what is still alive when it should not be is a leak (or a cycle).
"""

import contextlib
import gc
import weakref

import pytest
import torch
from support.runs import configurations
from support.tables import rows
from support.watch import Watch
from support.zoo import Evaluations, ops_of
from torch import nn
from torch.func import grad, hessian, jvp, vjp, vmap

from remat import remat
from remat.testing import count_ops, live_bytes


pytestmark = pytest.mark.usefixtures("_no_collector")


class Token:
    """Something besides tensors that a call may hold on to."""


# --- The detector ---


def test_the_watch_sees_what_a_cycle_keeps_alive():
    watch = Watch()
    cycle = [watch(torch.ones(3))]
    cycle.append(cycle)
    del cycle
    assert watch.alive == 1
    gc.collect()
    assert watch.alive == 0


def test_the_watch_sees_tensors_that_only_a_graph_holds():
    watch = Watch()
    x = torch.ones(3, requires_grad=True)
    out = watch(x.sin()).sin()
    assert watch.alive == 1
    del out
    assert watch.alive == 0


# --- One call ---


def make_call(watch):
    """Return a function, made for this call alone, and its input; all of it watched."""
    token, captured = watch(Token()), watch(torch.linspace(1, 2, 4).requires_grad_())
    module = watch(nn.Linear(4, 4))
    inputs = {"x": watch(torch.linspace(0, 1, 4).requires_grad_()), "n": 2}
    calls = Evaluations()

    def fn(inputs):
        calls.note(token)
        y = watch(inputs["x"].sin() * captured)
        z = watch(module(y).tanh())
        return watch((z * y).exp()) * inputs["n"]

    return remat(watch(fn)), inputs, calls


def backward(fn, inputs):
    out = fn(inputs)
    out.sum().backward()
    return out


def backward_twice(fn, inputs):
    out = fn(inputs).sum()
    out.backward(retain_graph=True)
    out.backward()
    return out


def create_graph(fn, inputs):
    x = inputs["x"]
    return torch.autograd.grad(fn(inputs).sum(), x, create_graph=True)


def double_backward(fn, inputs):
    (first,) = create_graph(fn, inputs)
    first.square().sum().backward()


def of_x(fn):
    return lambda x: fn({"x": x, "n": 2})


def loss_of_x(fn):
    return lambda x: fn({"x": x, "n": 2}).sum()


def under(transform, loss=loss_of_x):
    return lambda fn, inputs: transform(loss(fn))(inputs["x"].detach())


def under_vmap(fn, inputs):
    out = vmap(of_x(fn))(torch.stack([inputs["x"], inputs["x"]]))
    out.sum().backward()
    return out


def vmap_of_grad(loss):
    return lambda x: vmap(grad(loss))(torch.stack([x, x]))


# How it is used: (the use, how often that evaluates the body).
USES = {
    "forward without backward": (lambda fn, inputs: fn(inputs), 1),
    "backward": (backward, 2),
    "backward twice": (backward_twice, 3),
    "backward with create_graph": (create_graph, 2),
    "double backward": (double_backward, 3),
    "grad": (under(grad), 2),
    "vjp": (under(lambda f: lambda x: vjp(f, x), of_x), 1),
    "vmap": (under_vmap, 2),
    "vmap(grad)": (under(vmap_of_grad), 2),
    "jvp(grad)": (under(lambda f: lambda x: jvp(grad(f), (x,), (x,))), 2),
    "hessian": (under(hessian), 2),
}


@rows("use, evaluations", USES)
def test_all_is_freed_when_the_results_are(use, evaluations):
    use(*make_call(Watch())[:2])  # what torch keeps for good is kept now
    gc.collect()
    watch = Watch()
    fn, inputs, calls = make_call(watch)
    made = len(watch)
    result = use(fn, inputs)
    assert len(calls) == evaluations
    assert watch.alive == made, "only what the caller holds, whatever the result is"
    calls.clear()
    del fn, inputs, result
    assert watch.alive == 0


def on_the_input(q):
    q.h = q.sin()
    return (q.h * q).sum()


def on_an_input_that_was_computed(fn):
    def outer(q):
        q.h = q.sin()
        return fn(q)

    return outer


def on_what_is_computed(q):
    h = q.exp()
    h.last = h.sin()
    return (h * h.last).sum()


# A cycle through the graph: an attribute of a tensor that was computed from it.
CYCLES = {
    "on the input": (lambda wrap: wrap(on_the_input), 1),
    "outside": (
        lambda wrap: on_an_input_that_was_computed(
            wrap(lambda q: (q.h * q.sin()).sum())
        ),
        2,
    ),
    "on what is computed": (lambda wrap: wrap(on_what_is_computed), 1),
}


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f))], ids=["grad", ""])
@rows("make, sines", CYCLES)
def test_attributes_keep_no_more_alive_than_in_plain_code(make, sines, transform):
    x = torch.ones(2, 1000)

    def kept(wrap):
        step = transform(make(wrap))
        step(x)  # what torch keeps for good is kept now
        with count_ops() as ops:
            return live_bytes(lambda: [step(x) for _ in range(5)] and None), ops["sin"]

    plain, ours = kept(lambda fn: fn), kept(remat)
    assert ours == (plain[0], plain[1] + 5)
    assert plain[1] == 5 * sines


@pytest.mark.parametrize("transform", [grad, lambda f: vmap(grad(f))], ids=["grad", ""])
def test_what_was_set_before_an_error_stays_and_keeps_nothing_alive(transform):
    x = torch.ones(2, 1000)

    def kept(wrap):
        seen = torch.ones(2)
        seen.times = 0

        def fn(q):
            seen.times += 1
            q.h = q.sin()
            raise ValueError

        def step():
            with contextlib.suppress(ValueError):
                transform(wrap(fn))(x)

        step()
        return live_bytes(lambda: [step() for _ in range(5)] and None), vars(seen)

    (_, plain), ours = kept(lambda fn: fn), kept(remat)
    assert ours == (0, plain)  # plain code keeps a cycle
    assert plain == {"times": 6}


def test_after_a_backward_only_the_gradients_stay_while_the_output_lives():
    watch = Watch()
    fn = lambda x: watch(watch(x.sin()).exp()).sin()
    x = torch.linspace(0, 1, 4).requires_grad_()
    y = watch(x * 2.0)
    out = remat(fn)(y)
    assert (len(watch), watch.alive) == (3, 1)
    out.sum().backward()
    assert (len(watch), watch.alive) == (5, 1)
    del y
    assert watch.alive == 0, "the graph of `out` was freed by the backward"


ASKS = {
    "whether it is a leaf": lambda x: x.is_leaf,
    "the name of its node": lambda x: x.grad_fn.name() != "MulBackward0",
    "its text": lambda x: "MulBackward0" not in repr(x),
    "its place among outputs": lambda x: x.output_nr,
}


@pytest.mark.parametrize("question", ASKS)
def test_an_input_of_which_something_is_asked_is_freed_if_a_result_is_added_to_it(
    question,
):
    asks = ASKS[question]

    def fn(x):
        return x if asks(x) else (x * 2.0).sin().exp()

    def run(wrap):
        watch, a = Watch(), torch.linspace(0, 1, 4).requires_grad_()
        scaled = lambda: a * watch(torch.full((4,), 1.5))  # the graph alone holds it
        with count_ops() as ops:
            y = wrap(fn)(scaled())  # which is gone by the backward
            y.sum().backward()
            x = watch(scaled())
            x += watch(wrap(fn)(x))  # nobody differentiates it
        del x, y
        assert watch.alive == 0
        return a.grad, ops["sin"]

    (expected, sines), (found, more) = run(lambda f: f), run(remat)
    assert torch.equal(found, expected)
    assert more == sines + 1


def test_a_discarded_output_frees_its_call_although_others_live():
    watch = Watch()
    x = torch.linspace(0, 1, 4).requires_grad_()
    fn = remat(lambda y: watch(y.sin()).sin())
    kept, dropped = fn(x), fn(watch(x * 2.0))
    del dropped
    assert (len(watch), watch.alive) == (3, 0)
    kept.sum().backward()
    assert (len(watch), watch.alive) == (4, 0)


def test_the_callable_itself_need_not_live_until_the_backward():
    watch = Watch()
    fn, inputs, calls = make_call(watch)
    out = fn(inputs)
    body = weakref.ref(fn.__wrapped__)
    del fn
    assert body() is None, "the backward makes it again, around what it refers to"
    out.sum().backward()
    assert len(calls) == 2
    calls.clear()
    del inputs, out
    assert watch.alive == 0


@configurations
def test_nested_calls_with_a_policy_are_freed_after_their_backward(ours):
    x, watch = torch.ones(4, 4, requires_grad=True), Watch()
    # It fails in no evaluation.
    inner = ours(products_failing_at(0, x, watch)[0])
    outer = ours(lambda x: inner(x.sin()).cos())
    for _ in range(3):
        with count_ops() as ops:
            outer(x).backward()
    assert ops["exp"] >= 2
    assert watch.alive == 0


# --- Errors ---


class PlannedError(Exception):
    pass


def failing_at(evaluation, watch):
    """Return a function that raises in that evaluation of its body."""
    count = Evaluations()

    def fn(x):
        count.note(1)
        y = watch(watch(x.sin()).exp())
        if len(count) == evaluation:
            raise PlannedError("as planned")
        return y.sin().sum()

    return fn, count


def attempt(use, fn, x):
    with pytest.raises(PlannedError, match="as planned"):
        use(fn, x)


ATTEMPTS = {
    "backward": lambda fn, x: fn(x.requires_grad_()).backward(),
    "grad": lambda fn, x: grad(fn)(x),
    "vmap(grad)": lambda fn, x: vmap(grad(fn))(x[None]),
    "hessian": lambda fn, x: hessian(fn)(x),
}


@rows("use", ATTEMPTS)
@pytest.mark.parametrize("evaluation", [1, 2], ids=["forward", "recompute"])
def test_an_exception_leaves_nothing_alive(use, evaluation):
    # torch's first transform imports modules, which keep the frames they are met in.
    use(lambda x: x.sin().sum(), torch.ones(4))
    watch = Watch()
    fn, count = failing_at(evaluation, watch)
    x = watch(torch.linspace(0, 1, 4))
    attempt(use, remat(watch(fn)), x)
    assert len(count) == evaluation
    count.note("past the failure")
    use(remat(fn), x)
    assert len(count) > evaluation + 2, "and the next attempt is rematerialized"
    del fn, x
    assert watch.alive == 0


def products_failing_at(evaluation, w, watch):
    """As `failing_at`, with a product of what the graph saves by a handle."""
    count = Evaluations()

    def fn(x):
        count.note(1)
        y = watch(watch(watch(x @ w).sin()) @ w)
        if len(count) == evaluation:
            raise PlannedError("as planned")
        return (y.cos() @ w).exp().sum()

    return fn, count


@configurations
@pytest.mark.parametrize("nested", [False, True], ids=["alone", "nested"])
@pytest.mark.parametrize("evaluation", [1, 2, 3], ids=["first", "second", "third"])
def test_an_exception_leaves_nothing_alive_that_a_policy_may_save(
    evaluation, nested, ours
):
    x, watch = torch.ones(4, 4, requires_grad=True), Watch()
    fn, count = products_failing_at(evaluation, x, watch)
    wrapped = ours(fn)
    if nested:
        wrapped = ours(lambda x, inner=wrapped: inner(x.sin()).cos())

    def train():
        for _ in range(3):
            wrapped(x).backward()

    with pytest.raises(PlannedError, match="as planned"):
        train()
    assert len(count) == evaluation
    assert watch.alive == 0
    ops = ops_of(lambda: wrapped(x).backward())
    assert ops["sin"] >= 2, "and the next call is rematerialized"
