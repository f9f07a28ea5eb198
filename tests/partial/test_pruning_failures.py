"""Exceptions, threads, layers of torch's, and where pruning ends.

An exception of the user's is raised as in plain code and costs no later call its
pruning. Threads may call a function for the first time at the same moment.
"""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.pruning import (
    W,
    X,
    assert_exact,
    assert_like_plain,
    dead_end,
    each_policy,
    last_call_cache,
    nothing_or_everything,
    of_backward,
    of_func_grad,
    strikes,
)
from support.zoo import Evaluations, leaves_of, make, scalar
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import has_torch_function

from remat import RecomputeError, checkpoint_name, policies, remat
from remat.testing import assert_same, count_ops


# --- Exceptions half-way ---


class BrokenError(Exception):
    """What the user's code raises."""


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("place", ["forward", "backward", "recomputation"])
@nothing_or_everything
def test_a_call_works_after_an_exception(policy, place, at):
    broken, runs = [False], Evaluations()

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, cotangent):
            if broken[0] and place == "backward":
                raise BrokenError("by the user")
            return cotangent * 2

    def fn(x, w):
        runs.note(None)
        h = Raises.apply(x @ w)
        if broken[0] and place == ("forward", "recomputation")[len(runs) > 1]:
            raise BrokenError("by the user")
        # No policy keeps a constant: it is made again, for which the function runs.
        return dead_end(h.exp() * torch.full((4, 4), 0.5, dtype=h.dtype))

    ours = remat(fn, policy=policy, prune=True)
    for call in range(5):
        runs.clear()
        if call == at:
            broken[0] = True
            with pytest.raises(BrokenError, match="by the user"):
                of_backward(ours, (X, W))
            broken[0] = False
            continue
        with count_ops() as ops:
            got = of_backward(ours, (X, W))
        assert_same(got, of_backward(fn, (X, W)))
    cache = last_call_cache()
    assert (cache.misfits, cache.reason) == (0, "")
    assert ops["sin"] == 2, "of the forward, and of the loss"


@each_policy
def test_an_exception_of_a_hook_is_raised_after_one_run(policy):
    calls = []

    def fn(x):
        h = x.sin()

        def hook(grad):
            calls.append(None)
            if len(calls) == 1:
                raise BrokenError("by the user")

        h.register_hook(hook)
        return dead_end(h.exp())

    ours = remat(fn, policy=policy, prune=True)
    x = leaves_of(X)[0]
    loss = scalar(ours(x))
    with pytest.raises(BrokenError, match="by the user"):
        torch.autograd.grad(loss, x)
    assert len(calls) == 1


# --- Threads ---


def in_threads(work, seeds=range(4)):
    """What each of some threads gives that start at the same time."""
    barrier = threading.Barrier(len(seeds))

    def run(seed):
        barrier.wait()
        return work(seed)

    with ThreadPoolExecutor(len(seeds)) as pool:
        return [*pool.map(run, seeds)]


def test_an_error_of_a_recompute_within_is_raised_after_one_run():
    """Under torch.func: it says nothing of the record, which stays."""
    broken, runs = [False], Evaluations()

    def fn(x, w):
        runs.note(None)
        y = (x @ w).sin()
        if broken[0] and len(runs) > 1:
            raise RecomputeError("of a call within")
        return y.exp().sum() + dead_end(y).sum()

    gradient = torch.func.grad(remat(fn, policy=policies.dots_saveable))
    expected = gradient(X, W)
    broken[0] = True
    runs.clear()
    with pytest.raises(RecomputeError, match="of a call within"):
        gradient(X, W)
    assert len(runs) == 2
    assert not any(strikes())
    broken[0] = False
    assert_same(gradient(X, W), expected)


@each_policy
def test_threads_call_first_at_the_same_time(policy):
    fn = lambda x, w: dead_end(torch.tanh(x @ w).exp() @ w)
    ours = remat(fn, policy=policy, prune=True)

    def gradients(fn, seed):
        args = [(make(4, 4, seed=seed), make(4, 4, seed=seed + k)) for k in range(6)]
        return [of_backward(fn, each) for each in args]

    results = in_threads(lambda seed: gradients(ours, seed))
    assert_same(results, [gradients(fn, seed) for seed in range(4)])
    assert strikes() == [0]
    assert not last_call_cache().reason


def test_threads_learn_and_strike_at_the_same_time():
    def fn(x, flag):
        h = x.sin()
        value = h.detach().numpy().sum() if flag[0] else 2.0
        return (x * float(value)).exp()

    ours = remat(fn, prune=True, policy=policies.everything_saveable)

    def work(seed):
        x = make(4, 4, seed=seed)
        for call in range(12):
            assert_like_plain(ours, fn, x, [(call + seed) % 3 == 0])

    in_threads(work)


# --- Layers of torch's ---


BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


