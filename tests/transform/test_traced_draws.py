"""Draws in compiled code and in traces: one mask for both runs, and another next time.

Euler's identity tells: w . grad f(w) = n f(w) for f of degree n in w. It holds whatever
the masks are, if the value and the gradient are of the same ones.
"""

import pytest
import torch
from support.tables import rows
from support.traced import Graphs, W, X, begins_again, compiling, ran
from torch import nn
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import RandomnessError, policies, random, remat


dropout = nn.functional.dropout
KEY = random.key(0)
DOUBLE = {"dtype": torch.double}


# --- Of degree 2 in w ---


def dropped(w, x):
    return dropout(x @ w, 0.5) @ w


def drawn_twice(w, x):
    return dropout(dropout(x @ w, 0.5), 0.3) @ w


def same_arguments(w, x):
    """Two draws that differ in nothing but when they are drawn."""
    y = x @ w
    return (torch.rand(4, 8, **DOUBLE) * y) @ w + (torch.rand(4, 8, **DOUBLE) * y) @ w


def bernoulli(w, x):
    """In place, with the probability by default, and by name."""
    y = x @ w
    mask = torch.empty_like(y).bernoulli_(p=0.5) + torch.empty_like(y).bernoulli_()
    return (y * mask) @ w


def normal(w, x):
    y = x @ w
    return (y * torch.empty_like(y).normal_(mean=1.0, std=0.5)) @ w


def shuffled(w, x):
    return ((x @ w)[torch.randperm(4)] * x) @ w


def by_key(w, x):
    return random.dropout(KEY, x @ w, 0.5) @ w


def bound(w, x):
    return random.bind(KEY)(dropped)(w, x)


def nested(w, x):
    return remat(dropped)(w, x) + remat(dropped)(w, x)


DRAWS = {
    fn.__name__: fn
    for fn in (
        *(dropped, drawn_twice, same_arguments, bernoulli, normal, shuffled),
        *(by_key, bound, nested),
    )
}
KEYED = "by_key", "bound"
POLICIES = {
    "nothing": None,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
}


def loss_of(fn, policy=None):
    """Of degree 4 in w."""
    return lambda w, x: remat(fn, policy=policy)(w, x).square().sum()


def by_backward(compile, loss):
    compiled = compile(loss)

    def run():
        w = W.clone().requires_grad_()
        value = compiled(w, X)
        torch.rand(3)  # as what runs before a backward may
        value.backward()
        return w.grad, value.detach()

    return run


def by_grad(compile, loss):
    compiled = compile(grad_and_value(loss))
    return lambda: compiled(W, X)


def by_make_fx(mode):
    def traced(_, loss):
        trace = make_fx(grad_and_value(loss), tracing_mode=mode)(W, X)
        return lambda: trace(W, X)

    return traced


PATHS = {"backward": by_backward, "grad": by_grad}
TRACES = {f"make_fx, {mode}": by_make_fx(mode) for mode in ("real", "fake", "symbolic")}


def assert_euler(path, loss, *, backend="aot_eager", keyed=False):
    """The identity holds in each call; calls draw anew, and seeds decide."""
    torch._dynamo.reset()
    run = path(lambda fn: torch.compile(fn, backend=backend, fullgraph=True), loss)
    values = []
    for seed in (0, None, 0):
        if seed is not None:
            torch.manual_seed(seed)
        gradient, value = run()
        torch.testing.assert_close(
            (W * gradient).sum() / (4 * value), torch.ones_like(value)
        )
        values.append(value)
    _, ops = ran(run)
    # Without AOTAutograd there is no barrier. Plain code runs five products.
    assert ops["mm"] > 5 if backend == "eager" else begins_again(ops)
    assert values[0] == values[2]
    assert (values[0] == values[1]) == keyed, "each call has to draw anew"


@rows("path", PATHS, fast=["backward"])
@rows("fn", DRAWS, fast=["drawn_twice", "by_key"])
def test_both_runs_have_the_same_masks(fn, path):
    assert_euler(path, loss_of(fn), keyed=fn.__name__ in KEYED)


@rows("path", PATHS, fast=["grad"])
@rows("policy", {k: p for k, p in POLICIES.items() if p is not None})
@rows("fn", {k: DRAWS[k] for k in ("dropped", "nested")}, fast=["nested"])
def test_under_a_policy_both_runs_have_the_same_masks(fn, policy, path):
    assert_euler(path, loss_of(fn, policy))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # inductor warns of slow numerics
@rows("policy", POLICIES)
@rows("path", PATHS)
@rows("fn", DRAWS)
def test_both_runs_have_the_same_masks_in_inductors_code(fn, path, policy):
    loss, keyed = loss_of(fn, policy), fn.__name__ in KEYED
    assert_euler(path, loss, backend="inductor", keyed=keyed)


