"""`saved_residuals`: what stays alive for the backward, to the byte.

The measure: the function runs on fresh copies of its arguments, of which only the graph
keeps any, and the bytes alive afterwards are the allocator's own count.
"""

import functools
import types

import pytest
import torch
from support.kept import leaves, measured, origins, total
from support.tables import crossed
from support.zoo import ZOO, X, plainly
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import dropout

import remat.random
from remat import remat as ckpt, saved_residuals
from remat._torch import autograd as _autograd


def assert_exact(fn, *args, captured=0, **kwargs):
    """The list adds up to what is measured, and to what the caller holds besides."""
    found = saved_residuals(fn, *args, **kwargs)
    outside = [r for r in found if r.origin.startswith("from the captured")]
    assert total(found) - total(outside) == measured(fn, *args, **kwargs) > 0
    assert total(outside) == captured
    return found


WRAPS = {
    "plain": plainly,
    "remat": ckpt,
    "remat of remat": lambda fn: ckpt(ckpt(fn)),
    "twice": lambda fn: (
        lambda *args, **kwargs: (fn(*args, **kwargs), ckpt(fn)(*args, **kwargs))
    ),
}
plain_and_remat = pytest.mark.parametrize("wrap", [plainly, ckpt])


@crossed("case, name", sorted(ZOO), WRAPS)
def test_the_total_is_what_the_graph_of_the_zoo_keeps_alive(case, name):
    (fn, call), wrap = ZOO[case], WRAPS[name]
    w, x = leaves((4, 4), (4, 4))
    wrapped = wrap(fn)
    if case == "linear" and wrap is plainly:
        assert [r.origin for r in saved_residuals(fn, w, x)] == ["from a constant"]
        return
    assert_exact(functools.partial(call, wrapped), w, x)


# --- All kinds of functions ---


def tensors(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).requires_grad_() for s in sizes]


def called(module, *sizes):
    """A call of a module with parameters that are arguments."""
    params = {k: p.detach().requires_grad_() for k, p in module.named_parameters()}

    def call(params, *args):
        return functional_call(module, params, args)

    return call, [params, *tensors(*sizes)]


def assigned(x):
    h = x.exp()
    h[0] = x[1].sin()
    h[:, 1].mul_(x[:, 2])
    return h.pow(3)


def in_place(x):
    h = x.sin()
    h.mul_(x).tanh_()
    out = torch.zeros(4, 4, dtype=h.dtype)
    out[1:] = h[1:].exp()
    out[0].mul_(x[0].cos())
    return out.sin()


def drop_by_key(key, x):
    return remat.random.dropout(key, x, 0.5).sin()


def with_generator(x, generator):
    return x * torch.rand(64, generator=generator)


def func_inside(x):
    slopes = vmap(grad(lambda x: x.sin().sin()))(x)
    return slopes * jvp(torch.sin, (x,), (x,))[1]


# Each gives a function and arguments.
BATTERY = {
    # Of an LSTM the profiler loses events: blocks that oneDNN had before it started.
    "a recurrent cell": lambda: called(nn.LSTMCell(4, 5), (3, 4)),
    "a perceptron": lambda: called(
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)),
        (5, 4),
    ),
    "attention": lambda: called(nn.MultiheadAttention(16, 4), *[(5, 2, 16)] * 3),
    "a transformer layer": lambda: called(
        nn.TransformerEncoderLayer(16, 4, batch_first=True), (2, 5, 16)
    ),
    "convolutions": lambda: called(
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.SiLU(), nn.MaxPool2d(2)
        ),
        (2, 3, 8, 8),
    ),
    "spectral norm": lambda: called(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), (2, 4)
    ),
    "fused attention": lambda: (
        functools.partial(nn.functional.scaled_dot_product_attention, is_causal=True),
        tensors(*[(1, 2, 8, 16)] * 3),
    ),
    "an embedding": lambda: (
        nn.functional.embedding,
        [torch.tensor([[1, 2], [0, 1]]), *tensors((4, 3))],
    ),
    "a vmapped gradient": lambda: (
        lambda x: vmap(grad(lambda r: (r.sin() * 2).exp().sum()))(x),
        tensors((4, 4)),
    ),
    "torch.func inside": lambda: (func_inside, leaves((4,))),
    "several at once": lambda: (
        lambda a, b: [t.sin() for t in torch._foreach_mul([a, b], [b, a])],
        tensors((4,), (4,)),
    ),
    "assignment": lambda: (assigned, tensors((4, 4))),
    "in-place operations": lambda: (in_place, leaves((4, 4))),
    "Python numbers": lambda: (lambda x: 2 * x * (x - 1) ** 3 / 7, tensors((4,))),
    "complex numbers": lambda: (lambda x: torch.fft.fft(x).abs(), tensors((4, 4))),
    "solvers": lambda: (lambda a: torch.linalg.inv(a).logdet(), tensors((4, 4))),
    "dropout": lambda: (lambda x: dropout(x.sin(), 0.5).exp(), leaves((64,))),
    "dropout by key": lambda: (drop_by_key, [remat.random.key(0), *leaves((1000,))]),
    "a generator": lambda: (with_generator, [*leaves((64,)), torch.Generator()]),
}


