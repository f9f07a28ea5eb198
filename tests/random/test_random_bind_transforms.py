"""bind under vmap, derivatives and remat."""

from contextlib import nullcontext

import pytest
import torch
from support.binding import (
    ATTENTION,
    ENCODER,
    KEYS,
    ONES,
    SEQUENCE,
    XS,
    bound,
    first,
    loss,
    make,
    per_example,
    unmoved,
)
from support.tables import rows
from support.transforms import TRANSFORMS
from support.zoo import assert_not_vanishing
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F  # noqa: N812

from remat import RandomnessError, random, remat
from remat.random import bind, fold_in, key
from remat.testing import assert_same, count_ops, live_bytes


# --- Per example: vmap over keys --------------------------------------------------

BATCHED = {
    "dropout": F.dropout,
    "dropout1d": F.dropout1d,
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rand": lambda x: torch.rand(2, 3),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(10, (50,)),
    "randperm": lambda x: torch.randperm(20),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "normal": lambda x: torch.normal(x, x.abs()),
    "multinomial": lambda x: torch.multinomial(x.softmax(-1), 3),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3),
    "MultiheadAttention": lambda x: ATTENTION(x, x, x)[0],
    "TransformerEncoderLayer": ENCODER,
}


@rows("in_dims", {"both": (0, 0), "keys": (0, None), "xs": (None, 0)}, fast=("both",))
@rows("fn", BATCHED)
def test_each_key_draws_under_vmap_what_it_draws_alone(fn, in_dims):
    one = per_example(fn)
    k, x = (a if d == 0 else a[0] for a, d in zip((KEYS, XS), in_dims, strict=True))
    ks = [*k] if k.ndim else [k] * 3
    xs = [*x] if x.ndim == XS.ndim else [x] * 3
    each = torch.stack([one(k, x) for k, x in zip(ks, xs, strict=True)])
    torch.testing.assert_close(vmap(one, in_dims)(k, x).expand_as(each), each)


def test_only_a_batched_tensor_may_be_drawn_into_under_vmap():
    one = per_example(lambda x: x.clone().normal_())
    assert torch.equal(vmap(one)(KEYS, XS)[1], one(KEYS[1], XS[1]))
    with pytest.raises(RuntimeError, match="vmapped over"):
        vmap(one, (0, None))(KEYS, XS[0])


def test_a_shared_key_is_refused_where_vmap_asks_for_different_numbers():
    def drop(x):
        return vmap(F.dropout, randomness="different")(x)

    refused = pytest.raises(RandomnessError, match="examples share")
    with unmoved(), refused:
        bound(0, drop, XS)
    with refused:
        vmap(per_example(F.dropout), (None, 0), randomness="different")(KEYS[0], XS)
    got = vmap(per_example(F.dropout), randomness="different")(KEYS, XS)
    assert torch.equal(got, vmap(per_example(F.dropout))(KEYS, XS))
    # Of an outer vmap it is the inner that asks.
    outer = vmap(lambda x: vmap(F.dropout)(x), randomness="different")
    assert torch.equal(*bound(0, outer, XS[0].expand(2, *XS[0].shape) + 1))


# --- Derivatives ------------------------------------------------------------------


def written_out(w, k, x=XS[0]):
    y = random.dropout(fold_in(k, 0), x @ w, 0.5).tanh()
    return (y * random.uniform(fold_in(k, 1), (8,))).square().sum()


# torch.func.linearize's own.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@rows("transform", TRANSFORMS)
def test_derivatives_are_those_of_the_draws_written_out(transform):
    w = make(8, 8)
    got, want = (transform(lambda w, f=f: f(w, key(4)), w) for f in (loss, written_out))
    assert_same(got, want, reassociated=True)
    assert_not_vanishing(got)


# --- remat: the recompute draws the same ------------------------------------------

MLP = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8))
MODELS = {"mlp": (MLP, make(4, 8, seed=7)), "transformer": (ENCODER, SEQUENCE)}


def inside(model, k):
    def fn(x):
        with bind(k):
            return first(model(x))

    return fn


