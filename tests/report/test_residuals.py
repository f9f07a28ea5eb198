"""`saved_residuals`: what stays alive for the backward, to the byte.

The measure: the function runs on fresh copies of its arguments, of which only the graph
keeps any, and the bytes alive afterwards are the allocator's own count.
"""

import functools
import gc
import random
import types
import weakref

import pytest
import torch
from support.zoo import ZOO, W, X, make
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.functional import dropout
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._pytree import tree_leaves, tree_map_only

import remat.random
from remat import (
    CaptureError,
    Residual,
    print_saved_residuals,
    remat as ckpt,
    saved_residuals,
)
from remat._graph.graph import foreign_tensors_at, handles_at, nodes_of
from remat._torch import autograd as _autograd
from remat.testing import live_bytes


def plain(fn):
    return fn


def leaves(*sizes, seed=0):
    return [make(*s, seed=seed + i).requires_grad_() for i, s in enumerate(sizes)]


def total(residuals):
    """The bytes of all tensors; the states of random streams are none."""
    return sum(r.nbytes for r in residuals if r.dtype is not None)


def origins(fn, *args, **kwargs):
    return [r.origin for r in saved_residuals(fn, *args, **kwargs)]


def graph_of(tree):
    return [t.grad_fn for t in tree_leaves(tree) if isinstance(t, Tensor)]


def measured(fn, *args, **kwargs):
    """The bytes that the graph of a call holds, when it alone holds the arguments."""

    def run():
        fresh = tree_map_only(Tensor, Tensor.clone, (args, kwargs))
        result = fn(*fresh[0], **fresh[1])
        torch.clear_autocast_cache()
        return graph_of(result)

    torch.manual_seed(0)
    run()
    return live_bytes(run)


def assert_exact(fn, *args, captured=0, **kwargs):
    """The list adds up to what is measured, and to what the caller holds besides."""
    found = saved_residuals(fn, *args, **kwargs)
    outside = [r for r in found if r.origin.startswith("from the captured")]
    assert total(found) - total(outside) == measured(fn, *args, **kwargs) > 0
    assert total(outside) == captured
    return found


# --- To the byte ---


WRAPS = {
    "plain": plain,
    "remat": ckpt,
    "remat of remat": lambda fn: ckpt(ckpt(fn)),
    "twice": lambda fn: (
        lambda *args, **kwargs: (
            fn(*args, **kwargs),
            ckpt(fn)(*args, **kwargs),
        )
    ),
}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
@pytest.mark.parametrize("case", sorted(ZOO))
def test_the_total_is_what_the_graph_keeps_alive(case, wrap):
    fn, call = ZOO[case]
    w, x = leaves((4, 4), (4, 4))
    wrapped = wrap(fn)
    if case == "linear" and wrap is plain:
        assert [r.origin for r in saved_residuals(fn, w, x)] == ["from a constant"]
        return
    assert_exact(functools.partial(call, wrapped), w, x)


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


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_a_module_to_the_byte(wrap):
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4))
    x = torch.randn(5, 4, requires_grad=True)
    params = {k: p.detach().requires_grad_() for k, p in module.named_parameters()}
    assert_exact(wrap(functools.partial(functional_call, module)), params, x)


def test_a_captured_module_is_listed_with_the_paths_of_its_parameters():
    block = nn.Module()
    block.up, block.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def f(x):
        return block.down(block.up(x).relu())

    x = torch.randn(5, 4)
    weights = ["from the captured `block.up.weight`"]
    weights += ["from the captured `block.down.weight`"]
    found = assert_exact(f, x.requires_grad_(), captured=2 * 32 * 4)
    assert {r.origin for r in found if "captured" in r.origin} == {*weights}
    found = assert_exact(ckpt(f), x, captured=2 * 32 * 4 + 8 * 4 + 4 * 4)
    assert {r.origin for r in found if "weight" in r.origin} == {*weights}


