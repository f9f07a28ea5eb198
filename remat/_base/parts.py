"""The strided tensors that a tensor consists of: one, or those of a wrapper.

Invariant: each has one storage. Rejected: to ask a tensor for its storage. A sparse one
has none, and that of a wrapper is empty.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remat._base.absent import Absent
from remat._base.errors import CaptureError


def parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the tensors that a tensor consists of, each with one storage."""
    if type(tensor) is Absent:
        return
    if is_traceable_wrapper_subclass(tensor):
        wrapper: Any = tensor
        found = [getattr(tensor, name) for name in wrapper.__tensor_flatten__()[0]]
        inner = [part for part in found if isinstance(part, Tensor)]
    elif tensor.is_nested:
        inner = [tensor.values(), *(getattr(tensor, name)() for name in _OF_NESTED)]
    elif tensor.layout is torch.strided:
        yield tensor
        return
    elif tensor.layout in _SPARSE:
        inner = [getattr(tensor, name)() for name in _SPARSE[tensor.layout]]
    else:
        kind = type(tensor).__qualname__
        raise CaptureError(_NO_STORAGE.format(kind=kind, layout=tensor.layout))
    for part in inner:
        yield from parts(part)


_OF_NESTED = (
    "_nested_tensor_size",
    "_nested_tensor_strides",
    "_nested_tensor_storage_offsets",
)
_BY_ROW = ("crow_indices", "col_indices", "values")
_BY_COLUMN = ("ccol_indices", "row_indices", "values")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), _BY_ROW),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), _BY_COLUMN),
}


_NO_STORAGE = (
    "remat: a saved tensor of {kind} and layout {layout} has no storage whose bytes "
    "could be counted. Report on a function of strided or sparse tensors."
)
