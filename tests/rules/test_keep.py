"""`keep`: a call that is not entered again, what stays of it, when it is entered."""

import functools
import random
import re
import warnings

import numpy
import pytest
import torch
from support.kernels import Launch, launches, pointers
from support.ruled import ran, runs
from support.zoo import X, leaves_of, make
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

from remat import CaptureError, keep, policies, remat
from remat.testing import assert_same, count_ops, live_bytes


REGIONS = {
    "remat": remat,
    "prune": lambda f: remat(f, prune=True),
    "dots": lambda f: remat(f, policy=policies.dots_saveable),
    "everything": lambda f: remat(f, policy=policies.everything_saveable),
    "nested": lambda f: remat(lambda x: remat(f)(x).sin()),
    "higher_order": lambda f: remat(f, higher_order=True),
}


@keep
def wave(x):
    ran("fn")
    return x.sin()


def gradient(fn, *leaves):
    return torch.autograd.grad(fn(*leaves).sum(), leaves)


def counted(fn, *leaves):
    """The gradients, and how often `wave` was entered."""
    runs()
    found = gradient(fn, *leaves)
    return found, runs().get("fn", 0)


def body(x):
    return wave(x.exp()).cos() * x


# --- What is not entered again ---


@pytest.mark.parametrize("region", REGIONS)
def test_it_is_entered_once_and_its_operations_are_not_run_again(region):
    fn = REGIONS[region](body)
    plain = body if region != "nested" else lambda x: body(x).sin()
    want, _ = counted(plain, *leaves_of(X))
    for _ in range(3):
        found, entered = counted(fn, *leaves_of(X))
        assert entered == 1
        assert_same(found, want)


def test_without_it_the_call_is_entered_again():
    assert counted(remat(lambda x: wave.fn(x.exp()).cos()), *leaves_of(X))[1] == 2
    assert wave.__name__ == "wave"
    assert repr(wave).startswith("keep(<function wave")


def test_a_kernel_that_writes_through_pointers_is_launched_once():
    kept = keep(Launch.apply)
    plain = lambda x: Launch.apply(x * 2, pointers).cos()
    want = gradient(plain, *leaves_of(X))
    for region in REGIONS.values():
        fn = region(lambda x: kept(x * 2, pointers).cos())
        for _ in range(2):
            found = []
            run = functools.partial(
                lambda fn, found: found.append(gradient(fn, *leaves_of(X))), fn, found
            )
            assert launches(run) == 2  # one of them in its own backward
            if region is not REGIONS["nested"]:
                assert_same(found[0], want)


def test_modules_methods_keywords_and_trees():
    layer = nn.Linear(4, 4).double()

    class Holder:
        @keep
        def call(self, tree, *, scale):
            ran("fn")
            return {"out": layer(tree["x"]) * scale, "scale": scale, "same": tree["x"]}

    holder = Holder()

    def block(x):
        found = holder.call({"x": x.sin()}, scale=3.0)
        return (found["out"].exp() * found["scale"] + found["same"]).sin()

    for transform in (remat, lambda f: remat(f, prune=True)):
        runs()
        (x,) = leaves_of(X)
        transform(block)(x).sum().backward()
        found = x.grad, layer.weight.grad, layer.bias.grad
        assert runs() == {"fn": 1}
        layer.zero_grad()
        (x,) = leaves_of(X)
        block(x).sum().backward()
        assert_same(found, (x.grad, layer.weight.grad, layer.bias.grad))
        layer.zero_grad()


def test_what_it_saved_stays_and_a_backward_frees_it():
    big = make(64, 64, seed=1)
    (x,) = leaves_of(big)
    held = []
    fn = remat(lambda x: wave(x.exp()).cos().sum())

    def run():
        held[:] = [fn(x)]

    # Its argument, which its sine saves, and its result.
    assert 2 * big.nbytes <= live_bytes(run) < 2.5 * big.nbytes

    def run_and_free():
        run()
        held[0].backward()
        x.grad = None

    assert live_bytes(run_and_free) < big.nbytes


