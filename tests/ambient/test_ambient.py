"""A recomputation happens in the random, autocast and device state of its forward."""

import gc

import pytest
import torch
from support.zoo import Evaluations, counted
from torch import nn
from torch.func import grad, vmap

from remat import RandomnessError, RecomputeError, remat
from remat._transform.saved import Saved
from remat.testing import assert_same, count_ops, live_bytes


def noisy(x):
    """Homogeneous of degree 2, with a mask that is drawn."""
    return nn.functional.dropout(x, 0.5).sin().square().sum()


def masked(x):
    """As `noisy`, without a sine: degree 2 exactly."""
    return nn.functional.dropout(x.exp().log(), 0.5).square().sum()


def leaf(n=64):
    return torch.randn(n, requires_grad=True)


def after(call):
    """Seed, call, and return the result with the state the global stream is in."""
    torch.manual_seed(7)
    return call(), torch.get_rng_state()


# --- The global random stream ----------------------------------------------------

DRAWS = {
    "dropout": lambda x: nn.functional.dropout(x, 0.5).sin(),
    "rand": lambda x: (x * torch.rand(64)).sin(),
    "randn_like": lambda x: (x * torch.randn_like(x)).sin(),
    "bernoulli": lambda x: (x * torch.full((64,), 0.5).bernoulli()).sin(),
    "in place": lambda x: (x * torch.empty(64).normal_()).sin(),
    "permutation": lambda x: x.sin() * torch.arange(64.0)[torch.randperm(64)],
    "several": lambda x: (x * torch.rand(64) + torch.randn(64)).sin() * torch.rand(1),
}


@pytest.mark.parametrize("fn", DRAWS.values(), ids=DRAWS.keys())
def test_draws_are_replayed(fn):
    x = leaf()
    (want,), state = after(lambda: torch.autograd.grad(fn(x).sum(), x))
    fn, calls = counted(fn)
    (got,), our_state = after(lambda: torch.autograd.grad(remat(fn)(x).sum(), x))
    assert_same(got, want)
    assert_same(our_state, state)
    assert len(calls) == 2


def test_the_outer_stream_after_forward_and_after_backward_is_that_of_plain():
    x = leaf()
    _, want = after(lambda: noisy(x))
    y, forward = after(lambda: remat(noisy)(x))
    assert_same(forward, want)
    with count_ops() as ops:
        y.backward()
    assert ops["sin"] == 1
    assert_same(torch.get_rng_state(), want)


def test_draws_between_forward_and_backward_do_not_matter():
    x = leaf()
    (want,), _ = after(lambda: torch.autograd.grad(noisy(x), x))
    y, _ = after(lambda: remat(noisy)(x))
    torch.manual_seed(99)
    torch.rand(5)
    state = torch.get_rng_state()
    with count_ops() as ops:
        assert_same(torch.autograd.grad(y, x)[0], want)
    assert ops["sin"] == 1
    assert_same(torch.get_rng_state(), state)


def test_two_backwards_use_the_same_mask():
    x = leaf()
    y = remat(noisy)(x)
    with count_ops() as ops:
        first, second = (
            torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)
        )
    assert_same(first, second)
    assert ops["sin"] == 2


def test_calls_in_a_row_draw_masks_of_their_own():
    x = leaf()

    def loss(call):
        return call(x) + 2 * call(x) + 3 * call(x)

    (want,), state = after(lambda: torch.autograd.grad(loss(noisy), x))
    with count_ops() as ops:
        (got,), ours = after(lambda: torch.autograd.grad(loss(remat(noisy)), x))
    assert_same(got, want)
    assert_same(ours, state)
    assert ops["sin"] == 2 * 3


TRANSFORMS = {
    "grad": grad,
    "vmap(grad), same": lambda f: vmap(grad(f), randomness="same"),
    "vmap(grad), different": lambda f: vmap(grad(f), randomness="different"),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f, randomness="different")(x).sum()),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())
def test_draws_are_replayed_under_transforms(transform):
    x = torch.randn(4, 64)
    want, state = after(lambda: transform(noisy)(x))
    with count_ops() as ops:
        got, our_state = after(lambda: transform(remat(noisy))(x))
    assert_same(got, want)
    assert_same(our_state, state)
    assert ops["sin"] == 2


def test_randomness_is_refused_by_vmap_as_in_plain():
    x = torch.randn(4, 64)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(grad(remat(noisy)))(x)
    with count_ops() as ops:
        vmap(grad(remat(noisy)), randomness="same")(x)
    assert ops["sin"] == 2


