"""The golden table: how often each operation runs, forward and backward, as in JAX.

The numbers are those of JAX 0.10.2 for the same programs, of DESIGN.md (section 4) and
the survey of JAX (section G), and those of 0.12. Each row holds on the first call of a
signature, which records, and on those after it, which follow the record; and under
every transform.
"""

from functools import partial, reduce

import pytest
import torch
from support.golden import (
    BY_REMAT3,
    CALLS_WITHIN,
    REASSOCIATED,
    ROWS,
    ROWS_OF_0_12,
    as_it_is,
    backward_of,
    block,
    compared,
    dots,
    executed,
    least,
    linear,
    only,
    ours,
    product,
    pruned,
    sin2,
    sin3,
    sin_plus,
    table,
    within,
)
from support.tables import crossed, rows
from support.zoo import W, X, leaves_of
from torch.func import grad, jacrev, vjp, vmap

from remat import remat, saved_residuals
from remat.testing import assert_same, count_ops


# --- By .backward(): forward and backward apart ---


def backward(fn):
    w, x = leaves_of(W, X)
    with count_ops() as forward:
        out = fn(w, x)
    cotangent = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view_as(out)
    with count_ops() as back:
        out.backward(cotangent)
    return (out.detach(), w.grad, x.grad), forward, back


@pytest.mark.parametrize("row", ROWS)
def test_forward_and_backward_run_what_they_do_in_jax(row):
    plain, fn, in_forward, _ = ROWS[row]
    expected, _, _ = backward(plain)
    for call in range(3):
        actual, forward, back = backward(fn)
        assert compared(forward, row) == table(in_forward), call
        assert compared(back, row) == backward_of(row), call
        assert_same(actual, expected, reassociated=row in REASSOCIATED)


# A name of JAX's is an operation, so the tanh before it is computed again. Here what is
# named is the result of the tanh.
BETTER = dict.fromkeys(("named a", "named ha", "named anybut h"), "tanh 1, dot 5")


@pytest.mark.parametrize("row", ROWS_OF_0_12)
def test_what_else_runs_in_jax_0_12(row):
    plain, fn, in_forward, in_backward = ROWS_OF_0_12[row]
    expected, _, _ = backward(plain)
    for call in range(2):
        actual, forward, back = backward(fn)
        assert compared(forward, row) == table(in_forward), call
        assert compared(back, row) == table(BETTER.get(row, in_backward)), call
        assert_same(actual, expected, reassociated=True)


@pytest.mark.parametrize("row", BY_REMAT3)
def test_the_newer_implementation_of_jax_differs(row):
    """Its calls within others ask no policy. Here nothing runs more."""
    assert backward_of(row) <= table(BY_REMAT3[row])


IN_TURN = [case for case in CALLS_WITHIN if case != "side by side"]


@pytest.mark.parametrize("around", [pruned, remat], ids=["pruned", "remat"])
@pytest.mark.parametrize("case", IN_TURN)
def test_a_call_around_hands_on_what_it_computes_for_one_within(case, around):
    expected, _, plainly = backward(within(case, as_it_is, as_it_is))
    fn = within(case, around, dots)
    for call in range(3):
        actual, _, back = backward(fn)
        again = executed(back) - executed(plainly)
        assert only(again, "tanh", "dot") == least(case), call
        assert_same(actual, expected, reassociated=True)


# Of blocks side by side, only the one whose backward comes first is handed what the
# call around computes: the others would hold that beside their products. The newer
# implementation of JAX's runs 4 tanh, the older one 6.
@pytest.mark.parametrize(
    ("around", "tanh"), [(pruned, 5), (remat, 6)], ids=["pruned", "remat"]
)
def test_calls_side_by_side_run_no_more_than_in_jax(around, tanh):
    case = "side by side"
    expected, _, plainly = backward(within(case, as_it_is, as_it_is))
    fn = within(case, around, dots)
    for call in range(3):
        actual, _, back = backward(fn)
        again = executed(back) - executed(plainly)
        assert only(again, "tanh", "dot") == table(f"tanh {tanh}, dot 4"), call
        assert_same(actual, expected, reassociated=True)


