"""What is written for a run, and when: nothing where nothing differs; threads."""

import contextlib
import gc
import signal
import threading
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from support.runs import leaf
from support.tables import rows
from support.zoo import ops_of
from torch import nn

from remat import policies, remat
from remat._reach import parts as _parts
from remat._reach.holders import container_kind
from remat.nn import apply, remove
from remat.testing import assert_same, count_ops


@pytest.fixture
def written(monkeypatch):
    """The holders that runs wrote so far."""
    found, note = [], _parts.Written.__init__

    def noting(self, kind, holder, *rest):
        found.append(holder)
        note(self, kind, holder, *rest)

    monkeypatch.setattr(_parts.Written, "__init__", noting)
    return found


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls, self.table = 1, {"scale": [2.0]}

    def forward(self, x):
        return (self.linear(x) * self.table["scale"][0] * self.calls).sin().exp()


class Called(Counting):
    def forward(self, x):
        y = super().forward(x)
        self.calls += 1
        return y


def gradient(module, wrap, *, between=lambda: None):
    x = torch.ones(2, 4, requires_grad=True)
    y = wrap(module)(x).sum()
    between()
    return torch.autograd.grad(y, x)[0]


def test_nothing_is_written_where_nothing_differs(written):
    module = Counting()
    expected = gradient(module, lambda m: m)
    with count_ops() as ops:
        for _ in range(3):
            assert_same(gradient(module, remat), expected)
    assert ops["sin"] == 6
    assert not written
    assert not _parts.RUNNING


def test_only_what_differs_is_written(written):
    module = Counting()
    expected = gradient(module, lambda m: m)
    change = lambda: module.table["scale"].__setitem__(0, 9.0)
    ops = ops_of(lambda: assert_same(gradient(module, remat, between=change), expected))
    assert ops["sin"] == 2
    assert written == [module.table["scale"]]
    assert module.table == {"scale": [9.0]}
    assert not _parts.RUNNING


def test_an_effect_of_the_forward_is_put_back_where_it_was(written):
    module = Called()
    assert ops_of(lambda: gradient(module, remat))["sin"] == 2
    assert written == [vars(module)]
    assert module.calls == 2


def test_an_error_in_a_recompute_puts_everything_back():
    state = {"scale": 2.0}

    def fn(x):
        y = (x * state["scale"]).sin()
        state["scale"] += 1
        if _parts.RUNNING:
            raise ValueError("in the recompute")
        return y.exp()

    x = leaf()
    with count_ops() as ops:
        y = remat(fn)(x).sum()
    assert ops["sin"] == 1
    with pytest.raises(ValueError, match="in the recompute"):
        y.backward()
    assert state == {"scale": 3.0}
    assert not _parts.RUNNING


# --- Threads ---


def test_a_recompute_that_waits_for_one_of_another_thread():
    """Both exchange the same holder: a lock held meanwhile would be waited for."""
    state = {"scale": 2.0}
    inner = remat(lambda x: (x * state["scale"]).sin().exp())

    def fn(x):
        z = (x * state["scale"]).cos()
        if _parts.RUNNING:
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(torch.autograd.grad, other, w).result(60)[0])
        state["scale"] += 1
        return z.exp()

    found = []
    w, x = torch.ones(8, requires_grad=True), torch.ones(8, requires_grad=True)
    other = inner(w).sum()
    y = remat(fn)(x).sum()
    with count_ops() as ops:
        (got,) = torch.autograd.grad(y, x)
    assert ops["cos"] >= 1
    v = torch.ones(8, requires_grad=True)
    (plain,) = torch.autograd.grad((v * 2.0).sin().exp().sum(), v)
    assert_same(found[0], plain)
    (plain,) = torch.autograd.grad((v * 2.0).cos().exp().sum(), v)
    assert_same(got, plain)
    assert state == {"scale": 3.0}
    assert not _parts.RUNNING


