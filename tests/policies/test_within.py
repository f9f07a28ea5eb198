"""What a budget keeps and recomputes: bytes are counted, and so is what runs again."""

import pickle
import sys

import pytest
import torch
from support.pruning import forget_calls

from remat import checkpoint_name, explain, remat
from remat._partial import budget, effects as timing
from remat.policies import dots_saveable, save_only_these_names, within
from remat.testing import assert_same, count_ops, live_bytes


SIZE = 16
MATRIX = SIZE * SIZE * 8


def matrix(seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, SIZE, generator=generator, dtype=torch.double) / SIZE
    return x.requires_grad_()


def backward_ops(fn, *args):
    """What runs in a backward, and the gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in args]
    out = fn(*leaves).sum()
    with count_ops() as ops:
        grads = torch.autograd.grad(out, leaves)
    return ops, grads


def again(fn, plain, *args):
    """What runs in the backward of `fn`, and not in that of plain code."""
    ops, grads = backward_ops(fn, *args)
    once, expected = backward_ops(plain, *args)
    assert_same(grads, expected)
    return ops - once


def kept_bytes(fn, *args):
    """The bytes that the graph of a call holds besides the inputs."""
    fn(*args)
    return live_bytes(lambda: fn(*args).grad_fn)


def layers(w, x):
    for i in range(4):
        x = checkpoint_name(torch.tanh(x @ w), f"layer{i}")
    return x


# --- How much is kept ---


@pytest.mark.parametrize("count", [0, 2, 5])
@pytest.mark.parametrize("prune", ["auto", True, False])
def test_the_first_call_and_those_after_it_keep_the_budget(count, prune):
    w, x = matrix(1), matrix(2)
    nbytes = count * MATRIX + MATRIX - 1
    fn = remat(layers, policy=within(nbytes), prune=prune)
    forget_calls()
    kept = min(count, 4)
    for _ in range(3):
        assert live_bytes(lambda: fn(w, x)) in (kept * MATRIX, (kept + 1) * MATRIX)
        assert kept_bytes(fn, w, x) == kept * MATRIX
        ops = again(fn, layers, w, x)
        assert ops["mm"] == 4 - kept
        # Without pruning, a product is spared as well by keeping its own result.
        assert ops["tanh"] == 4 - kept or prune is False


# --- With other policies ---


def test_names_are_kept_and_count():
    w, x = matrix(1), matrix(2)
    names = save_only_these_names("layer1")
    for count in range(1, 5):
        fn = remat(layers, policy=within(count * MATRIX) | names)
        assert kept_bytes(fn, w, x) == count * MATRIX
        steps = explain(fn, w, x).ops
        saved = [op.fate for op in steps if op.name == "tanh"]
        assert saved[1] == "saved"
        assert saved.count("saved") == count
        assert again(fn, layers, w, x)["tanh"] == 4 - count


def test_names_that_exceed_the_budget_are_kept_alone():
    w, x = matrix(1), matrix(2)
    two = save_only_these_names("layer0", "layer1")
    fn = remat(layers, policy=within(MATRIX) | two)
    message = r"has to keep takes 4,096 bytes, more than its budget of 2,048\. It is"
    with pytest.warns(UserWarning, match=message):
        fn(w, x)
    assert kept_bytes(fn, w, x) == 2 * MATRIX
    assert again(fn, layers, w, x)["tanh"] == 2
    found = explain(fn, w, x)
    assert found.budget.overdrawn
    assert "4,096 of 2,048 bytes, exceeded by what must be kept" in str(found)


def test_only_what_another_policy_keeps_may_be_kept():
    f = lambda w, x: ((x @ w).exp() @ w).exp()
    w, x = matrix(1), matrix(2)
    # The backward reads both results of exp: what saves exp best may not be kept.
    some = remat(f, policy=within(2 * MATRIX) & dots_saveable)
    ops = again(some, f, w, x)
    assert (ops["exp"], ops["mm"]) == (2, 0)
    assert kept_bytes(some, w, x) == 2 * MATRIX
    one = again(remat(f, policy=within(MATRIX) & dots_saveable), f, w, x)
    assert (one["exp"], one["mm"]) == (2, 1)
    rest = again(remat(f, policy=within(2 * MATRIX) - dots_saveable), f, w, x)
    assert (rest["exp"], rest["mm"]) == (0, 0)


def test_what_is_offloaded_does_not_count():
    w, x = matrix(1), matrix(2)
    away = save_only_these_names("layer1").but_offload(to="disk")
    names = save_only_these_names("layer1")
    fn = remat(layers, policy=(within(MATRIX) - names) | away)
    assert again(fn, layers, w, x)["tanh"] == 2
    found = explain(fn, w, x)
    assert (found.budget.nbytes, found.offloaded_bytes) == (MATRIX, MATRIX)
    fates = [op.fate for op in found.ops if op.name == "tanh"]
    assert sorted(fates) == ["offloaded", "recomputed", "recomputed", "saved"]


# --- In every kind of call: values are in `test_policies_transforms.py` ---


def test_under_vmap_the_whole_batch_counts():
    w, xs = matrix(1).detach(), torch.stack([matrix(i).detach() for i in range(3)])
    for count in range(5):
        fn = remat(layers, policy=within(3 * count * MATRIX + MATRIX))
        loss = lambda x, fn=fn: fn(w, x).sum()
        with count_ops() as ops:
            torch.func.vmap(torch.func.grad(loss))(xs)
        assert ops["tanh"] == 4 + 4 - count


@pytest.mark.parametrize("count", [0, 2, 4])
def test_as_one_node(count):
    w, x = matrix(1), matrix(2)
    fn = remat(layers, policy=within(count * MATRIX), higher_order=True)
    for _ in range(3):
        assert again(fn, layers, w, x)["tanh"] == 4 - count
    assert kept_bytes(fn, w, x) == count * MATRIX


def test_the_budget_around_holds_for_all_that_is_inside():
    w, x = matrix(1), matrix(2)

    def outer(w, x):
        inside = remat(layers)
        return inside(w, inside(w, x))

    plain = lambda w, x: layers(w, layers(w, x))
    works = []
    for count in (0, 1, 3, 6, 9):
        fn = remat(outer, policy=within(count * MATRIX))
        for _ in range(3):
            works.append(again(fn, plain, w, x)["tanh"])
            assert kept_bytes(fn, w, x) <= count * MATRIX
    assert works[0] > works[-1]


@pytest.mark.parametrize("count", range(3))
def test_a_budget_inside_another_policy(count):
    w, x = matrix(1), matrix(2)
    inside = remat(layers, policy=within(count * MATRIX))
    outer = lambda w, x: inside(w, x.sin()).exp()
    plain = lambda w, x: layers(w, x.sin()).exp()
    # The call around keeps nothing that crosses; inside, the budget spares work.
    fn = remat(outer)
    ops = [again(fn, plain, w, x)["tanh"] for _ in range(3)]
    assert ops == [4 + 4 - count] * 3
    assert kept_bytes(fn, w, x) == 0


# --- Where it is not followed ---


def test_where_nothing_can_be_recorded_all_is_recomputed_and_that_is_said():
    compiled = torch.compile(torch.sin, backend="eager")
    f = lambda w, x: compiled(x @ w).tanh()
    w, x = matrix(1), matrix(2)
    fn = remat(f, policy=within(2**20))
    with pytest.warns(
        UserWarning, match="the policy of .* is not followed, and all is"
    ):
        fn(w, x)
    out = fn(w, x).sum()
    expected = torch.autograd.grad(f(w, x).sum(), [w, x])
    assert_same(torch.autograd.grad(out, [w, x]), expected)


def test_a_function_that_takes_another_path_is_right_and_keeps_the_budget():
    path = [1]

    def f(w, x):
        for _ in range(path[0]):
            x = torch.tanh(x @ w)
        return x

    w, x = matrix(1), matrix(2)
    fn = remat(f, policy=within(2 * MATRIX))
    for length in (4, 2, 6):
        path[0] = length
        for _ in range(3):
            leaves = [t.detach().clone().requires_grad_() for t in (w, x)]
            assert live_bytes(lambda: fn(w, x)) <= 3 * MATRIX
            grads = torch.autograd.grad(fn(*leaves).sum(), leaves)
            assert_same(grads, backward_ops(f, w, x)[1])


def test_without_scipy_a_policy_of_elsewhere_says_it_at_the_call(monkeypatch):
    policy = pickle.dumps(within(MATRIX))
    for name in ("scipy", "scipy.optimize"):
        monkeypatch.setitem(sys.modules, name, None)
    budget._known.cache_clear()
    budget._searched.cache_clear()
    forget_calls()
    fn = remat(layers, policy=pickle.loads(policy))
    with pytest.raises(ImportError, match=r"solved by scipy.*pip install scipy"):
        fn(matrix(1), matrix(2))


# --- Time, and measured costs ---


def wide(w, x):
    """Many values of sizes that fit a budget in many ways."""
    outs = []
    for i in range(1, SIZE):
        h = (x[:, :i] @ w[:i]).tanh()
        outs.append((h[:i].sin() * h[:i].exp()).sum(0))
    return torch.stack(outs)


def test_when_the_time_is_up_the_budget_holds_and_explain_tells_the_gap():
    w, x = matrix(1), matrix(2)
    budget._known.cache_clear()
    budget._searched.cache_clear()
    nbytes = 7 * MATRIX + 123
    fn = remat(wide, policy=within(nbytes, time_limit=0.0))
    assert kept_bytes(fn, w, x) <= nbytes
    again(fn, wide, w, x)
    found = explain(fn, w, x)
    assert found.budget.gap > 0
    assert "above the least" in str(found)
    patient = explain(remat(wide, policy=within(nbytes)), w, x)
    assert patient.budget.work < found.budget.work


def test_measured_costs_are_of_each_operation_once():
    w, x = matrix(1), matrix(2)
    timing._SECONDS.clear()
    forget_calls()
    policy = within(2 * MATRIX, costs="measured")
    fn = remat(layers, policy=policy)
    fn(w, x)
    timed = dict(timing._SECONDS)
    assert {op.__name__ for op, *_ in timed} >= {"mm.default", "tanh.default"}
    assert all(seconds > 0 for seconds in timed.values())
    for _ in range(2):
        assert again(fn, layers, w, x)["tanh"] == 2
        assert kept_bytes(fn, w, x) == 2 * MATRIX
    assert timed == {key: timing._SECONDS[key] for key in timed}


def test_measured_costs_decide(monkeypatch):
    def f(x):
        return x.sin().cos().exp()

    x = matrix(1)
    for name in ("sin", "cos", "exp"):
        timing._SECONDS.clear()
        forget_calls()

        class Slow(timing.Timing):
            slow = name

            def note(self, op):
                self._last = 1.0 if op.packet.__name__ == self.slow else 1e-3
                super().note(op)

        monkeypatch.setattr("remat._partial.recorder.Timing", Slow)
        fn = remat(f, policy=within(MATRIX, costs="measured"))
        ops = again(fn, f, x)
        assert ops[name] == 0
        assert ops["sin"] + ops["cos"] + ops["exp"] < 3
    timing._SECONDS.clear()


# --- Reports ---


def test_explain_shows_what_the_budget_keeps():
    w, x = matrix(1), matrix(2)
    fn = remat(layers, policy=within(3 * MATRIX + 5))
    found = explain(fn, w, x)
    spent = found.budget
    assert (spent.limit, spent.nbytes, spent.gap) == (3 * MATRIX + 5, 3 * MATRIX, 0)
    assert 0 < spent.work < spent.whole_work
    assert not spent.overdrawn
    assert "budget: 6,144 of 6,149 bytes; 2" in str(found)
    assert "of the work again, the least" in str(found)
    assert explain(remat(layers), w, x).budget is None
