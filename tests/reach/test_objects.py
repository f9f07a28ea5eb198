"""Objects that hold tensors and are no pytrees: as arguments and as results."""

import gc
import itertools
import threading
import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.objects import (
    KINDS,
    Attributes,
    Frozen,
    FrozenSlots,
    Plain,
    assert_as_plain,
    scalar_of,
)
from support.tables import crossed, rows
from support.transforms import TRANSFORMS
from support.zoo import ops_of, plainly
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

from remat import CaptureError, RecomputeError, remat
from remat.testing import assert_same, count_ops, live_bytes


higher = partial(remat, higher_order=True)
AT_BASE = [how for how, transform in TRANSFORMS.items() if transform.at_base]


FUNC = {
    "grad": grad,
    "vmap_grad": lambda loss: lambda x: vmap(grad(loss))(x[None])[0],
    "grad_vmap": lambda loss: lambda x: grad(lambda x: vmap(loss)(x).sum())(x[None])[0],
    "hessian": hessian,
}
under_func = pytest.mark.parametrize("transform", FUNC.values(), ids=FUNC.keys())
pytestmark = pytest.mark.filterwarnings(
    "ignore:Attempted to insert a get_attr Node:UserWarning"
)
X = torch.linspace(0.1, 1, 3)


def step_of(kind):
    """Takes an object of a kind, and returns another one."""
    put, get = KINDS[kind]

    def step(held):
        w, x = get(held)
        y = w.sin().exp() * x
        made = put(y, y.cos())
        assert type(held) is type(made)
        return made

    return step


# --- Each kind under each transform ---


@crossed("how, kind", TRANSFORMS, KINDS, whole=("backward", "vmap_grad"))
def test_a_kind_is_an_argument_and_a_result(how, kind):
    assert_as_plain(how, partial(scalar_of, kind), step_of(kind))


@crossed("how, kind", AT_BASE, KINDS)
def test_a_kind_with_higher_order(how, kind):
    loss_of, step = partial(scalar_of, kind), step_of(kind)
    assert_as_plain(how, loss_of, step, wrap=higher, calls=True)


WRONG = {
    "not rematerialized": (plainly, "1 evaluations, not 2"),
    "other values": (
        lambda f: remat(lambda o: f(replace(o, right=2 * o.right))),
        "value",
    ),
}


@rows("wrap, message", WRONG)
def test_the_comparison_of_kinds_fails_for_another_function(wrap, message):
    loss_of, step = partial(scalar_of, "dataclass"), step_of("dataclass")
    with pytest.raises(AssertionError, match=message):
        assert_as_plain("grad", loss_of, step, wrap=wrap)


def both(fn, x, loss, transform=grad, sines=None):
    """Assert that a transform of a loss is as plain, and that sines are taken again.

    A hessian takes more: the derivatives of the sines have sines as well.
    """
    expected = transform(partial(loss, fn))(x)
    plain = ops_of(lambda: transform(partial(loss, fn))(x))
    with count_ops() as ops:
        found = transform(partial(loss, remat(fn)))(x)
    assert_same(found, expected, reassociated=True)
    assert ops["sin"] > plain["sin"]
    if sines is not None:
        assert ops["sin"] == sines


def test_the_comparison_of_one_transform_fails_without_a_recompute(monkeypatch):
    monkeypatch.setitem(both.__globals__, "remat", plainly)
    with pytest.raises(AssertionError):
        both(lambda x: x.sin().exp(), X, lambda fn, x: fn(x).sum())


# --- What a result is ---


@under_func
def test_a_result_is_the_very_object_that_the_function_made(transform):
    def loss(fn, x):
        made = []

        def noting(x):
            out = fn(x)
            made.append(weakref.ref(out))
            return out

        wrapped = remat(noting) if isinstance(fn, type(remat(fn))) else noting
        out = wrapped(x)
        assert out is made[0]()
        return out.left.sum()

    both(lambda x: Plain(x.sin().exp(), None), X, loss, transform)


