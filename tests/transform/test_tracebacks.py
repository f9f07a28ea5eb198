"""Errors show the user's frames, and not remat's own."""

import dataclasses
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from support.zoo import Evaluations, make
from torch.func import grad

import remat as package
from remat import CaptureError, MutationError, remat


HERE = str(Path(package.__file__).parent)


def files(error):
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def assert_shows_the_user_alone(error, times):
    found = files(error)
    assert not [name for name in found if name.startswith(HERE)]
    assert found.count(__file__) == times


def test_the_check_fails_where_remats_frames_are():
    with pytest.raises(TypeError, match="is not callable") as found:
        remat(3)
    with pytest.raises(AssertionError, match="assert"):
        assert_shows_the_user_alone(found.value, 1)


def test_a_mutation_shows_the_backward_and_the_line_that_reads():
    fn = lambda x, w: (x @ w).sin().exp()
    x, w = make(3, 3, seed=1), make(3, 3, seed=2).requires_grad_()
    y = remat(fn)(x, w)
    x.add_(1)
    with pytest.raises(MutationError, match="`x` was changed in place") as found:
        y.sum().backward()
    assert_shows_the_user_alone(found.value, 2)
    assert "raised while recomputing `" in found.value.__notes__[0]


def fails_again(calls):
    def fn(x):
        calls.note(None)
        if len(calls) > 1:
            raise ValueError("on the second evaluation")
        return x.sin().exp().sum()

    return fn


@pytest.mark.parametrize("options", [{}, {"prune": True}, {"higher_order": True}])
def test_an_error_of_the_users_in_a_recompute(options):
    calls = Evaluations()
    out = remat(fails_again(calls), **options)(make(3, seed=1).requires_grad_())
    with pytest.raises(ValueError, match="on the second evaluation") as found:
        out.backward()
    assert len(calls) == 2
    assert_shows_the_user_alone(found.value, 2)


def test_an_error_of_the_users_under_func_and_in_nested_calls():
    calls = Evaluations()
    inner = remat(fails_again(calls))
    with pytest.raises(ValueError, match="on the second evaluation") as found:
        grad(remat(lambda x: inner(x * 2)))(make(3, seed=1))
    assert len(calls) == 2
    assert_shows_the_user_alone(found.value, 3)


def test_what_remat_refuses_ends_at_the_users_call():
    def fn(x):
        y = x.sin()
        return lambda: y.exp()

    with pytest.raises(CaptureError, match="leads to a tensor that the") as found:
        grad(lambda x: remat(fn)(x)().sum())(make(3, seed=1))
    assert not [name for name in files(found.value) if name.startswith(HERE)]


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):  # noqa: N818
    code: int


def test_an_error_that_refuses_attributes_comes_out_as_it_is():
    calls = Evaluations()

    def fn(x):
        calls.note(None)
        if len(calls) > 1:
            raise Frozen(3)
        return x.sin().exp()

    out = remat(fn)(make(3, seed=1).requires_grad_())
    with pytest.raises(Frozen, match="3") as found:
        out.sum().backward()
    assert len(calls) == 2
    assert_shows_the_user_alone(found.value, 2)


def test_where_nothing_is_differentiated_frames_are_hidden_too():
    calls = Evaluations()
    calls.note(None)
    fn = remat(fails_again(calls))
    with torch.no_grad(), pytest.raises(ValueError, match="second") as found:
        fn(make(3, seed=1))
    assert_shows_the_user_alone(found.value, 2)


SCRIPT = """
import torch, traceback
from remat import remat

x = torch.ones(3, requires_grad=True)
y = remat(lambda x, n: (x * n).sin())(x, n := torch.ones(3))
n.add_(1)
try:
    y.sum().backward()
except RuntimeError as error:
    names = [f.filename for f in traceback.extract_tb(error.__traceback__)]
    print(sum("saved.py" in name for name in names))
"""


@pytest.mark.slow
def test_a_variable_of_the_environment_shows_all():
    env = {**os.environ, "REMAT_FULL_TRACEBACK": "1"}
    run = [sys.executable, "-c", SCRIPT]
    root = Path(HERE).parent
    result = subprocess.run(
        run, env=env, capture_output=True, text=True, cwd=root, check=True
    )
    assert int(result.stdout) > 0


def test_the_error_is_the_one_that_was_raised():
    error = ValueError("mine")

    def fn(x):
        raise error

    with pytest.raises(ValueError, match="mine") as found:
        remat(fn)(torch.ones(2, requires_grad=True))
    assert found.value is error