@pytest.mark.parametrize("around", [pruned, remat], ids=["pruned", "remat"])
def test_a_block_in_two_calls_that_save_its_products_runs_as_in_one(around):
    _, _, plainly = backward(block)
    fn = around(dots(dots(block)))
    for call in range(3):
        again = executed(backward(fn)[2]) - executed(plainly)
        assert only(again, "tanh", "dot") == least("alone"), call


# --- Under torch.func: both together ---


def loss(fn):
    return lambda w, x: (fn(w, x) * X).sum()


def batches():
    return torch.stack([W, -W, 2 * W]), torch.stack([X, 2 * X, -X])


TRANSFORMS = {
    "grad": lambda fn: grad(loss(fn), (0, 1))(W, X),
    "vjp": lambda fn: vjp(fn, W, X)[1](X),
    "vmap_grad": lambda fn: vmap(grad(loss(fn), (0, 1)))(*batches()),
    "grad_vmap": lambda fn: grad(lambda w, x: vmap(loss(fn))(w, x).sum(), (0, 1))(
        *batches()
    ),
}


def run(transform, fn):
    with count_ops() as ops:
        result = transform(fn)
    return result, executed(ops)


# What a transform runs beside the function: the product in `loss`, and its derivative.
def run_around(transform):
    _, with_it = run(transform, sin2)
    _, forward, back = backward(sin2)
    return with_it - executed(forward) - executed(back)


@crossed("row, how", ROWS, TRANSFORMS, each=2)
def test_transforms_run_forward_and_backward_what_they_do_in_jax(row, how):
    plain, fn, *_ = ROWS[row]
    transform = TRANSFORMS[how]
    expected, _ = run(transform, plain)
    for call in range(3):
        actual, ops = run(transform, fn)
        assert compared(ops - run_around(transform), row) == ours(row), call
        assert_same(actual, expected, reassociated=row in REASSOCIATED)


@crossed("case, how", CALLS_WITHIN, TRANSFORMS, each=2)
def test_under_transforms_a_call_within_that_nothing_reads_keeps_nothing(case, how):
    """Its own backward, which follows, recomputes it; others keep their products."""
    transform, fn = TRANSFORMS[how], within(case, pruned, dots)
    expected, plainly = run(transform, within(case, as_it_is, as_it_is))
    for call in range(3):
        actual, ops = run(transform, fn)
        assert only(ops - plainly, "tanh", "dot") == least(case), call
        assert_same(actual, expected, reassociated=True)


def test_under_transforms_a_call_around_without_a_record_runs_all_of_one_within():
    """It does not know that nothing else reads the results, so both run each tanh."""
    fn, transform = remat(dots(block)), TRANSFORMS["grad"]
    _, plainly = run(transform, block)
    for call in range(2):
        _, ops = run(transform, fn)
        assert only(ops - plainly, "tanh", "dot") == table("tanh 4, dot 2"), call


@rows("row", {k: k for k in ROWS}, fast=["sin2", "dots", "remat(two)", "W@x"])
def test_what_one_transform_recorded_does_not_spoil_another(row):
    """Nor what another row did: in any order, as in a program."""
    for name in (row, "remat(remat)", "remat(dots)", row):
        for transform in TRANSFORMS.values():
            _, ops = run(transform, ROWS[name][1])
            assert compared(ops - run_around(transform), name) == ours(name)


# --- What is kept ---


@pytest.mark.parametrize(
    ("fn", "kept"),
    [
        (linear, ["from a constant"]),  # the number 2, which torch gives to no hook
        (sin_plus, ["from the argument x"]),
        (product, ["from the argument w", "from the argument x"]),
    ],
    ids=["2x+1", "sin(x)+y", "W@x"],
)
def test_inputs_that_the_backward_does_not_read_are_not_kept(fn, kept):
    """From the call on that follows a recompute which did without them."""
    rematerialized = pruned(fn)
    w, x = leaves_of(W, X)
    for _ in range(2):
        rematerialized(w, x).sum().backward()
    assert [r.origin for r in saved_residuals(rematerialized, W, X)] == kept