def test_hooks_of_the_user_have_what_it_saved_and_returned():
    (x,) = leaves_of(X)
    packed = []

    def pack(t):
        packed.append(t.clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda k: packed[k]):
        y = remat(body)(x)
    for value in (x.exp(), x.exp().sin()):
        assert any(torch.equal(t, value) for t in packed)
    y.sum().backward()
    assert_same((x.grad,), gradient(body, *leaves_of(X)))


def test_torchs_checkpoint_inside_and_outside():
    want = gradient(body, *leaves_of(X))
    again = functools.partial(checkpoint, use_reentrant=False)
    for fn in (
        lambda x: again(remat(body), x),
        remat(lambda x: again(body, x)),
        lambda x: remat(body, higher_order=True)(x),
    ):
        assert_same(gradient(fn, *leaves_of(X)), want)


# --- What it changes ---


class State:
    def __init__(self):
        self.count, self.log, self.last = 1, [], None


CHANGES = {
    "attribute": lambda s, x: setattr(s, "count", s.count + 1),
    "list": lambda s, x: s.log.append(2.0),
    "tensor": lambda s, x: setattr(s, "last", x.detach() * 2),
    "argument": lambda s, x: x.mul_(2),
}


@pytest.mark.parametrize("region", ["remat", "prune", "dots", "nested"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_it_changes_is_never_lost(change, region):
    def run(transform, kept):
        state = State()

        @kept
        def changing(x):
            CHANGES[change](state, x)
            return x.sin()

        def block(x):
            y = x * 1.5
            h = changing(y)
            last = 1 if state.last is None else state.last
            return (h * state.count * (1 + len(state.log)) * last + y).exp().sin()

        (x,) = leaves_of(X)
        out = transform(block)(x)
        state.count, state.log, state.last = 7, [1.0] * 3, None
        out.sum().backward()
        return x.grad

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = run(REGIONS[region], keep)
    told = [str(w.message) for w in told]
    assert any(
        re.search(r"keep\(changing\), called at .*, is entered", t) for t in told
    )
    plain = run(
        lambda f: (lambda x: f(x).sin()) if region == "nested" else f, lambda f: f
    )
    torch.testing.assert_close(found, plain)


STREAMS = {
    "torch": lambda: (
        (g := torch.Generator().manual_seed(0)),
        lambda: torch.rand((), generator=g, dtype=torch.float64),
    ),
    "python": lambda: ((g := random.Random(0)), lambda: g.random()),
    "numpy": lambda: ((g := numpy.random.default_rng(0)), lambda: g.random()),
    "global": lambda: (torch.manual_seed(0), lambda: torch.rand((), dtype=X.dtype)),
}


@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("stream", STREAMS)
def test_a_stream_that_it_draws_from_goes_on_behind_it(stream, region):
    def run(transform, kept):
        _, draw = STREAMS[stream]()

        @kept
        def noisy(x):
            ran("fn")
            return x.sin() * draw()

        def block(x):
            return (noisy(x * draw()) * draw()).exp()

        (x,) = leaves_of(X)
        return gradient(transform(block), x)[0], draw()

    plain = (lambda f: lambda x: f(x).sin()) if region == "nested" else lambda f: f
    want = run(plain, lambda f: f)
    runs()
    assert_same(run(REGIONS[region], keep), want, reassociated=True)
    assert runs() == {"fn": 1}


def test_a_setting_that_it_changes():
    def run(transform, kept):
        @kept
        def setting(x):
            torch.set_default_dtype(torch.float64)
            return x.sin()

        def block(x):
            y = setting(x * 2)
            return (y * torch.tensor(1 / 3)).exp()

        try:
            (x,) = leaves_of(X)
            return gradient(transform(block), x)
        finally:
            torch.set_default_dtype(torch.float32)

    with pytest.warns(UserWarning, match="gradients, or a setting of torch"):
        found = run(remat, keep)
    assert_same(found, run(lambda f: f, lambda f: f))


@pytest.mark.parametrize("region", REGIONS)
def test_gradients_that_it_computes(region):
    def run(transform, kept):
        w = torch.ones(4, dtype=X.dtype, requires_grad=True)

        @kept
        def stepping(x):
            w.exp().sum().backward()
            return x.sin()

        def block(x):
            y = stepping(x * 2)
            return (y * (1 if w.grad is None else w.grad.detach().clone())).exp()

        (x,) = leaves_of(X)
        return (*gradient(transform(block), x), w.grad)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if region == "higher_order":
            with pytest.raises(CaptureError, match="computes gradients inside, as by"):
                run(REGIONS[region], keep)
            return
        found = run(REGIONS[region], keep)
    plain = (lambda f: lambda x: f(x).sin()) if region == "nested" else lambda f: f
    assert_same(found, run(plain, lambda f: f), reassociated=True)


def test_running_statistics_are_updated_once():
    norm = nn.BatchNorm1d(4).double()
    plain = nn.BatchNorm1d(4).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = gradient(remat(lambda x: keep(norm)(x * 2).sin()), *leaves_of(X))
    assert_same(found, gradient(lambda x: plain(x * 2).sin(), *leaves_of(X)))
    assert_same(norm.running_mean, plain.running_mean)


def test_a_result_that_is_changed_later():
    def block(x):
        h = wave(x * 2)
        return h.mul_(3).exp() * h.sin()

    with pytest.warns(UserWarning, match="its result, or that is changed in place"):
        found, entered = counted(remat(block), *leaves_of(X))
    assert entered == 2
    assert_same(found, gradient(block, *leaves_of(X)))


@pytest.mark.parametrize("region", ["remat", "prune", "dots", "everything"])
def test_a_result_under_torch_func_that_is_changed_later(region):
    def block(x):
        h = wave(x * 2)
        return h.exp() * h.mul_(3)

    loss = lambda f: lambda x: f(x).sum()
    xs = torch.stack([X, X * 2, -X])
    want = grad(loss(block))(X), vmap(grad(loss(block)))(xs)
    fn = REGIONS[region](block)
    for _ in range(2):  # the second follows the record of the first
        runs()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it is told once
            found = grad(loss(fn))(X), vmap(grad(loss(fn)))(xs)
        assert runs()["fn"] >= 4  # plans are made by a run more
        torch.testing.assert_close(found, want)


def test_under_vmap_it_reads_what_the_block_left():
    held = {}
    scaled = keep(lambda x: wave(x) * held["scale"])

    def block(x):
        held["scale"] = x.exp()
        return scaled(x).cos()

    batched = lambda f: lambda x: vmap(f)(x)
    found, entered = counted(batched(remat(block)), *leaves_of(X))
    assert entered == 1
    assert_same(found, gradient(batched(block), *leaves_of(X)))


def test_an_object_that_it_returns():
    class Box:
        def __init__(self, value):
            self.value = value

    boxed = keep(lambda x: Box(x.sin()))
    block = lambda x: boxed(x * 2).value.exp()
    for transform in (remat, lambda f: remat(f, higher_order=True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = gradient(transform(block), *leaves_of(X))
        assert_same(found, gradient(block, *leaves_of(X)))


def test_a_function_that_differentiates_it_inside():
    def block(x):
        y = wave(x * 1)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return (y * g).exp()

    for transform in (remat, lambda f: remat(f, higher_order=True)):
        found = gradient(transform(block), *leaves_of(X))
        assert_same(found, gradient(block, *leaves_of(X)))


# --- Under torch.func ---


def test_parameters_that_it_closes_over_and_functional_call():
    layer = nn.Linear(4, 4).double()
    kept = keep(layer)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layer

        def forward(self, x):
            ran("fn")
            return kept(x.sin()).exp() + x

    block = Block()
    params = {k: p.detach() for k, p in block.named_parameters()}

    def loss(transform, params, x):
        return functional_call(transform(block), params, (x,)).square().sum()

    for transform in (remat, lambda b: remat(b, prune=True)):
        with count_ops() as ops:
            found = grad(functools.partial(loss, transform))(params, X)
        want = grad(functools.partial(loss, lambda b: b))(params, X)
        assert ops["addmm"] == 1
        assert_same(found, want)


def test_what_is_no_function():
    with pytest.raises(TypeError, match="keep takes a function, and not 3"):
        keep(3)
