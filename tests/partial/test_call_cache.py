"""Traces: what calls of one signature share, and for how long.

The cache is bounded and holds nothing of the user's; blocks of the same code share one
record; what does not fit is given up after three times, with a reason.
"""

import gc
import re
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from support.pruning import (
    W,
    X,
    dead_end,
    last_trace,
    of_backward,
    traces,
)
from support.zoo import counted, leaves_of, make, scalar
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from remat import RecomputeError, checkpoint_name, explain, policies, remat
from remat._partial.cache import CACHES, CallCache
from remat.testing import assert_same, count_ops


given_up = pytest.mark.filterwarnings("ignore:.* is not followed any more")


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


def test_twelve_blocks_share_one_trace():
    blocks = nn.ModuleList(Block(k) for k in range(12)).double()

    def model(wrap):
        def run(x):
            for block in blocks:
                x = wrap(block)(x)
            return x

        return run

    ours = model(lambda block: remat(block, prune=True))
    for _ in range(3):
        assert_same(of_backward(ours, (X,)), of_backward(model(lambda b: b), (X,)))
    assert len(CACHES) == 1
    assert last_trace().proven
    assert last_trace().misfits == 0


def test_a_block_records_once():
    ours = remat(fn, prune=True)
    of_backward(ours, (X, W))
    plans = last_trace().plans
    for _ in range(3):
        of_backward(ours, (X, W))
    assert last_trace().plans is plans
    assert len(CACHES) == 1


def test_a_function_wrapped_anew_in_each_call_shares_a_trace():
    for k in range(5):
        of_backward(remat(lambda x: dead_end(x.exp() * k), prune=True), (X,))  # noqa: B023
    assert len(CACHES) == 1


def differing():
    """Pairs of calls that must not share a record."""
    ours = remat(fn, prune=True)
    yield "shape", (ours, X, W), (ours, X[:2], W)
    yield "dtype", (ours, X, W), (ours, X.float(), W.float())
    yield "strides", (ours, X, W), (ours, X.t(), W)
    yield "gaps", (ours, X[:, ::2], W[:2]), (ours, X[:, 2:], W[:2])
    yield "code", (ours, X, W), (remat(lambda x, w: x @ w.exp(), prune=True), X, W)
    policy = policies.dots_saveable
    yield "policy", (ours, X, W), (remat(fn, prune=True, policy=policy), X, W)
    module = Block(0).double()
    yield (
        "module and function",
        (remat(module, prune=True), X),
        (remat(lambda x: module(x), prune=True), X),
    )
    yield "flag", (remat(flagged, prune=True), X, 1), (remat(flagged, prune=True), X, 2)
    yield (
        "structure",
        (remat(summed, prune=True), [X]),
        (remat(summed, prune=True), (X,)),
    )
    yield (
        "count",
        (remat(summed, prune=True), [X, W]),
        (remat(summed, prune=True), [X]),
    )


def flagged(x, kind):
    return dead_end(x.exp() if kind == 1 else x.tanh())


def summed(xs):
    return dead_end(sum(xs).exp())


DIFFERING = {name: pair for name, *pair in differing()}


@pytest.mark.parametrize("name", DIFFERING)
def test_calls_that_differ_do_not_share(name):
    for call, *args in DIFFERING[name]:
        for _ in range(2):
            scalar(call(*torch.utils._pytree.tree_map(_leaf, args))).backward()
    assert [t.misfits for t in traces()] == [0, 0]


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
    assert [t.misfits for t in traces()] == [0, 0]


# --- Bounds ---


def test_the_cache_is_bounded_and_drops_the_least_recently_used():
    size = CACHES._size
    ours = remat(lambda x: dead_end(x.exp()), prune=True)
    (first,) = leaves_of(X)
    ours(first)
    held = weakref.ref(last_trace()) if hasattr(CallCache, "__weakref__") else None
    x = torch.ones(size + 10, dtype=torch.double, requires_grad=True)
    for n in range(1, size + 5):
        ours(x[:n])
        if n % 100 == 0:
            ours(first)
    assert len(CACHES) == size
    kept = last_trace()
    ours(first)
    assert len(CACHES) == size
    assert kept is not last_trace()
    assert held is None or held() is not None
    with count_ops() as ops:
        of_backward(ours, (X,))
    assert ops["exp"] == 2