@pytest.mark.parametrize("fn", [linear, sin_plus], ids=["2x+1", "sin(x)+y"])
def test_a_call_that_kept_less_gives_the_same(fn):
    for how in (backward, *TRANSFORMS.values()):
        for _ in range(3):
            assert_same(how(pruned(fn))[0], how(fn)[0])


# --- Recursive checkpointing ---


def recursive(functions):
    """JAX's example: the second half is a call, each half is divided likewise."""
    if len(functions) == 1:
        return functions[0]
    middle = len(functions) // 2
    left, right = functions[:middle], functions[middle:]
    if len(functions) == 2:
        return lambda x: left[0](right[0](x))
    one, other = recursive(left), pruned(recursive(right))
    return lambda x: one(other(x))


def chain(functions):
    return lambda x: reduce(lambda y, f: f(y), functions, x)


def evaluations(fn, name):
    """How often an operation runs in the forward, and in the backward."""
    (x,) = leaves_of(X)
    with count_ops() as forward:
        out = fn(x).sum()
    with count_ops() as back:
        out.backward()
    return forward[name], back[name], x.grad


# A function whose derivative reads its result has to be evaluated itself: JAX's counts.
# Of one whose derivative reads its argument, the last of each recompute is not.
@pytest.mark.parametrize(
    ("length", "tanh", "sin"), [(4, 2, 1), (8, 8, 5), (16, 24, 17)]
)
def test_recursive_checkpointing_evaluates_again(length, tanh, sin):
    for fn, extra in ((torch.tanh, tanh), (torch.sin, sin)):
        _, _, expected = evaluations(chain([fn] * length), fn.__name__)
        rematerialized = recursive([fn] * length)
        for _ in range(3):
            *counts, actual = evaluations(rematerialized, fn.__name__)
            assert counts == [length, extra]
            assert_same(actual, expected)


def test_a_call_in_a_call_evaluates_twice_forward_and_three_times_backward():
    """JAX's `add_one`, whose derivative reads its result."""
    g = pruned(lambda x: pruned(torch.tanh)(x).tanh())
    for _ in range(3):
        assert evaluations(g, "tanh")[:2] == (2, 3)


def test_residuals_of_a_chain_and_of_recursive_checkpointing():
    sines = [torch.sin] * 8
    assert len(saved_residuals(chain(sines), X)) == 8
    for _ in range(3):
        assert len(saved_residuals(recursive(sines), X)) == 4
        assert len(saved_residuals(recursive(sines * 2), X)) == 5


# --- The same backward several times ---


def test_each_pull_back_recomputes():
    for _ in range(3):
        _, pull = vjp(partial(pruned(sin3), W), X)
        pulled = []
        for cotangent in (X, W):
            with count_ops() as ops:
                pulled.append(pull(cotangent)[0])
            assert (ops["sin"], ops["cos"]) == (2, 3)
        _, plain = vjp(partial(sin3, W), X)
        assert_same(pulled, [plain(X)[0], plain(W)[0]])


@pytest.mark.parametrize("size", [1, 3, 7])
def test_a_jacobian_recomputes_once_whatever_its_size(size):
    """And on values that are not batched: so many elements go through the sines."""
    x = X.flatten()[:size]
    sizes = []

    def fn(x):
        y = x.sin()
        sizes.append(y.shape)
        return y.sin()

    for _ in range(3):
        with count_ops() as ops:
            actual = jacrev(pruned(fn))(x)
        assert (ops["sin"], ops["cos"]) == (3, 2)
        assert_same(actual, jacrev(fn)(x))
    assert {*sizes} == {x.shape}


def test_a_retained_graph_recomputes_each_time():
    fn = pruned(sin3)
    for _ in range(3):
        (x,) = leaves_of(X)
        out = fn(W, x).sum()
        with count_ops() as ops:
            out.backward(retain_graph=True)
            out.backward()
        assert (ops["sin"], ops["cos"]) == (4, 6)
        assert_same(x.grad, 2 * grad(lambda x: sin3(W, x).sum())(X))