def test_draws_are_replayed_in_a_second_derivative():
    x = leaf()

    def second(call):
        (g,) = torch.autograd.grad(call(x), x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    want, state = after(lambda: second(noisy))
    with count_ops() as ops:
        got, our_state = after(lambda: second(remat(noisy)))
    assert_same(got, want)
    assert_same(our_state, state)
    assert ops["sin"] > 2


def test_draws_are_replayed_through_a_nested_remat():
    x = leaf()

    def fn(call):
        return lambda x: call(x) + torch.rand(()) * call(2 * x)

    (want,), state = after(lambda: torch.autograd.grad(fn(noisy)(x), x))
    nested = remat(fn(remat(noisy)))
    with count_ops() as ops:
        (got,), our_state = after(lambda: torch.autograd.grad(nested(x), x))
    assert_same(got, want)
    assert_same(our_state, state)
    assert ops["sin"] >= 2 * 2


# --- Euler: x . grad f(x) = 2 f(x), whatever the mask, unless it changed ----------

GENERATOR = torch.Generator()


def by_generator(x):
    mask = torch.rand(x.shape, generator=GENERATOR) > 0.5
    return (x.exp().log() * mask).square().sum()


def backward(f):
    def gradient(x):
        x = x.detach().requires_grad_()
        y = f(x)
        torch.rand(3)
        return torch.autograd.grad(y, x)[0], y

    return gradient


def pullback(f):
    def gradient(x):
        y, pull = torch.func.vjp(f, x)
        torch.rand(3)
        return pull(torch.ones(()))[0], y

    return gradient


PATHS = {
    "backward": backward,
    "grad": torch.func.grad_and_value,
    "vjp": pullback,
    "nested": lambda f: backward(remat(lambda x: f(2 * x))),
}


@pytest.mark.parametrize("gradient", PATHS.values(), ids=PATHS.keys())
@pytest.mark.parametrize("fn", [masked, by_generator], ids=["global", "generator"])
def test_euler(fn, gradient):
    x = torch.rand(64) + 0.5
    with count_ops() as ops:
        g, y = gradient(remat(fn))(x)
    assert ops["log"] >= 2
    torch.testing.assert_close((x * g).sum(), 2 * y.detach())
    assert (g == 0).any()
    assert (g != 0).any()


def test_euler_for_each_example_of_a_batch():
    x = torch.rand(8, 64) + 0.5
    with count_ops() as ops:
        g, y = vmap(torch.func.grad_and_value(remat(masked)), randomness="different")(x)
    assert ops["log"] == 2
    torch.testing.assert_close((x * g).sum(1), 2 * y)
    assert len({tuple(row.tolist()) for row in g == 0}) == 8


# --- What is stashed -------------------------------------------------------------


def test_nothing_is_stashed_for_a_function_that_draws_nothing():
    x = leaf(1024)
    fn = remat(lambda x: x.sin().sin())
    assert live_bytes(lambda: fn(x)) == 4096
    before = {*map(id, saved_calls())}
    y = fn(x)
    (call,) = (call for call in saved_calls() if id(call) not in before)
    assert not call.ambient.moved
    with count_ops() as ops:
        y.sum().backward()
    assert ops["sin"] == 1  # what the second sine makes is not needed


def saved_calls():
    """The calls whose graphs are alive."""
    gc.collect()
    return [call for call in gc.get_objects() if type(call) is Saved]


def test_only_the_state_is_stashed_for_a_function_that_draws():
    x = leaf(1024)
    fn = remat(lambda x: nn.functional.dropout(x.sin(), 0.5).sin())
    # The result alone: the state, five kilobytes, is no tensor.
    assert live_bytes(lambda: fn(x)) == 4096
    before = {*map(id, saved_calls())}
    y = fn(x)
    (call,) = (call for call in saved_calls() if id(call) not in before)
    ((_, state),) = call.ambient.moved
    assert len(state) == torch.get_rng_state().numel()
    with count_ops() as ops:
        y.sum().backward()
    assert ops["sin"] == 1  # what the second sine makes is not needed


# --- Generators ------------------------------------------------------------------


class HasGenerator(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def forward(self, x):
        return draw(x, self.generator)


def draw(x, generator):
    mask = torch.rand(x.shape, generator=generator) > 0.5
    return (x * mask).sin() * torch.randn(x.shape, generator=generator)


GENERATORS = {
    "argument": lambda wrap, g: lambda x: wrap(draw)(x, g),
    "keyword": lambda wrap, g: lambda x: wrap(draw)(x, generator=g),
    "nested": lambda wrap, g: (
        lambda x: wrap(lambda x, t: draw(x, t["g"][0]))(x, {"g": [g]})
    ),
    "closure": lambda wrap, g: wrap(lambda x: draw(x, g)),
    "module": lambda wrap, g: wrap(HasGenerator(g)),
    "default": lambda wrap, g: wrap(lambda x, g=g: draw(x, g)),
}
generators = pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS.keys())


@generators
def test_a_generator_is_replayed_and_advances_once(make):
    x = leaf()
    theirs, ours = (torch.Generator().manual_seed(5) for _ in "ab")
    (want,) = torch.autograd.grad(make(lambda f: f, theirs)(x).sum(), x)
    with count_ops() as ops:
        y = make(remat, ours)(x)
        assert_same(ours.get_state(), theirs.get_state())
        (got,) = torch.autograd.grad(y.sum(), x)
    assert_same(got, want)
    assert_same(ours.get_state(), theirs.get_state())
    assert ops["sin"] == 2


@generators
def test_two_calls_sharing_a_generator_replay_independently(make):
    x = leaf()

    def gradient(wrap):
        fn = make(wrap, torch.Generator().manual_seed(5))
        y, z = fn(x), fn(x)
        return [torch.autograd.grad(t.sum(), x, retain_graph=True) for t in (z, y, z)]

    want = gradient(lambda f: f)
    with count_ops() as ops:
        got = gradient(remat)
    assert_same(got, want)
    assert ops["sin"] == 2 + 3


@generators
def test_a_generator_is_replayed_under_grad(make):
    x = torch.randn(64)

    def gradient(wrap):
        generator = torch.Generator().manual_seed(5)
        fn = make(wrap, generator)
        return grad(lambda x: fn(x).sum())(x), generator.get_state()

    want = gradient(lambda f: f)
    with count_ops() as ops:
        got = gradient(remat)
    assert_same(got, want)
    assert ops["sin"] == 2


def test_the_global_stream_and_a_generator_are_replayed_together():
    x = leaf()

    def fn(x, generator):
        return nn.functional.dropout(draw(x, generator), 0.5)

    def gradient(call):
        g = torch.Generator().manual_seed(5)
        return torch.autograd.grad(call(x, g).sum(), x), g.get_state()

    want, state = after(lambda: gradient(fn))
    with count_ops() as ops:
        got, our_state = after(lambda: gradient(remat(fn)))
    assert_same([got, our_state], [want, state])
    assert ops["sin"] == 2


# --- rng="error" -----------------------------------------------------------------


@pytest.mark.parametrize("fn", DRAWS.values(), ids=DRAWS.keys())
def test_a_global_draw_is_refused_on_demand(fn):
    x, state = leaf(), torch.get_rng_state()
    with pytest.raises(RandomnessError, match=r"random stream in aten\..*test_ambient"):
        remat(fn, rng="error")(x)
    assert_same(torch.get_rng_state(), state)


def test_a_draw_from_a_generator_is_not_refused():
    x = leaf()
    with count_ops() as ops:
        remat(draw, rng="error")(x, torch.Generator()).sum().backward()
    assert ops["sin"] == 2


# --- Autocast --------------------------------------------------------------------


def cast(x, w):
    return (x @ w).sin() @ w


def autocast(*, enabled=True, dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype, enabled)


STATES = {
    "off": lambda: autocast(enabled=False),
    "bfloat16": autocast,
    "float16": lambda: autocast(dtype=torch.float16),
}


@pytest.mark.parametrize("then", STATES.values(), ids=[f"then {s}" for s in STATES])
@pytest.mark.parametrize("first", STATES.values(), ids=STATES.keys())
def test_autocast_is_that_of_the_forward(first, then):
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in "ab")

    def gradients(call):
        with first():
            y = call(x, w).float().sum()
        with then():
            return y, torch.autograd.grad(y, (x, w))

    want = gradients(cast)
    with count_ops() as ops:
        got = gradients(remat(cast))
    assert_same(got, want)
    assert ops["sin"] == 2