def test_a_trace_that_was_dropped_still_serves_the_calls_that_used_it():
    ours = remat(fn, prune=True)
    for _ in range(3):
        x, w = leaves_of(X, W)
        loss = scalar(ours(x, w))
        CACHES.clear()
        got = torch.autograd.grad(loss, (x, w))
        y, v = leaves_of(X, W)
        assert_same(got, torch.autograd.grad(scalar(fn(y, v)), (y, v)))


@pytest.mark.parametrize("clear", ["all", "the inner one", "the outer one"])
@pytest.mark.parametrize("policy", [None, policies.dots_saveable], ids=["none", "dots"])
def test_an_inner_trace_is_cold_while_the_outer_one_is_warm(clear, policy):
    inner = remat(lambda h, w: torch.tanh(h @ w).exp(), prune=True)
    plain = lambda x, w: dead_end(inner.__wrapped__(x.sin(), w) * x)
    ours = remat(
        lambda x, w: dead_end(inner(x.sin(), w) * x), prune=True, policy=policy
    )
    for call in range(6):
        got = of_backward(ours, (X, W))
        assert_same(got, of_backward(plain, (X, W)))
        keys = [*CACHES._caches]
        if call % 2:
            continue
        if clear == "all":
            CACHES.clear()
        else:
            del CACHES._caches[keys[0 if clear == "the inner one" else -1]]


@pytest.mark.parametrize("outer_first", [True, False])
def test_an_inner_call_is_called_on_its_own_as_well(outer_first):
    inner = remat(lambda h, w: torch.tanh(h @ w).exp(), prune=True)
    outer = remat(lambda x, w: dead_end(inner(x.sin(), w) * x), prune=True)

    def plain(x, w):
        return dead_end(inner.__wrapped__(x.sin(), w) * x)

    pairs = [(outer, plain), (inner, inner.__wrapped__)]
    for ours, want in (pairs if outer_first else pairs[::-1]) * 3:
        assert_same(of_backward(ours, (X, W)), of_backward(want, (X, W)))
    assert all(t.misfits == 0 for t in traces())


# --- Nothing of the user's is held ---


def freed(make_call):
    """Whether what `make_call` made is freed once its call is over.

    It returns the rematerialized function, its arguments, and what to watch.
    """
    fn, args, watched = make_call()
    refs = [weakref.ref(w) for w in watched]
    for _ in range(3):
        scalar(fn(*args)).backward()
    assert len(CACHES) >= 1, "nothing was recorded"
    fn = args = watched = None
    gc.collect()
    return [r() is None for r in refs]


class Thing:
    """Something of the user's."""

    def __init__(self):
        self.w = make(4, 4, seed=1)

    def __call__(self, x):
        return dead_end((x * self.w).exp())


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


HOLDERS = [
    *(of_a_module, of_a_closure, of_an_object, of_arguments, of_keys),
    *(of_a_static_argument, of_a_class, of_code, of_a_policy, of_a_combined_policy),
]


@pytest.mark.parametrize("make_call", HOLDERS, ids=lambda f: f.__name__)
def test_nothing_of_the_users_is_held(make_call):
    assert all(freed(make_call))


def test_a_record_holds_no_tensor():
    ours = remat(fn, prune=True, policy=policies.everything_saveable)
    of_backward(ours, (X, W))
    found = gc.get_referents(*gc.get_referents(last_trace().plans))
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


# --- Strikes and lessons ---


STATE = {"on": True, "saves": "all"}


def fickle(x):
    return dead_end(x.exp() if STATE["on"] else x.tanh())


@given_up
def test_after_three_strikes_it_is_off_for_a_reason():
    ours = remat(fickle, prune=True)
    strikes = []
    for call in range(12):
        STATE["on"] = call % 2 == 0
        assert_same(of_backward(ours, (X,)), of_backward(fickle, (X,)))
        strikes.append(last_trace().misfits)
    trace = last_trace()
    assert strikes == sorted(strikes)
    assert trace.misfits == 4
    assert "did not fit" in trace.reason
    assert trace.plans is None
    STATE["on"] = True
    with count_ops() as ops:
        of_backward(ours, (X,))
    with count_ops() as full:
        of_backward(remat(fickle, prune=False), (X,))
    assert ops == full


