"""Loops, of known and unknown length: what plain loops give, bit for bit."""

from dataclasses import dataclass

import pytest
import support.loops
import torch
from support.loops import (
    LENGTH,
    SLICES,
    Plain,
    assert_backward,
    assert_chained,
    of_backward,
    steps_run,
)
from support.tables import rows
from support.zoo import V, W, X, leaves_of, scalar
from torch.utils._pytree import tree_map

from remat import chain, random
from remat.chain.schedules import EveryStep, Online
from remat.testing import assert_same, count_ops


SCHEDULES = {
    "three": {"checkpoints": 3},
    "all": {"checkpoints": "all"},
    "pairs": {"checkpoints": 3, "unroll": 2},
    "unrolled": {"unroll": 2},
    "sqrt": {},
}


# --- What is scanned and collected --------------------------------------------------


def of_pytrees(loops, w, x, **options):
    xs = {"a": SLICES, "b": [SLICES[:, :2], None, (SLICES[:, 0] > 0,)]}

    def step(h, s):
        h = torch.tanh(h @ w) * s["a"] + s["b"][0].sum()
        h = torch.where(s["b"][2][0], h, -h)
        return h, {"h": h[0], "rest": (h.sum(), [None, s["b"][2][0]])}

    return loops.scan(step, x, xs, **options)


def of_nothing(loops, w, x, **options):
    return loops.scan(lambda h, s: (torch.tanh(h @ w), s), x, length=9, **options)


def of_a_length_and_slices(loops, w, x, **options):
    def step(h, s):
        return torch.tanh(h @ w) * s, None

    return loops.scan(step, x, SLICES, LENGTH, **options)


def of_numbers(loops, w, x, **options):
    """Numbers are carried as they are, and collected as tensors."""

    def step(carry, _):
        h, i, f, b = carry
        h = torch.tanh(h @ w) * (f + i if b else f)
        return (h, i + 1, f / 2, not b), (i, f, b, complex(i, f))

    return loops.scan(step, (x, 0, 4.0, True), length=6, **options)


@dataclass
class State:
    h: torch.Tensor
    name: str
    seen: dict


def of_dataclasses(loops, w, x, **options):
    def step(state, s):
        h = torch.tanh(state.h @ w) * s
        return State(h, state.name, {"last": state.h}), state.seen["last"].sum()

    last, sums = loops.scan(step, State(x, "state", {"last": x}), SLICES, **options)
    return last.h, last.name, last.seen, sums


def of_integer_carries(loops, w, x, **options):
    def step(carry, s):
        h, n = carry
        return (torch.tanh(h @ w), n + 1), (n, s, h.sum() > 0)

    n = torch.zeros(2, dtype=torch.long)
    return loops.scan(step, (x, n), torch.arange(LENGTH), **options)


def of_constant_parts(loops, w, x, **options):
    """What does not depend on w or x does not require grad."""

    def step(carry, _):
        h, c = carry
        return (torch.tanh(h @ w), c.cos()), (c, h)

    return loops.scan(step, (x, SLICES), length=5, **options)


def of_what_becomes_differentiable(loops, w, x, **options):
    """The carry requires grad from the first step on, the second part never."""

    def step(carry, s):
        h, c = carry
        return (torch.tanh(h + w * s), c), (h, c)

    return loops.scan(step, (SLICES[:4], SLICES[0]), SLICES, **options)


def of_detached_steps(loops, w, x, **options):
    """The carry does not require grad after step 3, and does again."""

    def step(carry, i):
        h = torch.tanh(carry @ w)
        return h.detach() if i == 3 else h, h.sum()

    return loops.scan(step, x, torch.arange(8), **options)


def of_unused_steps(loops, w, x, **options):
    """Only what is collected is used, and of it a part."""

    def step(h, s):
        h = torch.tanh(h @ w)
        return h, {"first": h[0] * s, "second": h[1].exp()}

    return loops.scan(step, x, SLICES, **options)[1]["second"]


def of_slices_alone(loops, w, x, **options):
    def step(h, s):
        return h, torch.tanh(s @ w)

    return loops.scan(step, x, torch.stack([x, x + 1, x.cos()]), **options)[1]


def of_one_tensor_twice(loops, w, x, **options):
    """Carried twice, scanned, and referred to."""

    def step(carry, s):
        a, b = carry
        return (torch.tanh(a * b + x), a), s * 2

    return loops.scan(step, (x, x), x, **options)


