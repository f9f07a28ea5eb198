"""What docs/concepts.md says of pruning, and what else holds for it.

Most of it is tested at length elsewhere: promises in test_pruning_safety.py and its
neighbors, inputs in test_pruning_inputs.py, errors in test_recompute_error.py, what is
held in test_call_cache.py.
"""

import pytest
import torch
from support.pruning import W, X, dead_end, of_backward, of_func_grad
from support.zoo import Evaluations
from torch import Tensor
from torch.overrides import has_torch_function

from remat import remat
from remat.testing import assert_same


# --- Limits ---


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
