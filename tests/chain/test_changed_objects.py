"""Steps that change objects, and that draw: once each, and as it was in a recompute.

Some steps only write, as one that counts; others read what steps before them left. A
recompute begins in the middle of a chain, where both find what the forward left there.
"""

import itertools
import random as python_random
from collections import deque
from types import FunctionType, SimpleNamespace

import numpy as np
import pytest
import torch
from support.loops import Plain
from support.tables import rows
from support.zoo import V
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.func import grad, hessian, jvp, vmap
from torch.nn import functional
from torch.testing import assert_close

from remat import CaptureError, chain, policies, random
from remat.chain.schedules import Uniform
from remat.testing import assert_same, count_ops


STEPS = 7


COUNT = 0


class Counter:
    def __init__(self):
        self.count, self.new = 0, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5, dtype=torch.double))
        self.calls, self.last = 0, deque(maxlen=3)

    def forward(self, x):
        self.calls += 1
        self.last.append(self.calls)
        return (x * self.weight * self.calls * len(self.last)).sin()


def bodies():  # noqa: C901 -- a table of functions that share variables
    """Return steps by name, and what reads all that they change."""
    counter, layer = Counter(), Layer()
    losses, count, counted = [], 0, itertools.count(1)
    pair = [torch.full((4,), 0.5).double(), 0]
    globals()["COUNT"] = 0

    def defaulting(i, x, held=[0]):  # noqa: B006
        held[0] += 1
        return (x * held[0]).sin()

    def counting(i, x):
        counter.count += 1
        return (x * 2).sin()

    def appending(i, x):
        losses.append(float(i))
        return (x * 2).sin()

    def reading_a_count(i, x):
        counter.count += 1
        return (x * counter.count).sin()

    def reading_a_list(i, x):
        losses.append({"step": i, "losses": [i, (i, None)]})
        return (x * len(losses)).sin()

    def reading_a_variable(i, x):
        nonlocal count
        count += 1
        return (x * count).sin()

    def reading_a_list_with_a_tensor(i, x):
        pair[1] += 1
        return (x * pair[0] * pair[1]).sin()

    def reading_what_it_made(i, x):
        counter.new = counter.new or []
        counter.new.append(i)
        return (x * len(counter.new)).sin()

    def reading_a_global(i, x):
        global COUNT
        COUNT += 1
        return (x * COUNT).sin()

    def reading_a_new_object(i, x):
        last, counter.new = counter.new, Counter()
        counter.new.count = 1 + (last.count if last else 0)
        return (x * counter.new.count).sin()

    def reading_an_iterator(i, x):
        return (x * next(counted)).sin()

    def with_a_default(i, x):
        return defaulting(i, x)

    def beginning_late(i, x):
        if i % 4 == 3:
            losses.append(i)
        return (x * (1 + len(losses))).sin()

    def set_for_some_steps(i, x):
        counter.count = 2 if 2 <= i < 5 else 0
        return (x * (1 + counter.count)).sin()

    def in_a_module(i, x):
        return layer(x)

    def changed():
        made = counter.new.count if isinstance(counter.new, Counter) else counter.new
        values = made, counter.count, losses, count, COUNT, pair[1], counted
        return repr((*values, layer.calls, [*layer.last], defaulting.__defaults__))

    found = {k: v for k, v in locals().items() if isinstance(v, FunctionType)}
    del found["defaulting"]
    return found, found.pop("changed"), layer.weight


NAMES = [*bodies()[0]]
CHECKPOINTS = {
    "none": {},
    "all": {"checkpoints": "all"},
    "one": {"checkpoints": 1},
    "two": {"checkpoints": 2},
    "segments": {"checkpoints": Uniform(2)},
    "disk": {"checkpoints": 3, "disk": True},
}


def in_a_loop(body, x):
    for i in range(STEPS):
        x = body(i, x)
    return x


def gradients(run, name):
    steps, changed, weight = bodies()
    x = V.clone().requires_grad_()
    out = run(steps[name], x).sum()
    inputs = [x, weight] if name == "in_a_module" else [x]
    found = [torch.autograd.grad(out, inputs, retain_graph=True) for _ in range(2)]
    (first,) = torch.autograd.grad(out, [x], create_graph=True)
    return [*found[0], *found[1], *torch.autograd.grad(first.sum(), x)], changed()


def counted(run, *args, **options):
    """What `run` returns, and how many sines it computes."""
    with count_ops() as ops:
        found = run(*args, **options)
    return found, ops["sin"]


