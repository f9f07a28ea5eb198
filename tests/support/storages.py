"""The storages of operations, and what they hold while they run: real, and as counted.

In: an operation with arguments, as torch's database has them. Out: where fakes differ.
"""

from typing import ClassVar

import torch
from support.allocated import most_allocated
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from remat._fit.meter import Meter
from remat._fit.workspace import hidden_in
from remat._torch.tensors import fake_mode, storage_id


class Sample:
    """Arguments as those of the database are."""

    kwargs: ClassVar[dict] = {}

    def __init__(self, first, *rest):
        self.input, self.args = first, rest


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


def compared(op, samples):
    comparing = Comparing()
    for sample in samples:
        with comparing:
            out = op.op(sample.input, *sample.args, **sample.kwargs)
            outs = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
            outs = [t for t in outs if t.requires_grad]
            torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
    return comparing


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
        meter.begin()
        ran(op, sample)
        meter.settle()
    return measured - (meter.peak - before)
