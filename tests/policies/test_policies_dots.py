"""Which operations are dots, and which of them have batch dimensions."""

import threading
from functools import partial

import pytest
import torch
from support.operations import MM, RECOMPUTE, SAVE, aten, custom, op, recorded, value
from support.tables import rows
from torch import nn
from torch.utils import flop_counter

from remat.policies import (
    Op,
    dots_saveable,
    dots_with_no_batch_dims_saveable,
    register_dot,
)
from remat.policies._operations import _DOTS


def dots(fn, *shapes):
    """The operations of `fn` that are dots, and those that are without batch."""
    ops = recorded(fn, *(torch.ones(s, requires_grad=True) for s in shapes))
    few = dots_with_no_batch_dims_saveable
    return sum(map(bool, map(dots_saveable, ops))), sum(map(bool, map(few, ops)))


def einsum(equation):
    return partial(torch.einsum, equation)


batched_mm = torch.vmap(torch.mm)
unbatched_mm = torch.vmap(torch.mm, in_dims=(0, None))
REAL = {
    "matrix": (torch.mm, [(2, 3), (3, 4)], (1, 1)),
    "folded": (torch.matmul, [(2, 5, 3), (3, 4)], (1, 1)),
    "vector": (torch.matmul, [(2, 3), (3,)], (1, 1)),
    "dot": (torch.dot, [(3,), (3,)], (1, 1)),
    "inner": (torch.inner, [(2, 3), (4, 3)], (1, 1)),
    "addmm": (torch.addmm, [(4,), (2, 3), (3, 4)], (1, 1)),
    "addmv": (torch.addmv, [(2,), (2, 3), (3,)], (1, 1)),
    "linear": (nn.functional.linear, [(2, 5, 3), (4, 3), (4,)], (1, 1)),
    "bilinear": (nn.functional.bilinear, [(2, 3), (2, 3), (5, 3, 3)], (1, 1)),
    "einsum of matrices": (einsum("ij,jk->ik"), [(2, 3), (3, 4)], (1, 1)),
    "einsum of tokens": (einsum("btd,de->bte"), [(2, 5, 3), (3, 4)], (1, 1)),
    "einsum of batches": (einsum("bij,bjk->bik"), [(2, 5, 3), (2, 3, 4)], (1, 0)),
    "batched": (torch.bmm, [(5, 2, 3), (5, 3, 4)], (1, 0)),
    "broadcast": (torch.matmul, [(5, 2, 3), (5, 3, 4)], (1, 0)),
    "added": (torch.baddbmm, [(4,), (5, 2, 3), (5, 3, 4)], (1, 0)),
    "summed": (torch.addbmm, [(2, 4), (5, 2, 3), (5, 3, 4)], (1, 1)),
    "of one": (torch.bmm, [(1, 2, 3), (1, 3, 4)], (1, 1)),
    "added to one": (torch.baddbmm, [(2, 4), (1, 2, 3), (1, 3, 4)], (1, 1)),
    "vmap of both": (batched_mm, [(5, 2, 3), (5, 3, 4)], (1, 0)),
    "vmap of one": (unbatched_mm, [(5, 2, 3), (3, 4)], (1, 1)),
    "conv1d": (nn.functional.conv1d, [(1, 2, 8), (4, 2, 3)], (1, 0)),
    "conv2d": (nn.functional.conv2d, [(1, 2, 8, 8), (4, 2, 3, 3)], (1, 0)),
    "transposed": (
        nn.functional.conv_transpose2d,
        [(1, 2, 8, 8), (2, 4, 3, 3)],
        (1, 0),
    ),
    "attention": (
        nn.functional.scaled_dot_product_attention,
        [(1, 2, 4, 8)] * 3,
        (1, 0),
    ),
    "outer": (torch.outer, [(3,), (4,)], (0, 0)),
    "pointwise": (lambda x: (x * x).exp().sum().sin(), [(3,)], (0, 0)),
    "norm": (lambda x: nn.functional.layer_norm(x, (3,)).softmax(-1), [(2, 3)], (0, 0)),
}


