"""Plain autograd: outputs, inputs and cotangents; what a backward frees; grad mode."""

from functools import partial

import pytest
import torch
from support.runs import replayed
from support.transforms import TRANSFORMS
from support.zoo import (
    BIG,
    DEPTH,
    Evaluations,
    W,
    X,
    assert_rematerialized,
    block,
    counted,
    leaves_of,
    make,
    matmul,
    ops_of,
    plainly,
    rematerialized,
)
from torch.utils.checkpoint import checkpoint

from remat import policies, remat
from remat.testing import assert_same, count_ops, live_bytes, peak_bytes


# --- Some of the outputs, some of the inputs ---


def branches(x, y):
    return x.sin().cos() * 2, y.exp().tanh() * 3


def one_after_the_other(first, second, x, y):
    first.sum().backward(retain_graph=True)
    second.sum().backward()


def each_frees_its_own_graph(first, second, x, y):
    first.sum().backward()
    second.sum().backward()
    for output in first, second:
        with pytest.raises(RuntimeError, match="through the graph a second time"):
            output.sum().backward()


def together(first, second, x, y):
    torch.autograd.backward((first, second), [X, W])


def in_batches(first, second, x, y):
    cts = make(3, 4, 4, seed=1), make(3, 4, 4, seed=2)
    return torch.autograd.grad((first, second), (x, y), cts, is_grads_batched=True)


BACKWARDS = {
    one_after_the_other: 2,
    each_frees_its_own_graph: 2,
    together: 1,
    in_batches: 1,
}


@pytest.mark.parametrize(("differentiate", "backwards"), BACKWARDS.items())
def test_outputs_are_differentiated_by_one_backward_or_by_two(differentiate, backwards):
    def transform(f):
        x, y = leaves_of(W, X)
        return differentiate(*f(x, y), x, y), x.grad, y.grad

    assert_rematerialized(transform, branches, evaluations=1 + backwards)


def test_a_node_that_gets_no_gradient_is_not_called():
    called = []

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(x, name):
            return x.clone()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.name = inputs[1]

        @staticmethod
        def backward(ctx, cotangent):
            called.append(ctx.name)
            return cotangent * 2, None

    def transform(f):
        (x,) = leaves_of(W)
        first, _ = f(x)
        first.sum().backward()
        return x.grad

    fn = lambda x: (Noted.apply(x, "first").sin(), Noted.apply(x, "second").sin())
    assert_rematerialized(transform, fn, evaluations=2)
    assert called == ["first", "first"]  # once in plain, once in remat


def test_an_unused_input_is_an_error_unless_allowed():
    fn, calls = counted(lambda x, unused: x.sin().sin().sum())
    x, unused = leaves_of(W, X)
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(remat(fn)(x, unused), unused)
    value = remat(fn)(x, unused)
    assert torch.autograd.grad(value, (x, unused), allow_unused=True)[1] is None
    assert len(calls) == 3  # nothing is recomputed for what has no edge


# --- What a backward frees ---


def test_a_second_backward_needs_retain_graph():
    fn, calls = counted(matmul)
    w, x = leaves_of(W, X)
    value = remat(fn)(w, x).sum()
    value.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        value.backward()
    assert len(calls) == 2


def test_gradients_share_no_memory():
    fn, calls = counted(lambda w, x: (w + x, w.exp()))
    w, x = leaves_of(W, X)
    cotangent = torch.ones_like(W)
    total, other = remat(fn)(w, x)
    total.backward(cotangent)
    w.grad.mul_(2)
    x.grad.mul_(3)
    assert (w.grad == 2).all()
    assert (x.grad == 3).all()
    assert (cotangent == 1).all()
    other.backward(cotangent)
    assert_same(w.grad, 2 + W.exp())
    assert (cotangent == 1).all()
    assert len(calls) == 2


# --- Checkers ---


def check_first_order(fn):
    return torch.autograd.gradcheck(
        fn, leaves_of(W[:2, :2], X[:2, :2]), check_batched_grad=True,
        check_forward_ad=True,
        check_batched_forward_grad=True, check_undefined_grad=True,
    )  # fmt: skip


def check_second_order(fn):
    return torch.autograd.gradgradcheck(
        fn, leaves_of(W[:2, :2], X[:2, :2]), check_batched_grad=True,
        check_fwd_over_rev=True, check_rev_over_rev=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fn", "check"),
    [
        (branches, check_first_order),
        (matmul, check_second_order),
        pytest.param(matmul, check_first_order, marks=pytest.mark.slow),
        pytest.param(branches, check_second_order, marks=pytest.mark.slow),
    ],
)
def test_gradcheck(check, fn):
    evaluated, calls = counted(fn)
    assert check(evaluated)
    plain = len(calls)
    assert check(remat(evaluated))
    assert len(calls) - plain > plain


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


def test_without_an_input_that_requires_grad_the_function_itself_is_called():
    seen = Evaluations()
    fn = remat(lambda x: seen.note(id(x)) or x.sin().sin())
    assert fn(X).grad_fn is None
    (x,) = leaves_of(X)
    fn(x).sum().backward()
    assert [*seen] == [id(X), id(x), id(x)]


def test_without_grad_mode_a_batch_is_evaluated_once():
    fn, calls = counted(matmul)
    batched = torch.func.vmap(remat(fn), (None, 0))
    xs = torch.stack([X, -X])
    out = batched(W, xs)
    assert_same(out, torch.func.vmap(matmul, (None, 0))(W, xs))
    (w,) = leaves_of(W)
    with torch.no_grad():
        assert_same(batched(w, xs), out)
    assert len(calls) == 2
    batched(w, xs).sum().backward()
    assert len(calls) == 4


@rematerialized(
    lambda x: (x.sin().sin(), x.detach().cos(), torch.ones(3)), evaluations=2
)
def test_an_output_that_depends_on_no_input_requires_no_grad(f):
    (x,) = leaves_of(X)
    out = f(x)
    assert [t.requires_grad for t in out] == [True, False, False]
    out[0].sum().backward()
    return out, x.grad


# --- Remat in remat: what is kept, the peak, and functions that wrap functions ---
# Under base autograd an outer call is run again only as far as the inputs of its
# inner calls need it. Under torch.func, a call inside a call is evaluated once in
# each recompute of the outer one and once in its own.


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
    kept = lambda *wraps: live_bytes(lambda: chain(*wraps)(x)) // BIG.nbytes
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
    ops = ops_of(lambda: remat(halves(8))(x).sum().backward())
    # At each of three depths the first of two halves is run again, for the second.
    assert (ops["sin"], ops["cos"]) == (8 + 3 * 8 // 2, 8)


# --- Functions that wrap others ---


def recursive(wrap, fn):
    wrapped = wrap(lambda n, w: w if n == 0 else wrapped(n - 1, w) @ fn(w))
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
    sines = lambda x: x.sin().sin().sin()
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
