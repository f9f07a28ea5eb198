"""What PyTorch's tests of `torch.utils.checkpoint` say of calls, states and memory.

Numbers are items of the survey of those tests. `test_torch_graphs.py` has items 19 to
30. `tests/compat` says them of `compat.checkpoint`, beside torch's own. Left out,
because there is nothing in `remat` they could be about: the reentrant
variant (2 in part, 8 in part, 17, 23 in part), the argument checks of
`checkpoint_sequential` (4), `preserve_rng_state=False` (6: there is no way to switch
replay off), `context_fn` (16), execution groups (18, in `tests/compat`),
messages of `debug=` (19 in part), a switch for early stop (29: there is none), and
`DataParallel` (25 in part), which needs several devices.
"""

import weakref
from contextlib import nullcontext

import pytest
import torch
from support.checkpoints import KINDS, Logged, chain
from support.compared import compared, leaf, points
from support.zoo import Evaluations, counted, plainly
from torch import nn

from remat import remat
from remat.testing import assert_same, assert_same_gradients, count_ops, peak_bytes


# --- 1-3: sequences ---


def sequential(modules, segments, x):
    """As `checkpoint_sequential`: all segments but the last are rematerialized."""
    modules = list(modules)
    size = len(modules) // segments
    for start in range(0, size * (segments - 1), size):
        x = remat(nn.Sequential(*modules[start : start + size]))(x)
    return chain(modules[size * (segments - 1) :], x)


def test_a_sequence_of_two_segments_runs_its_first_half_again():
    """1."""
    log = Evaluations()
    modules = [Logged(k, log) for k in range(10)]
    x = leaf(2, 4)
    out = sequential(modules, 2, x)
    assert [*log] == list(range(10))
    out.sum().backward()
    assert [*log] == list(range(5))
    assert_same(x.grad, torch.autograd.grad(chain(modules, x).sum(), x)[0])


@compared(evaluations=3)
def test_gradients_by_autograd_grad_and_of_gradients(wrap, counting):
    """2: `autograd.grad` and `create_graph` are no different from `backward`."""
    x = leaf(3)
    body = counting(lambda x: x.sin().exp())
    (first,) = torch.autograd.grad(wrap(body)(x).sum(), x, create_graph=True)
    return first, *torch.autograd.grad(first.square().sum(), x)


@pytest.mark.parametrize("segments", [2, 3, 6])
@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_sequences_of_any_kind(kind, segments):
    """3: outputs, gradients of inputs and of parameters."""
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


# --- 5: random streams ---


@pytest.mark.parametrize(
    "layer",
    [nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU()],
    ids=["Dropout", "AlphaDropout", "RReLU"],
)
@compared(evaluations=2)
def test_masks_are_the_same_in_the_recompute(wrap, counting, layer):
    """5: bit for bit; and the stream goes on as if nothing had been recomputed."""
    body = counting(lambda x: layer(x.sin()) * layer(x - 0.7).exp())
    x = leaf(50)
    out = wrap(body)(x)
    between = torch.rand(3)
    out.sum().backward()
    return out.detach(), x.grad, between, torch.rand(3)


# --- 7, 8: what may go in and out ---


def test_what_is_no_tensor_passes_both_ways():
    """7."""
    seen = Evaluations()

    def f(x, none, text, number, pair):
        seen.note((none, text, number, pair))
        return x.sin().exp() * number, none, text, pair, number

    x = leaf(3)
    out, *rest = remat(f)(x, None, "text", 3, (1, None))
    assert rest == [None, "text", (1, None), 3]
    out.sum().backward()
    assert [*seen] == [(None, "text", 3, (1, None))] * 2
    assert_same(x.grad, 3 * points(3).sin().exp() * points(3).cos())


def test_a_call_without_tensors():
    """7: there is nothing to differentiate, but what is captured may be."""
    body, calls = counted(lambda n, text: (n + 1, text.upper()))
    assert remat(body)(1, text="a") == (2, "A")
    assert len(calls) == 1
    x = leaf(3)
    with count_ops() as ops:
        (got,) = torch.autograd.grad(remat(lambda _: x.sin().exp())(1).sum(), x)
        torch.autograd.grad(remat(lambda: x.sin().exp())().sum(), x)
    assert ops["sin"] == 2 * 2
    assert_same(got, points(3).sin().exp() * points(3).cos())


@compared(evaluations=2)
def test_some_outputs_may_need_no_grad(wrap, counting):
    """8."""
    body = counting(
        lambda x: (x.detach() + 1, x.sin().exp(), x > 0.5, [x.exp().detach()])
    )
    x = leaf(3)
    outs = wrap(body)(x)
    flags = [o.requires_grad for o in (*outs[:3], *outs[3])]
    assert flags == [False, True, False, False]
    outs[1].sum().backward()
    return x.grad


@pytest.mark.parametrize("depth", [1, 2])
def test_a_call_none_of_whose_outputs_need_grad(depth):
    """8, 23: fine here, and never evaluated again."""
    wrap = remat if depth == 1 else lambda f: remat(remat(f))
    body, calls = counted(lambda x: x.sin().detach())
    x = leaf(3)
    out = wrap(body)(x)
    assert (out.requires_grad, len(calls)) == (False, 1)
    inner, inner_calls = counted(lambda x: x.sin().exp())
    (out + wrap(inner)(x)).sum().backward()
    assert (len(calls), len(inner_calls) >= 2) == (1, True)
    assert_same(x.grad, torch.autograd.grad(inner(x).sum(), x)[0])


