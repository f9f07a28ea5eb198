"""`custom_vjp`: JAX's counts, what is kept and freed, arguments, and wrong rules."""

import functools
import pickle

import pytest
import torch
from support.ruled import bwd, fwd, ran, rem, ruled, runs
from support.zoo import W, X, leaves_of, make
from torch.func import vmap

from remat import (
    CaptureError,
    RecomputeError,
    checkpoint_name,
    custom_vjp,
    policies,
    remat,
)
from remat.testing import check_replay, count_ops, live_bytes


# --- JAX's documented examples: a sine that keeps its cosine ---


def sine_fwd(x):
    return x.sin(), checkpoint_name(x.cos(), "cosine")


def sine_of(cos, x):
    return x.sin(), cos


def sine_bwd(cos, ct):
    return (ct * cos,)


def sine(*, remat=False, vjp=False):
    fn = custom_vjp(torch.sin)
    if remat:
        fn.defremat(sine_fwd, sine_of, sine_bwd)
    if vjp:
        fn.defvjp(sine_fwd, sine_bwd)
    return fn


SINE = sine(remat=True)
BY_VJP = sine(vjp=True)
ROWS = {
    # What runs, its waves in the forward, and in the backward, by JAX 0.12.
    "alone": (SINE, "sin sin cos", ""),  # JAX drops the sine of `rem`, as below
    "remat": (remat(SINE), "sin cos", ""),
    "remat of remat": (remat(remat(SINE)), "sin cos", ""),
    "under vmap": (vmap(remat(SINE)), "sin cos", ""),
    "its exponential": (remat(lambda x: SINE(x).exp()), "sin cos exp", "sin exp"),
    "defvjp": (remat(BY_VJP, prune=True), "sin cos", "cos"),
    "defvjp, named": (
        remat(BY_VJP, policy=policies.save_only_these_names("cosine")),
        *("sin cos", ""),
    ),
    "everything": (remat(SINE, policy=policies.everything_saveable), "sin cos", ""),
}


def waves(ops):
    return " ".join(op for op in ("sin", "cos", "exp") for _ in range(ops[op]))


@pytest.mark.parametrize("row", ROWS)
def test_waves_are_those_of_jax(row):
    fn, forward, backward = ROWS[row]
    for _ in range(2):
        (x,) = leaves_of(X)
        with count_ops() as ops:
            y = fn(x)
        assert waves(ops) == forward
        with count_ops() as ops:
            (found,) = torch.autograd.grad(y.sum(), x)
        # JAX drops the sine of `rem` where nothing reads it. Here `rem` runs whole.
        is_whole = row in {"remat", "remat of remat", "under vmap", "everything"}
        assert waves(ops) == ("sin" if is_whole else backward)
        want = x.cos() * (x.sin().exp() if "exp" in backward else 1)
        assert torch.equal(found, want.detach())


# --- What is kept, where, and how long ---


BIG = make(64, 64, seed=3)
KEEPS = custom_vjp(lambda x: x.sin() * 2)
KEEPS.defremat(
    lambda x: (x.sin() * 2, x.cos()),
    lambda cos, x: (x.sin() * 2, cos),
    lambda cos, ct: (ct * cos * 2,),
)


@pytest.mark.parametrize("higher_order", [False, True])
def test_a_backward_frees_what_is_kept(higher_order):
    (x,) = leaves_of(BIG)
    held = []

    def run():
        held.append(remat(lambda x: KEEPS(x).exp(), higher_order=higher_order)(x).sum())

    assert live_bytes(run) > BIG.nbytes
    held.clear()

    def run_and_free():
        run()
        held[0].backward()
        x.grad = None

    assert live_bytes(run_and_free) < BIG.nbytes


def test_hooks_for_saved_tensors_have_what_is_kept():
    (x,) = leaves_of(X)
    packed = []

    def pack(t):
        packed.append(t.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: packed[k]):
        y = remat(lambda x: KEEPS(x).exp())(x)
    assert any(torch.equal(t, X.cos()) for t in packed)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * X.cos() * (X.sin() * 2).exp())


def test_draws_around_and_in_fwd():
    def of(fn):
        def body(x):
            x = torch.dropout(x, 0.5, True)
            y = fn(x)
            return torch.dropout(y, 0.5, True).sin()

        return body

    noisy = custom_vjp(lambda x: x * torch.rand_like(x))
    noisy.defremat(
        lambda x: (x * (noise := torch.rand_like(x)), noise),
        lambda noise, x: (x * noise, noise),
        lambda noise, ct: (ct * noise,),
    )
    found = []
    for fn in (of(noisy.fn), remat(of(noisy)), remat(of(noisy), prune=True)):
        torch.manual_seed(0)
        (x,) = leaves_of(X)
        fn(x).sum().backward()
        found.append((x.grad, torch.rand(2)))
    pairs = [pair for f in found[1:] for pair in zip(f, found[0], strict=True)]
    assert all(torch.equal(*pair) for pair in pairs)


# --- Arguments ---


def test_keywords_defaults_and_arguments_that_are_no_tensors():
    scale = custom_vjp(lambda tree, *, power: tree)

    @custom_vjp
    def scaled(tree, factor=2.0, names=("a",)):
        return {name: tree[name] * factor for name in names}

    scaled.defremat(
        lambda tree, factor, names: (scaled.fn(tree, factor, names), None),
        lambda res, tree, factor, names: (scaled.fn(tree, factor, names), factor),
        lambda factor, cts: ({"a": cts["a"] * factor, "b": None}, None, None),
    )
    a, b = leaves_of(W, X)
    out = remat(lambda a, b: scaled(names=("a",), tree={"a": a, "b": b})["a"].sin())(
        a, b
    )
    (found,) = torch.autograd.grad(out.sum(), a)
    assert torch.equal(found, 2.0 * (2.0 * W).cos())
    scale.defvjp(lambda *_: None, lambda *_: None)
    with pytest.raises(TypeError, match="has keyword-only parameters"):
        scale({"a": a}, power=3)


