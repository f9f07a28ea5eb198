"""`compat.checkpoint`: its arguments and settings. Items 16 to 19 and 29.

See `test_compat_calls.py` for the numbers.
"""

import contextlib
import functools
import inspect
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from support.checkpoints import (
    both,
    both_modules,
    ours,
    sin_exp,
    slope_of_sin_exp,
    theirs,
)
from support.compared import leaf, points
from support.zoo import Evaluations, counted
from torch.utils import checkpoint as torchs

import remat
import remat.compat as ours_as_a_module
from remat import RecomputeError, RematError, compare, compat, policies
from remat.testing import assert_same, count_ops


SLOPE = slope_of_sin_exp()


# --- Names and signatures ---


def test_all_names_of_torchs_module_are_there():
    assert set(torchs.__all__) <= set(vars(ours_as_a_module))
    for name in torchs.__all__:
        assert callable(getattr(compat, name)) == callable(getattr(torchs, name))


@pytest.mark.parametrize("name", ["checkpoint", "checkpoint_sequential"])
def test_ours_take_what_torchs_take(name):
    taken = inspect.signature(getattr(compat, name)).parameters
    for argument in inspect.signature(getattr(torchs, name)).parameters.values():
        assert taken[argument.name].kind == argument.kind


def test_only_what_recomputes_is_our_own():
    names = {n for n in torchs.__all__ if getattr(compat, n) is not getattr(torchs, n)}
    assert names == {"checkpoint", "checkpoint_sequential"}


# --- 16: contexts ---


class Counting:
    """A context that may be entered again, and counts operations."""

    def __init__(self):
        self.entered, self.ops = 0, {}

    def __enter__(self):
        self.entered += 1
        self._counting = count_ops()
        self.ops = self._counting.__enter__()

    def __exit__(self, *error):
        return self._counting.__exit__(*error)


class Contexts:
    """A `context_fn`, and the contexts that it made, in recomputes too."""

    def __init__(self):
        self.calls = Evaluations()

    def __call__(self):
        made = Counting(), Counting()
        self.calls.note(made)
        return made

    @property
    def made(self):
        return [*self.calls]


@both
def test_the_contexts_see_the_forward_and_the_recompute(checkpoint):
    """16: and what they note is not undone."""
    contexts, x = Contexts(), leaf(3)
    out = checkpoint(sin_exp, x, context_fn=contexts)
    ((first, second),) = contexts.made
    assert (first.entered, second.entered) == (1, 0)
    assert (first.ops["sin"], first.ops["exp"], first.ops["cos"]) == (1, 1, 0)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    assert (first.entered, second.entered) == (1, 2)
    assert (second.ops["sin"], second.ops["exp"], second.ops["cos"]) == (1, 1, 0)
    assert_same(x.grad, 2 * SLOPE)


@both
def test_the_first_context_is_let_go_of_after_the_forward(checkpoint):
    """16: it may hold tensors."""
    x, refs, second = leaf(3), [], Counting()

    def context_fn():
        first = Counting()
        refs.append(weakref.ref(first))
        return first, second

    out = checkpoint(sin_exp, x, context_fn=context_fn)
    assert [ref() for ref in refs] == [None]
    out.sum().backward()
    assert (second.entered, second.ops["sin"]) == (1, 1)
    assert_same(x.grad, SLOPE)


@both
def test_each_call_has_contexts_of_its_own(checkpoint):
    """16: a nested call, too, whose forward runs again in the recompute around it."""
    context_fn, x = Contexts(), leaf(3)

    def outer(x):
        return checkpoint(lambda x: x.exp().sin(), x, context_fn=context_fn).cos()

    checkpoint(outer, x).sum().backward()
    # That of the recompute stops at the last value that the first call is to be given.
    assert [(a.entered, b.entered) for a, b in context_fn.made] == [(1, 1), (1, 0)]
    y = leaf(3)
    y.exp().sin().cos().sum().backward()
    assert_same(x.grad, y.grad)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev])
def test_contexts_under_torch_func(transform):
    context_fn = Contexts()

    def f(x):
        return ours(sin_exp, x, context_fn=context_fn).sum()

    assert_same(transform(f)(points(3)), SLOPE)
    ((first, second),) = context_fn.made
    assert (first.entered, second.entered) == (1, 1)
    assert (second.ops["sin"], second.ops["exp"]) == (1, 1)


