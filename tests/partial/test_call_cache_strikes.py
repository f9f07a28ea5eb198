"""What does not fit a record is a strike, and what is read besides is a lesson.

A call that does not fit recomputes all. After three strikes no more is recorded, for a
reason that a warning gives.
"""

import re
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from support.pruning import (
    X,
    assert_like_plain,
    dead_end,
    given_up,
    last_call_cache,
    of_backward,
)
from support.zoo import counted, leaves_of, scalar
from torch.testing._internal.two_tensor import TwoTensor

from remat import RecomputeError, explain, policies, remat
from remat.testing import assert_same, count_ops


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
def test_another_saved_value_is_not_taken_for_the_one_that_was_saved(state):
    policy = policies.save_ops(torch.ops.aten.exp)
    states = "all", "all", state, state, "all"
    # A call that does not fit recomputes all; the one after it is recorded.
    assert exponentials_of_calls(elsewhere, policy, states) == [1, 1, 2, 1, 2]
    assert last_call_cache().misfits == 2


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
    with count_ops() as ops:
        of_backward(ours, (X,))
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
    of_backward(ours, (X,))
    assert len(ran) == 2 <= first


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

    def plain(x):
        return dead_end(fickle(x * 2))

    alternate(outer, plain)


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
        assert_like_plain(ours, changes, X)
    assert last_call_cache().misfits <= 1


def test_a_read_that_is_learned_is_no_strike():
    ours = remat(reads, prune=True)
    for _ in range(4):
        assert_like_plain(ours, reads, X)
    cache = last_call_cache()
    assert (cache.misfits, cache.reason) == (0, "")