@crossed("case, wrap", sorted(BATTERY), [plainly, ckpt])
def test_what_torch_has_to_the_byte(case, wrap):
    fn, args = BATTERY[case]()
    found = saved_residuals(wrap(fn), *args)
    ours = [r for r in found if "captured" not in r.origin]
    assert total(ours) == measured(wrap(fn), *args) > 0


@plain_and_remat
def test_batch_norm_to_the_byte_and_with_the_copies_that_remat_keeps(wrap):
    norm = nn.BatchNorm1d(4)
    x = torch.randn(8, 4, requires_grad=True)
    # The weight and the running statistics; a recompute reads the bias besides.
    found = assert_exact(wrap(norm), x, captured=16 * (3 + (wrap is ckpt)))
    copies = [r.origin for r in found if r.origin.startswith("copy")]
    names = ["self.running_mean", "self.running_var", "self.num_batches_tracked"]
    expected = [f"copy of `{n}` as it was before the call" for n in names]
    assert copies == (expected if wrap is ckpt else [])


# --- Views and storages ---


def test_each_storage_counts_once_however_many_views_of_it_are_saved():
    (x,) = leaves((4, 4))

    def f(x):
        return x[0].sin() + x[1].sin() + x.t()[2].sin()

    (only,) = assert_exact(f, x)
    assert (only.nbytes, only.shape, only.readers) == (128, (4, 4), ("sin",))


def test_a_saved_view_keeps_the_whole_storage():
    (x,) = leaves((4, 4))
    found = assert_exact(lambda x: x.exp()[0].sin(), x)
    assert [(r.origin, r.nbytes) for r in found] == [("output of exp", 128)]


def test_an_argument_that_is_a_view_counts_with_all_that_it_keeps():
    (x,) = leaves((8, 4))
    (only,) = saved_residuals(torch.sin, x[0])
    assert (only.shape, only.nbytes) == ((4,), 256)


def test_tied_weights_count_once():
    (w,) = leaves((4, 4))
    found = assert_exact(lambda p, x: x @ p["a"] @ p["b"].t(), {"a": w, "b": w}, X)
    assert [r.origin for r in found].count("from the argument p['a']") == 1
    assert "from the argument p['b']" not in [r.origin for r in found]


def test_a_captured_module_is_listed_with_the_paths_of_its_parameters():
    block = nn.Module()
    block.up, block.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def f(x):
        return block.down(block.up(x).relu())

    x = torch.randn(5, 4, requires_grad=True)
    weights = {f"from the captured `block.{part}.weight`" for part in ("up", "down")}
    found = assert_exact(f, x, captured=2 * 32 * 4)
    assert {r.origin for r in found if "captured" in r.origin} == weights
    found = assert_exact(ckpt(f), x, captured=2 * 32 * 4 + 8 * 4 + 4 * 4)
    assert {r.origin for r in found if "weight" in r.origin} == weights


# --- Autocast ---


def halves(w, x):
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ w).relu() @ w


# No leaves, of which autocast would cache the casts: the copies measured are none.
@plain_and_remat
def test_autocast_to_the_byte(wrap):
    found = assert_exact(wrap(halves), *(t.float() for t in leaves((4, 4), (4, 4))))
    made = [r for r in found if r.dtype is torch.bfloat16]
    assert bool(made) == (wrap is plainly)


def test_an_autocast_around_the_report_is_that_of_the_function():
    w, x = (t.float() for t in leaves((4, 4), (4, 4)))
    with torch.autocast("cpu", torch.bfloat16):
        found = assert_exact(torch.mm, w, x)
    assert {r.dtype for r in found} == {torch.bfloat16}


# --- Custom functions and hooks ---