def test_autocast_entered_inside_is_entered_again():
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in "ab")

    def fn(x, w):
        with autocast():
            y = cast(x, w)
            with autocast(enabled=False):
                return cast(y.float(), w)

    want = torch.autograd.grad(fn(x, w).sum(), (x, w))
    with count_ops() as ops:
        got = torch.autograd.grad(remat(fn)(x, w).sum(), (x, w))
    assert_same(got, want)
    assert ops["sin"] == 2 * 2


def test_autocast_with_a_weight_shared_by_two_calls():
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in "ab")

    def gradients(call):
        with autocast():
            y = call(call(x, w), w).float().sum()
        return torch.autograd.grad(y, (x, w))

    want = gradients(cast)
    with count_ops() as ops:
        got = gradients(remat(cast))
    assert ops["sin"] == 2 * 2
    # As in plain, autocast casts it once for both calls.
    assert_same(got, want)


def test_what_was_cast_is_freed_when_autocast_ends():
    x = torch.randn(4, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)

    def two(call):
        with autocast():
            return call(call(x, w), w)

    one = 4 * 64 * 2
    # The results alone. Plain keeps the weight in half the bytes, too.
    assert live_bytes(lambda: two(remat(cast))) == 2 * one
    assert live_bytes(lambda: two(cast)) > 2 * one + 64 * 64 * 2