def test_parameters_of_a_module_itself_have_the_names_of_its_state_dict():
    module = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    for fn in (module, ckpt(module)):
        found = origins(fn, torch.randn(2, 4))
        assert found[0] == "from the argument input"
        if fn is not module:
            assert "from the captured `0.weight`" in found


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_batch_norm_to_the_byte_and_with_the_copies_that_remat_keeps(wrap):
    norm = nn.BatchNorm1d(4)
    x = torch.randn(8, 4, requires_grad=True)
    # The weight and the running statistics; a recompute reads the bias besides.
    found = assert_exact(wrap(norm), x, captured=16 * (3 + (wrap is ckpt)))
    copies = [r.origin for r in found if r.origin.startswith("copy")]
    names = ["running_mean", "running_var", "num_batches_tracked"]
    expected = [f"copy of `{n}` as it was before the call" for n in names]
    assert copies == (expected if wrap is ckpt else [])


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_dropout_to_the_byte(wrap):
    (x,) = leaves((64,))
    assert_exact(wrap(lambda x: dropout(x.sin(), 0.5).exp()), x)


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_dropout_by_key_to_the_byte(wrap):
    (x,) = leaves((1000,))
    key = remat.random.key(0)
    assert_exact(wrap(lambda k, x: remat.random.dropout(k, x, 0.5).sin()), key, x)


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_a_generator_to_the_byte(wrap):
    (x,) = leaves((64,))

    def f(x, generator):
        return x * torch.rand(64, generator=generator)

    assert_exact(wrap(f), x, generator=torch.Generator())


def test_the_states_of_streams_that_remat_sets_back_are_listed_besides():
    (x,) = leaves((64,))
    found = saved_residuals(ckpt(lambda x: dropout(x, 0.5)), x)
    (state,) = [r for r in found if r.dtype is None]
    assert state.origin == "state of the stream: cpu"
    assert state.nbytes > 2496
    assert all(r.dtype for r in saved_residuals(ckpt(torch.sin), x))


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_autocast_to_the_byte(wrap):
    # No leaves, of which autocast would cache the casts: the copies measured are none.
    w, x = (t.float() for t in leaves((4, 4), (4, 4)))

    def f(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ w).relu() @ w

    found = assert_exact(wrap(f), w, x)
    halves = [r for r in found if r.dtype is torch.bfloat16]
    assert bool(halves) == (wrap is plain)


def test_an_autocast_around_the_report_is_that_of_the_function():
    # No leaves, of which autocast would cache the casts: the copies measured are none.
    w, x = (t.float() for t in leaves((4, 4), (4, 4)))
    with torch.autocast("cpu", torch.bfloat16):
        found = assert_exact(torch.mm, w, x)
    assert {r.dtype for r in found} == {torch.bfloat16}


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_in_place_operations_to_the_byte(wrap):
    (x,) = leaves((4, 4))

    def f(x):
        h = x.sin()
        h.mul_(x).tanh_()
        out = torch.zeros(4, 4, dtype=h.dtype)
        out[1:] = h[1:].exp()
        out[0].mul_(x[0].cos())
        return out.sin()

    assert_exact(wrap(f), x)


def test_an_in_place_operation_on_a_view_does_not_tell_what_it_read():
    (x,) = leaves((4,))

    def f(x):
        h = x.exp()
        h[1:].mul_(x[1:].sin())
        return h

    found = assert_exact(f, x)
    assert [r.readers for r in found if r.origin == "output of sin"] == [()]


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
    made = [r for r in found if r.readers == ("Keeps",)]
    assert {r.origin for r in made} == {
        "output of mul",
        "output of exp",
        *["output of cos"],
    }
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


def test_a_saved_tensor_that_was_changed_since_is_still_listed():
    (x,) = leaves((4,))

    def f(x):
        h = x.exp()
        out = h.sin()
        h.mul_(2.0)
        return out

    assert "output of mul_" in [r.origin for r in assert_exact(f, x)]


class Circular(torch.autograd.Function):
    """Holds its own output, and so its own node, where nobody looks."""

    @staticmethod
    def forward(ctx, x):
        out = x.exp()
        ctx.kept = iter([out, x.cos()])
        return out

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


def test_a_function_that_holds_itself_is_seen_through():
    (x,) = leaves((4,))
    found = saved_residuals(Circular.apply, x)
    assert [r.origin for r in found] == ["output of exp", "output of cos"]


def test_garbage_is_not_what_is_kept():
    (x,) = leaves((4,))

    def f(x):
        cycle = [x.cos().detach()]
        cycle.append(cycle)
        return x.exp()

    assert origins(f, x) == ["output of exp"]