def test_the_run_that_ends_first_hands_on_what_was_before():
    """Two runs overlap and end in the order in which they began."""
    kind, holder = container_kind(dict), {"a": 1}

    def start(value):
        (one,) = _parts.written_to(kind, holder, *kind.held(holder))
        kind.write(holder, ["a"], [value])
        return one

    first, second = start(2), start(3)
    first.end()
    assert holder == {"a": 3}
    second.end()
    assert holder == {"a": 1}
    assert not _parts.RUNNING


# --- Modules that are gone ---


def code_of_the_users(op):
    return op.func is torch.ops.aten.mm.default


RECOMPUTED = {
    "view": remat,
    "view, pruned": remat(prune=True),
    "view with a policy": remat(policy=policies.dots_saveable),
    "view with a function": remat(policy=code_of_the_users),
    "view of a view": lambda module: remat(remat(module, prune=False)),
    "in place": lambda module: apply(nn.Sequential(module), Counting)[0],
}


@rows("wrap", RECOMPUTED)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize(
    "kind", [lambda: Counting, lambda: type("Local", (Counting,), {})]
)
def test_a_recomputed_module_in_a_variable_is_made_again_with_its_class(
    kind, wrap, kept
):
    alive = []

    def gradients(outer):
        torch.manual_seed(0)
        recomputed, x = wrap(kind()()), torch.ones(2, 4, requires_grad=True)
        fn = outer(lambda x: recomputed(x).tanh())
        alive.append((fn, recomputed) if kept else ())
        return fn(x).sum(), x, recomputed.linear.weight

    with count_ops() as ops:
        loss, *inputs = gradients(remat)
        gc.collect()
        actual = torch.autograd.grad(loss, inputs)
    assert ops["tanh"] == 2
    loss, *inputs = gradients(lambda fn: fn)
    assert_same(actual, torch.autograd.grad(loss, inputs))


def test_a_layout_holds_no_policy():
    class Decide:
        def __call__(self, op):
            return op.func is torch.ops.aten.mm.default

    decide, module = Decide(), nn.Sequential(Counting())
    apply(module, Counting, policy=decide)
    fn, x = remat(lambda x: module(x).tanh()), torch.ones(2, 4, requires_grad=True)
    assert ops_of(lambda: fn(x).sum().backward())["tanh"] == 2
    ref = weakref.ref(decide)
    remove(module)
    del decide
    gc.collect()
    assert ref() is None


# --- Lifetimes ---


def test_what_is_remembered_of_a_module_keeps_no_package_s_object_alive():
    module = Counting()
    module.thread = threading.Thread(target=module.forward)
    module.stack = contextlib.ExitStack()
    module.stack.callback(module.forward)
    with count_ops() as ops:
        for _ in range(3):
            gradient(module, remat)
    assert ops["sin"] == 6
    ref = weakref.ref(module)
    del module
    gc.collect()
    assert ref() is None


