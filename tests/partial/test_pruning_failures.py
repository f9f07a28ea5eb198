"""Exceptions half-way, and threads: whatever happens, the next call is right.

An exception of the user's is raised as in plain code and costs no later call its
pruning. Threads may call a function for the first time at the same moment.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.pruning import (
    W,
    X,
    assert_like_plain,
    dead_end,
    each_policy,
    last_call_cache,
    nothing_or_everything,
    of_backward,
    strikes,
)
from support.zoo import Evaluations, leaves_of, make, scalar

from remat import RecomputeError, policies, remat
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