def everything(x):
    y = x.sin().exp()
    o = Attributes(y, (y, None, [x, "text"]))
    o.me, o.number = o, 3
    return {"o": o, "p": Frozen(o, FrozenSlots(y, 1.5)), "y": y}


@under_func
def test_identities_and_constants_are_kept(transform):
    def loss(fn, x):
        out = fn(x)
        o, p, y = out["o"], out["p"], out["y"]
        assert o.me is o
        assert p.left is o
        assert o.left is y
        assert o.right[0] is y
        assert p.right.left is y
        assert o.right[2][0] is x
        assert (o.number, o.right[1], o.right[2][1]) == (3, None, "text")
        assert (p.right.right, p.right.none) == (1.5, None)
        return (o.left * p.right.left).sum()

    both(everything, X, loss, transform)


def test_no_constructor_and_no_setter_runs():
    ran = []

    class Noting:
        def __init__(self, y):
            ran.append("init")
            self.y = y

        def __setattr__(self, name, value):
            ran.append("set")
            super().__setattr__(name, value)

        def __reduce__(self):
            raise AssertionError("copied")

        def __del__(self):
            ran.append("del")

    loss = lambda x: remat(lambda x: Noting(x.sin().exp()))(x).y.sum()
    assert ops_of(lambda: grad(loss)(X))["sin"] == 2
    # What the recompute notes is dropped, but for what it notes when it has ended.
    assert sorted(ran) == ["del", "del", "init", "set"]


def test_a_cycle_among_tuples_is_kept():
    def fn(x):
        y, inner = x.sin().exp(), []
        outer = (inner, y)
        inner.append(outer)
        return outer

    def loss(fn, x):
        outer = fn(x)
        assert outer[0][0] is outer
        return outer[1].sum()

    both(fn, X, loss, sines=2)


def test_methods_partials_and_weak_references_of_a_result():
    def fn(x):
        held = Attributes(x.sin().exp(), x)
        read = partial(torch.mul, held.left)
        return held, held.__getattribute__, read, weakref.ref(held), (weakref.ref(fn),)

    def loss(fn, x):
        held, get, read, ref, _ = fn(x)
        assert ref() is held
        assert get("left") is held.left
        assert read.args[0] is held.left
        return read(get("left")).sum()

    both(fn, X, loss, sines=2)


# --- The user's own objects ---


class Cache:
    """Starts empty, and grows."""

    def __init__(self):
        self.layers, self.seen = [], 0

    def update(self, y):
        self.seen += 1
        self.layers.append({"y": y, "twice": (y, y * 2)})
        return sum(layer["twice"][1] for layer in self.layers)


@under_func
def test_a_cache_that_is_passed_updated_and_returned_is_that_cache(transform):
    fn = lambda cache, x: (cache.update(x.sin().exp()), cache)

    def loss(fn, x):
        cache = Cache()
        layers = cache.layers
        a, first = fn(cache, x)
        b, second = fn(cache, x * 2)
        assert first is second is cache
        assert cache.layers is layers
        assert (cache.seen, len(layers)) == (2, 2)
        return (a * b * layers[0]["y"]).sum()

    both(fn, X, loss, transform)


# --- Memory and errors ---


def test_a_call_holds_nothing_of_its_result():
    refs = []

    def loss(x):
        out = remat(lambda x: Plain(x.sin().exp(), Attributes(x.cos(), None)))(x)
        refs.extend(map(weakref.ref, (out, out.right)))
        left = out.left
        del out
        assert [ref() for ref in refs] == [None, None]
        return left.sum()

    gc.disable()
    try:
        ops = ops_of(lambda: grad(loss)(X))
    finally:
        gc.enable()
    assert ops["sin"] == 2