def test_what_the_function_stashes_elsewhere_is_not_for_the_backward():
    (x,) = leaves((4,))
    stash = []

    def f(x):
        stash.append(x.cos().detach())
        return x.exp()

    assert origins(f, x) == ["output of exp"]


class Deep(torch.autograd.Function):
    """Keeps its input where nobody looks."""

    @staticmethod
    def forward(ctx, x):
        ctx.kept = iter([x])
        return x * 2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 2


def test_an_input_that_is_kept_out_of_sight_is_listed():
    for x in [*leaves((4,)), torch.ones(4)]:
        assert "from the argument x" in origins(lambda x: Deep.apply(x), x)


def test_sparse_tensors_count_with_their_indices():
    indices = torch.tensor([[0, 1], [1, 0]])
    sparse = torch.sparse_coo_tensor(
        indices, torch.ones(2, dtype=torch.double), (4, 4), check_invariants=True
    ).coalesce()
    (x,) = leaves((4, 4))
    found = saved_residuals(lambda s, x: torch.sparse.mm(s, x), sparse, x)
    assert [r.origin for r in found] == ["from the argument s"] * 2
    assert sum(r.nbytes for r in found) == 32 + 16


def test_the_function_of_a_call_is_not_searched_for_what_the_graph_keeps():
    # It may refer to anything: here to a tensor that no node saved.
    aside, kept = torch.full((3,), 2.0), torch.full((5,), 3.0)

    def f(x):
        return (x * x).sin().sum() if len(aside) == 3 else x

    (x,) = leaves((4,))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t + kept[0]):
        h = x.clone()
        out = ckpt(f)(h)
    nodes = [node for node, _ in nodes_of([out])]
    assert sum(len(handles_at(node)) for node in nodes) > 0
    found = {id(t) for node in nodes for t in foreign_tensors_at(node)}
    assert found == {id(h), id(kept)}


def tensors(*sizes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=generator).requires_grad_() for s in sizes]


def called(module, *sizes):
    params = {k: p.detach().requires_grad_() for k, p in module.named_parameters()}
    return functools.partial(functional_call, module), [params, tensors(*sizes)]


def assigned(x):
    h = x.exp()
    h[0] = x[1].sin()
    h[:, 1].mul_(x[:, 2])
    return h.pow(3)


# Each gives a function and arguments.
BATTERY = {
    # Of an LSTM the profiler loses events: blocks that oneDNN had before it started.
    "a recurrent cell": lambda: called(nn.LSTMCell(4, 5), (3, 4)),
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
    "several at once": lambda: (
        lambda a, b: [t.sin() for t in torch._foreach_mul([a, b], [b, a])],
        tensors((4,), (4,)),
    ),
    "assignment": lambda: (assigned, tensors((4, 4))),
    "Python numbers": lambda: (lambda x: 2 * x * (x - 1) ** 3 / 7, tensors((4,))),
    "complex numbers": lambda: (lambda x: torch.fft.fft(x).abs(), tensors((4, 4))),
    "solvers": lambda: (lambda a: torch.linalg.inv(a).logdet(), tensors((4, 4))),
}


@pytest.mark.parametrize("wrap", [plain, ckpt])
@pytest.mark.parametrize("case", sorted(BATTERY))
def test_what_torch_has_to_the_byte(case, wrap):
    fn, args = BATTERY[case]()

    def call(args):
        flat = [*args[:1], *args[1]] if isinstance(args[0], dict) else args
        if isinstance(args[0], dict):
            return fn(flat[0], tuple(flat[1:]))
        return fn(*flat)

    found = saved_residuals(wrap(call), args)
    ours = [r for r in found if "captured" not in r.origin]
    assert total(ours) == measured(wrap(call), args) > 0


