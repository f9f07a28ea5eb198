"""The measures that judge everything else: operations and bytes, counted exactly."""

import gc
import weakref

import pytest
import torch
from support.tables import rows
from support.transforms import some
from torch.func import jvp

from remat.testing import count_ops, live_bytes, memory_timeline, peak_bytes


def sines(count):
    def fn(x):
        for _ in range(count):
            x = x.sin()
        return x

    return fn


# --- count_ops -----------------------------------------------------------------


def test_counts_by_name_and_zero_for_absent():
    x = torch.randn(3, 3)
    with count_ops() as ops:
        (x @ x).sin().add_(1)
    assert (ops["mm"], ops["sin"], ops["add_"]) == (1, 1, 1)
    assert (ops["add"], ops["cos"]) == (0, 0)


def test_counts_only_inside_the_block():
    x = torch.randn(3)
    x.sin()
    with count_ops() as ops:
        x.sin()
    x.sin()
    assert ops["sin"] == 1


def test_counts_go_on_while_the_block_runs():
    x = torch.randn(3, requires_grad=True)
    with count_ops() as ops:
        y = sines(3)(x).sum()
        forward = ops.copy()
        y.backward()
    assert (forward["sin"], forward["cos"]) == (3, 0)
    assert (ops["sin"], ops["cos"]) == (3, 3)


# Not the table's jvp: it takes the cosine of its input for a tangent.
WAYS = some("grad", "vmap_grad", "grad_vmap") | {
    "jvp": lambda fn, x: jvp(fn, (x,), (x,))
}


@rows("transform", WAYS)
def test_counts_each_kernel_once_under_transforms(transform):
    with count_ops() as ops:
        transform(lambda x: sines(3)(x).sum(), torch.randn(4))
    assert (ops["sin"], ops["cos"]) == (3, 3)


def test_counts_nested_blocks_both():
    x = torch.randn(3)
    with count_ops() as outer:
        x.sin()
        with count_ops() as inner:
            x.sin()
    assert (outer["sin"], inner["sin"]) == (2, 1)


def test_counts_custom_ops_with_their_namespace():
    @torch.library.custom_op("remat_test::double", mutates_args=())
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with count_ops() as ops:
        double(torch.randn(3))
    assert (ops["remat_test::double"], ops["double"]) == (1, 0)


# --- bytes ---------------------------------------------------------------------

UNIT = 4096  # bytes of 1,024 float32


def backward_of(fn):
    x = torch.randn(UNIT // 4, requires_grad=True)

    def step():
        fn(x).sum().backward()
        x.grad = None

    return step


def test_timeline_lists_every_allocation_and_free():
    x = torch.randn(UNIT // 4)
    assert memory_timeline(lambda: x.sin().cos().sum()) == [
        UNIT,  # sin
        2 * UNIT,  # cos
        UNIT,  # sin freed
        UNIT + 4,  # the sum
        4,  # cos freed
    ]


@pytest.mark.parametrize("run", ["first", "second"])
def test_peak_resolves_single_tensors(run):
    del run
    # 16 sines; the sum and its cotangent are 4 bytes each when the peak is reached.
    assert peak_bytes(backward_of(sines(16))) == 17 * UNIT + 8
    assert peak_bytes(backward_of(sines(4))) == 5 * UNIT + 8


@pytest.mark.parametrize("measure", [peak_bytes, live_bytes, memory_timeline])
def test_a_measure_is_zero_when_nothing_is_allocated(measure):
    assert not measure(lambda: None)


@pytest.mark.parametrize("count", [1, 3, 1001])
def test_live_bytes_are_exact(count):
    x = torch.zeros(count, requires_grad=True)
    assert live_bytes(lambda: x.detach().sin().cos()) == 4 * count
    assert live_bytes(lambda: x.sin().cos()) == 8 * count
    assert live_bytes(lambda: [x.sin().cos(), torch.zeros(7)]) == 8 * count + 28


def test_live_bytes_include_what_the_call_stores_elsewhere():
    stash = []
    assert live_bytes(lambda: stash.append(torch.zeros(100))) == 400


def cyclic():
    cycle = [torch.zeros(100)]
    cycle.append(cycle)
    return weakref.ref(cycle[0])


def test_live_bytes_show_memory_held_by_a_cycle():
    assert live_bytes(cyclic) == 400


def test_an_earlier_cycle_is_not_subtracted():
    held = cyclic()
    assert live_bytes(lambda: torch.zeros(10)) == 40
    assert held() is None


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_as_before(enabled):
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        peak_bytes(lambda: None)
        assert gc.isenabled() == enabled
        with pytest.raises(ZeroDivisionError, match="division by zero"):
            peak_bytes(lambda: 1 / 0)
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_an_error_leaves_no_profiler_running():
    with pytest.raises(ZeroDivisionError, match="division by zero"):
        peak_bytes(lambda: 1 / 0)
    assert peak_bytes(lambda: torch.zeros(3)) == 12