def of_views(loops, w, x, **options):
    """Parts of a carry share memory; what is collected is a view of one."""

    def step(carry, _):
        a, b = carry
        h = torch.tanh(torch.cat([a, b]) @ w)
        return (h[:2], h[2:]), h[1:3, ::2].T

    return loops.scan(step, (x[:2], x[2:]), length=7, **options)


def of_returned_inputs(loops, w, x, **options):
    """What is returned is the carry itself, the slice itself and the tensor w."""

    def step(carry, s):
        a, b, _ = carry
        return (b, torch.tanh(a), w), (s, a, w)

    return loops.scan(step, (x, x.cos(), w), x.sin(), **options)


def of_one_step(loops, w, x, **options):
    return loops.scan(lambda h, s: (torch.tanh(h @ w), h), x, x[None], **options)


def of_keys(loops, w, x, **options):
    """A key in the carry, and one that is folded with the number of the step."""
    key = random.key(3)

    def step(carry, i):
        h, mine = carry
        mine, sub = random.split(mine)
        noise = random.normal(sub, h.shape, dtype=h.dtype)
        h = random.dropout(random.fold_in(key, i), torch.tanh(h @ w), 0.3)
        return (h + noise, mine), noise.sum()

    numbers = torch.arange(LENGTH)
    (h, last), sums = loops.scan(step, (x, random.key(4)), numbers, **options)
    return h, random.key_data(last), sums


RUNS = {
    "pytrees": (of_pytrees, LENGTH),
    "nothing": (of_nothing, 9),
    "a length and slices": (of_a_length_and_slices, LENGTH),
    "numbers": (of_numbers, 6),
    "dataclasses": (of_dataclasses, LENGTH),
    "integer carries": (of_integer_carries, LENGTH),
    "constant parts": (of_constant_parts, 5),
    "what becomes differentiable": (of_what_becomes_differentiable, LENGTH),
    "detached steps": (of_detached_steps, 8),
    "unused steps": (of_unused_steps, LENGTH),
    "slices alone": (of_slices_alone, 3),
    "one tensor twice": (of_one_tensor_twice, 4),
    "views": (of_views, 7),
    "returned inputs": (of_returned_inputs, 4),
    "one step": (of_one_step, 1),
    "keys": (of_keys, LENGTH),
}

# x is used in several places besides: the loops add these up in another order.
SEVERAL_USES = of_dataclasses, of_one_tensor_twice


@pytest.mark.parametrize("reverse", [False, True])
@rows("options", SCHEDULES, fast=("three", "sqrt"))
@rows("run, steps", RUNS)
def test_a_scan_is_the_plain_loop(run, steps, options, reverse):
    if reverse and not options:
        return  # segments do not know the order of what is scanned
    is_alone = options in (SCHEDULES["three"], SCHEDULES["all"])
    assert_backward(
        *(run, W, X),
        steps=steps,
        reverse=reverse,
        reassociated=not is_alone or run in SEVERAL_USES,
        **options,
    )


@rows("run, steps", RUNS)
def test_outputs_require_grad_where_those_of_the_plain_loop_do(run, steps):
    def flags(loops):
        out = run(loops, *leaves_of(W, X))
        scalar(out).backward()
        return tree_map(
            lambda t: t.requires_grad if isinstance(t, torch.Tensor) else t, out
        )

    expected = flags(Plain)
    with count_ops() as ops:
        assert flags(chain) == expected
    assert ops["tanh"] == 2 * steps


# --- Lengths ------------------------------------------------------------------------


def test_a_scan_of_no_steps_returns_the_carry_and_empty_tensors():
    def step(h, s):
        return torch.tanh(h), {"sum": s.sum(0), "i": 3, "none": None}

    (x,) = leaves_of(X)
    last, ys = chain.scan(step, x, torch.empty(0, 2, 5))
    assert last is x
    assert ys["none"] is None
    assert (ys["sum"].shape, ys["sum"].dtype) == ((0, 5), torch.float32)
    assert (ys["i"].shape, ys["i"].dtype) == ((0,), torch.int64)


def test_a_scan_of_no_steps_and_nothing_scanned_collects_nothing():
    assert chain.scan(lambda h, s: (h, None), 3, length=0) == (3, None)


# --- Which gradients are wanted -----------------------------------------------------