# A trace holds no state of its own: each call of it draws a new mask.
@rows("path", TRACES, fast=["make_fx, real"])
@rows("fn", {k: fn for k, fn in DRAWS.items() if k not in KEYED})
@pytest.mark.one_in(3)
def test_a_trace_draws_anew_in_each_call(fn, path):
    assert_euler(path, loss_of(fn))


@rows("fn", {k: DRAWS[k] for k in KEYED})
def test_a_trace_holds_the_key_that_it_captures(fn):
    """As a real tensor, which torch refuses in a trace of fake ones."""
    assert_euler(by_make_fx("real"), loss_of(fn), keyed=True)


# --- Draws are not merged, and not hidden ---


def test_two_draws_with_the_same_arguments_are_different_ones():
    def fn(w, x):
        first, second = torch.rand_like(x), torch.rand_like(x)
        return first * (x @ w), second * (x @ w)

    with compiling():
        graphs = Graphs()
        compiled = torch.compile(lambda w, x: remat(fn)(w, x), backend=graphs)
        w = W.clone().requires_grad_()
        first, second = compiled(w, X)
        (first + second).sum().backward()
    assert not (first == second).any()
    assert graphs.backward["run_with_rng_state"] == 2
    torch._dynamo.reset()


@pytest.mark.one_in(2)
@rows("fn", {"draws": dropped, "two calls": nested})
def test_a_graph_of_the_backward_draws_from_the_states_of_the_forward(fn):
    graphs = Graphs()
    with compiling():
        by_backward(lambda f: torch.compile(f, backend=graphs), loss_of(fn))()
    names = [name for name in graphs.backward if "rng_state" in name]
    assert names == ["run_with_rng_state"]
    assert sum(graphs.forward[n] for n in graphs.forward if "save_rng_state" in n) >= 1


def test_a_batch_of_masks_is_one_per_example():
    loss = loss_of(dropped)
    xs = torch.stack([X, X, X])
    transform = vmap(grad_and_value(loss), (None, 0), randomness="different")
    with compiling():
        compiled = torch.compile(transform, backend="aot_eager", fullgraph=True)
        gradients, values = compiled(W, xs)
        assert begins_again(ran(lambda: compiled(W, xs))[1])
    euler = (W * gradients).sum((1, 2)) / (4 * values)
    torch.testing.assert_close(euler, torch.ones_like(euler))
    assert len({*values.tolist()}) == 3


@rows("path", PATHS, fast=["backward"])
def test_attention_draws_for_its_dropout(path):
    def attend(w, x):
        q = (x @ w)[None]
        options = {"dropout_p": 0.5}
        out = nn.functional.scaled_dot_product_attention(x[None], x[None], q, **options)
        return out[0] @ w

    assert_euler(path, loss_of(attend))


def test_a_generator_is_refused_in_a_graph():
    generator = torch.Generator().manual_seed(0)

    def fn(w, x):
        return torch.rand(4, 8, generator=generator, **DOUBLE) * (x @ w)

    message = (
        r"rand.generator draws from an explicit generator in `\S+fn` .* with a key"
    )
    with pytest.raises(RandomnessError, match=message):
        make_fx(grad_and_value(loss_of(fn)))(W, X)


def test_the_stream_is_left_where_plain_leaves_it():
    """What is drawn after a call is what would be drawn after the plain one."""
    after = []
    for wrap in (lambda fn: fn, remat):
        with compiling():
            compiled = torch.compile(wrap(dropped), backend="aot_eager")
            w = W.clone().requires_grad_()
            compiled(w, X)
            torch.manual_seed(5)
            value = compiled(w, X).sum()
            _, ops = ran(value.backward)
            assert begins_again(ops) == (wrap is remat)
            after.append((value.detach(), w.grad, torch.rand(3)))
    for plain, ours in zip(*after, strict=True):
        assert torch.equal(plain, ours)


# --- The helper itself ---


class Draws:
    """Draws anew in the backward: what a recompute without states does."""

    def __init__(self, fn):
        self.fn = fn

    def __call__(self, w, x):
        return self.fn(w.detach(), x) - self.fn(w, x).detach() + self.fn(w, x)


def test_the_identity_fails_for_other_masks():
    with pytest.raises(AssertionError, match="not close"):
        assert_euler(by_backward, lambda w, x: Draws(dropped)(w, x).square().sum())


def test_the_identity_fails_for_masks_that_stay():
    with pytest.raises(AssertionError, match="draw anew"):
        assert_euler(by_backward, loss_of(by_key))