@both
def test_a_context_that_suppresses_an_error_of_the_forward_is_refused(checkpoint):
    """16: there would be no result."""

    def fails(x):
        raise ValueError(f"no {x.shape[0]}")

    def context_fn():
        return contextlib.suppress(ValueError), nullcontext()

    with pytest.raises(RuntimeError, match="context_fn suppressed an exception"):
        checkpoint(fails, leaf(3), context_fn=context_fn)
    body, calls = counted(sin_exp)
    checkpoint(body, leaf(3), context_fn=context_fn).sum().backward()
    assert len(calls) == 2


@both
def test_without_gradients_no_context_is_entered(checkpoint):
    context_fn = Contexts()
    with torch.no_grad():
        out = checkpoint(sin_exp, leaf(3), context_fn=context_fn)
    assert not any(first.entered for first, _ in context_fn.made)
    assert_same(out, sin_exp(points(3)))


NEEDS_ONE = {
    "context_fn": lambda: (nullcontext(), nullcontext()),
    "debug": True,
    "respect_saved_tensors_hooks": True,
}


@both_modules
@pytest.mark.parametrize("name", NEEDS_ONE)
def test_some_options_exclude_the_reentrant_variant(api, name):
    """16."""
    if name not in inspect.signature(torchs.checkpoint).parameters:
        pytest.skip("an option of a newer torch")
    option = {name: NEEDS_ONE[name]}
    with pytest.raises(ValueError, match=r"use_reentrant=False"):
        api.checkpoint(sin_exp, leaf(3), use_reentrant=True, **option)


@both
def test_debug_and_contexts_exclude_each_other(checkpoint):
    with pytest.raises(ValueError, match=r"debug=True"):
        checkpoint(sin_exp, leaf(3), debug=True, context_fn=Contexts())


# --- 17: no warning ---


def test_the_variant_need_not_be_said():
    """17: torch warns, since its two variants differ."""
    x = leaf(3)
    for run in (
        lambda api: api.checkpoint(sin_exp, x),
        lambda api: api.checkpoint_sequential([sin_exp] * 2, 2, x),
    ):
        with pytest.warns(UserWarning, match="use_reentrant parameter should be"):
            run(torchs)
        with warnings.catch_warnings(), count_ops() as ops:
            warnings.simplefilter("error")
            run(compat).sum().backward()
        assert ops["exp"] > ops["cos"]


@pytest.mark.parametrize("use_reentrant", [True, False, None])
def test_both_variants_are_one(use_reentrant):
    """Keywords, nested tensors and closures have gradients with each."""
    w, x = leaf(3), leaf(3)
    body, calls = counted(lambda xs, *, scale: (xs[0] * w).sin() * scale)
    out = compat.checkpoint(body, [x], scale=w, use_reentrant=use_reentrant)
    got = torch.autograd.grad(out.sum(), (w, x))
    assert len(calls) == 2
    assert_same(got, torch.autograd.grad(body([x], scale=w).sum(), (w, x)))


# --- 18: groups of backwards ---


@both
@pytest.mark.parametrize("grouped", [True, False])
def test_two_halves_of_a_call_recompute_once_in_a_group(checkpoint, grouped):
    """18: the two backwards read different values of one call."""
    body, calls = counted(lambda a, b: (a.exp().sin(), b.exp().sin()))
    a, b = leaf(3), leaf(3)
    one, other = checkpoint(body, a, b)
    with compat.GraphExecGroup() if grouped else nullcontext():
        one.sum().backward()
        other.sum().backward()
    assert len(calls) == (2 if grouped else 3)
    want = points(3).exp() * points(3).exp().cos()
    assert_same((a.grad, b.grad), (want, want), reassociated=True)


def test_a_value_may_be_read_twice_in_a_group():
    """18: torch raises where backwards of a group overlap."""
    body, calls = counted(sin_exp)
    x = leaf(3)
    out = ours(body, x).sum()
    with compat.GraphExecGroup():
        out.backward(retain_graph=True)
        out.backward()
    assert len(calls) == 3
    assert_same(x.grad, 2 * SLOPE)