def test_an_input_that_nothing_depends_on_has_no_gradient():
    def program(loops):
        w, x, unused, late = leaves_of(W, X, V, V)

        def step(carry, s):
            h, other = carry
            return (torch.tanh(h @ w), other * unused), None

        (h, _), _ = loops.scan(step, (x, late), length=6, checkpoints=3)
        inputs = w, x, unused, late
        return torch.autograd.grad(h.sum(), inputs, allow_unused=True)

    assert program(chain)[2:] == program(Plain)[2:] == (None, None)
    assert_chained(lambda loops: program(loops)[:2], steps=6, runs=6 + 9)


@pytest.mark.parametrize("others", [True, False], ids=["all require", "one requires"])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_the_gradient_of_one_input_alone(wanted, others):
    def program(loops):
        leaves = [t.clone() for t in (W, X, SLICES)]
        for k, leaf in enumerate(leaves):
            leaf.requires_grad_(others or k == wanted)
        out = by_scan_of(loops, *leaves, checkpoints=3)
        return torch.autograd.grad(scalar(out), leaves[wanted])

    runs = steps_run(LENGTH, checkpoints=3)
    assert_chained(program, steps=LENGTH, runs=runs)


def by_scan_of(loops, w, x, xs, **options):
    def step(h, s):
        h = torch.tanh(h @ w) * s
        return h, h.sum(0)

    return loops.scan(step, x, xs, **options)


def test_slices_whose_gradients_are_missing_have_zeros():
    """The cotangents reach three of the slices."""

    def program(loops):
        (xs,) = leaves_of(SLICES)
        ys = loops.scan(lambda h, s: (h, torch.tanh(s)), X, xs, checkpoints=3)[1]
        return torch.autograd.grad(scalar(ys[[2, 5, 6]]), xs)

    assert_chained(program, steps=LENGTH, runs=steps_run(LENGTH, checkpoints=3))


def test_slices_that_some_steps_leave_have_zeros_in_a_second_derivative():
    """The steps of the first and of the last segments do not use theirs."""

    def program(loops):
        (xs,) = leaves_of(SLICES)

        def step(h, s):
            h = torch.tanh(h)
            return (h * s["x"] if 3 < s["i"] < 6 else h), None

        scanned = {"x": xs, "i": torch.arange(LENGTH)}
        (g,) = torch.autograd.grad(
            scalar(loops.scan(step, X, scanned)[0]), xs, create_graph=True
        )
        return g.detach(), torch.autograd.grad(scalar(g), xs)

    with count_ops() as ops:
        found = program(chain)
    assert_same(found, program(Plain), reassociated=True)
    assert ops["tanh"] > 2 * LENGTH


def test_results_may_be_changed_in_place_after_the_call():
    def program(loops):
        def run(w, x):
            h, ys = by_scan_of(loops, w, x * 1, SLICES, checkpoints=3)
            h.mul_(2)
            ys[0].zero_()
            return h, ys

        return of_backward(run, W, X)

    assert_chained(program, steps=LENGTH, runs=steps_run(LENGTH, checkpoints=3))


# --- fori_loop and while_loop ---


OPTIONS = {"three": {"checkpoints": 3}, "all": {"checkpoints": "all"}, "sqrt": {}}


# --- fori_loop ----------------------------------------------------------------------


def powers(loops, w, x, *, lower=-2, upper=7, **options):
    def body(i, carry):
        h, total = carry
        return torch.tanh(h @ w) * (i + 0.5), total + i

    h, total = loops.fori_loop(lower, upper, body, (x, 0), **options)
    return h * total


@rows("options", OPTIONS)
def test_fori_loop_is_the_plain_loop(options):
    assert_backward(powers, W, X, steps=9, reassociated=not options, **options)


@pytest.mark.parametrize(("lower", "upper"), [(3, 3), (5, 2)])
def test_a_loop_without_steps_returns_its_carry(lower, upper):
    def never(i, h):
        raise AssertionError

    (x,) = leaves_of(X)
    assert chain.fori_loop(lower, upper, never, x) is x


def test_bounds_are_whatever_python_takes_for_integers():
    def run(loops, w, x, **options):
        first, last = torch.tensor(1), torch.tensor(5)
        return powers(loops, w, x, lower=first, upper=last, **options)

    assert_backward(run, W, X, steps=4, checkpoints=2)


# --- while_loop ---------------------------------------------------------------------

CONDITIONS = {
    "tensor": lambda h: h.norm() > 0.02,
    "bool": lambda h: bool(h.norm() > 0.02),
    "tensor of one element": lambda h: (h.norm() > 0.02)[None, None],
    "number": lambda h: int(h.norm() * 50),
}


