"""Call caches: what calls of one signature share, and for how long.

The cache is bounded and holds nothing of the user's; blocks of the same code share one
record; what does not fit is given up after three times, with a reason.
"""

import gc
import re
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from pathlib import Path

import pytest
import torch
from support.pruning import (
    W,
    X,
    assert_like_plain,
    call_caches,
    cases_of,
    dead_end,
    each_case,
    forget_calls,
    given_up,
    last_call_cache,
    of_backward,
    strikes,
    written,
)
from support.tables import rows
from support.zoo import Waves, counted, leaves_of, make, ops_of, plainly, scalar
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_map

from remat import checkpoint_name, explain, policies, remat
from remat._partial.decide import CACHES
from remat.testing import assert_same, count_ops


def fn(x, w):
    return dead_end(torch.tanh(x @ w).exp())


class Block(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).tanh())


# --- What is shared ---


def test_twelve_blocks_share_one_call_cache():
    blocks = nn.ModuleList(Block(k) for k in range(12)).double()

    def model(wrap):
        return lambda x: reduce(lambda x, block: wrap(block)(x), blocks, x)

    ours = model(partial(remat, prune=True))
    for _ in range(3):
        assert_like_plain(ours, model(plainly), X)
    assert strikes() == [0]
    assert last_call_cache().proven


def test_a_function_that_is_wrapped_in_each_call_shares_one_call_cache():
    for k in range(5):
        of_backward(remat(lambda x: dead_end(x.exp() * k), prune=True), (X,))  # noqa: B023
    assert len(call_caches()) == 1


def flagged(x, kind):
    return dead_end(x.exp() if kind == 1 else x.tanh())


def summed(xs):
    return dead_end(sum(xs).exp())


pruned = partial(remat, prune=True)
OURS, MODULE = pruned(fn), Block(0).double()
DIFFERING = {
    "shape": [(OURS, X, W), (OURS, X[:2], W)],
    "dtype": [(OURS, X, W), (OURS, X.float(), W.float())],
    "strides": [(OURS, X, W), (OURS, X.t(), W)],
    "gaps": [(OURS, X[:, ::2], W[:2]), (OURS, X[:, 2:], W[:2])],
    "code": [(OURS, X, W), (pruned(lambda x, w: x @ w.exp()), X, W)],
    "policy": [(OURS, X, W), (pruned(fn, policy=policies.dots_saveable), X, W)],
    "module and function": [(pruned(MODULE), X), (pruned(lambda x: MODULE(x)), X)],
    "flag": [(pruned(flagged), X, 1), (pruned(flagged), X, 2)],
    "structure": [(pruned(summed), [X]), (pruned(summed), (X,))],
    "count": [(pruned(summed), [X, W]), (pruned(summed), [X])],
}


@pytest.mark.parametrize("name", DIFFERING)
def test_calls_that_differ_do_not_share(name):
    for call, *args in DIFFERING[name]:
        for _ in range(2):
            scalar(call(*tree_map(_leaf, args))).backward()
    assert strikes() == [0, 0]


def _leaf(t):
    # Not a copy, which would have no gaps.
    return t.detach().requires_grad_() if isinstance(t, torch.Tensor) else t


@pytest.mark.parametrize("mode", ["training", "autocast", "which require grad"])
def test_calls_in_another_mode_do_not_share(mode):
    module = Block(0)
    ours = remat(module, prune=True)
    for on in (True, False) * 3:
        x = X.float().requires_grad_(on or mode != "which require grad")
        if mode == "training":
            module.train(on)
        with torch.autocast("cpu", torch.bfloat16, enabled=on and mode == "autocast"):
            loss = ours(x).float().square().sum()
        loss.backward()
    assert strikes() == [0, 0]


# --- Bounds ---