def test_what_nobody_read_in_a_group_is_freed_with_it():
    """18: and is computed again by a later backward."""
    body, calls = counted(lambda a, b: (a.exp().sin(), b.exp().sin()))
    a, b = leaf(3), leaf(3)
    one, other = ours(body, a, b)
    handle = other.grad_fn._raw_saved_self.data
    with compat.GraphExecGroup():
        one.sum().backward()
        assert handle.value is not None
    assert handle.value is None
    other.sum().backward()
    assert len(calls) == 3
    assert_same(b.grad, points(3).exp().cos() * points(3).exp(), reassociated=True)


# --- 19: functions that are not the same when they run again ---


def changing(first, then):
    """A function that is another one when it runs again."""
    runs = Evaluations()

    def changes(x):
        runs.note(None)
        return (first if len(runs) == 1 else then)(x.sin())

    return changes


def more(x):
    return x.exp().exp()


SAVES_OTHERS = "different number|save more tensors|something else"
DIFFERENT = {
    "fewer": (more, lambda x: x.exp()),
    "another shape": (lambda x: x.exp(), lambda x: x[:2].exp()),
    "another dtype": (lambda x: x.exp(), lambda x: x.double().exp().float()),
}


@both
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("case", DIFFERENT)
def test_a_recompute_that_differs_is_refused(checkpoint, case, early_stop):
    """19."""
    out = checkpoint(changing(*DIFFERENT[case]), leaf(3), early_stop=early_stop)
    with pytest.raises(torchs.CheckpointError, match=r"recomput|Recomputed"):
        out.sum().backward()


@both
def test_a_recompute_that_saves_more_is_refused_if_it_does_not_stop(checkpoint):
    """19: one that stops early never comes that far."""
    x = leaf(3)
    checkpoint(changing(torch.exp, more), x).sum().backward()
    assert_same(x.grad, SLOPE)
    with compat.set_checkpoint_early_stop(False):
        out = checkpoint(changing(torch.exp, more), leaf(3))
    with pytest.raises(torchs.CheckpointError, match=SAVES_OTHERS):
        out.sum().backward()


@both
def test_metadata_need_not_agree_if_nothing_is_checked(checkpoint):
    """19: the gradient is then whatever the recompute saved."""
    f = changing(lambda x: x.exp(), lambda x: x.double().exp())
    x = leaf(3)
    checkpoint(f, x, determinism_check="none").sum().backward()
    assert_same(x.grad, SLOPE, reassociated=True)
    out = checkpoint(changing(more, torch.exp), leaf(3), determinism_check="none")
    with pytest.raises(torchs.CheckpointError, match=SAVES_OTHERS):
        out.sum().backward()


@both
def test_the_two_checks_have_names(checkpoint):
    with pytest.raises(ValueError, match=r"determinism_check"):
        checkpoint(sin_exp, leaf(3), determinism_check="strict")


def text_of(checkpoint, **options):
    """What the error of a recompute that differs says."""
    out = checkpoint(changing(torch.exp, torch.sigmoid), leaf(3), **options)
    with pytest.raises(RecomputeError, match="saves something else") as info:
        out.sum().backward()
    return "\n".join([str(info.value), *info.value.__notes__])


def test_debug_shows_the_operations_of_both_runs():
    """19: around the first that differs, with the user's lines."""
    text = text_of(ours, debug=True)
    assert "  forward (2 operations):\n    0: aten.sin.default  # " in text
    assert "  > 1: aten.exp.default  # " in text
    assert "  > 1: aten.sigmoid.default  # " in text
    assert text.count("test_compat_options.py:") >= 4
    assert "around the first" not in text_of(ours)


@pytest.mark.parametrize("argument", [True, False])
@pytest.mark.parametrize("setting", [True, False, None])
def test_the_setting_for_debug_wins_over_the_argument(setting, argument):
    """19: False, too; a setting holds for the calls in it."""
    with ours_as_a_module.set_checkpoint_debug_enabled(setting):
        out = ours(changing(torch.exp, torch.sigmoid), leaf(3), debug=argument)
    with pytest.raises(RecomputeError, match="something else") as info:
        out.sum().backward()
    shown = "around the first" in "\n".join(info.value.__notes__)
    assert shown is (argument if setting is None else setting)


def test_errors_are_of_torchs_class_and_of_ours():
    assert issubclass(RecomputeError, (torchs.CheckpointError, RematError))
    assert compat.CheckpointError is torchs.CheckpointError


