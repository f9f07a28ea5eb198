"""One runner: a program with functions as they are, and with them rematerialized.

A program takes `wrap` and returns what it computed with the functions that it wrapped.
It makes what it changes itself: both runs begin in the same state of all streams.
"""

import functools
import io
import json
import random
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from support.tables import checked
from support.zoo import Evaluations, assert_not_vanishing, plainly
from torch import Tensor

from remat import policies, remat
from remat.testing import assert_same, count_ops


Program = Callable[[Callable[..., Any]], Any]

# Calls with a policy, and those that prune, take other ways than the others.
CONFIGURATIONS: dict[str, Callable[..., Any]] = {
    "default": remat,
    "prune": functools.partial(remat, prune=True),
    "dots": functools.partial(remat, policy=policies.dots_saveable),
}
configurations = pytest.mark.parametrize(
    "ours", CONFIGURATIONS.values(), ids=CONFIGURATIONS
)


def saved_and_loaded(value: Any) -> Any:
    """Return what comes of saving a value with torch and loading it."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def leaf(*shape: int) -> Tensor:
    """Normal numbers, 64 if no shape is given, that require grad."""
    return torch.randn(*(shape or (64,)), requires_grad=True)


def gradients(fn: Callable[..., Any], *xs: Tensor) -> Program:
    """A program: the gradients of the sum of what `fn` returns."""
    return lambda wrap: torch.autograd.grad(wrap(fn)(*xs).sum(), xs)


def seed_streams() -> None:
    """Seed the global streams; of each pair of normal numbers one is left to draw."""
    torch.manual_seed(7)
    random.seed(3)
    random.gauss(0, 1)
    np.random.seed(4)
    np.random.randn()


def states() -> tuple[str, str, Tensor]:
    """Where the global streams of Python, NumPy and torch are."""
    numpy = json.dumps(np.random.get_state(legacy=False), default=np.ndarray.tolist)
    return repr(random.getstate()), numpy, torch.get_rng_state()


def noting(wrap: Callable[..., Any], notes: Evaluations) -> Callable[..., Any]:
    """`wrap`, with each evaluation of a function that it wraps noted."""
    note = notes.note

    def wrap_and_note(fn):
        def evaluated(*args, **kwargs):
            note(None)
            return fn(*args, **kwargs)

        return wrap(evaluated)

    return wrap_and_note


def run(
    program: Program, wrap: Callable[..., Any], counts: Collection[str]
) -> tuple[Any, Counter[str]]:
    """What a program gives, with the streams after it; and how often things ran."""
    evaluations = Evaluations()
    if "evaluations" in counts:
        wrap = noting(wrap, evaluations)
    # In a mode torch compiles nothing: there is one if operations are counted.
    counts_operations = any(name != "evaluations" for name in counts)
    seed_streams()
    with count_ops() if counts_operations else nullcontext(Counter()) as ops:
        result = program(wrap)
    return (result, states()), ops + Counter(evaluations=len(evaluations))


def assert_replayed(
    program: Program,
    *,
    wrap: Callable[..., Any] = remat,
    reassociated: bool = False,
    **counts: int | tuple[int, int],
) -> None:
    """Plain and wrapped, a program gives the same and leaves the same streams.

    `counts` are of operations by name: wrapped, or a pair of plain and wrapped.
    One named `evaluations` is of the functions that are wrapped.
    """
    expected, plain = run(program, plainly, counts)
    actual, ours = run(program, wrap, counts)
    assert_same(actual, expected, reassociated=reassociated)
    assert_not_vanishing(expected[0])
    pairs = {k: n if isinstance(n, tuple) else (plain[k], n) for k, n in counts.items()}
    found = {k: (plain[k], ours[k]) for k in counts}
    assert found == pairs, f"plain and rematerialized ran {found}, not {pairs}"


def replayed(
    *, wrap: Callable[..., Any] = remat, each: bool = False, **how: Any
) -> Callable[..., Any]:
    """Make a test of a program by `assert_replayed`.

    If `each`, a test in each of the configurations.
    """

    def check(program, ours=wrap):
        assert_replayed(program, wrap=ours, **how)

    def test_of(program):
        test = checked(program, check, more=("ours",) if each else ())
        return configurations(test) if each else test

    return test_of