# --- 9: memory during the backward ---


def living(refs):
    """How many of the objects that were noted are alive."""
    taken = [*refs]
    for ref in taken:
        refs.note(ref)
    return sum(ref() is not None for ref in taken)


@pytest.mark.parametrize("retain_graph", [False, True])
def test_recomputed_values_are_freed_block_by_block(retain_graph):
    """9: with a retained graph too. No block sees recomputed values of others alive."""
    refs, alive = Evaluations(), Evaluations()

    def block(x):
        alive.note(living(refs))
        for _ in range(3):
            x = x.sin()
            refs.note(weakref.ref(x))
        return x

    x = leaf(3)
    out = x
    for _ in range(4):
        out = remat(block)(out)
    # The outputs, of which each is the input of the next, and nothing recomputed.
    assert [*alive] == [0, 1, 2, 3]
    out.sum().backward(retain_graph=retain_graph)
    assert [*alive] == ([4] * 4 if retain_graph else [4, 3, 2, 1])
    assert x.grad.abs().min() > 0.01


def test_inputs_are_freed_as_the_backward_proceeds():
    """9: after a block's backward its input is gone, unless the graph is retained."""
    refs, alive = Evaluations(), Evaluations()

    def block(x):
        alive.note(living(refs))
        return x.sin().exp()

    def run(**options):
        refs.clear()
        alive.clear()
        out = leaf(3) * 1.0
        for _ in range(4):
            refs.note(weakref.ref(out))
            out = remat(block)(out)
        out.sum().backward(**options)
        return [*alive][4:]

    assert run() == [4, 3, 2, 1]
    assert run(retain_graph=True) == [4, 4, 4, 4]


# --- 10, 11: devices ---


@compared(evaluations=2)
def test_tensors_on_other_devices_in_nested_structures(wrap, counting):
    """10: meta tensors in dicts and lists; the CPU's stream is replayed anyway."""
    body = counting(
        lambda tree: (
            tree["a"][0].sin() * torch.rand(3),
            {"m": tree["b"]["m"].sin()},
        )
    )
    x, m = leaf(3), torch.empty(3, device="meta", requires_grad=True)
    out, on_meta = wrap(body)({"a": [x, None], "b": {"m": m}})
    assert on_meta["m"].is_meta
    out.sum().backward()
    return x.grad


def test_only_meta_tensors():
    """10."""
    body, calls = counted(lambda x, w: (x @ w).sin().exp())
    x = torch.empty(2, 3, device="meta", requires_grad=True)
    out = remat(body)(x, torch.empty(3, 4, device="meta"))
    out.sum().backward()
    assert len(calls) == 2
    assert (out.shape, x.grad.shape, x.grad.is_meta) == ((2, 4), (2, 3), True)


def test_a_draw_is_replayed_where_no_argument_tells_of_its_device():
    """10: no argument at all, only a captured tensor inside an object."""

    class Holder:
        value = None

    holder = Holder()
    holder.value = leaf(50)
    draws = Evaluations()

    def f():
        mask = torch.rand(50)
        draws.note(mask)
        return (holder.value * mask).sin()

    remat(f)().sum().backward()
    first, second = draws
    assert_same(first, second)
    assert_same(holder.value.grad, first * (points(50) * first).cos())


@pytest.mark.parametrize("inside", [True, False])
def test_the_device_context_of_the_forward_is_in_force_again(inside):
    """11."""
    devices = Evaluations()

    def f(x):
        devices.note(torch.zeros(1).device.type)
        return x.sin().exp()

    x = leaf(3)
    with torch.device("meta") if inside else nullcontext():
        out = remat(f)(x)
    ones = torch.ones(3)
    with torch.device("cpu" if inside else "meta"):
        out.backward(ones)
    assert [*devices] == (["meta"] if inside else ["cpu"]) * 2
    assert_same(x.grad, points(3).sin().exp() * points(3).cos())


# --- 12-14: many, autocast, memory ---


# The contributions are added up in the order of the graph: the same one.
@compared(evaluations=4000, plain=2000)
def test_two_thousand_small_nets_in_one_graph(wrap, counting):
    """12."""
    net = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))
    fn = wrap(counting(net))
    sum(fn(row) for row in leaf(2000, 4)).sum().backward()
    return {k: p.grad for k, p in net.named_parameters()}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_recompute_autocasts_as_the_forward_did(dtype, enabled):
    """13: whatever is on when the backward runs."""
    dtypes = Evaluations()

    def f(x, w):
        y = (x @ w).sin()
        dtypes.note(y.dtype)
        return y.exp().sum()

    def run(fn):
        x, w = leaf(3, 4), leaf(4, 2)
        with torch.autocast("cpu", dtype, enabled=enabled):
            out = fn(x, w)
        with torch.autocast("cpu", torch.bfloat16, enabled=not enabled):
            out.backward()
        return out.detach(), x.grad, w.grad

    got = run(remat(f))
    assert [*dtypes] == [dtype if enabled else torch.float32] * 2
    assert_same(got, run(f))


def test_the_peak_is_lower_than_plain():
    """14."""
    modules = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Tanh()) for _ in range(8)]
    x = torch.randn(512, 64, requires_grad=True)

    def step(wrap):
        chain(map(wrap, modules), x).sum().backward()

    step(plainly)  # the gradients exist from here on
    want = peak_bytes(lambda: step(plainly))
    assert peak_bytes(lambda: step(remat)) < 0.7 * want