# --- 29: early stop ---


def trailing(x):
    return x.exp().sin().clone()


@both_modules
@pytest.mark.parametrize("setting", [True, False, None])
@pytest.mark.parametrize("argument", [True, False])
def test_operations_after_the_last_value_run_again_if_asked(api, setting, argument):
    """29: the setting wins over the argument, and is that of the forward."""
    context = (
        nullcontext() if setting is None else api.set_checkpoint_early_stop(setting)
    )
    x = leaf(3)
    with context:
        out = api.checkpoint(trailing, x, use_reentrant=False, early_stop=argument)
    with count_ops() as ops, api.set_checkpoint_early_stop(setting is False):
        out.sum().backward()
    stops = argument if setting is None else setting
    assert (ops["exp"], ops["sin"]) == (1, 0 if stops else 1)
    assert_same(x.grad, points(3).exp().cos() * points(3).exp())


def test_a_setting_ends_with_its_block():
    with (
        pytest.raises(ValueError, match="inside"),
        compat.set_checkpoint_early_stop(False),
    ):
        raise ValueError("inside")
    with count_ops() as ops:
        ours(trailing, leaf(3)).sum().backward()
    assert ops["sin"] == 1
    with compat.set_checkpoint_early_stop(False):
        out = torchs.checkpoint(trailing, leaf(3), use_reentrant=False)
    with count_ops() as ops:
        out.sum().backward()
    assert ops["sin"] == 1, "torch's own setting is another"


@both
def test_nested_calls_that_do_not_stop_early(checkpoint):
    """29: each recompute runs its function to the end."""
    body, calls = counted(lambda x: x.exp().sin())
    whole = functools.partial(checkpoint, early_stop=False)
    x = leaf(3)
    out = whole(lambda x: whole(body, x).cos().clone(), x)
    with count_ops() as ops:
        out.sum().backward()
    assert len(calls) == 3
    assert ops["clone"] >= 1
    assert ops["exp"] == 2
    y = leaf(3)
    y.exp().sin().cos().sum().backward()
    assert_same(x.grad, y.grad)


# --- The decorator ---


decorators = pytest.mark.parametrize(
    "api",
    [
        pytest.param(
            torchs,
            marks=pytest.mark.skipif(
                not hasattr(torchs, "_CheckpointedFunction"),
                reason="this torch has no decorator",
            ),
            id="torch",
        ),
        pytest.param(compat, id="remat"),
    ],
)


@decorators
def test_without_a_function_it_is_a_decorator(api):
    calls = Evaluations()

    @api.checkpoint(use_reentrant=False, early_stop=False)
    def block(x, *, debug=1.0):
        """A block."""
        calls.note(None)
        return trailing(x) * debug

    assert (block.__name__, block.__doc__) == ("block", "A block.")
    x = leaf(3)
    with count_ops() as ops:
        block(x, debug=3.0).sum().backward()
    assert (len(calls), ops["sin"]) == (2, 2)
    assert_same(x.grad, 3 * points(3).exp().cos() * points(3).exp(), reassociated=True)


@decorators
def test_the_decorator_takes_no_arguments_of_a_function(api):
    with pytest.raises(ValueError, match="scale"):
        api.checkpoint(use_reentrant=False, scale=2)


def test_what_cannot_be_recomputed_is_refused():
    def numbers(x):
        yield x

    for function in (numbers, torch.nn.Linear, 3):
        with pytest.raises(TypeError, match="remat: "):
            compat.checkpoint(function, leaf(3))


def test_torchs_reference_is_torchs():
    assert theirs.func is torchs.checkpoint is not ours.func


def test_a_report_takes_calls_for_blocks():
    def f(w, x):
        return (w @ x).tanh().exp().sin()

    def model(call):
        def run(w, x):
            for _ in range(3):
                x = call(w, x)
            return x

        return run

    w, x = leaf(4), leaf(4)
    w = (w[:, None] * x).detach().requires_grad_()
    dots = {"dots": {"*f": policies.dots_saveable}}
    found, wanted = (
        compare(model(call), w, x, policies=dots).rows
        for call in (lambda *args: compat.checkpoint(f, *args), remat.remat(f))
    )
    assert found == wanted
    assert [row.name for row in found][:2] == ["as written", "plain"]
    assert found[0].saved_bytes < found[1].saved_bytes
