"""`RecomputeError`: a function that does something else in the recompute.

Where the forward was seen, in the first call under `prune=True` and under a policy, the
error shows both sequences of operations around the first difference, and the lines of
the user's that ran them. Without it, the error shows what was saved. Behind the last
value that a backward reads nothing is compared, for nothing is run.
"""

import re
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch
from support.pruning import X, of_backward
from support.zoo import assert_not_vanishing, leaves_of, ops_of, scalar

from remat import RecomputeError, RematError, policies, remat
from remat.testing import assert_same, count_ops


HERE = Path(__file__).name
WAYS = {
    "prune": {"prune": True},
    "policy": {"policy": policies.dots_saveable},
    "dots": {"policy": policies.dots_saveable, "prune": True},
    "not pruned": {"policy": policies.dots_saveable, "prune": False},
}
# Nothing puts it back for a recompute.
RUNS = SimpleQueue()


@pytest.fixture(autouse=True)
def _no_runs():
    set_runs(0)


def set_runs(count):
    while RUNS.qsize():
        RUNS.get()
    for _ in range(count):
        RUNS.put(None)


def runs():
    """How often the function ran before: the state that it should not depend on."""
    RUNS.put(None)
    return RUNS.qsize() - 1


def swapped(x):
    h = x.sin()
    h = h.exp() if runs() == 0 else h.tanh()
    return h * 2


def with_more(x):
    h = x.sin()
    if runs():
        h = h.tanh()
    return h.exp()


def with_fewer(x):
    h = x.sin()
    if not runs():
        h = h.tanh()
    return h.exp()


def longer(x):
    h = x.sin().exp()
    return h.tanh() if runs() else h


def shorter(x):
    h = x.sin().exp()
    return h if runs() else h.tanh()


# By what they do: the operations around the difference, and what differs.
CHANGES = {
    swapped: (["sin", "exp", "mul"], ["sin", "tanh"]),
    with_more: (["sin", "exp"], ["sin", "tanh"]),
    with_fewer: (["sin", "tanh", "exp"], ["sin", "exp"]),
    shorter: (["sin", "exp", "tanh"], ["sin", "exp", "nothing more"]),
}
CHANGES_UNDER_FUNC = {
    **CHANGES,
    longer: (["sin", "exp", "nothing more"], ["sin", "exp", "tanh"]),
}


def error_of(fn, **options):
    (x,) = leaves_of(X)
    loss = scalar(remat(fn, **options)(x))
    with pytest.raises(RecomputeError, match="forward:") as caught:
        torch.autograd.grad(loss, x)
    return caught.value