def test_a_function_that_acts_otherwise_under_a_mode_is_listed_as_it_acts_there():
    """A limit: it keeps the lengths as tensors here, and as numbers otherwise."""
    (x,) = tensors((6, 2, 5))
    lengths = torch.tensor([6, 6])
    targets = torch.ones(2, 3, dtype=torch.long)

    def f(x):
        return nn.functional.ctc_loss(x, targets, lengths, lengths // 2)

    found = saved_residuals(f, x.log_softmax(-1))
    assert {r.readers for r in found if r.dtype is torch.long} >= {("ctc_loss",)}


def test_the_tensors_in_a_subclass_are_listed_each():
    t = TwoTensor(torch.ones(4), torch.ones(4, dtype=torch.float32))
    assert origins(lambda t: t.sin(), t) == ["from the argument t"] * 2
    assert origins(ckpt(lambda t: t.sin()), t) == ["from the argument t"] * 2


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_values_and_the_sizes_of_nested_tensors_are_listed():
    (x,) = leaves((2, 5, 8))

    def f(x):
        ragged = torch.nested.as_nested_tensor([x[0], x[1][:3]])
        return torch.nested.to_padded_tensor(ragged.sin(), 0.0)

    found = assert_exact(f, x)
    values = [r for r in found if r.dtype is torch.double]
    assert [r.nbytes for r in values if r.shape == (64,)] == [512] * 2


def test_what_a_captured_function_captures_has_a_path():
    table = {"scale": torch.ones(4)}

    def inner(x):
        return x * table["scale"]

    def outer(x):
        return inner(x)

    assert origins(outer, torch.ones(4)) == ["from the captured `inner.table['scale']`"]


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


def test_dtypes_are_written_as_in_jax():
    dtypes = [torch.float32, torch.bfloat16, torch.uint8, torch.complex64, torch.bool]
    host = torch.device("cpu")
    lines = [str(Residual(d, (2, 3), host, 6, "made", "", ())) for d in dtypes]
    assert [line.split("[")[0] for line in lines] == [
        "f32",
        "bf16",
        "u8",
        "c64",
        "bool",
    ]


# --- What plain torch saves ---


@pytest.mark.parametrize(
    ("fn", "args", "expected"),
    [
        (torch.sin, 1, ["from the argument input"]),
        (lambda x: x.exp(), 1, ["output of exp"]),
        (lambda x: x.sin().sin(), 1, ["from the argument x", "output of sin"]),
        (lambda x: x + x, 1, []),
        (lambda x: torch.zeros_like(x) * x, 1, ["output of zeros_like"]),
        (lambda x: torch.einsum("ii->i", x), 1, []),
        (lambda x, y: x @ y, 2, ["from the argument x", "from the argument y"]),
        (lambda x, y: x.sin() + y, 2, ["from the argument x"]),
    ],
)
def test_what_torch_saves(fn, args, expected):
    inputs = [make(4, 4, seed=i) for i in range(args)]
    found = origins(fn, *inputs)
    if fn is torch.sin:
        found, expected = [len(found)], [1]
    assert found == expected


def test_arguments_come_in_order_then_captured_then_program_order():
    """JAX's, item 43."""
    scale, table = make(4, seed=1), torch.arange(4.0).double()

    def f(x, y, *, z):
        h = (x["b"] * x["a"][0]).sin() * z * scale
        return h.exp() * y * torch.tensor([1.0, 2.0, 3.0, 4.0]) * table

    a, b, y, z = leaves(*[(4,)] * 4)
    found = saved_residuals(f, {"b": b, "a": [a]}, y, z=z)
    assert [r.origin for r in found][:7] == [
        "from a constant",
        "from the argument x['b']",  # the order of the dict
        "from the argument x['a'][0]",
        "from the argument y",
        "from the argument z",
        "from the captured `scale`",
        "from the captured `table`",
    ]
    made = [r.origin.removeprefix("output of ") for r in found[7:]]
    assert made == ["mul", "sin", "exp"]


def test_varargs_are_named_by_position():
    def f(*xs):
        return xs[0].sin() * xs[1].sin()

    found = origins(f, *leaves((4,), (4,)))
    assert found[:2] == ["from the argument xs[0]", "from the argument xs[1]"]


def test_source_and_readers_of_a_residual():
    (x,) = leaves((4, 4))

    def f(x):
        return x.sin().cos() @ x

    sine = next(r for r in saved_residuals(f, x) if r.origin == "output of sin")
    file, line = sine.source.rsplit(":", 1)
    assert file == __file__
    assert line == f"{f.__code__.co_firstlineno + 1}, in f"
    assert sine.readers == ("cos",)
    assert (sine.dtype, sine.device) == (torch.double, torch.device("cpu"))
    argument = saved_residuals(f, x)[0]
    assert (argument.source, argument.readers) == ("", ("sin", "mm"))


def test_printing_is_one_residual_on_a_line_and_the_total(capsys):
    def f(x):
        return x.sin().sin()

    print_saved_residuals(f, torch.ones(3, 2))
    first, second, last = capsys.readouterr().out.splitlines()
    assert first == "f32[3,2] from the argument x: 24 bytes, read by sin"
    where = f"{__file__}:{f.__code__.co_firstlineno + 1}, in f"
    assert second == f"f32[3,2] output of sin from {where}: 24 bytes, read by sin"
    assert last == "total: 48 bytes in 2 residuals"


def test_printing_nothing(capsys):
    print_saved_residuals(lambda x: x + 1, torch.ones(3))
    assert capsys.readouterr().out == "total: 0 bytes in 0 residuals\n"


# --- Which functions ---


def test_functions_that_return_no_tensors_keep_nothing():
    (x,) = leaves((4,))
    for fn in (lambda x: None, lambda x: 3.0, lambda x: ["text", x.sin().detach()]):
        assert saved_residuals(fn, x) == []


def test_outputs_without_grad_are_left_out():
    (x,) = leaves((4,))

    def f(x):
        with torch.no_grad():
            y = x.exp().sin()
        return {"out": x.sin(), "aside": y, "name": "text"}

    assert origins(f, x) == ["from the argument x"]


def test_outputs_in_an_object_that_is_no_pytree_are_found():
    (x,) = leaves((4,))
    found = origins(lambda x: types.SimpleNamespace(y=x.exp()), x)
    assert found == ["output of exp"]


def test_no_grad_around_the_report_does_not_empty_it():
    with torch.no_grad():
        assert origins(torch.exp, torch.ones(3)) == ["output of exp"]
    with torch.inference_mode():
        assert origins(lambda x: x.exp(), torch.ones(3)) == []  # cannot be saved


def test_without_anything_that_requires_grad_all_floating_arguments_do():
    x, i = torch.ones(3), torch.arange(3)
    assert origins(lambda x, i: x * i, x, i) == ["from the argument i"]
    assert not x.requires_grad
    scale = torch.ones(3)
    assert origins(lambda x: x * scale, x) == ["from the captured `scale`"]


def test_with_something_that_requires_grad_nothing_else_does():
    x, y = torch.ones(3), torch.ones(3, requires_grad=True)
    assert origins(lambda x, y: x * y, x, y) == ["from the argument x"]


def test_torch_func_inside_the_function():
    (x,) = leaves((4,))

    def f(x):
        slopes = vmap(grad(lambda x: x.sin().sin()))(x)
        return slopes * jvp(torch.sin, (x,), (x,))[1]

    assert_exact(f, x)
    assert_exact(ckpt(f), x)


def test_torch_func_outside_the_function():
    (x,) = leaves((4,))
    found = assert_exact(grad(lambda x: x.sin().sin().sum()), x)
    kept = assert_exact(grad(ckpt(lambda x: x.sin().sin().sum())), x)
    assert total(kept) < total(found)


def test_a_gradient_taken_inside_with_create_graph():
    (x,) = leaves((4,))

    def f(x):
        y = x.sin().exp().sum()
        return torch.autograd.grad(y, x, create_graph=True)[0]

    def on_a_copy(x):
        return f(x * 1.0)

    assert_exact(on_a_copy, x)


def test_under_a_transform_the_report_is_refused():
    with pytest.raises(RuntimeError, match=r"under a transform of torch\.func"):
        grad(lambda x: (saved_residuals(torch.sin, x), x.sum())[1])(torch.ones(3))
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="forward-mode AD"),
    ):
        saved_residuals(torch.sin, torch.ones(3))