@pytest.mark.parametrize("inside", [True, False])
@each_policy
def test_a_backend_of_attention_is_chosen(policy, inside):
    names = ["math", "flash", "flash", "math", "flash", "math", "math"]
    current = [names[0]]

    def backend(where):
        here = where == inside
        return sdpa_kernel(BACKENDS[current[0]]) if here else contextlib.nullcontext()

    def fn(q):
        with backend(True):
            return dead_end(scaled_dot_product_attention(q.sin(), q, q * 2))

    def way(fn, args):
        with backend(False):
            return of_backward(fn, args)

    assert_exact(
        fn,
        make(1, 2, 3, 4, seed=1),
        policy=policy,
        way=way,
        before=lambda call: current.__setitem__(0, names[call]),
        calls=len(names),
    )


@pytest.mark.parametrize("prune", [True, False])
@each_policy
@pytest.mark.parametrize("uses", ["a dead result", "its result"])
def test_statistics_are_read_after_their_update(uses, policy, prune):
    def reader(norm):
        def fn(x):
            y = norm(norm(x))
            y = (y.pow(2) if uses == "its result" else x) * norm.running_mean.cos()
            return y * torch.full((4,), 2.0, dtype=torch.double)

        return fn

    plain, norm = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    saves_all = policy is policies.everything_saveable
    kept = saves_all and prune and uses == "a dead result"
    ours = remat(reader(norm), policy=policy, prune=prune)
    for call in range(4):
        x = make(3, 4, seed=call) + 3
        with count_ops() as once:
            want = of_backward(reader(plain), (x,))
        with count_ops() as ops:
            got = of_backward(ours, (x,))
        assert_same(got, want)
        assert_same(norm.running_mean, plain.running_mean)
        if call:  # the first may find that it needs more than was kept
            assert ops["cos"] == once["cos"] + (not saves_all)
            assert ops["native_batch_norm"] == (2 if kept else 4)
        # Even where all is kept, constants are made again.
        assert (ops["full"], once["full"]) == (2, 1)


# --- Names, and long records ---


def test_many_outputs_are_named():
    def fn(x):
        parts = torch.split(x.flatten().repeat(25), 4)
        sines = torch._foreach_sin([*parts])
        torch._foreach_mul_(sines, 2.0)
        return [checkpoint_name(dead_end(p.exp()), "p") for p in sines]

    assert_exact(fn, X, policy=policies.save_only_these_names("p"))
    assert strikes() == [0]


def test_a_record_has_two_thousand_operations():
    def long(x):
        for k in range(1000):
            x = x.sin() if k % 3 else x * 1.5
        return dead_end(x)

    assert_exact(long, X, pruned=True, calls=3)
    assert strikes() == [0]


# --- Limits, as docs/concepts.md says ---


def test_a_recomputation_that_is_given_up_runs_again():
    """Under torch.func, where the hooks that fire are those of the recompute."""
    ran, hooks = Evaluations(), Evaluations()
    note_run, note_hook = ran.note, hooks.note

    def fn(x):
        note_run(None)
        h, other = x.sin(), x * 3
        (y := x * 1.0).register_hook(lambda g: g * other.detach())
        (z := y * 2).register_hook(lambda g: note_hook(None))
        return h.exp() + z

    ours = remat(fn, prune=True)
    counts = []
    for _ in range(3):
        ran.clear(), hooks.clear()
        of_func_grad(ours, (X,))
        counts.append((len(ran), len(hooks)))
    assert counts[0][0] == 3, "forward, the replay given up, in full"
    assert counts[1:] == [(2, 1)] * 2


CALLS: list = []


@torch.library.custom_op("pruning_docs::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    CALLS.append(None)
    return x * 2


@torch.library.custom_op("pruning_docs::counted_", mutates_args=())
def counted_without_result(x: Tensor) -> None:
    CALLS.append(None)


@pytest.mark.parametrize(
    ("op", "runs"), [(counted, 1), (counted_without_result, 2)], ids=["one", "none"]
)
def test_an_operator_that_is_left_out_has_no_side_effect(op, runs):
    def fn(x):
        op(x.detach())
        return dead_end((x * 2).exp())

    ours = remat(fn, prune=True)
    expected = of_backward(fn, (X,))
    for _ in range(3):
        CALLS.clear()
        assert_same(of_backward(ours, (X,)), expected)
    assert len(CALLS) == runs


def test_a_value_that_is_left_out_is_a_plain_tensor():
    seen = Evaluations()
    note = seen.note

    def fn(x, w):
        h = x * 2
        note((isinstance(h, Tensor), type(h) is Tensor))
        return h + w.sin().exp()

    ours = remat(fn, prune=True)
    of_backward(ours, (X, W))
    assert [*seen] == [(True, True), (True, True)]


def test_code_that_asks_for_torch_functions_is_not_recorded():
    seen = Evaluations()
    note = seen.note

    def fn(x, w):
        note(has_torch_function((x,)))
        return x * 2 + w.sin().exp()

    with pytest.warns(UserWarning, match="has_torch_function"):
        of_backward(remat(fn, prune=True), (X, W))
    assert [*seen] == [False, False]


def test_calls_inside_of_sixteen_are_not_recorded():
    fn = lambda x, w: x * 2 + w.sin().exp()
    ours = fn
    for _ in range(17):
        ours = remat(ours, prune=True)
    with pytest.warns(UserWarning, match="inside of 16 calls"):
        found = of_backward(ours, (X, W))
    assert all(map(torch.equal, found, of_backward(fn, (X, W))))
