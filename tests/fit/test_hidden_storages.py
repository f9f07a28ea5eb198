"""Results of fake kernels are as large as real ones, but where `fit` knows better.

All operations of torch's database run on real tensors, forward and backward. Each one
is run on fakes, too, and the storages of its results are compared. The peaks of both
are compared with what the profiler counts.
"""

from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from support.allocated import most_allocated
from torch.nn import functional
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from remat._fit.meter import Meter
from remat._fit.workspace import hidden_in
from remat._torch import fake_mode, storage_id


# Of which the fakes lack bytes: one index, or those of sparse products.
OTHERS = {"aten._embedding_bag.default", "aten._sparse_mm_reduce_impl.default"}
FAST = {"nn.functional.mse_loss", "nn.functional.binary_cross_entropy"}
FAST |= {"nn.functional.smooth_l1_loss", "nn.functional.soft_margin_loss"}


def storages(tree, known=()):
    """Return the bytes of each new storage."""
    tensors = [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor)]
    strided = [t for t in tensors if t.layout is torch.strided]
    found = {storage_id(t): t.untyped_storage().nbytes() for t in strided}
    return [n for key, n in found.items() if key not in known]


class Comparing(TorchDispatchMode):
    """Runs operations on fakes, too."""

    def __init__(self):
        super().__init__()
        self.seen, self.differ = set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [
            t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        ]
        known = {storage_id(t) for t in tensors if t.layout is torch.strided}
        fake = None
        if not (func.is_view or func._schema.is_mutable):
            fake = self._on_fakes(func, args, kwargs)
        result = func(*args, **kwargs)
        if fake is not None:
            self.seen.add(str(func))
            expected = storages(fake)
            at, more = hidden_in(func, args)
            if more:
                expected[at] += more
            real = storages(result, known)
            if len(real) == len(expected) and real != expected:
                self.differ[str(func)] = real, expected
        return result

    def _on_fakes(self, func, args, kwargs):
        mode = fake_mode()
        try:
            with mode:
                fakes = tree_map_only(torch.Tensor, mode.from_tensor, (args, kwargs))
                return func(*fakes[0], **fakes[1])
        except Exception:  # noqa: BLE001 - it asks for values
            return None


def compared(op, count):
    comparing = Comparing()
    needs_grad = op.supports_autograd
    samples = op.sample_inputs("cpu", torch.float32, requires_grad=needs_grad)
    for _, sample in zip(range(count), samples, strict=False):
        with comparing:
            out = op.op(sample.input, *sample.args, **sample.kwargs)
            outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            outs = [t for t in outs if t.requires_grad]
            torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
    return comparing


@pytest.mark.parametrize("name", sorted(FAST))
def test_sums_of_losses_are_as_large_as_fit_knows(name):
    (op,) = [op for op in op_db if op.name == name]
    comparing = compared(op, 6)
    assert not comparing.differ
    assert any(name.split(".")[-1] in seen for seen in comparing.seen)


@pytest.mark.opinfo
@pytest.mark.filterwarnings("ignore")
def test_storages_of_all_operations_are_known():
    differ, seen = {}, set()
    for op in (op for op in op_db if op.supports_dtype(torch.float32, "cpu")):
        try:
            comparing = compared(op, 4)
        except Exception:  # noqa: BLE001 - a sample is an error, or has no derivative
            continue
        differ |= comparing.differ
        seen |= comparing.seen
    assert len(seen) > 300
    assert differ.keys() <= OTHERS, differ


# What holds more while it runs than is known: by what values are, or in one kernel.
HOLD_MORE = {
    "_chunk_cat",
    "argsort",
    "masked_select",
    "multinomial",
    "nn.functional.conv3d",
}
STREAM = 5120  # bytes: the database saves the state of a stream


def ran(op, sample):
    out = op.op(sample.input, *sample.args, **sample.kwargs)
    outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
    outs = [t for t in outs if t.requires_grad]
    torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])


def bytes_not_known(op, sample):
    """Return by how many bytes a peak is over the one that a meter counts."""
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs))
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    ran(op, sample)
    for tensor in tensors:
        tensor.grad = None
    measured, meter = most_allocated(ran, op, sample)[0], Meter()
    for tensor in tensors:
        tensor.grad = None
    with meter:
        for tensor in tensors:
            meter.hold(tensor)
        before = meter.live
        meter.begin(costs=False)
        ran(op, sample)
        meter.end()
    return measured - (meter.peak - before)


@pytest.mark.opinfo
@pytest.mark.filterwarnings("ignore")
def test_what_operations_hold_is_known():
    over, count = set(), 0
    for op in (op for op in op_db if op.supports_dtype(torch.float32, "cpu")):
        try:
            needs_grad = op.supports_autograd
            samples = op.sample_inputs("cpu", torch.float32, requires_grad=needs_grad)
            found = [
                bytes_not_known(op, each)
                for _, each in zip(range(4), samples, strict=False)
            ]
        except Exception:  # noqa: BLE001 - a sample is an error, or has no derivative
            continue
        count += 1
        if max(found, default=0) > STREAM:
            over.add(op.name)
    assert count > 500
    assert over <= HOLD_MORE, over


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


MASK = torch.arange(128 * 64).view(128, 64) % 3 > 0
ROWS = MASK[:, 1].clone()
# Larger than those of the database.
LARGE = {
    "bilinear": (
        functional.bilinear,
        (leaf(64, 32), leaf(64, 24), leaf(16, 32, 24), leaf(16)),
    ),
    "a wide bilinear": (
        functional.bilinear,
        (leaf(16, 32), leaf(16, 32), leaf(32, 32, 32)),
    ),
    "a mask": (lambda x: x[MASK], (leaf(128, 64),)),
    "rows of a mask": (lambda x: x[ROWS], (leaf(128, 64),)),
    "what a mask fills": (
        lambda x: x.clone().index_put((MASK,), torch.zeros(())),
        (leaf(128, 64),),
    ),
    "var_mean": (lambda x: torch.var_mean(x, -1), (leaf(128, 64),)),
    "matrix_exp": (torch.matrix_exp, (leaf(64, 64),)),
}


@pytest.mark.parametrize("name", LARGE)
def test_what_large_operations_hold_is_known(name):
    fn, leaves = LARGE[name]
    assert abs(bytes_not_known(SimpleNamespace(op=fn), Sample(*leaves))) <= 200


class Sample:
    """Arguments as those of the database are."""

    kwargs: ClassVar[dict] = {}

    def __init__(self, first, *rest):
        self.input, self.args = first, rest


def test_an_empty_batch_holds_nothing():
    layer = Sample(leaf(0, 4, 4), leaf(0, 4, 4))
    assert bytes_not_known(SimpleNamespace(op=torch.bmm), layer) == 0