def test_the_cache_is_bounded_and_drops_the_least_recently_used(monkeypatch):
    size = 16
    monkeypatch.setattr(CACHES, "_size", size)
    ours = remat(lambda x: dead_end(x.exp()), prune=True)
    (first,) = leaves_of(X)
    ours(first)
    kept = last_call_cache()
    x = torch.ones(size + 10, dtype=torch.double, requires_grad=True)
    for n in range(1, size + 5):
        ours(x[:n])
        if n % 7 == 0:
            ours(first)
    assert len(call_caches()) == size
    assert kept is not last_call_cache()
    ours(first)
    assert len(call_caches()) == size
    assert kept is last_call_cache()
    assert ops_of(lambda: of_backward(ours, (X,)))["exp"] == 2


def test_a_call_cache_that_was_dropped_still_serves_its_calls():
    ours = remat(fn, prune=True)
    for _ in range(3):
        x, w = leaves_of(X, W)
        result = ours(x, w)
        forget_calls()
        got = torch.autograd.grad(scalar(result), (x, w))
        assert_same([result, *got], of_backward(fn, (X, W)))


FORGOTTEN = {"all": None, "the inner one": slice(1), "the outer one": slice(-1, None)}


@rows("which", FORGOTTEN)
@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["none", "dots"])
def test_an_inner_call_is_a_first_one_and_the_outer_one_is_not(which, policy):
    inner = lambda h, w: torch.tanh(h @ w).exp()
    outer = lambda inner: lambda x, w: dead_end(inner(x.sin(), w) * x)
    ours = remat(outer(remat(inner, prune=True)), prune=True, policy=policy)
    for call in range(6):
        assert_like_plain(ours, outer(inner), X, W)
        assert len(call_caches()) == 2
        if call % 2 == 0:
            forget_calls(which)


# --- Nothing of the user's is held ---


class Thing:
    """Something of the user's."""

    def __init__(self):
        self.w = make(4, 4, seed=1)

    def __call__(self, x):
        return dead_end((x * self.w).exp())


class Holders:
    """Each returns a rematerialized function, its arguments, and what to watch."""

    def of_a_module():
        module = Block(0).double()
        return remat(module, prune=True), (leaves_of(X)[0],), [module, module.up.weight]

    def of_a_closure():
        thing, w = Thing(), make(4, 4, seed=2)
        call = remat(lambda x: dead_end(x * w * thing.w), prune=True)
        return call, (leaves_of(X)[0],), [thing, w]

    def of_an_object():
        thing = Thing()
        return remat(thing, prune=True), (leaves_of(X)[0],), [thing, thing.w]

    def of_arguments():
        x, w = leaves_of(X, W)
        return remat(fn, prune=True), (x, w), [x, w]

    def of_keys():
        module = nn.Linear(2, 2)
        call = remat(lambda d: dead_end(sum(d.values()).exp()), prune=True)
        return call, ({module: leaves_of(X)[0]},), [module]

    def of_a_static_argument():
        thing = Thing()
        call = remat(lambda x, thing: dead_end((x * thing.w).exp()), prune=True)
        return call, (leaves_of(X)[0], thing), [thing, thing.w]

    def of_a_class():
        kind = type("Local", (), {"__call__": lambda self, x: dead_end(x.exp())})
        return remat(kind(), prune=True), (leaves_of(X)[0],), [kind]

    def of_code():
        scope = {"dead_end": dead_end}
        exec("def fn(x):\n    return dead_end(x.exp())", scope)
        local = scope["fn"]
        # The code itself is held, with 4095 others: it is of a fixed size.
        return remat(local, prune=True), (leaves_of(X)[0],), [local]

    def of_a_policy():
        thing = Thing()
        policy = lambda op, held=thing: held.w is not None and op.nbytes > 0
        call = remat(fn, prune=True, policy=policy)
        return call, (*leaves_of(X, W),), [thing, thing.w]

    def of_a_combined_policy():
        thing = Thing()
        policy = (lambda op: thing.w is None) | policies.dots_saveable
        call = remat(fn, prune=True, policy=policy)
        return call, (*leaves_of(X, W),), [thing]