def elsewhere(x):
    """Save something else at the same place, in each state."""
    h = (x[:2] if STATE["saves"] == "exp of half" else x).exp()
    if STATE["saves"] == "transposed":
        h = h.t()
    elif STATE["saves"] == "half":
        h = h[:2]
    return h.sin()


def exponentials_of_calls(fn, policy, states):
    """How often `exp` runs in each of some calls, whose gradients are those of `fn`."""
    ours, found = remat(fn, policy=policy, prune=True), []
    for STATE["saves"] in states:
        with count_ops() as ops:
            got = of_backward(ours, (X,))
        assert_same(got, of_backward(fn, (X,)))
        found.append(ops["exp"])
    return found


@pytest.mark.parametrize("state", ["transposed", "half", "exp of half"])
def test_what_a_graph_saves_now_is_not_taken_for_what_it_saved(state):
    policy = policies.save_ops(torch.ops.aten.exp)
    states = "all", "all", state, state, "all"
    # A call that does not fit recomputes all; the one after it is recorded.
    assert exponentials_of_calls(elsewhere, policy, states) == [1, 1, 2, 1, 2]
    assert last_trace().misfits == 2


def swapped(x):
    """Read, at a place where one value was saved twice, two values."""
    a, b = x.exp(), (x * 2).exp()
    return a.sin() + (b if STATE["saves"] == "both" else a).cos() * b


def test_one_value_saved_twice_is_not_taken_for_two():
    states = "one", "one", "both", "both", "one"
    found = exponentials_of_calls(swapped, policies.everything_saveable, states)
    assert found == [2, 2, 4, 2, 4]


