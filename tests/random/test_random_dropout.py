"""Dropout by a key: the mask is a function of it, so nothing else is stored."""

import pytest
import torch
from support.draws import KEYS, K
from support.tables import rows
from support.transforms import TRANSFORMS, backward
from torch import nn
from torch.autograd import forward_ad, gradcheck
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from remat import random, remat
from remat.testing import assert_same, count_ops, live_bytes, peak_bytes


X = torch.linspace(-2.0, 3.0, 24).view(2, 3, 4)


def leaf(x=X):
    return x.clone().requires_grad_()


def plain(key, x, p):
    """What it is to equal, with a mask."""
    drop = random.bernoulli(key, p, x.shape)
    return torch.where(drop, 0.0, x * (1 / (1 - p)))


# --- Values ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.complex64, torch.complex128),
    ],
)
@pytest.mark.parametrize("p", [0.1, 0.9])
def test_dropout_drops_by_coins_of_the_key_and_scales_the_rest(p, dtype):
    x = leaf(X.to(dtype))
    y = random.dropout(K, x, p)
    assert_same(y.detach(), plain(K, X.to(dtype), p))
    assert y.dtype == dtype
    with torch.no_grad():
        assert_same(random.dropout(K, x, p), y.detach())
    with torch.inference_mode():
        assert torch.equal(random.dropout(K, x, p), y)


def test_the_input_is_returned_where_there_is_nothing_to_drop():
    x = leaf()
    assert random.dropout(K, x, 0.0) is x
    assert random.dropout(K, x, 0) is x
    assert random.dropout(K, x, 0.5, training=False) is x
    assert random.dropout(None, x, 0.5, False) is x


@pytest.mark.parametrize("p", [1, 1.0, torch.tensor(1.0)])
def test_the_result_and_its_derivative_are_0_where_all_is_dropped(p):
    x = leaf(torch.tensor([1.0, torch.inf, torch.nan]))
    y = random.dropout(K, x, p)
    y.sum().backward()
    assert_same(y.detach(), torch.zeros(3))
    assert_same(x.grad, torch.zeros(3))
    assert_same(grad(lambda x: random.dropout(K, x, p).sum())(X), torch.zeros_like(X))


def test_a_dropped_nan_is_0():
    x = torch.full((100,), torch.nan)
    y = random.dropout(K, x, 0.5)
    assert_same(y.isnan(), ~random.bernoulli(K, 0.5, (100,)))
    assert (y[~y.isnan()] == 0).all()


@pytest.mark.parametrize("keys", [K, KEYS[:, 0], KEYS])
def test_keys_are_for_the_first_dimensions(keys):
    y = random.dropout(keys, leaf(), 0.5).detach()
    drop = random.bernoulli(keys, 0.5, X.shape[keys.ndim :])
    assert_same(y, torch.where(drop, 0.0, 2 * X))


REFUSED = {
    "p above": ((K, X, 1.5), ValueError, r"`p` is 1.5, outside \[0, 1"),
    "p below": ((K, X, -0.1, False), ValueError, r"`p` is -0.1, outside"),
    "integers": ((K, X.long(), 0.5), TypeError, r"dropout of torch.int64"),
    "a device": ((KEYS.to("meta"), X, 0.5), ValueError, "key.to.x.device"),
    "a shape": ((KEYS[0], X, 0.5), ValueError, r"shape \[3\] for an `x`"),
    "dimensions": ((KEYS, X[:, 0, 0], 0.5), ValueError, "must begin"),
    "no key": ((X, K, 0.5), TypeError, r"got torch.float32. To make a"),
    "shape of p": ((K, X, torch.ones(3)), ValueError, r"`p` has shape \[3"),
}


@rows("args, error, match", REFUSED)
def test_what_cannot_be_dropped_is_refused(args, error, match):
    with pytest.raises(error, match=match):
        random.dropout(*args)


# --- Derivatives -------------------------------------------------------------------


def curved(drop, p=0.5):
    return lambda x, key=K: (drop(key, x, p).sin() * x).sum()


OURS, PLAIN = curved(random.dropout), curved(plain)


def batch_of_cotangents(fn, x):
    x = leaf(x)
    y = torch.stack([fn(x), fn(2 * x)])
    return torch.autograd.grad(y, x, torch.eye(2), is_grads_batched=True)[0]


def forward_mode(fn, x):
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(fn(dual)).tangent


