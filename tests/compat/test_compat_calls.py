"""`compat.checkpoint`: calls, sequences, graphs, and what torch's cannot do.

What PyTorch's tests say of `torch.utils.checkpoint` has numbers in our survey: 1 to 14
and 20 to 28 are here, 16 to 19 and 29 in `test_compat_options.py`, 31 and 32 in
`test_compat_selective.py`. Most tests run with torch's checkpoint, too: see
`support/checkpoints.py`. What is missing are programs, which `support.adversarial` runs
with both.
"""

import functools
import sys
import weakref

import pytest
import torch
from support.checkpoints import (
    KINDS,
    Logged,
    both,
    both_sequential,
    chain,
    derivative,
    ours,
    sin_exp,
    slope_of_sin_exp,
    theirs,
    wrapped,
)
from support.compared import leaf, points
from support.zoo import Evaluations, counted, plainly
from torch import nn
from torch.func import grad, hessian, jacrev, jvp, vjp, vmap

from remat import compat
from remat.testing import assert_same, assert_same_gradients, count_ops, live_bytes


SLOPE = slope_of_sin_exp()


def test_random_streams_are_restored_though_the_user_said_no():
    """6: the one argument without effect."""
    draws = Evaluations()

    def f(x):
        mask = torch.rand(3)
        draws.note(mask)
        return (x * mask).sin()

    x = leaf(3)
    ours(f, x, preserve_rng_state=False).sum().backward()
    first, second = draws
    assert_same(first, second)
    assert_same(x.grad, first * (points(3) * first).cos())


@pytest.mark.parametrize(
    "checkpoint",
    [theirs, ours, functools.partial(ours, debug=True)],
    ids=["torch", "remat", "remat, debug"],
)
def test_a_third_backward_needs_a_graph(checkpoint):
    """7: as in plain code, each but the last retains it."""
    body, calls = counted(sin_exp)
    x = leaf(3)
    out = checkpoint(body, x).sum()
    out.backward(retain_graph=True)
    out.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.backward()
    assert len(calls) == 3
    assert_same(x.grad, 2 * SLOPE)


# --- 1, 3 and 4, sequences ---


@both_sequential
@pytest.mark.parametrize("segments", [2, 3, 4, 6])
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_sequences_of_any_kind(sequential, kind, segments):
    """3: outputs, gradients of inputs and of parameters; the last one may be longer."""
    log = Evaluations()
    modules = kind([Logged(k, log) for k in range(6)])
    assert_same_gradients(
        lambda x: sequential(modules, segments, x),
        lambda x: chain(modules, x),
        leaf(2, 4),
        wrt={k: dict(m.named_parameters()) for k, m in enumerate(modules)},
    )
    again = (6 // segments) * (segments - 1)
    assert len(log) == 6 + again + 6


@both_sequential
def test_a_sequence_takes_one_input_and_no_other_keyword(sequential):
    """4: but `preserve_rng_state`."""
    x = leaf(3)
    with pytest.raises(TypeError, match=r"positional argument|multiple values"):
        sequential([torch.sin, torch.cos], 2, x, False, x)
    with pytest.raises(TypeError, match="'input'"):
        sequential([torch.sin, torch.cos], 2)
    with pytest.raises(ValueError, match="depth"):
        sequential([torch.sin, torch.cos], 2, x, depth=3)
    with count_ops() as ops:
        sequential([torch.sin] * 4, 2, x, preserve_rng_state=False).sum().backward()
    assert ops["sin"] == 4 + 1


@pytest.mark.parametrize("segments", [-1, 0, 3])
def test_too_many_or_too_few_segments_are_refused(segments):
    with pytest.raises(ValueError, match=f"{segments} segments of 2 functions: use 1"):
        compat.checkpoint_sequential([torch.sin, torch.cos], segments, leaf(3))


def test_an_error_names_the_segment():
    log = Evaluations()

    def changes(x):
        log.note(None)
        return x.sigmoid() if len(log) > 1 else x.exp()

    functions = [torch.sin, changes, torch.sin, torch.sin]
    out = compat.checkpoint_sequential(functions, 2, leaf(3))
    with pytest.raises(compat.CheckpointError, match=r"`functions\[0:2\]` \(remat.*py"):
        out.sum().backward()
    assert len(log) == 2


def calls_of(run):
    """How many Python functions run."""
    count = 0

    def note(_frame, event, _arg):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("style", ["modules", "functions"])
def test_a_segment_costs_what_a_call_costs_however_many_there_are(style):
    """It does not refer to the others: counted in calls of Python functions."""
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(64)]
    functions = layers
    if style == "functions":
        functions = [lambda x, layer=layer: layer(x) for layer in layers]
    x = leaf(2, 4)

    def in_sequence(count):
        return lambda: compat.checkpoint_sequential(functions[:count], count, x)

    def one_by_one():
        out = x
        for function in functions[:-1]:
            out = compat.checkpoint(function, out)
        return functions[-1](out)

    # Three calls look for writes that torch does not count.
    for warm_up in 3 * (one_by_one, in_sequence(64), in_sequence(16)):
        warm_up()
    of_64 = calls_of(in_sequence(64))
    assert of_64 <= 1.05 * calls_of(one_by_one)
    assert of_64 <= 1.05 * 63 / 15 * calls_of(in_sequence(16))
    with count_ops() as ops:
        in_sequence(64)().sum().backward()
    assert ops["tanh"] == 64 + 63