class Keeps(torch.autograd.Function):
    """Keeps one tensor as it should, another on its ctx, a third deeper."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.second = x * 2
        ctx.rest = {"third": [x.exp()], "object": types.SimpleNamespace(t=x.cos())}
        return x.sin()

    @staticmethod
    def backward(ctx, cotangent):
        (x,) = ctx.saved_tensors
        return cotangent * x * ctx.second


def test_what_a_custom_function_keeps_on_its_ctx_is_listed():
    (x,) = leaves((4,))
    found = assert_exact(lambda x: Keeps.apply(x) * x, x)
    made = {r.origin for r in found if r.readers == ("Keeps",)}
    assert made == {"output of mul", "output of exp", "output of cos"}
    assert [r.nbytes for r in found] == [32] * 5


def test_what_hooks_packed_is_listed_and_not_unpacked():
    (x,) = leaves((4,))
    unpacked = []

    def f(x):
        hooks = (lambda t: (t * 3, "text"), unpacked.append)
        with torch.autograd.graph.saved_tensors_hooks(*hooks):
            return x.sin().exp()

    found = assert_exact(f, x)
    assert [r.origin for r in found] == ["output of mul"] * 2
    assert [r.readers for r in found] == [("sin",), ("exp",)]
    assert unpacked == []


def test_torch_checkpoint_is_not_run_again_by_the_report():
    calls = []
    (x,) = leaves((4,))

    def f(x):
        calls.append(None)
        return x.sin().sin()

    def checkpointed(x):
        return torch.utils.checkpoint.checkpoint(f, x.exp(), use_reentrant=False)

    assert "from a constant" in origins(checkpointed, x)  # the state of the generator
    assert len(calls) == 1
    assert_exact(checkpointed, x)


def test_an_in_place_operation_on_a_view_does_not_tell_what_it_read():
    (x,) = leaves((4,))

    def f(x):
        h = x.exp()
        h[1:].mul_(x[1:].sin())
        return h

    found = assert_exact(f, x)
    assert [r.readers for r in found if r.origin == "output of sin"] == [()]


def test_a_saved_tensor_that_was_changed_since_is_still_listed():
    (x,) = leaves((4,))

    def f(x):
        h = x.exp()
        out = h.sin()
        h.mul_(2.0)
        return out

    assert "output of mul_" in [r.origin for r in assert_exact(f, x)]


def test_without_access_to_saved_tensors_they_are_read_as_the_backward_does(
    monkeypatch,
):
    """An older torch: its saved tensors show nothing but through the node."""

    def old(node):
        for name, raws in raw_of(node):
            yield name, [object()] * len(raws)

    raw_of = _autograd._raw_of
    (x,) = leaves((4,))

    def f(x):
        h = x.sin().exp()
        return Keeps.apply(h).mul_(x)

    new = saved_residuals(f, x)
    monkeypatch.setattr(_autograd, "_raw_of", old)
    assert saved_residuals(f, x) == new
    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda t: t):
        (only,) = saved_residuals(lambda x: x.exp(), x)
    assert (only.origin, only.readers) == ("output of exp", ())


# --- Tensors that are not plain ---


def test_sparse_tensors_count_with_their_indices():
    indices = torch.tensor([[0, 1], [1, 0]])
    sparse = torch.sparse_coo_tensor(
        indices, torch.ones(2, dtype=torch.double), (4, 4), check_invariants=True
    ).coalesce()
    (x,) = leaves((4, 4))
    found = saved_residuals(lambda s, x: torch.sparse.mm(s, x), sparse, x)
    assert [r.origin for r in found] == ["from the argument s"] * 2
    assert sum(r.nbytes for r in found) == 32 + 16


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_values_and_the_sizes_of_nested_tensors_are_listed():
    (x,) = leaves((2, 5, 8))

    def f(x):
        ragged = torch.nested.as_nested_tensor([x[0], x[1][:3]])
        return torch.nested.to_padded_tensor(ragged.sin(), 0.0)

    found = assert_exact(f, x)
    values = [r for r in found if r.dtype is torch.double]
    assert [r.nbytes for r in values if r.shape == (64,)] == [512] * 2


# --- Tensors without memory ---


@plain_and_remat
def test_a_module_of_fake_or_meta_tensors_keeps_as_many_bytes(wrap):
    def listed(device):
        with torch.device(device):
            norm, x = nn.BatchNorm1d(4), torch.ones(8, 4)
        found = saved_residuals(lambda x: wrap(norm)(x), x)
        return [(r.shape, r.nbytes) for r in found]

    real = listed("cpu")
    with FakeTensorMode():
        assert listed("cpu") == real
    assert listed("meta") == real
