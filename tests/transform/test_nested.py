"""Remat in remat: what is kept, the peak, and functions that wrap functions.

Under base autograd an outer call is run again only as far as the inputs of its inner
calls need it. Under torch.func, a call inside a call is evaluated once in each
recompute of the outer one and once in its own.
"""

import pytest
import torch
from support.runs import assert_replayed
from support.transforms import TRANSFORMS
from support.zoo import (
    BIG,
    DEPTH,
    W,
    X,
    block,
    counted,
    leaves_of,
    make,
    plainly,
)
from torch.utils.checkpoint import checkpoint

from remat import policies, remat
from remat.testing import assert_same, count_ops, live_bytes, peak_bytes


def chain(wrap_outer, wrap_inner):
    """Two groups of three blocks."""

    def group(x):
        for _ in range(3):
            x = wrap_inner(block)(x)
        return x

    return lambda x: wrap_outer(group)(wrap_outer(group)(x)).sum()


@pytest.mark.parametrize("how", ["backward", "grad"])
def test_the_peak_falls_with_each_depth(how):
    def peak(*wraps):
        return peak_bytes(lambda: TRANSFORMS[how](chain(*wraps), BIG)) // BIG.nbytes

    plain, outer = peak(plainly, plainly), peak(remat, plainly)
    both = peak(remat, remat)
    assert plain > 1.5 * outer
    assert outer > 1.5 * both


def test_only_the_inputs_of_the_outer_call_are_kept():
    (x,) = leaves_of(BIG)

    def kept(*wraps):
        return live_bytes(lambda: chain(*wraps)(x)) // BIG.nbytes

    assert kept(plainly, plainly) == 6 * DEPTH - 1
    assert kept(plainly, remat) == 5
    assert kept(remat, remat) == 1


def test_nesting_in_halves_has_a_logarithmic_peak():
    def halves(count):
        if count == 1:
            return torch.sin
        half = halves(count // 2)
        return lambda x: remat(half)(remat(half)(x))

    def sines(x):
        for _ in range(8):
            x = x.sin()
        return x

    (x,) = leaves_of(BIG)
    peaks = []
    for fn in (sines, remat(sines), remat(halves(8))):
        fn(x).sum().backward()  # what is kept for good is kept now
        x.grad = None
        peaks.append(peak_bytes(lambda f=fn: f(x).sum().backward()) // BIG.nbytes)
        x.grad = None
    assert peaks[2] < peaks[1] <= peaks[0] + 1
    with count_ops() as ops:
        remat(halves(8))(x).sum().backward()
    # At each of three depths the first of two halves is run again, for the second.
    assert (ops["sin"], ops["cos"]) == (8 + 3 * 8 // 2, 8)


# --- Functions that wrap others ---


def recursive(wrap, fn):
    def power(n, w):
        return w if n == 0 else wrapped(n - 1, w) @ fn(w)

    wrapped = wrap(power)
    return lambda w, x: wrapped(4, w)


def on_constants(wrap, fn):
    return wrap(lambda w, x: w * wrap(fn)(X))


def capturing(wrap, fn):
    def outer(w, x):
        h = x @ w
        return wrap(lambda y: fn(y) * h)(w)

    return wrap(outer)


def without_grad_mode(wrap, fn):
    def outer(w, x):
        with torch.no_grad():
            constant = wrap(fn)(w)
        return w * constant

    return wrap(outer)


# A function that wraps functions, and the evaluations of what is called innermost.
WRAPPING = {
    # The forward, 4; then each depth recomputes those below it: 4 + 3 + 2 + 1.
    recursive: (4, 14),
    # The product is all that the outer call is run again for.
    capturing: (1, 2),
    # An inner call is the function itself: the forward and the outer recompute.
    on_constants: (1, 2),
    without_grad_mode: (1, 2),
}


@pytest.mark.parametrize(("program", "evaluations"), WRAPPING.items())
def test_functions_that_wrap_functions(program, evaluations):
    counts, results = [], []
    for wrap in (plainly, remat):
        fn, calls = counted(torch.exp)
        w, x = leaves_of(W, X)
        program(wrap, fn)(w, x).sum().backward()
        counts.append(len(calls))
        results.append((w.grad, x.grad))
    assert_same(results[1], results[0])
    assert tuple(counts) == evaluations


def test_calls_side_by_side_within_a_call_keep_only_its_inputs():
    def sines(x):
        return x.sin().sin().sin()

    (x,) = leaves_of(BIG)
    held = live_bytes(lambda: remat(lambda x: remat(sines)(remat(sines)(x)))(x))
    assert held < 1.5 * x.nbytes  # its result


# Evaluations with a checkpoint of torch and in plain: one in the other runs both again.
@pytest.mark.parametrize(
    ("reentrant", "evaluations", "plain"), [(True, 3, 2), (False, 3 + 3, 2 + 2)]
)
def test_a_call_in_a_checkpoint_of_torch_and_the_other_way_round(
    reentrant, evaluations, plain
):
    def transform(f):
        (x,) = leaves_of(W)
        outer = lambda x: f(x).cos()
        checkpoint(outer, x, use_reentrant=reentrant).sum().backward()
        if not reentrant:
            # A function that is wrapped, in which torch runs `fn` again.
            wrap = plainly if f is fn else remat
            inside = lambda x: checkpoint(fn, x, use_reentrant=False).cos()
            wrap(inside)(x).sum().backward()
        return x.grad

    fn, calls = counted(lambda x: x.sin().exp().tanh())
    expected = transform(fn)
    assert len(calls) == plain
    calls.clear()
    assert_same(transform(remat(fn)), expected)
    assert len(calls) == evaluations


CONSTANTS = make(4, seed=7), make(4, 1, seed=8), torch.tensor(0.5).double()
SAVING = policies.dots_saveable, policies.everything_saveable


@pytest.mark.parametrize("policy", SAVING)
@pytest.mark.parametrize("constant", CONSTANTS)
def test_a_constant_and_a_residual_of_an_inner_call_are_told_apart(constant, policy):
    """They may have one shape. Then only their order tells them apart."""

    def program(wrap):
        w = make(4, 4, seed=5).requires_grad_()
        x = make(*constant.shape or (4,), seed=6)

        def f(w, x):
            return (w @ x).tanh() * constant

        call = wrap(wrap(f) if wrap is plainly else remat(f, policy=policy))
        found = []
        for _ in range(3):  # recorded, then with the record
            found += torch.autograd.grad(call(w, x).sum(), w)
        return found

    assert_replayed(program, tanh=(3, 6))