@rows("fn, shapes, want", REAL)
def test_the_dots_that_torch_runs_are_known(fn, shapes, want):
    assert dots(fn, *shapes) == want


def test_all_that_torch_counts_flops_of_is_a_dot():
    for packet in flop_counter.flop_registry:
        assert dots_saveable(Op(packet)) is SAVE, packet


@pytest.mark.parametrize(
    "known",
    [
        *("mm", "addmm", "bmm", "baddbmm", "mv", "convolution", "_scaled_mm"),
        *("_grouped_mm", "_int_mm", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_grouped_mm"),
        *("_scaled_dot_product_cudnn_attention", "convolution_backward"),
        "_scaled_dot_product_fused_attention_overrideable",
    ],
)
def test_dots_of_all_devices_are_known(known):
    overload = getattr(aten, known).default
    assert dots_saveable(Op(overload)) is SAVE
    inputs = value(2, 3, 4), value(2, 4, 5), value(2, 4, 5)
    few = dots_with_no_batch_dims_saveable(Op(overload, inputs))
    matrix = {"mm", "addmm", "mv", "_scaled_mm", "_int_mm"}
    assert few is (SAVE if known in matrix else RECOMPUTE)


def test_dots_in_place_and_into_an_output_are_dots():
    for overload in (aten.addmm_.default, aten.mm.out, aten.baddbmm_.default):
        assert dots_saveable(op(overload)) is SAVE
    assert dots_with_no_batch_dims_saveable(op(aten.addmm_.default)) is SAVE


def test_grouped_products_of_tokens_have_no_batch():
    grouped = partial(op, aten._grouped_mm.default)
    few = dots_with_no_batch_dims_saveable
    assert few(grouped((64, 8), (4, 8, 16), (4,))) is SAVE
    assert few(grouped((4, 64, 8), (4, 8, 16))) is RECOMPUTE


def test_the_table_of_dots_names_operators_that_exist():
    """A slip of the pen would be a dot that is never saved."""
    for dot in _DOTS:
        namespace, base = dot.split(".")
        assert namespace != "aten" or hasattr(aten, base), dot


def test_a_dot_of_ones_own_is_registered():
    custom("mine")
    packet = torch.ops.remat_tests.mine
    o = op(packet.default, (2, 3), (3, 4))
    assert dots_saveable(o) is RECOMPUTE
    register_dot(packet)
    assert dots_saveable(o) is SAVE
    assert dots_with_no_batch_dims_saveable(o) is SAVE


@pytest.mark.parametrize("batched", [True, 1])
def test_a_dot_with_batch_dimensions_is_registered(batched):
    name = f"batched_{type(batched).__name__}"
    register_dot(custom(name), batched=batched)
    o = op(getattr(torch.ops.remat_tests, name).default, (2, 3), (3, 4))
    assert dots_saveable(o) is SAVE
    assert dots_with_no_batch_dims_saveable(o) is RECOMPUTE


def test_registering_again_changes_nothing_or_is_refused():
    twice = custom("twice")
    for _ in range(2):
        register_dot(twice)
    register_dot(aten.mm)
    register_dot(aten.bmm.default, batched=True)
    with pytest.raises(ValueError, match=r"remat_tests\.twice is a dot already"):
        register_dot(twice, batched=True)
    with pytest.raises(
        ValueError, match=r"aten\.mm is a dot already, and batched=False"
    ):
        register_dot(aten.mm, batched=True)
    assert dots_with_no_batch_dims_saveable(op(MM)) is SAVE


def test_a_dot_is_registered_by_many_threads_once():
    """One of two kinds wins, whole, and the other is refused in each thread."""
    raced = custom("raced")
    start, refused = threading.Barrier(8), []

    def register(batched):
        start.wait()
        try:
            register_dot(raced, batched=batched)
        except ValueError:
            refused.append(batched)

    threads = [threading.Thread(target=register, args=(i % 2 == 0,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 4
    assert len(set(refused)) == 1