@rows("cond", CONDITIONS)
@rows("transform", {"base": of_backward, "func": None})
def test_values_say_how_many_steps_there_are(transform, cond):
    def program(loops):
        def run(w, x):
            def body(h):
                return torch.tanh(h * w.cos()) * 0.8

            return loops.while_loop(cond, body, x, checkpoints=3)

        if transform is not None:
            return transform(run, W, X * 9)
        out, pull = torch.func.vjp(run, W, X * 9)
        return out, pull(out.cos())

    with count_ops() as ops:
        program(Plain)
    length = ops["tanh"]
    assert 3 < length < 100
    assert_chained(program, steps=length, runs=sum(Online(3).evaluations(length)))


def test_a_condition_is_asked_once_for_each_carry_and_not_again():
    """It is called with the last carry, too."""

    def program(loops):
        def run(w, x):
            return loops.while_loop(
                lambda c: torch.tanh(c[1]) < 0.999,
                lambda c: (c[0] @ w, c[1] + 0.4),
                (x, torch.tensor(0.0)),
                checkpoints=2,
            )[0]

        return of_backward(run, W, X)

    assert_chained(program, steps=11, runs=11)
    with count_ops() as plain:
        program(Plain)
    with count_ops() as ops:
        program(chain)
    again = Online(2).evaluations(10).backward
    assert ops["mm"] - plain["mm"] == again


def test_a_condition_reads_what_it_refers_to_when_it_is_called():
    limit = torch.tensor(4)

    def run(loops, w, x, checkpoints):
        h, n = loops.while_loop(
            lambda c: c[1] < limit,
            lambda c: (torch.tanh(c[0] @ w), c[1] + 1),
            (x, torch.tensor(0)),
            checkpoints=checkpoints,
        )
        limit.fill_(0)
        return h, n

    def program(loops):
        limit.fill_(4)
        return of_backward(lambda w, x: run(loops, w, x, 2), W, X)

    assert_chained(program, steps=4, runs=sum(Online(2).evaluations(4)))


def test_a_loop_whose_condition_is_false_at_once():
    def never(h):
        raise AssertionError

    def program(loops):
        def run(x):
            return loops.while_loop(lambda h: False, never, x.tanh(), checkpoints=2) * 2

        return of_backward(run, X)

    assert_chained(program, steps=1, runs=1)


def test_all_carries_of_a_loop_are_stored():
    def run(loops, w, x, **options):
        return loops.while_loop(
            lambda c: c[1] < 9,
            lambda c: (torch.tanh(c[0] @ w), c[1] + 1),
            (x, 0),
            **options,
        )[0]

    assert_backward(run, W, X, steps=9, checkpoints="all")
    assert_backward(run, W, X, steps=9, checkpoints=EveryStep(3), reassociated=True)


# --- The comparison itself ----------------------------------------------------------


def ten_steps(loops):
    return of_backward(lambda w, x: powers(loops, w, x, upper=8, checkpoints=3), W, X)


def test_the_comparison_fails_for_loops_that_run_no_step_again(monkeypatch):
    runs = steps_run(10, checkpoints=3)
    assert_chained(ten_steps, steps=10, runs=runs)
    monkeypatch.setattr(support.loops, "chain", Plain)
    with pytest.raises(AssertionError, match=f"10 steps run, not {runs}"):
        assert_chained(ten_steps, steps=10, runs=runs)
    with pytest.raises(AssertionError, match="plain runs 10 steps, not 9"):
        assert_chained(ten_steps, steps=9, runs=runs)


def test_a_loop_that_grows_without_bound_is_stopped_by_an_error_of_the_body():
    class TooLongError(Exception):
        pass

    def body(c):
        if c[1] == 20:
            raise TooLongError("twenty")
        return c[0].tanh(), c[1] + 1

    (x,) = leaves_of(V)
    with count_ops() as ops, pytest.raises(TooLongError, match="twenty"):
        chain.while_loop(lambda c: True, body, (x, 0), checkpoints=2)
    assert ops["tanh"] == 20


def test_the_comparison_fails_for_other_gradients():
    def program(loops):
        h, (w, x) = ten_steps(loops)
        return h, (w, x * (1 + (loops is chain) * 1e-6))

    with pytest.raises(AssertionError, match="differs in value"):
        assert_chained(program, steps=10, runs=steps_run(10, checkpoints=3))
