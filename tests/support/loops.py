"""What the tests of executed chains share: plain loops, programs, and one comparison.

A *program* is given loops, those of `remat.chain` or the plain ones, and returns what
was computed with them. Each of its steps calls tanh once, which no derivative of tanh
does. So the kernels of tanh count how many steps ran, under every transform.
"""

import functools
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import torch
from support.transforms import Transform
from support.zoo import V, assert_not_vanishing, leaves_of, make, scalar
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from remat import chain, policies, remat
from remat.chain._call import schedule_for
from remat.chain._schedules import Uniform
from remat.testing import assert_same, count_ops


class Plain:
    """The loops of `remat.chain`, as anyone would write them."""

    @staticmethod
    def scan(f, init, xs=None, length=None, *, reverse=False, **_):
        leaves = [t for t in tree_leaves(xs) if isinstance(t, Tensor)]
        count = len(leaves[0]) if leaves else length
        carry, ys = init, []
        for i in reversed(range(count)) if reverse else range(count):
            carry, y = f(carry, tree_map(functools.partial(_slice, i), xs))
            ys.append(y)
        return carry, tree_map(_stack, *(ys[::-1] if reverse else ys))

    @staticmethod
    def fori_loop(lower, upper, body, init, **_):
        for i in range(lower, upper):
            init = body(i, init)
        return init

    @staticmethod
    def while_loop(cond, body, init, **_):
        while cond(init):
            init = body(init)
        return init

    @staticmethod
    def sequential(fns, x, *args, **_):
        for fn in fns:
            x = fn(x, *args)
        return x


def _slice(i, t):
    return None if t is None else t[i]


def _stack(*rows):
    return None if rows[0] is None else torch.stack([*map(torch.as_tensor, rows)])


# --- How many steps run -----------------------------------------------------------


def schedule_of(*, checkpoints=None, unroll=1, segments=None, **_):
    """The schedule that these options ask for."""
    if segments is not None:
        return Uniform(segments)
    return schedule_for(checkpoints, unroll)


def steps_run(length, **options):
    """How many steps a forward and a backward run."""
    return sum(schedule_of(**options).evaluations(length))


def assert_chained(
    program: Callable[[Any], Any], *, steps: int, runs: int, reassociated: bool = False
) -> None:
    """A program of loops computes the same with plain ones, which run so many `steps`.

    In chains `runs` of them run, those that run again included.
    """
    with count_ops() as ops:
        expected = program(Plain)
    assert ops["tanh"] == steps, f"plain runs {ops['tanh']} steps, not {steps}"
    with count_ops() as ops:
        actual = program(chain)
    assert_same(actual, expected, reassociated=reassociated)
    assert_not_vanishing(expected)
    assert ops["tanh"] == runs, f"{ops['tanh']} steps run, not {runs}"


def of_backward(run: Callable[..., Any], *tensors: Tensor) -> Any:
    """The result of `run` and the gradients of its tensors."""
    leaves = leaves_of(*tensors)
    out = run(*leaves)
    grads = torch.autograd.grad(scalar(out), leaves, allow_unused=True)
    return tree_map(lambda t: t.detach() if isinstance(t, Tensor) else t, out), grads


def assert_backward(
    run: Callable[..., Any],
    *tensors: Tensor,
    steps: int,
    reassociated: bool = False,
    **options: Any,
) -> None:
    """`run(loops, *tensors, **options)` has the gradients of plain loops.

    It calls one chain of so many steps, whose schedule the options say.
    """

    def program(loops):
        return of_backward(lambda *ts: run(loops, *ts, **options), *tensors)

    runs = steps_run(steps, **options)
    assert_chained(program, steps=steps, runs=runs, reassociated=reassociated)


# --- Errors of steps ----------------------------------------------------------------


class StopError(Exception):
    """What a step raises."""


def stopping(after: int) -> Callable[[Tensor], Tensor]:
    """A step that raises when it has run so many times, recomputes included."""
    left = SimpleQueue()  # which a recompute finds as it is by then
    for _ in range(after):
        left.put(None)

    def step(h):
        if left.empty():
            raise StopError("stopped")
        left.get()
        return h.tanh()

    return step


# --- Programs of two 4x4 matrices, of ten steps -----------------------------------

LENGTH = 10
SLICES = make(LENGTH, 4, seed=7)


def by_scan(loops, w, x, **options):
    def step(h, s):
        h = torch.tanh(h @ w) + s
        return h, {"sum": h.sum(0), "none": None}

    h, ys = loops.scan(step, x, SLICES, **options)
    return h, ys["sum"]


def by_scan_of_inputs(loops, w, x, **options):
    """What is scanned is differentiated; what is collected depends on nothing else."""

    def step(h, s):
        return torch.tanh(h * s["a"]) + s["b"], h.sum()

    xs = {"a": torch.cat([w, w, w[:2]]), "b": SLICES}
    return loops.scan(step, x, xs, reverse=True, **options)


def by_fori_loop(loops, w, x, **options):
    def body(i, h):
        return {"h": torch.tanh(h["h"] @ w) * i, "n": h["n"] + 1}

    return loops.fori_loop(2, 2 + LENGTH, body, {"h": x, "n": 0}, **options)["h"]


def by_while_loop(loops, w, x, *, checkpoints=3, **options):
    def body(carry):
        h, left = carry
        return torch.tanh(h @ w), left - 1

    return loops.while_loop(
        lambda carry: carry[1] > 0,
        body,
        (x, LENGTH),
        checkpoints=checkpoints or "all",
        **options,
    )[0]


def by_sequential(loops, w, x, **options):
    """The values between the functions change their shapes."""

    def wide(h, w):
        return torch.tanh(h @ torch.cat([w, w], 1))

    def narrow(h, w):
        return torch.tanh(h @ torch.cat([w, w]))

    return loops.sequential([wide, narrow] * (LENGTH // 2), x, w, **options)


def by_rematerialized_body(loops, w, x, **options):
    @remat(policy=policies.dots_saveable)
    def inner(h):
        return h @ w

    return loops.fori_loop(
        0, LENGTH, lambda i, h: torch.tanh(inner(h)).sin(), x, **options
    )


PROGRAMS = {
    "scan": by_scan,
    "scan of inputs": by_scan_of_inputs,
    "fori_loop": by_fori_loop,
    "while_loop": by_while_loop,
    "sequential": by_sequential,
    "rematerialized body": by_rematerialized_body,
}


def derivatives(transform: Transform, program: Any, loops: Any, **options: Any) -> Any:
    """What a transform makes of a program; with a backward if it stores nothing."""

    def loss(w, x):
        return scalar(program(loops, w, x, **options))

    result = transform(loss, V, V.mT.contiguous() + 1)
    if transform.stores_nothing:
        return result, of_backward(loss, V, V + 1)
    return result