@each_case(cases_of(vars(Holders)))
def test_nothing_of_the_users_is_held(case):
    fn, args, watched = case.fn()
    refs = [weakref.ref(w) for w in watched]
    for _ in range(3):
        scalar(fn(*args)).backward()
    assert call_caches(), "nothing was recorded"
    del fn, args, watched
    gc.collect()
    assert [r() for r in refs] == [None] * len(refs)


def test_a_record_holds_no_tensor():
    ours = remat(fn, prune=True, policy=policies.everything_saveable)
    of_backward(ours, (X, W))
    found = gc.get_referents(*gc.get_referents(last_call_cache().plans))
    assert not any(isinstance(o, torch.Tensor) for o in found)


def test_values_are_freed_without_the_garbage_collector():
    ours = remat(fn, prune=True, policy=policies.everything_saveable)
    of_backward(ours, (X, W))
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            x, w = leaves_of(X, W)
            h = x * 1
            refs = [weakref.ref(h), weakref.ref(w)]
            scalar(ours(h, w)).backward()
            del x, w, h
            assert [r() for r in refs] == [None, None]
    finally:
        gc.enable()


# --- Threads ---


def in_threads(work, count=3):
    """What each of some threads gives."""
    with ThreadPoolExecutor(count) as pool:
        return [*pool.map(work, range(count))]


def test_a_thread_clears_the_cache_while_others_call():
    ours = remat(fn, prune=True)
    want = of_backward(fn, (X, W))
    running = {1, 2}

    def work(k):
        if k == 0:
            while running:
                forget_calls()
            return
        try:
            for _ in range(20):
                assert_same(of_backward(ours, (X, W)), want)
        finally:
            running.discard(k)

    in_threads(work)


def test_an_error_in_a_recording_leaves_no_recorder_behind():
    def broken(x):
        checkpoint_name(x.sin(), "h")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        remat(broken, prune=True)(leaves_of(X)[0])
    (x,) = leaves_of(X)
    assert ops_of(lambda: checkpoint_name(x.sin(), "h"))["sin"] == 1
    assert_like_plain(remat(fn, prune=True), fn, X, W)


def caught(name):
    """A function that catches what `mm` raises; next it runs another one, or `mm`."""

    def fn(x, w):
        h = x @ w
        try:
            h = h @ torch.zeros(7, 7, dtype=h.dtype)
        except RuntimeError:
            h = h * 0.7 if name == "another" else h @ w
        return (h @ w).sin()

    return fn