# From how to wrap a function, a model and its input, to what has gradients.
USES = {
    "bind outside": lambda wrap, m, x: bound(1, lambda: first(wrap(m)(x))),
    "bind inside": lambda wrap, m, x: wrap(inside(m, key(1)))(x),
    "a key as argument": lambda wrap, m, x: wrap(lambda k, x: inside(m, k)(x))(
        key(1), x
    ),
    "bind outside and inside": lambda wrap, m, x: bound(
        2, lambda: wrap(inside(m, key(1)))(x) * torch.rand(1)
    ),
    "two calls, and draws between": lambda wrap, m, x: bound(
        1, lambda: first(wrap(m)(first(wrap(m)(x)) * torch.rand(1)))
    ),
    "nested": lambda wrap, m, x: bound(
        1, lambda: wrap(lambda x: first(wrap(m)(x)) * torch.rand(1))(x)
    ),
}


def grads_of(y, parameters):
    return torch.autograd.grad(y.square().sum(), parameters, retain_graph=True)


@rows("model, x", MODELS, fast=("mlp", "transformer"))
@rows("use", USES, fast=("bind outside", "bind inside", "nested"))
def test_recomputed_draws_are_those_of_the_forward(use, model, x):
    parameters = [*model.parameters()]
    want = use(lambda f: f, model, x)
    with unmoved():
        got = use(remat, model, x)
        with count_ops() as ops:
            grads = [grads_of(got, parameters) for _ in range(2)]
    assert torch.equal(got, want)
    with count_ops() as plain:
        wanted = grads_of(want, parameters)
    assert ops["remat::uniform"] > 2 * plain["remat::uniform"]
    for a, b, c in zip(*grads, wanted, strict=True):
        assert torch.equal(a, b)
        # A model that is called twice adds up its gradients in another order.
        torch.testing.assert_close(a, c)


def test_the_recomputation_draws_each_number_again_and_counts_for_nobody():
    x = make(4, 8, seed=7)
    with bind(key(1)):
        y = remat(MLP)(x)
        with count_ops() as ops:
            grads_of(y, [*MLP.parameters()])
        after = torch.rand(3)
    # Of the dropout, and again for its derivative.
    assert ops["remat::uniform"] == 2
    assert ops["tanh"] == 1
    assert torch.equal(after, random.uniform(fold_in(key(1), 1), (3,)))


def test_a_backward_in_a_block_replays_what_was_drawn_outside_of_it():
    x = make(64).requires_grad_()

    def gradient(wrap, *, inside):
        torch.manual_seed(3)
        y = wrap(lambda x: F.dropout(x).sin().exp())(x)
        with bind(key(77)) if inside else nullcontext():
            return torch.autograd.grad(y.sum(), x)[0]

    want = gradient(lambda f: f, inside=False)
    with count_ops() as ops:
        assert torch.equal(gradient(remat, inside=True), want)
    assert ops["sin"] == 2
    with bind(key(1)):
        y = remat(F.dropout)(x)
    with bind(key(2)):
        (got,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(torch.rand(3), random.uniform(fold_in(key(2), 0), (3,)))
    assert torch.equal(got, bound(1, F.dropout, ONES.new_ones(64)))


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("model", "x"), [*MODELS.values()][:2], ids=[*MODELS][:2])
def test_recomputed_draws_are_those_of_the_forward_in_torch_func(outside, model, x):
    params = dict(model.named_parameters())

    def results(wrap):
        def fn(p, x):
            return functional_call(model, p, (x,))

        def loss(p, k, x):
            if outside:
                return bind(k)(wrap(fn))(p, x).square().sum()
            return wrap(lambda p, k, x: bind(k)(fn)(p, x))(p, k, x).square().sum()

        xs = torch.stack([x, x + 1, x - 1])
        one = grad(loss)(params, KEYS[0], x)
        return one, vmap(grad(loss), (None, 0, 0))(params, KEYS, xs)

    with count_ops() as ops:
        got = results(remat)
    with count_ops() as plain:
        want = results(lambda f: f)
    assert ops["remat::uniform"] > plain["remat::uniform"]
    assert_same(got, want)


@rows("model, x", MODELS)
def test_a_bound_model_consumes_each_key_once_and_no_global_stream(model, x):
    with random.check_key_reuse(), bind(key(1)):
        with count_ops() as forward:
            y = first(remat(model, rng="error")(x))
        with count_ops() as backward:
            y.square().sum().backward()
    # Of the recompute, and again for the derivative.
    assert backward["remat::uniform"] > forward["remat::uniform"] > 0
    model.zero_grad()


def test_no_mask_is_held_for_the_backward():
    x = make(1000, 100).requires_grad_()
    assert live_bytes(lambda: F.dropout(x)) - x.nbytes >= x.numel()
    assert live_bytes(lambda: bound(0, F.dropout, x)) - x.nbytes < 1000