@rows("options", CHECKPOINTS, fast=("none", "two"))
@pytest.mark.parametrize("name", NAMES)
def test_each_step_changes_objects_once(name, options, folder):
    def run(body, x):
        return chain.fori_loop(0, STEPS, body, x, **options)

    (found, changed), ran = counted(gradients, run, name)
    (expected, plainly), plain = counted(gradients, in_a_loop, name)
    assert changed == plainly
    assert_close(found, expected)
    assert ran > plain


WAYS = {
    "grad": lambda f: grad(lambda x: f(x).sum())(V[0]),
    "vmap of grad": lambda f: vmap(grad(lambda x: f(x).sum()))(V),
    "hessian": lambda f: hessian(lambda x: f(x).sum())(V[0]),
    "jvp": lambda f: jvp(f, (V[0],), (V[1],)),
}


@rows("way", WAYS, fast=("vmap of grad",))
@pytest.mark.parametrize("name", NAMES)
def test_under_transforms(name, way):
    steps, changed, _ = bodies()
    found, ran = counted(way, lambda x: chain.fori_loop(0, STEPS, steps[name], x))
    after = changed()
    steps, changed, _ = bodies()
    expected, plain = counted(way, lambda x: in_a_loop(steps[name], x))
    assert_close(found, expected)
    assert after == changed()
    # Forward mode alone runs nothing again.
    assert ran == plain if way is WAYS["jvp"] else ran > plain


def sines(name, checkpoints):
    steps, _, _ = bodies()
    x = V.clone().requires_grad_()
    with count_ops() as ops:
        out = chain.fori_loop(0, STEPS, steps[name], x, checkpoints=checkpoints)
        out.sum().backward()
    return ops["sin"]


def test_a_change_costs_no_evaluation():
    for checkpoints in (2, "all"):
        x = V.clone().requires_grad_()
        with count_ops() as ops:
            chain.fori_loop(
                0, STEPS, lambda i, x: (x * 2).sin(), x, checkpoints=checkpoints
            ).sum().backward()
        for name in ("counting", "beginning_late", "set_for_some_steps"):
            assert sines(name, checkpoints) == ops["sin"] > STEPS


# --- Other loops --------------------------------------------------------------------


def a_scan(scan, **options):
    """A loss that logs what it did, and what it logged."""
    layer, log = Layer(), []

    def step(h, u):
        h = layer(h) + u
        log.append(h.sum().item())
        return h, h.sum()

    x, us = V[0].clone().requires_grad_(), V.clone().requires_grad_()
    last, ys = scan(step, x, us, **options)
    loss = last.sum() + ys.square().sum()
    grads = torch.autograd.grad(loss, [x, us, layer.weight])
    return [loss.detach(), *grads], (log, layer.calls)


def plain_scan(step, x, us, *, reverse=False):
    ys = []
    for u in us.flip(0) if reverse else us:
        x, y = step(x, u)
        ys.append(y)
    return x, torch.stack(ys)


OPTIONS = {
    "none": {},
    "one": {"checkpoints": 1},
    "unroll": {"checkpoints": "all", "unroll": 3},
    "policy": {"policy": policies.everything_saveable},
    "reverse": {"reverse": True},
}


@rows("options", OPTIONS)
def test_a_scan_that_logs(options):
    kept = {key: value for key, value in options.items() if key == "reverse"}
    (found, log), ran = counted(a_scan, chain.scan, **options)
    (expected, plain_log), plain = counted(a_scan, plain_scan, **kept)
    assert log == plain_log
    assert_close(found, expected)
    assert ran > plain


def a_while_loop(loop):
    log = []

    def body(c):
        x, k = c
        log.append(k)
        return (x * len(log)).sin(), k + 1

    x = V.clone().requires_grad_()
    out = loop(lambda c: c[1] < STEPS, body, (x, 0))[0].sum()
    first = torch.autograd.grad(out, x, retain_graph=True)
    return [*first, *torch.autograd.grad(out, x)], log


def plain_while(cond, body, c):
    while cond(c):
        c = body(c)
    return c


@pytest.mark.parametrize("checkpoints", [1, 3, "all"])
def test_a_while_loop_that_logs(checkpoints):
    def loop(*args):
        return chain.while_loop(*args, checkpoints=checkpoints)

    (found, log), ran = counted(a_while_loop, loop)
    (expected, plain_log), plain = counted(a_while_loop, plain_while)
    assert log == plain_log
    assert_close(found, expected)
    assert ran > plain


# --- What cannot be put back --------------------------------------------------------


