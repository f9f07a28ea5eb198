"""`explain`: its totals are those of a real backward, to the byte.

The measure: a call that has been differentiated before, so that inputs which no
backward reads are dropped, against plain. Operations and FLOPs are counted in the
backward; bytes are the allocator's, of a graph that alone holds the arguments.
What a backward runs of nested calls is in the golden table.
"""

import math
from collections import Counter

import pytest
import torch
from support.explained import CASES, POLICIES, SQUARE, blk, case_of, example, nest, two
from support.kept import measured, total
from support.tables import crossed
from torch import nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from remat import explain, policies, remat as ckpt, saved_residuals
from remat.testing import count_ops


def parameters_of(fn):
    owner = getattr(fn, "__self__", None)
    return [] if owner is None else [*owner.parameters()]


def held_by_module(report):
    """The bytes of what is kept of a module, without the copies of its buffers."""
    kept = [i for i in report.inputs if i.kept and i.name.startswith("self.")]
    return sum(math.prod(i.shape) * i.dtype.itemsize for i in kept)


def differentiate(fn, args):
    """A backward from every output to every input, and what it ran."""
    outs = [t for t in tree_leaves(fn(*args)) if t.requires_grad]
    cts = [torch.ones_like(t) for t in outs]
    inputs = (*args, *parameters_of(getattr(fn, "__wrapped__", fn)))
    with FlopCounterMode(display=False) as counter, count_ops() as ops:
        torch.autograd.grad(outs, inputs, cts, allow_unused=True)
    return counter.get_total_flops(), ops


def warm(fn, args):
    for _ in range(2):
        differentiate(fn, args)


def executed(report):
    """How often each operation is run again."""
    found = Counter()
    for op in report.ops:
        if not op.is_view:
            found[op.name] += op.times
    return found


# What a call does besides: copies of buffers, and autograd's own.
BESIDES = {"clone", "detach", "alias", "copy_"}


@crossed("name, policy, prune", CASES, POLICIES, [True, False])
def test_the_flops_and_operations_are_those_of_a_backward(name, policy, prune):
    fn, args = case_of(name)
    report = explain(fn, *args, policy=POLICIES[policy], prune=prune)
    rematerialized = ckpt(fn, policy=POLICIES[policy], prune=prune)
    warm(rematerialized, args)
    flops, ops = differentiate(rematerialized, args)
    plain_flops, plain_ops = differentiate(fn, args)
    assert report.recomputed_flops == flops - plain_flops
    found = executed(report)
    again = {n: ops[n] - plain_ops[n] for n in found if n not in BESIDES}
    assert again == {n: found[n] for n in again}


@crossed("name, policy", CASES, POLICIES)
def test_the_saved_bytes_are_what_is_alive_after_a_forward(name, policy):
    fn, args = case_of(name)
    fresh = [t.clone() for t in args]  # no leaves, which the graph would keep alive
    report = explain(fn, *fresh, policy=POLICIES[policy], prune=True)
    rematerialized = ckpt(fn, policy=POLICIES[policy], prune=True)
    warm(rematerialized, args)
    outside = held_by_module(report)
    assert report.saved_bytes - outside == measured(rematerialized, *args) > 0
    assert report.saved_bytes == total(saved_residuals(rematerialized, *fresh))


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_and_flops_of_plain_are_those_that_torch_has(name):
    fn, args = case_of(name)
    report = explain(fn, *args)
    assert report.plain_bytes == total(saved_residuals(fn, *args)) > 0
    with FlopCounterMode(display=False) as counter:
        fn(*args)
    assert report.flops == counter.get_total_flops()


def shape_of_layers(w, x):
    layer = ckpt(blk, prune=False)
    for _ in range(3):
        x = layer(w, x).sin()
    return x


# The function, and how many products plain's backward runs.
NESTED = {
    "twice": (nest(1), 4),
    "three times": (nest(2), 4),
    "dots within": (nest(1, policies.dots_saveable), 4),
    "two": (two, 8),
    "layers": (shape_of_layers, 12),
}


@crossed("name, policy", NESTED, ["none", "dots", "everything"])
def test_what_calls_within_recompute_is_counted(name, policy):
    (fn, plain), args = NESTED[name], example(*SQUARE)
    rematerialized = ckpt(fn, policy=POLICIES[policy], prune=True)
    report = explain(rematerialized, *args)
    warm(rematerialized, args)
    _, ops = differentiate(rematerialized, args)
    again = executed(report)
    assert (again["mm"], again["tanh"]) == (ops["mm"] - plain, ops["tanh"])
    assert report.saved_bytes == measured(rematerialized, *args)


# --- All kinds of functions ---


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = x.exp()
        return ctx.y * 2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.y


def in_bfloat16(w, x):
    with torch.autocast("cpu", torch.bfloat16):
        return (w @ x).tanh()


OTHERS = {
    "vmap": (lambda w, x: vmap(lambda row: (w @ row).tanh())(x), SQUARE),
    "Function": (lambda x: Kept.apply(x.sin()), ((64, 64),)),
    "autocast": (in_bfloat16, SQUARE),
    "complex": (lambda x: (x.to(torch.complex64) * 1j).exp().abs(), ((64, 64),)),
    "sparse": (lambda w, x: torch.sparse.mm(w.to_sparse(), x).sin(), SQUARE),
    "LSTM": (nn.LSTM(16, 16), ((5, 4, 16),)),
    "Transformer": (
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        ((4, 16, 32),),
    ),
    "many outputs": (lambda x: [(x + i).sin() for i in range(20)], ((64, 64),)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_it_explains_all_kinds_of_functions(name):
    fn, sizes = OTHERS[name]
    args = example(*sizes)
    report = explain(fn, *args, prune=True)
    assert report.plain_bytes == total(saved_residuals(fn, *args))
    assert report.saved_bytes == total(saved_residuals(ckpt(fn, prune=True), *args))
    assert {op.fate for op in report.ops} & {"recomputed", "dead"}
    assert all(op.why for op in report.ops)
    assert all(row.why for row in report.inputs)


def test_a_plain_backward_of_a_block_runs_four_products():
    assert differentiate(blk, example(*SQUARE))[1]["mm"] == 4