def sequences(text):
    """The names of the operations that the two halves of a message list."""
    before, after = text.split("recompute:\n")
    listed = before.split("forward:\n")[1]
    return [
        [
            line.split("#")[0].strip().removeprefix("aten.").split(".")[0]
            for line in half.splitlines()
            if line.startswith("    ")
        ]
        for half in (listed, after)
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("fn", CHANGES, ids=lambda fn: fn.__name__)
def test_both_sequences_are_shown(fn, way):
    then, now = CHANGES[fn]
    got = sequences(str(error_of(fn, **WAYS[way])))
    assert got[0][: len(then)] == then
    assert got[1] == now


@pytest.mark.parametrize("fn", CHANGES_UNDER_FUNC, ids=lambda fn: fn.__name__)
def test_both_sequences_are_shown_under_func_grad(fn):
    ours = remat(fn, prune=True)
    with pytest.raises(RecomputeError, match="forward:") as caught:
        torch.func.grad(lambda x: scalar(ours(x)))(X)
    then, now = CHANGES_UNDER_FUNC[fn]
    got = sequences(str(caught.value))
    assert got[0][: len(then)] == then
    assert got[1] == now


# What is saved: by which nodes in the forward, and in the recompute.
SAVED = {
    swapped: (["Exp"], ["Tanh"]),
    with_more: (["Exp"], ["Tanh"]),
    with_fewer: (["Tanh", "Exp"], ["Exp"]),
    shorter: (["Exp", "Tanh"], ["Exp", "nothing more"]),
}


@pytest.mark.parametrize("fn", SAVED, ids=lambda fn: fn.__name__)
def test_without_a_record_what_is_saved_is_shown(fn):
    text = str(error_of(fn))
    assert "saves something else for the backward than the forward did" in text
    assert re.search(rf"recomputing `{fn.__name__}` \(rematerialized at", text)
    halves = text.split("forward:\n")[1].split("  recompute:\n")
    for half, expected in zip(halves, SAVED[fn], strict=True):
        found = re.findall(r"of (\w+)Backward0|(nothing more)", half)
        assert [a or b for a, b in found] == expected


def gradient_of(fn):
    (x,) = leaves_of(X)
    return torch.autograd.grad(scalar(fn(x)), x)


@pytest.mark.parametrize("way", [{}, *WAYS.values()], ids=["default", *WAYS])
def test_what_comes_after_the_last_value_that_is_read_may_differ(way):
    set_runs(0)
    expected = gradient_of(longer)
    set_runs(0)
    ops = ops_of(lambda: assert_same(gradient_of(remat(longer, **way)), expected))
    # The forward, the loss, the recompute.
    assert (ops["sin"], ops["tanh"]) == (1 + 1 + 1, 0)
    assert_not_vanishing(expected)


@pytest.mark.parametrize("fn", CHANGES, ids=lambda fn: fn.__name__)
def test_each_operation_of_the_forward_has_its_line(fn):
    text = str(error_of(fn, prune=True))
    listed = text.split("forward:\n")[1].split("  recompute:")[0]
    lines = [line for line in listed.splitlines() if "nothing more" not in line]
    for line in lines:
        assert re.search(rf"# .*{HERE}:\d+, in {fn.__name__}$", line)
    first = fn.__code__.co_firstlineno
    numbers = [int(re.search(r":(\d+),", line)[1]) for line in lines]
    assert all(first < n < first + 8 for n in numbers)


def test_the_operation_of_the_recomputation_has_its_line_too():
    """It is where the user has to look."""
    text = str(error_of(swapped, prune=True))
    now = text.split("recompute:\n")[1].splitlines()[-1]
    assert re.match(r"    aten\.tanh\.default  # .*:\d+, in swapped$", now)


def test_what_to_do_and_where_it_was():
    error = error_of(swapped, prune=True)
    assert isinstance(error, RematError)
    assert str(error).startswith("remat: the recompute ran other operations than")
    assert "pass that state as an argument" in str(error)
    line = error_of.__code__.co_firstlineno + 2
    where = f"(rematerialized at {__file__}:{line})"
    assert error.__notes__ == [f"remat: raised while recomputing `swapped` {where}."]


def test_the_operations_before_the_difference_are_few():
    def fn(x):
        for _ in range(20):
            x = x.sin()
        x = x.tanh() if runs() else x.exp()
        for _ in range(20):
            x = x.cos()
        return x

    then, now = sequences(str(error_of(fn, prune=True)))
    assert then == ["sin", "sin", "exp", "cos", "cos"]
    assert now == ["sin", "sin", "tanh"]


def test_a_layer_of_torch_shows_the_line_that_calls_it():
    def fn(x):
        x = torch.nn.functional.layer_norm(x, (4,))
        return x.tanh() if runs() else x.exp()

    text = str(error_of(fn, prune=True))
    assert re.search(rf"aten\.native_layer_norm\.default  # .*{HERE}:\d+, in fn", text)


@pytest.mark.parametrize("way", [{}, *WAYS.values()], ids=["default", *WAYS])
def test_another_shape_is_an_error(way):
    def fn(x):
        h = x.sin().exp()
        return (h[:2] if runs() else h[:3]).exp()

    text = str(error_of(fn, **way))
    assert re.search(r"float64\[3, 4\] of Exp(?s:.*)float64\[2, 4\] of Exp", text)


@pytest.mark.parametrize("way", WAYS)
def test_another_shape_of_a_result_is_an_error_of_one_node(way):
    def fn(x):
        h = x.sin().exp()
        return h.sum(0) if runs() else h.sum(1)[:3]

    (x,) = leaves_of(X)
    loss = scalar(remat(fn, **WAYS[way], higher_order=True)(x))
    # The operations are the same, with other arguments.
    message = r"returned \[.*Size\(\[4\]\).*where the forward returned .*Size\(\[3\]\)"
    with pytest.raises(RecomputeError, match=message):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("then", [True, False])
def test_a_result_of_one_node_that_requires_grad_in_one_of_both_only(way, then):
    def fn(x):
        h = x.sin().exp()
        return h.detach() if bool(runs()) == then else h, x * 2

    (x,) = leaves_of(X)
    loss = scalar(remat(fn, **WAYS[way], higher_order=True)(x))
    with pytest.raises(RecomputeError, match="outputs that require grad"):
        torch.autograd.grad(loss, x)


def test_nested_it_names_the_outer_function():
    """Whose recompute runs the forward of the inner one again, differently."""
    inner = remat(swapped, prune=True)
    error = error_of(lambda x: inner(x * 3).cos(), prune=True)
    assert any("recomputing `test_nested" in note for note in error.__notes__)
    assert sequences(str(error)) == [
        ["mul", "sin", "exp", "mul", "cos"],
        ["mul", "sin", "tanh"],
    ]


def test_later_calls_are_not_the_worse_for_it():
    ours = remat(swapped, policy=policies.dots_saveable)
    for _ in range(3):
        set_runs(0)
        (x,) = leaves_of(X)
        loss = scalar(ours(x))
        with pytest.raises(RecomputeError, match="forward:"):
            torch.autograd.grad(loss, x)
    set_runs(5)
    with count_ops() as ops:
        got = of_backward(ours, (X,))
    set_runs(5)
    assert_same(got, of_backward(swapped, (X,)))
    assert ops["tanh"] == 2


def test_dropped_inputs():
    """They cannot be had again, so whatever does not fit is an error that says so."""
    flag = SimpleQueue()
    fn = lambda x, w: (x.exp() if flag.qsize() else x * 2) + w.sin().exp()
    ours = remat(fn, prune=True)
    for _ in range(3):
        of_backward(ours, (X, X * 2))
    x, w = leaves_of(X, X * 2)
    loss = scalar(ours(x * 1, w * 1))
    flag.put(None)
    with pytest.raises(RecomputeError, match="inputs that were dropped") as caught:
        torch.autograd.grad(loss, (x, w))
    assert "Pass prune=False" in str(caught.value)
    then, now = sequences(str(caught.value))
    assert then[:3] == ["mul", "sin", "exp"]
    assert now == ["exp"]


def test_an_error_that_the_function_catches_is_raised_at_its_end():
    other = lambda h: h.exp() if runs() == 0 else h.tanh()

    def forgiving(x):
        h = x.sin()
        try:
            return other(h)
        except RuntimeError:
            return h

    (x,) = leaves_of(X)
    with count_ops() as ops:
        y = remat(forgiving, prune=True)(x)
    assert ops["exp"] == 1
    with pytest.raises(RecomputeError, match="forward:"):
        y.sum().backward()
    assert x.grad is None