def test_a_condition_that_changes_something_late_is_refused():
    log = []

    def cond(c):
        log.extend([1] if c[1] == 2 else [])
        return c[1] < 4

    with pytest.raises(CaptureError, match=r"the condition of .* changed `log`"):
        chain.while_loop(
            cond,
            lambda c: (c[0].sin(), c[1] + 1),
            (V.clone().requires_grad_(), 0),
            checkpoints=2,
        )


# --- Random numbers in the steps of a chain: those of the forward, once more ---


X = torch.linspace(0.1, 2, 40, dtype=torch.double)
GENERATOR = torch.Generator()


def drops(i, x):
    return functional.dropout(torch.sin(x) + x, 0.3)


def by_generator(i, x):
    noise = torch.rand(x.shape, generator=GENERATOR, dtype=x.dtype)
    return torch.sin(x) * noise + x


def by_python(i, x):
    return torch.sin(x) * python_random.random() + x


def by_numpy(i, x):
    return torch.sin(x) * np.random.rand() + x


def sometimes(i, x):
    return drops(i, x) if i % 3 == 1 else torch.sin(x) + x


def by_key(i, x):
    return random.dropout(random.fold_in(KEY, i), torch.sin(x) + x, 0.3)


KEY = random.key(0)
MADE = {}


def by_a_generator_of_a_step(i, x):
    """The third step makes it, and later ones draw from it; the sixth makes another."""
    if i in (2, 5):
        MADE["generator"] = torch.Generator().manual_seed(i)
    return by_the_latest(x) if MADE else torch.sin(x) + x


def by_the_latest(x):
    return torch.sin(x) * torch.rand(40, generator=MADE["generator"]).double() + x


BODIES = {
    f.__name__: f
    for f in (
        *(drops, by_generator, by_python, by_numpy, sometimes, by_key),
        by_a_generator_of_a_step,
    )
}


def seed():
    torch.manual_seed(3)
    GENERATOR.manual_seed(4)
    python_random.seed(5)
    np.random.seed(6)
    MADE.clear()


def after():
    """The next numbers of all streams."""
    rest = python_random.random(), np.random.rand(), torch.rand(()).item()
    generators = GENERATOR, *MADE.values()
    return *rest, *(torch.rand((), generator=g).item() for g in generators)


@rows("name", {name: name for name in BODIES})
@rows("checkpoints", {"sqrt": None, "one": 1, "three": 3}, fast=("sqrt", "three"))
@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_a_step_draws_the_same_numbers_again(name, checkpoints, transform):
    length, found = 10, []
    for loop, options in (
        (Plain.fori_loop, {}),
        (chain.fori_loop, {"checkpoints": checkpoints}),
    ):
        seed()

        def value(x, loop=loop, options=options):
            return loop(0, length, BODIES[name], x, **options).sum()

        with count_ops() as ops:
            if transform == "grad":
                gradient = torch.func.grad(value)(X)
            else:
                x = X.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(value(x), x)
        found.append((gradient, after(), ops["sin"]))
    (want, next_plain, plain), (got, next_ours, again) = found
    assert_same(got, want)
    assert next_ours == next_plain
    assert again >= plain + length


def test_states_of_streams_are_stored_only_if_something_was_drawn(monkeypatch):
    seen = []
    load = chain._steps.Stored.load

    def loading(self, step):
        live = load(self, step)
        seen.append((step, live.ambient is None))
        return live

    monkeypatch.setattr(chain._steps.Stored, "load", loading)
    x = X.clone().requires_grad_()
    for body, is_plain in ((drops, False), (by_key, True)):
        seen.clear()
        chain.fori_loop(0, 12, body, x, checkpoints="all").sum().backward()
        assert len(seen) == 12
        assert {plain for step, plain in seen if step} == {is_plain}


class Noting(nn.Module):
    """A module whose hooks on gradients note that they ran."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, h):
        both = h.sin(), h.cos()
        register_multi_grad_hook(both, lambda grads: self.seen.append(len(grads)))
        return both[0] * both[1]


def test_what_hooks_in_the_graph_of_a_step_change_stays():
    module, counter = Noting(), SimpleNamespace(n=1.0)

    def counting(h):
        counter.n += 1
        return module(h) * counter.n

    def run(x):  # the step is gone by the backward
        return chain.scan(lambda h, _: (counting(h), None), x, length=2)[0]

    with count_ops() as ops:
        run(X.clone().requires_grad_().exp()).sum().backward()
    assert module.seen == [2, 2]
    assert counter.n == 3
    assert ops["sin"] > 4  # two of the forward, two of derivatives
