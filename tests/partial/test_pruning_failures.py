"""Exceptions half-way, and threads: whatever happens, the next call is right.

An exception of the user's is raised as in plain code and costs no later call its
pruning. Threads may call a function for the first time at the same moment.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.pruning import POLICIES, W, X, dead_end, last_trace, traces
from support.zoo import Evaluations, leaves_of, make, scalar
from torch.nn.functional import dropout

from remat import MutationError, policies, remat
from remat._partial.cache import CACHES
from remat.testing import assert_same, count_ops


everything = policies.everything_saveable


# --- Exceptions half-way ---


class BrokenError(Exception):
    """What the user's code raises."""


PLACES = ["forward", "backward", "recomputation"]


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("policy", POLICIES)
def test_after_an_exception_it_works(policy, place, at):
    broken, runs = [False], Evaluations()

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, cotangent):
            if broken[0] and place == "backward":
                raise BrokenError
            return cotangent * 2

    def fn(x, w):
        runs.note(None)
        h = Raises.apply(x @ w)
        if broken[0] and place == ("forward", "recomputation")[len(runs) > 1]:
            raise BrokenError
        # No policy keeps a constant: it is made again, for which the function runs.
        return dead_end(h.exp() * torch.full((4, 4), 0.5, dtype=h.dtype))

    ours = remat(fn, policy=POLICIES[policy], prune=True)
    for call in range(6):
        x, w = leaves_of(X, W)
        runs.clear()
        if call == at:
            broken[0] = True
            with pytest.raises(BrokenError):
                torch.autograd.grad(scalar(ours(x, w)), (x, w))
            broken[0] = False
            continue
        with count_ops() as ops:
            got = torch.autograd.grad(scalar(ours(x, w)), (x, w))
        assert_same(got, torch.autograd.grad(scalar(fn(x, w)), (x, w)))
    trace = last_trace()
    assert (trace.misfits, trace.reason) == (0, "")
    assert ops["sin"] == 2, "of the forward, and of the loss"


@pytest.mark.parametrize("policy", POLICIES)
def test_an_exception_of_a_hook_is_raised_and_the_hook_runs_once(policy):
    calls = []

    def fn(x):
        h = x.sin()

        def hook(grad):
            calls.append(None)
            if len(calls) == 1:
                raise BrokenError

        h.register_hook(hook)
        return dead_end(h.exp())

    ours = remat(fn, policy=POLICIES[policy], prune=True)
    x = leaves_of(X)[0]
    loss = scalar(ours(x))
    with pytest.raises(BrokenError):
        torch.autograd.grad(loss, x)
    assert len(calls) == 1


# --- Threads ---


@pytest.mark.parametrize("policy", POLICIES)
def test_threads_that_call_first_at_the_same_time(policy):
    def fn(x, w):
        return dead_end(torch.tanh(x @ w).exp() @ w)

    ours = remat(fn, policy=POLICIES[policy], prune=True)
    barrier = threading.Barrier(4)

    def work(seed):
        barrier.wait()
        got = []
        for call in range(6):
            x, w = leaves_of(make(4, 4, seed=seed), make(4, 4, seed=seed + call))
            got.append(torch.autograd.grad(scalar(ours(x, w)), (x, w)))
        return got

    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(work, range(4))]
    for seed, got in enumerate(results):
        for call, grads in enumerate(got):
            x, w = leaves_of(make(4, 4, seed=seed), make(4, 4, seed=seed + call))
            assert_same(grads, torch.autograd.grad(scalar(fn(x, w)), (x, w)))
    assert len(CACHES) == 1
    assert not last_trace().reason


def test_threads_that_learn_and_strike_at_the_same_time():
    def fn(x, flag):
        h = x.sin()
        value = h.detach().numpy().sum() if flag[0] else 2.0
        return (x * float(value)).exp()

    ours = remat(fn, prune=True, policy=everything)
    barrier = threading.Barrier(4)

    def work(seed):
        barrier.wait()
        got = []
        for call in range(12):
            flag = [(call + seed) % 3 == 0]
            x = leaves_of(make(4, 4, seed=seed))[0]
            (grad,) = torch.autograd.grad(scalar(ours(x, flag)), x)
            (want,) = torch.autograd.grad(scalar(fn(x, flag)), x)
            got.append(torch.equal(grad, want))
        return got

    with ThreadPoolExecutor(4) as pool:
        assert all(map(all, pool.map(work, range(4))))


def test_the_backward_runs_in_another_thread():
    def fn(x, w):
        return dead_end(dropout(torch.tanh(x @ w)) @ w)

    ours = remat(fn, prune=True)
    for call in range(4):
        results = []
        for f in (fn, ours):
            x, w = leaves_of(X, W)
            torch.manual_seed(call)
            loss = scalar(f(x, w))
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(torch.autograd.grad, loss, (x, w))
                results.append(job.result())
        assert_same(results[1], results[0])
    assert [t.misfits for t in traces()] == [0]


def test_an_input_changed_between_forward_and_backward_is_refused():
    ours = remat(lambda x: dead_end(x.exp()), prune=True)
    for _ in range(4):
        leaf = leaves_of(X)[0]
        x = leaf * 1
        loss = scalar(ours(x))
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(MutationError, match="`x`"):
            torch.autograd.grad(loss, leaf)