def test_a_sequence_keeps_the_inputs_of_its_segments():
    functions = [torch.sin] * 16
    x = leaf(1024)
    plain = live_bytes(lambda: chain(functions, x))
    in_segments = live_bytes(lambda: compat.checkpoint_sequential(functions, 4, x))
    # `sin` saves its input, which is `x` for the first. The result counts.
    assert (plain, in_segments) == (16 * 4096, (3 + 4) * 4096)


# --- 20, 27: reading the graph, nesting ---


@both
def test_reading_what_a_node_saved_recomputes_it(checkpoint):
    """20: each time, until it is freed."""
    body, calls = counted(sin_exp)
    x = leaf(3)
    out = checkpoint(body, x)
    for count in range(2, 5):
        assert_same(out.grad_fn._saved_result.detach(), out.detach())
        assert len(calls) == count
    out.sum().backward()
    assert len(calls) == 5
    with pytest.raises(RuntimeError, match="after they have already been freed"):
        _ = out.grad_fn._saved_result
    assert_same(x.grad, SLOPE)


# What is applied, from the outside in: c is the checkpoint, g a derivative.
MIXES = ["c", "cc", "cg", "gc", "gcg", "cgc", "ggc", "cgg", "gcgc", "cgcgc", "gggc"]


@pytest.mark.usefixtures("_no_collector")
@both
@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("mix", MIXES)
def test_any_mix_of_gradients_and_checkpoints(checkpoint, early_stop, mix):
    """27: to third order; all of it is freed by reference counting."""
    refs = Evaluations()
    wrap = wrapped(functools.partial(checkpoint, early_stop=early_stop))

    def body(x):
        y = (x * x).sin()
        refs.note(weakref.ref(y))
        return y.exp()

    def run(wrap):
        refs.clear()
        f = body
        for step in reversed(mix):
            f = wrap(f) if step == "c" else derivative(f)
        x = leaf(3)
        out = f(x)
        (first,) = torch.autograd.grad(out.sum(), x)
        return out.detach(), first

    got, made = run(wrap), [*refs]
    left = [ref for ref in made if ref() is not None]
    want = run(plainly)
    assert_same(got, want, reassociated=checkpoint is not ours)
    if checkpoint is ours:
        assert left == []
    assert len(made) > len(refs)


# --- Where torch's does not work, torch.func and swapped parameters ---


def body(x):
    return (x.sin() * x).exp()


def loss(fn):
    return lambda x: fn(x).sum()


TRANSFORMS = {
    "grad": lambda f: grad(loss(f))(points(3)),
    "vjp": lambda f: vjp(f, points(3))[1](points(3))[0],
    "jacrev": lambda f: jacrev(f)(points(3)),
    "vmap(grad)": lambda f: vmap(grad(loss(f)))(points(2, 3)),
    "hessian": lambda f: hessian(loss(f))(points(3)),
    "grad(grad)": lambda f: grad(lambda x: grad(loss(f))(x).square().sum())(points(3)),
    "jvp(grad)": lambda f: jvp(grad(loss(f)), (points(3),), (points(3),))[1],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(name):
    """torch's checkpoint raises under all of them."""
    transform = TRANSFORMS[name]
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        transform(wrapped(theirs)(body))
    fn, calls = counted(body)
    got = transform(wrapped(ours)(fn))
    assert len(calls) >= 2
    assert_same(got, transform(body), reassociated=True)


@pytest.mark.parametrize(
    "options", [{"early_stop": False}, {"determinism_check": "none"}, {"debug": True}]
)
def test_options_under_torch_func(options):
    """A recompute there runs to the end, and its results are compared, in any case."""
    fn, calls = counted(body)
    got = grad(loss(functools.partial(ours, fn, **options)))(points(3))
    assert len(calls) == 2
    assert_same(got, grad(loss(body))(points(3)))
