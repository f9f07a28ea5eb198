"""What a function leaves in a list, an attribute or a variable is as plain code's.

Under torch.func such a tensor is one of the results of the call.
"""

import contextvars
import functools
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple
from weakref import WeakValueDictionary

import pytest
import torch
from support.tables import rows
from torch import nn
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap
from torch.utils.weak import WeakTensorKeyDictionary

from remat import CaptureError, policies, remat


X = torch.linspace(-1, 1, 6, dtype=torch.double).reshape(2, 3)
RAN = SimpleQueue()  # which no recompute puts back
VARIABLE = contextvars.ContextVar("variable")
LAST = None


def ran():
    """Return how often a function ran since this was asked last."""
    count = RAN.qsize()
    for _ in range(count):
        RAN.get()
    return count


class Pair(NamedTuple):
    first: torch.Tensor
    second: int


@dataclass(frozen=True)
class Frozen:
    value: torch.Tensor


class Slotted:
    __slots__ = ("value",)


class State:
    pass


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1, 3, dtype=torch.double))
        self.register_buffer("seen", None)

    def forward(self, x):
        RAN.put(1)
        self.last = (x * self.weight).sin()
        return self.last.exp()


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


def a_list_in_a_dict():
    held = defaultdict(list)
    return of(lambda h: held["h"].append(h), lambda: held["h"][-1])


def a_deque():
    held = deque(maxlen=2)
    return of(held.append, lambda: held[-1])


def a_dict():
    held = OrderedDict()
    return of(lambda h: held.update(h=h), lambda: held["h"])


def keys_of_a_dict():
    held = {}
    return of(lambda h: held.update({h: 2}), lambda: [*held][-1])


def a_tuple():
    held = State()
    return of(lambda h: setattr(held, "pair", (h, 2)), lambda: held.pair[0])


def a_named_tuple():
    held = State()
    return of(lambda h: setattr(held, "pair", Pair(h, 2)), lambda: held.pair.first)


def a_frozen_object():
    held = []
    return of(lambda h: held.append(Frozen(h)), lambda: held[-1].value)


def a_new_object():
    held = State()

    def keep(h):
        held.inner = State()
        held.inner.all = {"h": [h, held]}

    return of(keep, lambda: held.inner.all["h"][0])


def slots():
    held = Slotted()
    return of(lambda h: setattr(held, "value", h), lambda: held.value)


def a_variable():
    held = None

    def keep(h):
        nonlocal held
        held = h

    return of(keep, lambda: held)


def a_global():
    def keep(h):
        global LAST
        LAST = h

    return of(keep, lambda: LAST)


def a_class():
    class Owner:
        last = None

    return of(lambda h: setattr(Owner, "last", h), lambda: Owner.last)


def a_context_variable():
    return of(lambda h: VARIABLE.set(h), lambda: VARIABLE.get())


def an_attribute_of_a_module():
    block = Block()
    return block, lambda: block.last


def a_buffer_of_a_module():
    block = Block()

    def fn(x):
        y = block(x)
        block.seen = block.last * 3
        return y

    return fn, lambda: block.seen


def a_hook():
    block, held = Block(), []
    block.register_forward_hook(lambda _, args, out: held.append(out * 2))
    return block, lambda: held[-1]


def a_view():
    held = []
    return of(lambda h: held.append(h[..., 1:]), lambda: held[-1])


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


def a_detached_one_of_a_hook():
    block, held = Block(), []
    block.register_forward_hook(lambda _, args, out: held.append(out.detach()))
    return block, lambda: held[-1]


def an_attribute_of_a_constant():
    weight = torch.ones(3, dtype=X.dtype)
    return of(lambda h: setattr(weight, "last", weight * h), lambda: weight.last)


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


def a_value_that_is_held_weakly():
    held, table = State(), WeakValueDictionary()

    def keep(h):
        held.h = table["h"] = h

    return of(keep, lambda: table["h"])


KEPT = {
    fn.__name__.replace("_", " "): fn
    for fn in (
        *(a_list, a_list_in_a_dict, a_deque, a_dict, keys_of_a_dict),
        *(a_tuple, a_named_tuple, a_frozen_object, a_new_object, slots, a_variable),
        *(a_global, a_class, a_context_variable, an_attribute_of_a_module),
        *(a_buffer_of_a_module, a_hook, a_view, the_result, a_detached_one),
        *(a_detached_one_of_a_hook, an_attribute_of_a_constant),
        *(an_attribute_of_an_input, an_attribute_of_the_result, a_weak_table),
        a_value_that_is_held_weakly,
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


FAST = {"a tuple", "an attribute of an input", "a detached one"}


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
@pytest.mark.parametrize("kept", ["a list", "a detached one", "a tuple"])
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


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_what_is_set_on_an_input_is_read(transform):
    def loss(wrap):
        def fn(x):
            x.times += 1
            return (x * x.times).sin()

        def run(x):
            x.times = 2
            y = wrap(fn)(x)
            assert x.times == 3
            return y.sum()

        return run

    transform = TRANSFORMS[transform]
    torch.testing.assert_close(transform(loss(remat)), transform(loss(lambda f: f)))


def test_what_a_vmap_left_is_passed_over_in_another():
    fn, kept = a_list()
    run = remat(fn)

    def loss(x):
        return (run(x) * kept()).sum()

    for x in (X, X[:1], torch.cat([X, X])):
        assert torch.equal(vmap(grad(loss))(x)[:1], grad(loss)(X[0])[None])


def test_a_second_call_reads_what_the_first_one_kept():
    def build(wrap):
        held = [torch.ones((), dtype=X.dtype)]

        def step(x):
            RAN.put(1)
            held[0] = (held[0] * x).sin()
            return held[0].exp()

        run = wrap(step)
        return grad(lambda x: (run(run(x)) * held[0]).sum())(X)

    ran()
    torch.testing.assert_close(build(remat), build(lambda f: f))
    assert ran() == 2 + 4


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