@pytest.mark.parametrize("name", ["another", "the next one"])
@pytest.mark.parametrize(
    "options", [{"policy": policies.dots_saveable}, {"prune": True}]
)
@pytest.mark.parametrize("higher_order", [False, True])
def test_an_operation_that_raises_is_in_no_record(name, options, higher_order):
    plain, x = caught(name), make(4, 4, seed=1)
    (w,) = leaves_of(make(4, 4, seed=2))
    (want,) = torch.autograd.grad(plain(x, w).sum(), w)
    fn, evaluations = counted(plain)
    run = remat(fn, higher_order=higher_order, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may be followed no more
        for _ in range(4):
            run(x, w).sum().backward()
            assert_same(w.grad, want)
            w.grad = None
    # Where `mm` is the last one, all that a backward reads is saved.
    is_all_saved = name != "another" and "policy" in options and not higher_order
    assert len(evaluations) == 4 if is_all_saved else len(evaluations) >= 8


@pytest.mark.parametrize("outer_first", [True, False])
def test_an_inner_call_is_called_on_its_own_as_well(outer_first):
    plain_inner = lambda h, w: torch.tanh(h @ w).exp()
    around = lambda inner: lambda x, w: dead_end(inner(x.sin(), w) * x)
    inner = remat(plain_inner, prune=True)
    pairs = [(remat(around(inner), prune=True), around(plain_inner))]
    pairs.insert(outer_first, (inner, plain_inner))
    for ours, plain in pairs * 3:
        assert_like_plain(ours, plain, X, W)
    assert strikes() == [0, 0]


# --- What does not fit a record is a strike, and what is read besides is a lesson ---
# A call that does not fit recomputes all. After three strikes no more is recorded,
# for a reason that a warning gives.


STATE = {"on": True, "saves": "all"}


def fickle(x):
    return dead_end(x.exp() if STATE["on"] else x.tanh())


def alternate(ours, plain):
    """Change the state before each call; return how often records did not fit."""
    counts = []
    for call in range(12):
        STATE["on"] = call % 2 == 0
        assert_like_plain(ours, plain, X)
        counts.append(last_call_cache().misfits)
    return counts


@given_up
def test_pruning_is_off_for_a_reason_after_three_strikes():
    ours = remat(fickle, prune=True)
    counts = alternate(ours, fickle)
    assert counts == sorted(counts)
    cache = last_call_cache()
    assert (cache.misfits, cache.plans) == (4, None)
    assert "did not fit" in cache.reason
    STATE["on"] = True
    ops = ops_of(lambda: of_backward(ours, (X,)))
    assert ops == ops_of(lambda: of_backward(remat(fickle, prune=False), (X,)))


OF_MODULES = {
    "a method": lambda module, **options: remat(module.forward, **options),
    "a view": remat,
    "a function": lambda module, **options: partial(
        remat(Waves.forward, **options), module
    ),
}


@pytest.mark.parametrize("rng", ["replay", "error"])
@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("kind", OF_MODULES)
def test_modules_that_differ_have_records_of_their_own(kind, higher_order, rng):
    options = {"policy": policies.save_ops(torch.ops.aten.exp), "rng": rng}
    of = partial(OF_MODULES[kind], higher_order=higher_order, **options)
    calls, found = [of(Waves(count)) for count in (1, 2)], []
    for call in calls * 4:
        x = X.clone().requires_grad_()
        with count_ops() as ops:
            call(x).sum().backward()
        found.append(ops["exp"])
    # Once one did not fit the record of the other, each saves its exponential.
    assert found == [1, 2, 1, 1, 1, 1, 1, 1]
    assert last_call_cache().reason == ""


# What differs in some calls: what is saved at a place, which of two values is changed,
# and their order.
LATER = """
elsewhere: h = (x[:2] if STATE["saves"] == "quarter" else x).exp()
    h = {"transposed": h.t(), "half": h[:2]}.get(STATE["saves"], h); h.sin()
twice: a, b = x.exp(), (x * 2).exp()
    a.sin() + (b if STATE["saves"] == "both" else a).cos() * b
# A constant is made again, for which the function runs.
changed: u, v = x @ w, w @ x; (u if STATE["saves"] == "first" else v).mul_(2)
    u.sin() * v.sin() * torch.full((4, 4), 0.5, dtype=x.dtype)
through a view: u, v = x * 3, w * 2
    (u if STATE["saves"] == "first" else v)[0].mul_(0.5); dead_end(u.exp()) + v
factors: u, v = x.sin() * 2, w * 3
    (u * v if STATE["saves"] == "first" else v * u).tanh()
# Of another dtype, conjugated or negated: what is kept is not that.
as real: torch.view_as_real(torch.fft.fft(x)).sin()
conjugate: (torch.fft.fft(x).conj() * 1j).abs()
real part: z = torch.fft.fft(x); z.real.sin() + z.abs()
negated: torch.fft.fft(x).conj().imag.sin()
"""
LATER = written(LATER, globals())
EXP = policies.save_ops(torch.ops.aten.exp)
FFT = policies.save_ops(torch.ops.aten._fft_r2c)
TURNS = "second second first first second"
# A function, what is asked for, its states, and how often an operation then runs: a
# call that does not fit recomputes all; the one after it is recorded.
COUNTS = {
    **{
        state: ("elsewhere", EXP, True, f"all all {state} {state} all", "exp 1 1 2 1 2")
        for state in ("transposed", "half", "quarter")
    },
    "twice": (
        *("twice", policies.everything_saveable, True),
        *("one one both both one", "exp 2 2 4 2 4"),
    ),
    # One is recomputed, and both in a call that the record does not fit.
    "dots": ("changed", policies.dots_saveable, "auto", TURNS, "mm 7 7 8 7 8"),
    "all": ("changed", policies.everything_saveable, "auto", TURNS, "mm 7 7 8 7 8"),
    "a view": ("through a view", None, True, TURNS[7:], "exp 2 2 2 2"),
    "a view, dots": (
        *("through a view", policies.dots_saveable, "auto", TURNS[7:], "exp 2 2 2 2"),
    ),
    **{
        name: (name, FFT, "auto", "all all all", "_fft_r2c 1 1 1")
        for name in ("as real", "conjugate", "real part", "negated")
    },
}


@rows("name, policy, prune, states, counts", COUNTS)
def test_another_value_is_not_taken_for_the_one_that_was_saved(
    name, policy, prune, states, counts
):
    fn, (op, *expected) = LATER[name].fn, counts.split()
    args, found = (X, W)[: fn.__code__.co_argcount], []
    ours = remat(fn, policy=policy, prune=prune)
    for STATE["saves"] in states.split():
        with count_ops() as ops:
            got = of_backward(ours, args)
        assert_same(got, of_backward(fn, args))
        found.append(ops[op])
    assert found == [*map(int, expected)]
    assert policy is not EXP or last_call_cache().misfits == 2


def test_a_call_around_is_given_what_was_saved_in_its_order():
    factors = LATER["factors"].fn
    inner = remat(factors, policy=policies.everything_saveable)
    around = lambda inner: lambda x, w: inner(x, w).exp()
    ours, found = remat(around(inner)), []
    for STATE["saves"] in TURNS.split():
        with count_ops() as ops:
            got = of_backward(ours, (X, W))
        assert_same(got, of_backward(around(factors), (X, W)))
        found.append(ops["tanh"])
    # In a call that the record does not fit, the call within is recomputed, too.
    assert found == [2, 2, 3, 2, 3]


def longer(x):
    h = x.exp()
    return dead_end(h if STATE["on"] else h.tanh())


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"policy": policies.everything_saveable}, "the policy"), ({}, "prune=True")],
)
def test_a_request_that_is_given_up_is_a_warning(options, asked):
    ours = remat(longer, prune=True, **options)

    match = f"{asked} of `longer` .* is not followed any more"
    with pytest.warns(UserWarning, match=match) as found:
        alternate(ours, longer)
    assert len(found) == 1