def test_a_lazy_module_is_refused():
    with pytest.raises(CaptureError, match="not initialized yet"):
        saved_residuals(nn.LazyLinear(3), torch.ones(2, 3))


def test_the_history_of_an_argument_is_not_part_of_the_function():
    (x,) = leaves((4,))
    h = x.exp().sin()
    assert origins(torch.exp, h) == ["output of exp"]
    captured = x.exp().sin()
    assert origins(lambda y: y * captured, torch.ones(4)) == ["from the argument y"]
    found = saved_residuals(lambda y: y.sin() * captured, torch.ones(4))
    assert [r.origin for r in found] == ["output of sin"]


def test_a_larger_model_than_memory_on_meta_tensors():
    with torch.device("meta"):
        model, x = nn.Linear(1 << 20, 1 << 20), torch.empty(64, 1 << 20)
        x.requires_grad_()
    found = saved_residuals(lambda x: model(x).sin(), x)
    weight = next(r for r in found if r.origin == "from the captured `model.weight`")
    assert weight.nbytes == 4 << 40
    assert saved_residuals(lambda x: ckpt(model)(x).sin(), x)[-1].nbytes == 256 << 20


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_fake_tensors_give_the_same_list(wrap):
    def f(w, x):
        return wrap(lambda w, x: torch.tanh(x @ w) @ w)(w, x).exp()

    real = saved_residuals(f, W, X)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in (W, X)]
        assert saved_residuals(f, *fakes) == real