WAYS = TRANSFORMS | {
    "a batch of cotangents": batch_of_cotangents,
    "forward mode": forward_mode,
    "forward mode, then backward": lambda f, x: backward(
        lambda x: forward_mode(f, x), x
    ),
    "grad under a base gradient": lambda f, x: backward(
        lambda x: grad(f)(x).sin().sum(), x
    ),
    "vmap of grad, over keys": lambda f, x: vmap(grad(f), (None, 0))(x, KEYS[0]),
    "vmap of grad, over parts": lambda f, x: vmap(grad(f))(x, KEYS[:, 0]),
    "make_fx": lambda f, x: make_fx(lambda *a: grad(f)(*a))(x, K)(2 * x, KEYS[0, 0]),
    "remat": lambda f, x: backward(remat(f), x),
    "grad of remat": lambda f, x: grad(remat(f))(x),
    "vmap of grad of remat, over keys": lambda f, x: vmap(grad(remat(f)), (None, 0))(
        x, KEYS[0]
    ),
}


# torch.func.linearize's own.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@rows("way", WAYS)
def test_every_derivative_is_that_of_the_formula(way):
    assert_same(way(OURS, X), way(PLAIN, X), reassociated=True)


@pytest.mark.parametrize("way", ["backward", "grad", "vjp", "make_fx", "remat"])
def test_first_derivatives_are_bitwise_those_of_the_formula(way):
    assert_same(WAYS[way](OURS, X), WAYS[way](PLAIN, X))


@pytest.mark.parametrize("backend", ["aot_eager"])
def test_compiled_gradients_are_those_of_the_formula(backend):
    torch._dynamo.reset()
    compiled = torch.compile(OURS, backend=backend, fullgraph=True)
    assert_same(backward(compiled, X), backward(OURS, X))
    inner = torch.compile(grad(OURS), backend=backend, fullgraph=True)
    assert_same(inner(X), grad(OURS)(X))


def test_derivatives_flow_to_a_probability_that_is_a_tensor():
    x = leaf(X.double())
    p = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.double, requires_grad=True)
    assert gradcheck(lambda x, p: random.dropout(K, x, p), (x, p))
    even = random.dropout(K, x, torch.tensor(0.5))
    assert_same(even.detach(), random.dropout(K, x, 0.5).detach())
    each = vmap(random.dropout, in_dims=(None, None, 0))(K, X, p.detach().float())
    assert_same(each[1], random.dropout(K, X, p[1].detach().float()))


# --- Memory format -----------------------------------------------------------------

FORMATS = {
    "rows": lambda x: x,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(-1, -2),
    "permuted": lambda x: x.permute(3, 1, 0, 2),
}


@rows("arrange", FORMATS)
@pytest.mark.parametrize("p", [0.5, torch.tensor(0.5)])
def test_values_and_gradients_keep_the_memory_format(arrange, p):
    x = arrange(torch.arange(1.0, 2 * 3 * 4 * 5 + 1).view(2, 3, 4, 5)).detach()
    rows = random.dropout(K, x.contiguous(), p)
    for t in (x, of_graph := leaf(x)):
        y = random.dropout(K, t, p)
        assert y.stride() == x.stride()
        assert_same(y.detach().contiguous(), rows)
    (g,) = torch.autograd.grad(y, of_graph, torch.ones_like(x))
    assert g.stride() == x.stride()
    assert_same((g * x).contiguous(), rows)


def test_the_result_is_made_once_the_numbers_are_gone():
    x = torch.ones(100_000)
    numbers = peak_bytes(lambda: random.uniform(K, x.shape))
    # The mask beside the numbers, then beside the result; and two scalars of a product.
    both, scalars = 5 * x.numel(), 12
    assert peak_bytes(lambda: random.dropout(K, x, 0.5)) == max(numbers, both + scalars)


# --- What is stored ----------------------------------------------------------------


def test_the_graph_holds_the_key_and_no_mask():
    x = leaf(torch.ones(1000))
    n = x.nbytes
    assert live_bytes(lambda: random.dropout(K, x, 0.5)) == n
    assert live_bytes(lambda: random.dropout(random.fold_in(K, 3), x, 0.5)) == n + 16
    assert live_bytes(lambda: nn.functional.dropout(x, 0.5)) >= n + x.numel()


def test_within_remat_not_even_the_key_is_held():
    x = leaf(torch.ones(1000))
    fn = remat(lambda x, key: random.dropout(random.fold_in(key, 3), x.sin(), 0.5))
    assert live_bytes(lambda: fn(x, K)) == x.nbytes
    with count_ops() as ops:
        fn(x, K).sum().backward()
    assert ops["remat::uniform"] == 3  # in the forward, again, and for its derivative


def test_the_backward_draws_again_once():
    x = leaf()
    with count_ops() as forward:
        y = random.dropout(K, x, 0.5)
    with count_ops() as backward:
        y.sum().backward()
    assert forward["remat::uniform"] == backward["remat::uniform"] == 1
    assert_same(x.grad, plain(K, torch.ones_like(X), 0.5))


def test_a_key_changed_in_place_is_an_error():
    data = K.data.clone()
    y = random.dropout(data, leaf(), 0.5)
    data.copy_(KEYS.data[0, 0])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