def through_two_tensors(x):
    h = x.sin()
    other = TwoTensor(h.detach(), h.detach()) * 2
    return dead_end((h * other.a).cos().exp())


def test_a_class_inside_that_rules_pruning_out_is_a_warning():
    ours = remat(lambda x: through_two_tensors(x), prune=True)
    where = re.escape(f"{Path(__file__).name}:")
    match = f"is not pruned: at .*{where}.* is of a class that does not tell"
    want = of_backward(through_two_tensors, (X,))
    with pytest.warns(UserWarning, match=match) as found:
        got = [of_backward(ours, (X,)) for _ in range(3)]
    assert len(found) == 1
    for each in got:
        assert_same(each, want)
    report = explain(ours, X)
    assert not report.pruned
    assert re.search("does not tell what shares its memory", report.reason)
    assert found[0].message.args[0].endswith(f": {report.reason}.")


def test_one_change_for_good_is_one_strike():
    ours = remat(fickle, prune=True)
    for call in range(9):
        STATE["on"] = call < 3
        of_backward(ours, (X,))
    assert (last_call_cache().misfits, last_call_cache().reason) == (1, "")
    # One of them is in `dead_end`. What is dead there does not run again.
    ops = ops_of(lambda: of_backward(ours, (X,)))
    assert (ops["exp"], ops["tanh"]) == (0, 4)


def reads(x):
    h = x.detach().sin()
    return (x * float(h.numpy().sum())).exp()


def test_a_read_is_learned_once():
    noted, ran = counted(reads)
    ours = remat(noted, prune=True)
    of_backward(ours, (X,))
    first = len(ran)
    ran.clear()
    assert_same(of_backward(ours, (X,)), of_backward(reads, (X,)))
    assert len(ran) == 2 <= first
    cache = last_call_cache()
    assert (cache.misfits, cache.reason) == (0, "")