VIEWS = {
    "as real": lambda z: torch.view_as_real(z).sin(),
    "conjugate": lambda z: (z.conj() * 1j).abs(),
    "real part": lambda z: z.real.sin() + z.abs(),
    "negated": lambda z: z.conj().imag.sin(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_that_changes_how_memory_is_read_is_made_again(view):
    """Of another dtype, conjugated or negated: what is kept is not that."""

    def spectrum(x):
        return VIEWS[view](torch.fft.fft(x))

    ours = remat(spectrum, policy=policies.save_ops(torch.ops.aten._fft_r2c))
    for _ in range(3):
        with count_ops() as ops:
            got = of_backward(ours, (X,))
        assert_same(got, of_backward(spectrum, (X,)))
        assert ops["_fft_r2c"] == 1


def longer(x):
    h = x.exp()
    return dead_end(h if STATE["on"] else h.tanh())


@pytest.mark.parametrize(
    ("options", "asked"),
    [({"policy": policies.everything_saveable}, "the policy"), ({}, "prune=True")],
)
def test_what_was_asked_for_and_is_given_up_is_a_warning(options, asked):
    ours = remat(longer, prune=True, **options)

    def alternate():
        for call in range(12):
            STATE["on"] = call % 2 == 0
            assert_same(of_backward(ours, (X,)), of_backward(longer, (X,)))

    match = f"{asked} of `longer` .* is not followed any more"
    with pytest.warns(UserWarning, match=match) as found:
        alternate()
    assert len(found) == 1


def through_two_tensors(x):
    h = x.sin()
    other = TwoTensor(h.detach(), h.detach()) * 2
    return dead_end((h * other.a).cos().exp())


def test_pruning_that_what_is_inside_rules_out_is_a_warning():
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
    assert (last_trace().misfits, last_trace().reason) == (1, "")
    # One of them is in `dead_end`. What is dead there does not run again.
    with count_ops() as ops:
        of_backward(ours, (X,))
    assert (ops["exp"], ops["tanh"]) == (0, 4)


def reads(x):
    h = x.detach().sin()
    return (x * float(h.numpy().sum())).exp()


def test_learned_reads_are_no_strikes():
    ours = remat(reads, prune=True)
    for _ in range(4):
        assert_same(of_backward(ours, (X,)), of_backward(reads, (X,)))
    trace = last_trace()
    assert (trace.misfits, trace.reason) == (0, "")


def test_a_read_is_learned_once():
    noted, ran = counted(reads)
    ours = remat(noted, prune=True)
    of_backward(ours, (X,))
    first = len(ran)
    ran.clear()
    of_backward(ours, (X,))
    assert len(ran) == 2 <= first


def test_too_many_lessons_end_it():
    def hungry(x):
        total = 1.0
        for k in range(40):
            total += float((x.detach() * k).sin().numpy()[0, 0])
        return (x * total).exp()

    ours = remat(hungry, prune=True)
    for _ in range(25):
        assert_same(of_backward(ours, (X,)), of_backward(hungry, (X,)))
    trace = last_trace()
    assert trace.misfits == 0
    assert trace.reason == "" or "reads" in trace.reason


@given_up
def test_a_nested_call_that_strikes_does_not_strike_the_outer_one():
    inner = remat(fickle, prune=True)
    outer = remat(lambda x: dead_end(inner(x * 2)), prune=True)

    def plain(x):
        return dead_end(fickle(x * 2))

    for call in range(10):
        STATE["on"] = call % 2 == 0
        assert_same(of_backward(outer, (X,)), of_backward(plain, (X,)))


# --- Threads ---


def test_threads_share_one_trace():
    ours = remat(fn, prune=True)
    barrier = threading.Barrier(3)

    def work(_):
        barrier.wait()
        return [of_backward(ours, (X, W)) for _ in range(5)]

    with ThreadPoolExecutor(3) as pool:
        got = [*pool.map(work, range(3))]
    want = of_backward(fn, (X, W))
    for of_thread in got:
        for each in of_thread:
            assert_same(each, want)
    assert len(CACHES) == 1
    assert last_trace().misfits == 0


def test_threads_while_the_cache_is_cleared():
    ours = remat(fn, prune=True)
    stop = threading.Event()

    def clear():
        while not stop.is_set():
            CACHES.clear()

    want = of_backward(fn, (X, W))
    with ThreadPoolExecutor(3) as pool:
        clearing = pool.submit(clear)
        jobs = [
            pool.submit(lambda: [of_backward(ours, (X, W)) for _ in range(20)])
            for _ in range(2)
        ]
        try:
            results = [job.result() for job in jobs]
        finally:
            stop.set()
        clearing.result()
    for of_thread in results:
        for each in of_thread:
            assert_same(each, want)


def test_threads_record_their_own_names():
    def named(x):
        return dead_end(checkpoint_name(x.exp(), "h"))

    policy = policies.save_only_these_names("h")

    def work(seed):
        with_names = remat(named, prune=True, policy=policy)
        return [of_backward(with_names, (make(4, 4, seed=seed),)) for _ in range(4)]

    with ThreadPoolExecutor(3) as pool:
        for seed, got in enumerate(pool.map(work, range(3))):
            for each in got:
                assert_same(each, of_backward(named, (make(4, 4, seed=seed),)))


def test_an_error_in_a_recording_leaves_no_recorder_behind():
    def broken(x):
        checkpoint_name(x.sin(), "h")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        remat(broken, prune=True)(leaves_of(X)[0])
    (x,) = leaves_of(X)
    with count_ops() as ops:
        checkpoint_name(x.sin(), "h")
    assert ops["sin"] == 1
    assert_same(of_backward(remat(fn, prune=True), (X, W)), of_backward(fn, (X, W)))


def test_an_error_of_the_recomputation_is_no_strike_of_another_call():
    changed = SimpleQueue()
    is_as_it_was = changed.empty

    def changes(x):
        h = x.exp()
        return dead_end(h if is_as_it_was() else h.tanh())

    ours = remat(changes, prune=True, policy=policies.dots_saveable)
    (x,) = leaves_of(X)
    loss = scalar(ours(x))
    changed.put(True)
    with pytest.raises(RecomputeError, match="forward"):
        torch.autograd.grad(loss, x)
    changed.get()
    for _ in range(3):
        assert_same(of_backward(ours, (X,)), of_backward(changes, (X,)))
    assert last_trace().misfits <= 1