@pytest.mark.parametrize("transform", [lambda f: f, remat])
def test_arguments_that_are_not_differentiated(transform):
    seen = []

    @functools.partial(custom_vjp, nondiff_argnums=(0, 2))
    def power(exponent, x, fn):
        return fn(x) ** exponent

    def power_bwd(exponent, fn, x, ct):
        seen.append((exponent, fn))
        return (ct * exponent * x ** (exponent - 1),)

    power.defvjp(lambda n, x, fn: (fn(x) ** n, x), power_bwd)
    (x,) = leaves_of(X)
    transform(lambda x: power(3, x, abs).sin())(x).sum().backward()
    assert torch.equal(x.grad, (X.abs() ** 3).cos() * 3 * X**2)
    assert seen == [(3, abs)]


def test_methods_and_names():
    class Layer:
        @custom_vjp
        def call(self, x):
            return x.sin()

    Layer.call.defvjp(
        lambda self, x: (x.sin(), x), lambda x, ct: (None, ct * x.cos() * 3)
    )
    (x,) = leaves_of(X)
    remat(Layer().call)(x).sum().backward()
    assert torch.equal(x.grad, X.cos() * 3)
    assert Layer.call.__name__ == "call"
    assert "custom_vjp(<built-in" in repr(SINE)
    assert pickle.loads(pickle.dumps(CUBE)) is CUBE


@custom_vjp
def CUBE(x):  # noqa: N802
    return x**3


def test_nothing_is_differentiated():
    fn = ruled(remat=(fwd, rem, bwd))
    runs()
    remat(fn)(W, X)
    with torch.no_grad():
        fn(*leaves_of(W, X))
    assert runs() == {}


# --- Wrong rules ---


def wrong(*, fwd=sine_fwd, rem=sine_of, bwd=sine_bwd):
    fn = custom_vjp(torch.sin)
    fn.defremat(fwd, rem, bwd)
    return fn


def run(fn, transform=remat):
    (x,) = leaves_of(X)
    transform(lambda x: fn(x * 1).exp())(x).sum().backward()


MISTAKES = {
    "number": (wrong(bwd=lambda _, ct: (ct, ct)), "2 cotangents, and not a tuple of 1"),
    "no tuple": (wrong(bwd=lambda _, ct: ct), "a Tensor, and not a tuple of 1"),
    "shape": (wrong(bwd=lambda _, ct: (ct[0],)), r"float64\[4\] for `argument 0`"),
    "dtype": (wrong(bwd=lambda _, ct: (ct.float(),)), r"float32\[4, 4\] for"),
    "kind": (wrong(bwd=lambda _, ct: (3.0,)), "a cotangent of float for"),
    "structure": (wrong(bwd=lambda _, ct: ((ct,),)), "a cotangent of tuple for"),
    "no pair": (wrong(fwd=torch.sin), "fwd of .* returned a Tensor, and no pair"),
    "no pair of rem": (wrong(rem=lambda _, x: x), "rem of .* a Tensor, and no pair"),
    "another out": (
        wrong(rem=lambda c, x: (x.sum(), c)),
        r"rem of .* of float64\[\], where fwd returned .* of float64\[4, 4\]",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_rules_are_errors_that_name_the_function(mistake):
    fn, message = MISTAKES[mistake]
    with pytest.raises(TypeError, match=message) as raised:
        run(fn)
    assert "`sin`" in str(raised.value)


def test_a_tree_of_cotangents():
    @custom_vjp
    def first(tree):
        return tree["a"].sin()

    first.defvjp(lambda tree: (tree["a"].sin(), tree), lambda tree, ct: ([ct],))
    with pytest.raises(TypeError, match="another structure than `tree` has") as raised:
        remat(lambda a: first({"a": a}))(*leaves_of(X)).sum().backward()
    assert "test_custom_vjp.py:" in str(raised.value)


def test_what_is_no_argument_is_refused():
    (w,) = leaves_of(W)
    fn = wrong(fwd=lambda x: (x.sin() * w, x.cos()))
    for transform in (remat, lambda f: f):
        with pytest.raises(CaptureError, match="requires grad and is no argument"):
            run(fn, transform)


def test_no_rules_and_what_is_no_rule():
    with pytest.raises(AttributeError, match="has no rules"):
        custom_vjp(torch.sin)(X)
    with pytest.raises(TypeError, match="takes a function, and not 3"):
        custom_vjp(3)
    with pytest.raises(TypeError, match="a rule of a custom_vjp is no function: None"):
        custom_vjp(torch.sin).defvjp(torch.sin, None)


def test_a_recompute_that_calls_something_else():
    runs()

    def body(x):
        ran("fn")
        return (KEEPS, SINE)[runs()["fn"] % 2](x).exp()

    (x,) = leaves_of(X)
    out = remat(body)(x)
    ran("fn")
    with pytest.raises(RecomputeError, match="where the forward called `sin` at"):
        out.sum().backward()


def test_check_replay_finds_another_out():
    check_replay(lambda x: SINE(x).exp(), X)
    fn = wrong(rem=lambda c, x: (x.sin() + 1e-3, c))
    with pytest.raises(
        RecomputeError, match=r"Operation 0, remat.unit.default .* differs"
    ):
        check_replay(lambda x: fn(x).exp(), X)
