"""Plain autograd: outputs, inputs and cotangents; what a backward frees; grad mode."""

from functools import partial

import pytest
import torch
from support.runs import replayed
from support.transforms import TRANSFORMS
from support.zoo import (
    BIG,
    Evaluations,
    W,
    X,
    assert_rematerialized,
    counted,
    leaves_of,
    make,
    ops_of,
    plainly,
)

from remat import policies, remat
from remat.testing import assert_same, count_ops, live_bytes, peak_bytes


# --- Checkers ---


def zero_root(x):
    return (x * 0).sqrt() * 0  # the line


def test_anomaly_mode_names_the_operation_and_the_line_of_the_forward():
    def evaluations(wrap):
        fn, calls = counted(zero_root)
        value = wrap(fn)(*leaves_of(W)).sum()
        with (
            pytest.warns(UserWarning, match=r"Error detected|Previous calc") as caught,
            pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan values"),
        ):
            value.backward()
        texts = [str(warning.message) for warning in caught]
        assert any("detected in SqrtBackward0" in text for text in texts)
        assert any("Traceback of forward" in t and "# the line" in t for t in texts)
        return len(calls)

    with torch.autograd.set_detect_anomaly(True):
        assert evaluations(plainly) == 1
        assert evaluations(remat) == 2


# Above how deep Python's calls may be: a chain of graphs is not walked by recursion.
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("how", "calls"), [("backward", 1100), ("grad", 20)])
def test_each_of_many_calls_in_a_row_is_recomputed_once(how, calls):
    def transform(f):
        def loss(w, h):
            for _ in range(calls):
                h = f(w, h)
            return h.sum()

        return TRANSFORMS[how](loss, W, X)

    # No reassociation: each call uses w once.
    assert_rematerialized(
        transform, lambda w, h: (h @ w).sin() + h, plain=calls, evaluations=2 * calls
    )


# --- Nothing to differentiate: the function itself ---


MODES = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "set_grad_enabled": partial(torch.set_grad_enabled, False),
}


@pytest.mark.parametrize("mode", MODES)
def test_without_grad_mode_the_function_itself_is_called(mode):
    seen = Evaluations()
    fn = remat(lambda x: seen.note(id(x)) or x.sin().sin())
    (x,) = leaves_of(BIG)
    with MODES[mode]():
        out = fn(x)
        assert live_bytes(lambda: fn(x)) == BIG.nbytes
    assert not out.requires_grad
    out = fn(x)
    assert out.requires_grad
    assert len(seen) == 3
    out.sum().backward()
    assert [*seen] == [id(x)] * 4  # in the recompute, too


OPTIONS = {
    "default": {},
    "a policy": {"policy": policies.save_ops(torch.ops.aten.tanh)},
    "prune": {"prune": True},
    "higher_order": {"higher_order": True},
}


@pytest.mark.parametrize("options", OPTIONS)
def test_a_backward_in_inference_mode(options):
    for _ in range(3):
        (x,), (y,) = leaves_of(X), leaves_of(X)
        out = remat(lambda x: x.sin().exp().tanh(), **OPTIONS[options])(x).sum()
        y.sin().exp().tanh().sum().backward()
        with torch.inference_mode(), count_ops() as ops:
            out.backward()
        assert ops["sin"] == 1
        assert_same(x.grad, y.grad)
    out = remat(lambda x: x.sin().exp().tanh(), **OPTIONS[options])(x).sum()
    with torch.inference_mode():
        (got,) = torch.autograd.grad(out, x)
    assert not got.requires_grad
    assert_same(got, y.grad)


# --- Remat in remat: what is kept, the peak, and functions that wrap functions ---
# Under base autograd an outer call is run again only as far as the inputs of its
# inner calls need it. Under torch.func, a call inside a call is evaluated once in
# each recompute of the outer one and once in its own.


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
    ops = ops_of(lambda: remat(halves(8))(x).sum().backward())
    # At each of three depths the first of two halves is run again, for the second.
    assert (ops["sin"], ops["cos"]) == (8 + 3 * 8 // 2, 8)


# --- Functions that wrap others ---


CONSTANTS = make(4, seed=7), make(4, 1, seed=8), torch.tensor(0.5).double()
SAVING = policies.dots_saveable, policies.everything_saveable


@pytest.mark.parametrize("policy", SAVING)
@pytest.mark.parametrize("constant", CONSTANTS)
@replayed(tanh=(3, 6))
def test_a_constant_and_a_residual_of_an_inner_call_are_told_apart(
    wrap, constant, policy
):
    """They may have one shape. Then only their order tells them apart."""

    w = make(4, 4, seed=5).requires_grad_()
    x = make(*constant.shape or (4,), seed=6)
    f = lambda w, x: (w @ x).tanh() * constant
    call = wrap(wrap(f) if wrap is plainly else remat(f, policy=policy))
    found = []
    for _ in range(3):  # recorded, then with the record
        found += torch.autograd.grad(call(w, x).sum(), w)
    return found