def test_what_a_recomputation_casts_is_freed_when_it_ends():
    x = torch.randn(4, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    with autocast():
        y = remat(cast)(x, w).sum()
        torch.clear_autocast_cache()

        def gradients():
            return torch.autograd.grad(y, (x, w), retain_graph=True)

        with count_ops() as ops:
            assert live_bytes(gradients) == x.nbytes + w.nbytes
    assert ops["sin"] == 1


@pytest.mark.parametrize("failing", ["forward", "recomputation"])
def test_what_was_cast_is_freed_when_a_call_fails(failing):
    x = torch.randn(4, 64, requires_grad=True)
    w = torch.randn(64, 64, requires_grad=True)
    calls = Evaluations()
    fails_at = 1 if failing == "forward" else 2

    def fn(x, w):
        y = (x @ w).sin()
        calls.note(None)
        if len(calls) == fails_at:
            raise FailureError("as it happens")
        return y.sin()

    def attempt():
        calls.clear()
        with autocast():
            y = remat(fn)(x, w).sum()
        y.backward()

    def failed():
        with pytest.raises(FailureError, match="as it happens"):
            attempt()
        assert len(calls) == fails_at

    failed()
    assert live_bytes(failed) == 0
    # And everything works again.
    with autocast(), count_ops() as ops:
        remat(cast)(x, w).sum().backward()
    assert ops["sin"] == 2


def test_autocast_with_another_setting_of_its_cache():
    x, w = (torch.randn(8, 8, requires_grad=True) for _ in "ab")

    def gradients(call):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = call(x, w).float().sum()
        with autocast():
            return torch.autograd.grad(y, (x, w))

    want = gradients(cast)
    with count_ops() as plain:
        gradients(cast)
    with count_ops() as ops:
        got = gradients(remat(cast))
    assert_same(got, want)
    assert ops["sin"] == 2
    # The recomputation casts x, w, and w again.
    assert ops["_to_copy"] - plain["_to_copy"] == 3


def test_autocast_under_grad():
    x, w = torch.randn(8, 8), torch.randn(8, 8)

    def gradient(call):
        def loss(w):
            with autocast():
                return call(x, w).float().sum()

        return grad(loss)(w)

    want = gradient(cast)
    with count_ops() as ops:
        got = gradient(remat(cast))
    assert_same(got, want)
    assert ops["sin"] == 2


# --- The default device ----------------------------------------------------------


def test_a_device_context_is_that_of_the_forward():
    devices = Evaluations()
    note = devices.note

    def fn(x):
        note(torch.empty(()).device.type)
        return x.sin().sin()

    x = leaf(3)
    with torch.device("meta"):
        y = remat(fn)(x)
    y.sum().backward()
    y = remat(fn)(x)
    with torch.device("meta"):
        y.sum().backward()
    assert [*devices] == ["meta", "meta", "cpu", "cpu"]


def test_a_device_context_does_not_reach_the_surroundings_of_a_recomputation():
    x = leaf(3)
    with torch.device("meta"):
        y = remat(lambda x: x.sin().sin())(x * 1)
    devices = []
    y.register_hook(lambda g: devices.append(torch.empty(()).device.type))
    x.register_hook(lambda g: devices.append(torch.empty(()).device.type))
    with count_ops() as ops:
        y.sum().backward()
    assert devices == ["cpu", "cpu"]
    assert ops["sin"] == 1


# --- Exceptions in a recomputation -----------------------------------------------


class FailureError(Exception):
    pass


def fails_the_second_time():
    calls = Evaluations()

    def breaks(x):
        torch.rand(5)
        calls.note(None)
        if len(calls) == 2:
            with torch.no_grad():
                raise FailureError("boo")
        return (x @ x).sin().sum()

    return breaks


def ambient_state():
    return (
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.empty(()).device.type,
    )


def test_an_exception_carries_a_note_of_the_function_and_where_it_was_decorated():
    y = remat(fails_the_second_time())(torch.randn(3, 3, requires_grad=True))
    with pytest.raises(FailureError, match="boo") as caught:
        y.backward()
    (note,) = caught.value.__notes__
    assert "recomputing `fails_the_second_time.<locals>.breaks`" in note
    assert f"(rematerialized at {__file__}:" in note


@pytest.mark.parametrize(
    "surroundings",
    [
        lambda: torch.no_grad(),
        lambda: autocast(),
        lambda: torch.device("meta"),
        lambda: torch.random.fork_rng(),
    ],
    ids=["no_grad", "autocast", "device", "fork_rng"],
)
@pytest.mark.parametrize("path", ["backward", "vjp", "create_graph"])
def test_an_exception_leaves_the_ambient_state_alone(surroundings, path):
    x = torch.randn(3, 3, requires_grad=True)
    fn = remat(fails_the_second_time())
    if path == "vjp":
        _, pull = torch.func.vjp(fn, x.detach())
    else:
        y = fn(x)

    def run():
        if path == "vjp":
            pull(torch.ones((), device="cpu"))
        else:
            one = torch.ones((), device="cpu")
            torch.autograd.grad(y, x, one, create_graph=path == "create_graph")

    with surroundings():
        torch.manual_seed(11)
        before = ambient_state()
        with pytest.raises(FailureError, match="boo"):
            run()
        assert ambient_state() == before
    # And everything works again.
    with count_ops() as ops:
        remat(noisy)(leaf()).backward()
    assert ops["sin"] == 2


def test_an_exception_of_the_forward_leaves_the_ambient_state_alone():
    def breaks(x):
        with torch.no_grad():
            raise FailureError("boo")

    x = leaf()
    before = ambient_state()
    for call in (remat(breaks), grad(remat(breaks))):
        with pytest.raises(FailureError, match="boo") as caught:
            call(x)
        assert not hasattr(caught.value, "__notes__")
        assert ambient_state() == before
    with count_ops() as ops:
        remat(noisy)(leaf()).backward()
    assert ops["sin"] == 2


@pytest.mark.parametrize("higher_order", [False, True])
def test_a_recomputation_that_computes_something_else_is_an_error(higher_order):
    calls = Evaluations()

    def fn(x):
        calls.note(None)
        return x.sin().reshape((3,) if len(calls) == 1 else (1, 3)).cos()

    y = remat(fn, higher_order=higher_order)(leaf(3))
    # The graph of the forward tells what is saved, one node what is returned.
    differs = r"saves something else" if not higher_order else r"returned"
    with pytest.raises(RecomputeError, match=rf"{differs}[\s\S]*\[1, 3\]"):
        y.sum().backward()


# --- Grad mode -------------------------------------------------------------------


def test_grad_mode_inside_is_that_of_the_forward():
    modes = Evaluations()
    note = modes.note

    def fn(x):
        note(torch.is_grad_enabled())
        with torch.no_grad():
            note(torch.is_grad_enabled())
            scale = x.abs().max()
        return (x / scale).sin()

    x = leaf(3)
    want = torch.autograd.grad(fn(x).sum(), x)
    got = torch.autograd.grad(remat(fn)(x).sum(), x)
    assert_same(got, want)
    assert [*modes] == [True, False] * 3


def test_with_grad_mode_off_the_function_is_called_as_it_is():
    x = leaf(1024)
    seen = []

    def fn(x):
        seen.append((id(x), torch.is_grad_enabled()))
        return x.sin().sin()

    for off in (torch.no_grad, torch.inference_mode):
        with off():
            assert live_bytes(lambda: remat(fn)(x)) == 4096
    assert seen == [(id(x), False)] * 2
    with count_ops() as ops:
        remat(fn)(x).sum().backward()
    assert ops["sin"] == 2 + 1