def test_pruning_ends_after_too_many_lessons():
    def hungry(x):
        total = 1.0
        for k in range(40):
            total += float((x.detach() * k).sin().numpy()[0, 0])
        return (x * total).exp()

    ours = remat(hungry, prune=True)
    for _ in range(25):
        assert_like_plain(ours, hungry, X)
    cache = last_call_cache()
    assert cache.misfits == 0
    assert cache.reason == "" or "reads" in cache.reason


@given_up
def test_a_nested_call_that_strikes_does_not_strike_the_outer_one():
    inner = remat(fickle, prune=True)
    outer = remat(lambda x: dead_end(inner(x * 2)), prune=True)
    alternate(outer, lambda x: dead_end(fickle(x * 2)))


@given_up
def test_a_plan_that_is_given_up_between_two_runs_moves_no_value():
    """What calls within a call within do in its recompute is what they did."""

    def made(wrap):
        how = {"policy": policies.dots_saveable}
        both = wrap(lambda x, y, w: (x * 1.0, (x @ w).tanh() * 1.0), **how)

        def twice(x, y, w):
            x, y = both(*both(x, y, w), w)
            return x.tanh() + y

        within = wrap(twice, **how)
        return wrap(lambda x, y, w: within(x, y, w) + x)

    def gradients(fn):
        x, w = leaves_of(X, W)
        out = scalar(fn(x * 1.0, x * 2.0, w))
        for cache in call_caches():
            cache.refuse("a test")
        return torch.autograd.grad(out, (x, w))

    ours, expected = made(remat), gradients(made(lambda fn, **_: fn))
    for _ in range(3):
        forget_calls()
        for _ in range(2):
            scalar(ours(X.clone().requires_grad_() * 1.0, X, W)).backward()
        assert_same(gradients(ours), expected)


@given_up
def test_a_plan_that_comes_between_two_runs_moves_no_value_of_a_node():
    """A call within, whose node is in the graph of the call around, does the same."""

    def made(wrap):
        how = {"policy": policies.everything_saveable, "higher_order": True}
        within = wrap(lambda x: x.tanh() * 1.0, **how)

        def fn(x):
            y = within(x)
            return y, within(within(y))

        return wrap(fn)

    def gradient(fn, plans=()):
        """Have the forward follow nothing, and the recompute find these plans."""
        (x,) = leaves_of(X)
        for cache, _ in plans:
            cache.refuse("a test")
        out = scalar(fn(x * 1.0))
        for cache, kept in plans:
            cache.plans, cache.reason = kept, ""
        return torch.autograd.grad(out, x)

    ours, expected = made(remat), gradient(made(lambda fn, **_: fn))
    assert_same(gradient(ours), expected)
    plans = [(cache, cache.plans) for cache in call_caches() if cache.plans]
    assert plans
    assert_same(gradient(ours, plans), expected)


@given_up
def test_what_a_call_within_saves_otherwise_than_recorded_is_computed():
    """A call around that was recorded before left it out: its replay is given up."""

    def made(wrap):
        how = {"policy": policies.dots_saveable}
        within = wrap(lambda x: x.tanh().sin().exp(), **how)
        return wrap(lambda x: (within(x * 2.0) @ W).tanh(), **how)

    def gradient(fn):
        (x,) = leaves_of(X)
        return torch.autograd.grad(scalar(fn(x * 1.0)), x)

    ours, expected = made(remat), gradient(made(lambda fn, **_: fn))
    save, leave = policies.Decision.SAVE, policies.Decision.RECOMPUTE
    assert_same(gradient(ours), expected)
    for decisions in ([save, leave, leave], [leave, save, leave]):
        (within,) = (c for c in call_caches() if len(c.plans.record.steps) == 3)
        within.plans = within.plans.planned_again(decisions)
        for _ in range(3):
            assert_same(gradient(ours), expected)
