"""What docs/pruning.md says in words, in the order of that page.

Most of it is tested at length elsewhere: promises in test_pruning_safety.py and its
neighbors, inputs in test_pruning_inputs.py, errors in test_recompute_error.py, what is
held in test_traces.py.
"""

import pytest
import torch
from support.pruning import (
    W,
    X,
    dead_end,
    last_trace,
    of_backward,
    of_func_grad,
    total,
)
from support.zoo import Evaluations, leaves_of, make, scalar
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from remat import RecomputeError, checkpoint_name, policies, remat
from remat._partial.cache import CACHES
from remat.testing import assert_same, count_ops


def work(fn, *args):
    with count_ops() as ops:
        of_backward(fn, args)
    return total(ops)


# --- What is promised ---


def test_a_draw_that_nothing_needs_is_drawn_all_the_same():
    def fn(x):
        torch.nn.functional.dropout(x)
        return dead_end((x * torch.rand(4, 4, dtype=x.dtype)).exp())

    ours = remat(fn, prune=True)
    of_backward(ours, (X,))
    with count_ops() as ops:
        of_backward(ours, (X,))
    assert ops["bernoulli_"] == 2
    assert ops["div_"] == 1, "but what is made of it is not made again"


def test_the_records_of_the_last_512_kinds_are_held():
    assert CACHES._size == 512


# --- What is let go ---


def kept(ours, *args, used=slice(None)):
    """How many of its inputs a call keeps alive, whose results are then used."""
    inputs = [t * 1 for t in leaves_of(*args)]
    storages = [StorageWeakRef(t.untyped_storage()) for t in inputs]
    outs = ours(*inputs)
    del inputs
    alive = sum(not storage.expired() for storage in storages)
    torch.autograd.backward([o.sum() for o in outs[used]])
    return alive


def test_inputs_are_let_go_once_all_results_were_recomputed():
    ours = remat(lambda x, w: (x * 2, w.sin().exp()), prune=True)
    assert [kept(ours, X, W, used=slice(1)) for _ in range(3)] == [2, 2, 2]
    assert [kept(ours, X, W) for _ in range(2)] == [2, 1]


@pytest.mark.parametrize(
    ("size", "count"), [(2**12, 2), (2**13, 1)], ids=["32K", "64K"]
)
def test_under_a_policy_alone_they_have_to_be_large(size, count):
    policy = policies.save_only_these_names("pruning_docs")
    checkpoint_name(X, "pruning_docs")
    ours = remat(lambda x, w: (x * 2 + w.sin().exp(),), policy=policy)
    x, w = make(size, seed=1), make(size, seed=2)
    assert [kept(ours, x, w) for _ in range(3)][-1] == count


# --- When it is off ---


class OfTheUser(Tensor):
    """A tensor class of the user's."""


@pytest.mark.parametrize("case", ["compiled", "class", "small"])
def test_where_it_is_off_the_recomputation_is_full(case):
    x, fn, prune = X, lambda x: dead_end((x * 2).exp()), True
    if case == "compiled":
        compiled = torch.compile(torch.sin, backend="eager")
        fn = lambda x: dead_end(compiled(x).exp())
    if case == "class":
        x = X.as_subclass(OfTheUser)
    if case == "small":
        prune = "auto"
    ours, full = remat(fn, prune=prune), remat(fn, prune=False)
    if case == "compiled":
        with pytest.warns(UserWarning, match="prune=True of .* it calls compiled code"):
            work(ours, x)
    for _ in range(3):
        assert work(ours, x) == work(full, x) > work(fn, x)
    # Around what such a class sees, others may be left out: here there are none.
    assert case == "class" or not any(t.plans for t in CACHES._caches.values())


def test_forward_mode_is_not_recorded():
    ours = remat(lambda x: dead_end(x.exp()), prune=True)
    got = torch.func.jvp(ours, (X,), (W,))
    assert_same(got, torch.func.jvp(lambda x: dead_end(x.exp()), (X,), (W,)))
    assert not any(t.plans for t in CACHES._caches.values())
    with count_ops() as ops:
        torch.func.jvp(torch.func.grad(lambda x: scalar(ours(x))), (X,), (W,))
    assert ops["exp"] >= 2


# --- What a function that differs gets ---


def test_state_that_changes_unseen_gives_the_function_of_the_backward():
    state = {"on": True}

    def fn(x):
        return dead_end(x.exp() if state["on"] else x.tanh())

    def gradient(wrapped):
        state["on"] = True
        (x,) = leaves_of(X)
        loss = scalar(wrapped(x))
        state["on"] = False
        return torch.autograd.grad(loss, x)[0]

    ours = remat(fn, prune=True)
    for _ in range(2):
        state["on"] = True
        of_backward(ours, (X,))
    assert_same(gradient(ours), gradient(remat(fn, prune=False)))


# --- Limits ---


def test_what_ran_before_a_recomputation_was_given_up_runs_again():
    """Under torch.func, where the hooks that fire are those of the recomputation."""
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


@pytest.mark.parametrize("op", [counted, counted_without_result], ids=["one", "none"])
def test_side_effects_of_an_operator_that_is_left_out(op):
    def fn(x):
        op(x.detach())
        return dead_end((x * 2).exp())

    ours = remat(fn, prune=True)
    for _ in range(3):
        CALLS.clear()
        assert_same(of_backward(ours, (X,)), of_backward(fn, (X,)))
    # Once more for the plain call.
    assert len(CALLS) == (2 if op is counted else 3)


def test_the_class_of_what_is_left_out():
    seen = Evaluations()
    note = seen.note

    def fn(x, w):
        h = x * 2
        note((isinstance(h, Tensor), type(h) is Tensor))
        return h + w.sin().exp()

    ours = remat(fn, prune=True)
    of_backward(ours, (X, W))
    assert [*seen] == [(True, True), (True, False)]


def test_a_read_now_and_then_is_an_error_once():
    state = {"on": False}

    def fn(x, w):
        factor = float(x.detach().numpy()[0, 0]) if state["on"] else 1.5
        return (w * factor).sin() + x

    def gradients(fn):
        x, w = leaves_of(X, W)
        return torch.autograd.grad(scalar(fn(x * 1, w * 1)), (x, w))

    ours = remat(fn, prune=True)
    for _ in range(3):
        gradients(ours)
    state["on"] = True
    with pytest.raises(RecomputeError, match="inputs were not kept"):
        gradients(ours)
    for _ in range(3):
        assert_same(gradients(ours), gradients(fn))
    assert not last_trace().reason


def test_an_outer_call_leaves_out_what_the_inner_one_let_go():
    """Also if it was recorded when the inner call still kept all of its inputs."""
    plain = lambda h, y: 2 * h + y.exp().tanh()
    inner = remat(plain, prune=True)
    ours = remat(lambda x: inner(x.sinh(), x.abs()) * 3, prune=True)
    expected = of_backward(lambda x: plain(x.sinh(), x.abs()) * 3, (X,))
    counts = []
    for _ in range(4):
        with count_ops() as ops:
            got = of_backward(ours, (X,))
        assert_same(got, expected)
        counts.append((ops["sinh"], ops["abs"]))
    assert counts[0] == (2, 2)
    assert counts[-1] == (1, 2)