@pytest.mark.parametrize("wrap", [plain, ckpt])
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


# --- It is a report ---


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_buffers_and_their_versions_are_as_before(wrap):
    module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {k: v.clone() for k, v in module.state_dict().items()}
    versions = [b._version for b in module.buffers()]
    addresses = [b.data_ptr() for b in module.buffers()]
    saved_residuals(wrap(module), torch.randn(8, 4))
    assert all(torch.equal(v, before[k]) for k, v in module.state_dict().items())
    assert [b._version for b in module.buffers()] == versions
    assert [b.data_ptr() for b in module.buffers()] == addresses


@pytest.mark.parametrize("wrap", [plain, ckpt])
def test_random_streams_are_as_before(wrap):
    generator = torch.Generator().manual_seed(3)

    def f(x):
        noise = torch.randn(4, generator=generator) + random.random()
        return dropout(x, 0.5) * noise

    states = torch.get_rng_state(), generator.get_state(), random.getstate()
    saved_residuals(wrap(f), torch.ones(4))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.equal(generator.get_state(), states[1])
    assert random.getstate() == states[2]


def test_arguments_changed_in_place_are_as_before():
    x, leaf = torch.ones(4), torch.ones(4, requires_grad=True)
    h = leaf.exp()
    node, values = h.grad_fn, h.detach().clone()

    def f(x, h):
        x.add_(1)
        return (h.mul_(2) * x).exp()

    saved_residuals(f, x, h)
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(h, values)
    assert (x._version, h._version, h.grad_fn) == (0, 0, node)
    saved_residuals(f, x, values)  # where nothing requires grad
    assert torch.equal(x, torch.ones(4))


def test_gradients_are_as_before():
    (x,) = leaves((4,))
    y = make(4, seed=3).requires_grad_()
    y.grad = torch.ones_like(y)

    def f(x):
        (x * y).sum().backward()
        return x.sin()

    saved_residuals(f, x)
    assert x.grad is None
    assert torch.equal(y.grad, torch.ones_like(y))


def test_everything_is_put_back_after_an_error():
    x = torch.ones(4)

    def f(x):
        x.add_(torch.rand(4))
        raise ValueError("half-way")

    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="half-way"):
        saved_residuals(f, x)
    assert torch.equal(x, torch.ones(4))
    assert torch.equal(torch.get_rng_state(), state)


def test_the_report_keeps_nothing_alive():
    x = torch.ones(4)
    outs = []

    def f(x):
        y = x.sin()
        outs.append(weakref.ref(y))
        return y.sin()

    gc.disable()
    try:
        found = saved_residuals(f, x)
        assert [ref() for ref in outs] == [None]
    finally:
        gc.enable()
    assert len(found) == 2


def test_the_gradient_of_the_user_s_own_graph_is_right_after_a_report():
    (x,) = leaves((4,))
    h = x.sin()
    out = h.exp()
    saved_residuals(lambda h: h.mul_(2).exp(), h)
    (actual,) = torch.autograd.grad(out.sum(), x)
    assert torch.equal(actual, x.sin().exp() * x.cos())
