"""Random streams: what is left out of a recompute moves none that is read.

Under `prune=True` every draw still moves its stream, whether or not what it gives is
needed: another that is needed may come after it, or something that looks where the
stream stands.
"""

# ruff: noqa: F401 - the rows, which are text, use what is imported

import random

import numpy as np
import pytest
import torch
from support.pruning import (
    W,
    X,
    assert_exact,
    dead_end,
    each_case,
    each_policy,
    each_policy_and_way,
    given_up,
    written,
)
from support.tables import rows
from torch import Tensor, nn
from torch.nn.functional import (
    alpha_dropout,
    dropout,
    feature_alpha_dropout,
    rrelu,
    scaled_dot_product_attention as attend,
)
from torch.utils.checkpoint import checkpoint

from remat import remat


pytestmark = given_up  # what depends on the values drawn is in no record


DRAWS = """
only the first: h = dropout(x.sin()) * w; dropout(h); dead_end(h.exp())
only the second: dropout(x, 0.3); b = dropout(x.sin(), 0.4); dropout(w, 0.5)
    dead_end(b.exp() * w)
none needed: dropout(x).detach() * 2 + dropout(w) + x.sin()
of other shapes: torch.rand(7), torch.randn(3, 5), torch.randperm(9)
    torch.randint(5, (2,)); mask = torch.rand_like(x) < 0.5; torch.randn_like(x)
    dead_end((x * mask).exp())
bernoulli: torch.bernoulli(torch.full((3,), 0.5)); p = x.detach().sigmoid()
    mask = torch.bernoulli(p); p.bernoulli_(0.3); dead_end((x * mask).exp())
in place: noise = torch.empty(4, 4, dtype=x.dtype); noise.uniform_().normal_()
    torch.empty(5).exponential_().cauchy_().log_normal_().geometric_(0.3)
    noise.add_(torch.empty_like(noise).random_(5)); dead_end((x * noise).exp())
samplers: p = x.detach().abs() + 0.1; torch.multinomial(p, 2); torch.poisson(p)
    torch._standard_gamma(p); torch._sample_dirichlet(p); torch.normal(0.0, p)
    torch.binomial(torch.full((4, 4), 9.0), torch.full((4, 4), 0.4))
    dead_end((x * torch.normal(x.detach(), 1.0)).exp())
layers: alpha_dropout(x, 0.4, True); feature_alpha_dropout(x, 0.4, True)
    rrelu(x, training=True); h = rrelu(x, training=True)
    nn.functional.gumbel_softmax(x); dead_end((alpha_dropout(h, 0.5, True) * x).exp())
attention: q = torch.stack([x, w]); attend(q, q, q, dropout_p=0.5)
    dead_end(attend(q.sin(), q, q, dropout_p=0.5).exp())
Python and NumPy: dropout(x); random.random(), np.random.rand(3)
    h = (x * random.random()).sin() * np.random.rand(); dead_end(dropout(h).exp())
"""
CONDITIONAL = """
as another says: h = dropout(x); h = dropout(h.sin()) if torch.rand(()) < 0.5 else h
    dead_end((dropout(h) * x).exp())
"""


@pytest.mark.one_in(2)
@each_policy_and_way
@each_case(
    written(DRAWS, globals(), pruned=True), written(CONDITIONAL, globals(), calls=16)
)
def test_the_draws_that_are_needed_are_those_of_the_forward(case, policy, way):
    case.check(policy, way)


# --- Generators and keys ---


GENERATORS = """
dead draws: torch.rand(3, generator=g); dropout(x); mask = drawn(x, g)
    torch.randperm(5, generator=g); dead_end((x * mask).exp())
its state: torch.rand(3, generator=g); again = torch.Generator()
    again.set_state(g.get_state()); dead_end((x * drawn(x, again)).exp())
its clone: torch.rand(3, generator=g); dead_end((x * drawn(x, g.clone_state())).exp())
a seed from it: torch.rand(3, generator=g)
    seed = int(torch.randint(1 << 30, (), generator=g))
    dead_end((x * drawn(x, torch.Generator().manual_seed(seed))).exp())
"""


def drawn(x, generator=None):
    return torch.rand(x.shape, generator=generator, dtype=x.dtype)


@each_policy
@each_case(written(GENERATORS, globals(), arguments=["g"]))
def test_a_generator_is_an_argument(case, policy):
    generator = torch.Generator()
    fn = lambda x: case.fn(x, generator)
    assert_exact(fn, X, policy=policy, before=generator.manual_seed, pruned=True)