def test_an_object_costs_the_memory_of_a_tuple():
    x = torch.linspace(0, 1, 1000, requires_grad=True)

    def fn(x, put):
        y = x.sin().exp().sin().exp()
        return put(y, y + 1)

    bytes_of = lambda wrap, put: live_bytes(lambda: wrap(fn)(x, put))
    assert bytes_of(higher, Plain) == bytes_of(higher, lambda a, b: (a, b))
    assert bytes_of(higher, Plain) < bytes_of(plainly, Plain)


def test_another_result_in_the_recompute_is_an_error():
    first = threading.Lock()  # which no recompute puts back

    def fn(x):
        name = "left" if first.acquire(blocking=False) else "right"
        return SimpleNamespace(**{name: x.sin().exp()})

    with pytest.raises(RecomputeError, match=r"result\.right'\] where .*\.left'\]"):
        grad(lambda x: sum(t.sum() for t in vars(remat(fn)(x)).values()))(X)


# --- Results that are expanded ---


def normal(x):
    return torch.distributions.Normal(x.sin(), 1.0)


def scalar_of_normal(out):
    return (out.log_prob(X) * out.scale * out.loc.exp()).sum()


def expanded(x):
    y = x.sin()
    return y, y.sum().expand(3), y[0].exp().expand(3), torch.tensor(2.0).expand(3)


def scalar_of_expanded(out):
    return out[0].mul(out[1]).mul(out[2]).mul(out[3]).sum()


@pytest.mark.parametrize(
    "second",
    [
        hessian,
        lambda loss: jacfwd(jacrev(loss)),
        lambda loss: jacrev(jacfwd(loss)),
        lambda loss: lambda x: jvp(grad(loss), (x,), (x,))[1],
        lambda loss: grad(lambda x: jvp(loss, (x,), (x,))[1]),
        lambda loss: lambda x: vmap(hessian(loss))(torch.stack([x, x + 1])),
    ],
    ids=["hessian", "rev_fwd", "fwd_rev", "jvp_grad", "grad_jvp", "vmap"],
)
@pytest.mark.parametrize(
    ("fn", "scalar"),
    [(normal, scalar_of_normal), (expanded, scalar_of_expanded)],
    ids=["Normal", "tuple"],
)
def test_expanded_results_have_second_derivatives(second, fn, scalar):
    with count_ops() as plain_ops:
        expected = second(lambda x: scalar(fn(x)))(X)
    with count_ops() as ops:
        found = second(lambda x: scalar(remat(fn)(x)))(X)
    torch.testing.assert_close(found, expected)
    assert ops["sin"] > plain_ops["sin"] > 0


# --- Results that are read later ---

ITERATORS = {
    "map of a closure": lambda y: map(partial(lambda y, i: y * i, y), [1]),
    "zip": lambda y: zip([y], strict=True),
    "iter of a call": lambda y: iter(lambda: y, None),
    "deep": lambda y: iter([[[[[y]]]]]),
    "values": lambda y: {"a": y}.values(),
    "iter of values": lambda y: iter({"a": y}.values()),
    "tee": lambda y: itertools.tee([y])[0],
    "repeat": lambda y: itertools.repeat(y),
    "generator": lambda y: (t for t in [y]),
}


@rows("make", ITERATORS)
def test_iterators_that_lead_to_tensors_are_refused(make):
    def loss(x):
        y, _ = remat(lambda x: (x, make(x.sin())))(x)
        return y.sum()

    with pytest.raises(CaptureError, match=r"`result\[1\]`.*Return a list\.$"):
        grad(loss)(X)


PLAIN = {
    "iter": lambda: iter([1, 2]),
    "many": lambda: iter([*range(100_000)]),
    "values": lambda: {"a": 1}.values(),
    "enumerate": lambda: enumerate("ab"),
}


@rows("make", PLAIN)
def test_iterators_over_plain_values_are_returned(make):
    def loss(x):
        y, parts = remat(lambda x: (x.sin().exp(), make()))(x)
        assert [*parts] == [*make()]
        return y.sum()

    with count_ops() as ops:
        found = grad(loss)(X)
    torch.testing.assert_close(found, X.cos() * X.sin().exp())
    assert ops["sin"] == 2
