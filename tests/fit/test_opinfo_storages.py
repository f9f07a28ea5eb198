"""What `fit` knows of storages, of each operation in torch's database.

All operations run on real tensors, forward and backward. Each one is run on fakes, too,
and the storages of its results are compared. The peaks of both are compared with what
the profiler counts.
"""

from itertools import islice

import pytest
import torch
from support.storages import bytes_not_known, compared
from torch.testing._internal.common_methods_invocations import op_db


# Of which the fakes lack bytes: one index, or those of sparse products.
OTHERS = {"aten._embedding_bag.default", "aten._sparse_mm_reduce_impl.default"}
OPS = [op for op in op_db if op.supports_dtype(torch.float32, "cpu")]


def samples_of(op):
    needs_grad = op.supports_autograd
    return islice(op.sample_inputs("cpu", torch.float32, requires_grad=needs_grad), 4)


@pytest.mark.opinfo
@pytest.mark.filterwarnings("ignore")
def test_storages_of_all_operations_are_known():
    differ, seen = {}, set()
    for op in OPS:
        try:
            comparing = compared(op, samples_of(op))
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
    "kthvalue",
    "masked_select",
    "matrix_exp",
    "multinomial",
    "nn.functional.bilinear",
    "nn.functional.conv3d",
}
STREAM = 5120  # bytes: the database saves the state of a stream


@pytest.mark.opinfo
@pytest.mark.filterwarnings("ignore")
def test_what_operations_hold_is_known():
    over, count = set(), 0
    for op in OPS:
        try:
            found = [bytes_not_known(op, each) for each in samples_of(op)]
        except Exception:  # noqa: BLE001 - a sample is an error, or has no derivative
            continue
        count += 1
        if max(found, default=0) > STREAM:
            over.add(op.name)
    assert count > 500
    assert over <= HOLD_MORE, over
