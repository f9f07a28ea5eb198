"""What PyTorch's tests of `torch.utils.checkpoint` say of calls, states and memory.

Numbers are items of the survey of those tests. `test_torch_graphs.py` has items 19 to
30. `tests/compat` says them of `compat.checkpoint`, beside torch's own. What tests of
other parts say as well is not repeated (5, 11, 13: `tests/ambient`; 8: `tests/capture`;
14: `tests/transform/test_memory.py`). Left out,
because there is nothing in `remat` they could be about: the reentrant
variant (2 in part, 8 in part, 17, 23 in part), the argument checks of
`checkpoint_sequential` (4), `preserve_rng_state=False` (6: there is no way to switch
replay off), `context_fn` (16), execution groups (18, in `tests/compat`),
messages of `debug=` (19 in part), a switch for early stop (29: there is none), and
`DataParallel` (25 in part), which needs several devices.
"""

import weakref

import pytest
import torch
from support.checkpoints import KINDS, Logged, chain
from support.compared import compared, leaf, points
from support.zoo import Evaluations, counted
from torch import nn

from remat import remat
from remat.testing import assert_same, assert_same_gradients, count_ops


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


# --- 7, 8: what may go in and out ---


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


# --- 12-14: many, autocast, memory ---


# The contributions are added up in the order of the graph: the same one.
@compared(evaluations=800, plain=400)
def test_many_small_nets_in_one_graph(wrap, counting):
    """12."""
    net = nn.Sequential(nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 1))
    fn = wrap(counting(net))
    sum(fn(row) for row in leaf(400, 4)).sum().backward()
    return {k: p.grad for k, p in net.named_parameters()}