# --- What looks where a stream stands ---


class Checkpoint(torch.autograd.Function):
    """A checkpoint as many libraries have their own."""

    @staticmethod
    def forward(ctx, fn, x):
        ctx.fn, ctx.state = fn, torch.get_rng_state()
        ctx.save_for_backward(x)
        with torch.no_grad():
            return fn(x)

    @staticmethod
    def backward(ctx, cotangent):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.set_rng_state(ctx.state)
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return None, torch.autograd.grad(ctx.fn(x), x, cotangent)[0]


def dropped(h):
    return dropout(h).sin().exp()


LOOKERS = """
a checkpoint of ones own: dropout(x); Checkpoint.apply(dropped, x * 2) * 3
torch's checkpoint: dropout(x); checkpoint(dropped, x * 2, use_reentrant=False) * 3
reads the state: torch.rand(3); state = torch.get_rng_state(); torch.rand(3)
    # NumPy's copy of the state, in the last bytes of which is the position.
    dead_end((x * float(state.double().sum())).sin().exp())
forks: torch.rand(3)
    with torch.random.fork_rng(devices=[]): dropout(x); mask = drawn(x)
    torch.rand(2); dead_end((x * mask).exp())
puts it back: torch.rand(5); before = torch.get_rng_state(); a = drawn(x)
    torch.set_rng_state(before); drawn(x); dead_end((x * a * drawn(x)).exp())
"""


@each_policy
@each_case(written(LOOKERS, globals(), calls=7))
def test_a_function_looks_where_the_stream_stands(case, policy):
    case.check(policy)


@pytest.mark.one_in(2)
@each_policy_and_way
@pytest.mark.parametrize("outer_draws", [0, 1, 2])
@pytest.mark.parametrize("prune", ["auto", True, False])
def test_a_nested_call_draws_after_dead_draws(prune, outer_draws, policy, way):
    inner = remat(dropped, prune=prune)

    def fn(x):
        for _ in range(outer_draws):
            dropout(x)
        return inner(x * 2) * 3

    assert_exact(fn, X, policy=policy, way=way)


# --- Operations of the user's ---


STREAM = torch.Generator()


@torch.library.custom_op("pruning::untagged_noise", mutates_args=())
def untagged_noise(x: Tensor) -> Tensor:
    return x + drawn(x)


@torch.library.custom_op("pruning::generator_noise", mutates_args=())
def generator_noise(x: Tensor) -> Tensor:
    return x + drawn(x, STREAM)


@torch.library.custom_op("pruning::numpy_noise", mutates_args=())
def numpy_noise(x: Tensor) -> Tensor:
    return x + torch.from_numpy(np.random.rand(*x.shape))


@torch.library.custom_op("pruning::python_noise", mutates_args=())
def python_noise(x: Tensor) -> Tensor:
    return x + random.random()


def draw_of(op, x):
    """A number of the stream that an operation draws from."""
    if op is generator_noise:
        return drawn(x, STREAM)
    if op is numpy_noise:
        return torch.from_numpy(np.random.rand(*x.shape))
    return torch.rand((), dtype=x.dtype) if op is untagged_noise else random.random()


NOISES = {
    "torch": untagged_noise,
    "generator": generator_noise,
    "numpy": numpy_noise,
    "python": python_noise,
}


def dead_operation(op):
    def fn(x):
        op(x.detach())
        return dead_end((x * draw_of(op, x)).sin().exp())

    return fn


def after_a_dead_draw(op):
    def fn(x):
        draw_of(op, x)
        return dead_end((x * op(x.detach())).exp())

    return fn


@each_policy
@rows("op", NOISES)
@pytest.mark.parametrize("made", [dead_operation, after_a_dead_draw])
def test_an_operation_of_the_users_draws(made, op, policy):
    assert_exact(made(op), X, policy=policy, before=STREAM.manual_seed)


@torch.library.custom_op("pruning::sometimes_noise", mutates_args=())
def sometimes_noise(x: Tensor) -> Tensor:
    return drawn(x) if x.sum() > 0 else x * 2


@each_policy
def test_an_operation_of_the_users_draws_in_some_calls(policy):
    sign = torch.ones(3)

    def fn(x):
        sometimes_noise(sign)
        return dead_end((x * drawn(x)).exp())

    def start(call):
        sign.fill_(1.0 if call % 3 == 2 else -1.0)

    assert_exact(fn, X, policy=policy, before=start, calls=7)
