"""What a function leaves in a list, an attribute or a variable is as plain code's.

Under torch.func such a tensor is one of the results of the call.
"""

import contextvars
import functools
from queue import SimpleQueue

import pytest
import torch
from support.tables import rows
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.weak import WeakTensorKeyDictionary

from remat import CaptureError, policies, remat


X = torch.linspace(-1, 1, 6, dtype=torch.double).reshape(2, 3)
RAN = SimpleQueue()  # which no recompute puts back
VARIABLE = contextvars.ContextVar("variable")


def ran():
    """Return how often a function ran since this was asked last."""
    count = RAN.qsize()
    for _ in range(count):
        RAN.get()
    return count


class State:
    pass


def of(keep, keeps):
    """Return a function that keeps what `keep` is given, and what reads it."""

    def fn(x):
        RAN.put(1)
        h = (x * 2).sin()
        keep(h)
        return h.exp()

    return fn, keeps


def a_list():
    held = []
    return of(held.append, lambda: held[-1])


def a_context_variable():
    return of(lambda h: VARIABLE.set(h), lambda: VARIABLE.get())


def the_result():
    held = State()

    def fn(x):
        RAN.put(1)
        held.y = (x * 2).sin()
        return held.y

    return fn, lambda: held.y


def a_detached_one():
    held = []
    return of(lambda h: held.append(h.detach()), lambda: held[-1])


def an_attribute_of_an_input():
    held = State()

    def fn(x):
        RAN.put(1)
        x.last = (x * 2).sin()
        held.x = x
        return x.last.exp()

    return fn, lambda: held.x.last


def an_attribute_of_the_result():
    held = State()

    def fn(x):
        RAN.put(1)
        held.y = (x * 2).sin()
        held.y.last, held.y.tag, held.y.own = held.y.cos(), "last", held.y
        return held.y

    def kept():
        assert held.y.own is held.y
        return getattr(held.y, held.y.tag)

    return fn, kept


def a_weak_table():
    held, table = State(), WeakTensorKeyDictionary()

    def keep(h):
        held.h = h
        table[h] = h.cos()

    return of(keep, lambda: table[held.h])


# Other holders are those of `support.adversarial`, under `vjp` and others.
KEPT = {
    fn.__name__.replace("_", " "): fn
    for fn in (
        *(a_list, a_context_variable, the_result, a_detached_one),
        *(an_attribute_of_an_input, an_attribute_of_the_result, a_weak_table),
    )
}
TRANSFORMS = {
    "grad": lambda loss: grad(loss)(X),
    "vjp": lambda loss: vjp(loss, X)[1](torch.ones((), dtype=X.dtype))[0],
    "vmap(grad)": lambda loss: vmap(grad(loss))(X),
    "grad(vmap)": lambda loss: grad(lambda x: vmap(loss)(x).sum())(X),
    "jacrev": lambda loss: jacrev(loss)(X),
    "jvp": lambda loss: jvp(loss, (X,), (X.cos(),))[1],
    "jvp(grad)": lambda loss: jvp(grad(loss), (X,), (X.cos(),))[1],
    "vmap(jvp(grad))": lambda loss: vmap(
        lambda x: jvp(grad(loss), (x,), (x.cos(),))[1]
    )(X),
    "grad(grad)": lambda loss: grad(lambda x: grad(loss)(x).sin().sum())(X),
    "hessian": lambda loss: hessian(loss)(X),
}


def outcome(transform, make, wrap):
    """Return gradients of what uses what was kept, twice, and how often it ran."""
    ran()
    fn, kept = make()
    run = wrap(fn)

    def loss(x):
        return (run(x).sum(-1) * kept().cos().sum(-1)).sum()

    return [transform(loss), transform(loss)], ran()


FAST = {"a list", "an attribute of an input", "a detached one"}


@pytest.mark.parametrize("transform", TRANSFORMS)
@rows("kept", {name: name for name in KEPT}, fast=FAST)
def test_what_is_kept_is_as_plain_code_has_it(kept, transform):
    transform, make = TRANSFORMS[transform], KEPT[kept]
    expected, times = outcome(transform, make, lambda fn: fn)
    found, more = outcome(transform, make, remat)
    assert not all(t.eq(0).all() for t in expected)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    reverse = transform is not TRANSFORMS["jvp"]
    assert more >= times + 2 if reverse else more == times


@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable"])
@pytest.mark.parametrize("kept", ["a list", "a detached one"])
def test_what_is_kept_under_a_policy(kept, policy):
    wrap = functools.partial(remat, policy=getattr(policies, policy), prune=True)
    for transform in ("grad", "jvp(grad)", "vmap(grad)"):
        expected, _ = outcome(TRANSFORMS[transform], KEPT[kept], lambda fn: fn)
        found, _ = outcome(TRANSFORMS[transform], KEPT[kept], wrap)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_what_is_kept_is_the_result_itself():
    fn, kept = the_result()
    seen = []

    def loss(x):
        y = remat(fn)(x)
        seen.append(y is kept())
        return (y * y).sum()

    grad(loss)(X)
    assert seen == [True]


def test_what_a_vmap_left_is_passed_over_in_another():
    fn, kept = a_list()
    run = remat(fn)

    def loss(x):
        return (run(x) * kept()).sum()

    for x in (X, X[:1], torch.cat([X, X])):
        assert torch.equal(vmap(grad(loss))(x)[:1], grad(loss)(X[0])[None])


def test_what_is_kept_is_kept_once_at_the_base():
    held = []

    def fn(x):
        RAN.put(1)
        held.append(x.sin())
        return held[-1].exp()

    ran()
    x = X.clone().requires_grad_()
    y = remat(fn, higher_order=True)(x)
    (y * held[0].cos()).sum().backward()
    assert len(held) == 1
    assert ran() == 2
    plain = X.clone().requires_grad_()
    (fn(plain) * held[-1].cos()).sum().backward()
    torch.testing.assert_close(x.grad, plain.grad)


@pytest.mark.parametrize("transform", ["grad", "vmap(grad)", "jvp(grad)", "grad(vmap)"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default"),
        pytest.param({"prune": True}, id="prune"),
        pytest.param({"policy": policies.everything_saveable}, id="all saved"),
    ],
)
def test_what_is_kept_where_no_walk_comes_is_refused(transform, options, monkeypatch):
    """In each call: the first one of a kind is recorded."""
    held, weight = State(), torch.ones(3, dtype=X.dtype)
    monkeypatch.setattr(torch.utils, "held", held, raising=False)

    def fn(x):
        h = (x * weight).sin()
        torch.utils.held.h = h
        return h.exp().cos()

    wrapped = remat(fn, **options)

    def loss(x):
        return (wrapped(x) * held.h).sum()

    for _ in range(2):
        with pytest.raises(CaptureError, match="left it other than by being returned"):
            TRANSFORMS[transform](loss)