class Keeping(nn.Module):
    """Keeps what it computed, and with it the graph that leads to its call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        self.last = self.linear(x).sin().exp()
        return self.last * 2


@pytest.mark.usefixtures("_no_collector")
def test_of_the_outputs_of_thirty_steps_one_is_alive():
    module, refs = Keeping(), []
    with count_ops() as ops:
        for _ in range(30):
            remat(module)(torch.ones(2, 4)).sum().backward()
            refs.append(weakref.ref(module.last))
    assert ops["sin"] == 60
    assert sum(ref() is not None for ref in refs) == 1


# --- What hooks keep ---


class Hooked:
    """Keeps the last output of a layer, in an attribute and in a list."""

    def __init__(self):
        self.last, self.all = None, []

    def keep(self, _module, _args, out):
        self.last, self.all = out, [out]


@pytest.mark.parametrize("kind", ["closure", "method", "removed"])
def test_what_a_hook_keeps_lives_as_long_as_in_plain_code(kind):
    """With the collector off: no graph leads to what leads to it."""
    model, keeping = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), Hooked()
    hook = keeping.keep if kind == "method" else lambda *args: keeping.keep(*args)
    alive = []
    gc.collect()
    gc.disable()
    try:
        with count_ops() as ops:
            for _ in range(4):
                handle = model[1].register_forward_hook(hook)
                y = remat(model)(torch.ones(2, 4, requires_grad=True) * 1)
                if kind == "removed":
                    handle.remove()
                y.sin().sum().backward()
                handle.remove()
                alive.append(weakref.ref(keeping.last))
                del y
    finally:
        gc.enable()
    assert [ref() is not None for ref in alive] == [False, False, False, True]
    assert ops["tanh"] == 8


# --- Containers that were passed ---


PASSED = {
    "an ordered dict": lambda: OrderedDict(scale=2.0),
    "a dict of a class": lambda: Settings(scale=2.0),
    "a dict in a partial": lambda: partial(dict, held={"scale": 2.0}),
}


class Settings(dict):
    """A dict with weak references."""


def dict_in(passed):
    return passed.keywords["held"] if isinstance(passed, partial) else passed


@rows("make", PASSED)
def test_what_a_signal_handler_puts_into_a_passed_container_stays(make, written):
    passed, x = make(), leaf()
    late = []

    def handler(*_):
        if late:
            dict_in(passed)["late"] = True

    def run(x, passed):
        signal.raise_signal(signal.SIGUSR1)
        return (x * dict_in(passed)["scale"]).sin().exp()

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        y = remat(run)(x, passed)
        late.append(1)
        with count_ops() as ops:
            y.sum().backward()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ops["sin"] == 1, "it ran again"
    assert dict_in(passed) == {"scale": 2.0, "late": True}
    assert not written


@rows("make", PASSED)
def test_what_a_recompute_puts_into_a_passed_container_does_not_stay(make, written):
    def run(x, passed):
        held = dict_in(passed)
        held["calls"] = held.get("calls", 0) + 1
        return (x * held["scale"] * held["calls"]).sin().exp()

    passed, x = make(), leaf()
    y = remat(run)(x, passed)
    del dict_in(passed)["calls"]  # it holds what it held at the call
    y.sum().backward()
    assert dict_in(passed) == {"scale": 2.0}
    assert len(written) == 1
    assert_same(x.grad, torch.autograd.grad(run(x, make()).sum(), x)[0])


# --- A value that never changes, and has attributes ---


class Pair(tuple):
    """A tuple with a dict."""


def of_a_pair(wrap, *, leads_back):
    """Return a result and its pull; what a function reads is there, and changed."""
    kept = []

    def outer(x, w):
        holder = SimpleNamespace(w=w)
        pair = Pair((w, holder))
        pair.k = 3.0
        if leads_back:
            holder.pair = pair

        def fn(x):
            pair_of = pair[1].pair if leads_back else pair
            return (x * pair_of[0]).sin() * pair.k

        kept.extend([pair, fn])
        y = wrap(fn)(x)
        pair.k = 5.0
        return y

    y, pull = torch.func.vjp(outer, torch.ones(3), torch.arange(3.0))
    return y, *pull(torch.ones(3))


@pytest.mark.parametrize("leads_back", [False, True])
def test_a_tuple_with_attributes_is_made_again_around_other_tensors(leads_back):
    expected = of_a_pair(lambda fn: fn, leads_back=leads_back)
    with count_ops() as ops:
        found = of_a_pair(remat, leads_back=leads_back)
    assert_same(found, expected)
    assert ops["sin"] == 2


@pytest.mark.parametrize("derivative", [torch.func.jacrev, torch.func.hessian])
def test_what_the_function_sets_on_a_tuple_of_a_lifted_tensor_stays(derivative):
    def outcome(wrap):
        notes = []

        def outer(w):
            pair = Pair((w, 1.0))
            pair.scale = 3.0

            def inner(x):
                y = (x * pair[0]).sin() * pair.scale
                pair.scale, pair.seen = 4.0, y.cos()
                return y

            y = wrap(inner)(w) * pair.scale + pair.seen
            notes.append(pair.scale)
            return y.sum()

        w = torch.linspace(1, 2, 4, dtype=torch.double)
        with count_ops() as ops:
            return derivative(outer)(w), notes, ops["sin"]

    (expected, then, once), (found, now, again) = outcome(lambda fn: fn), outcome(remat)
    torch.testing.assert_close(found, expected)
    assert then == now
    assert again > once
