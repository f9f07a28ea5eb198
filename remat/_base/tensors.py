"""What tells tensors apart, and the strided tensors that one consists of, or wraps.

Invariant: nothing here reads a value or runs an operation. Each part has one storage.
Rejected: comparing contents to find a change, which would cost a copy of every input.
To ask a tensor for its storage: a sparse one has none, and that of a wrapper is empty.
DTensor by name: other subclasses follow the same protocol.
"""

import operator
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from remat._base.absent import Absent
from remat._base.errors import CaptureError
from remat._base.types import TENSORS
from remat._torch.modes import no_torch_functions


T = TypeVar("T")


def describe(tensor: Tensor) -> str:
    """Write a tensor's dtype, shape and device."""
    return f"{describe_meta(tensor.dtype, tensor.shape)} on {tensor.device}"


def describe_meta(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Write a dtype and a shape: "float32[2, 3]"."""
    return f"{str(dtype).removeprefix('torch.')}{[*shape]}"


def versions_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """Return how often each was changed in place; `None` where that is not counted."""
    try:
        return [*map(_version, tensors)]
    except RuntimeError:
        return [*map(version_of, tensors)]


def version_of(tensor: Tensor) -> int | None:
    """Return how often a tensor was changed; `None` where that is not counted."""
    return None if tensor.is_inference() else tensor._version


def changed_since(
    tensors: Iterable[Any],
    versions: Sequence[int | None],
    others: Container[type],
    known: Container[int] = (),
) -> list[int]:
    """Return the tensors that were changed in place since they had some versions.

    Not those of the classes `others`, and not those that are `known`.
    """
    each = enumerate(zip(tensors, versions, strict=False))
    counted = [(i, t, v) for i, (t, v) in each if v is not None and i not in known]
    return [i for i, t, v in counted if type(t) not in others and version_of(t) != v]


_version = operator.attrgetter("_version")


def outside_inference_mode(fn: Callable[..., T], *args: Any) -> T:
    """Call a function with inference mode off, and grad mode as it is.

    In inference mode a function that turns grad mode on makes no graph.
    """
    if not torch.is_inference_mode_enabled():
        return fn(*args)
    is_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_enabled):
        return fn(*args)


# --- The tensors that one consists of ---


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


# --- Wrappers of one tensor ---


def wrapped_by(tensor: Tensor) -> Tensor | None:
    """Return the tensor that a wrapper is made of; None if there is not just one."""
    if type(tensor) in TENSORS or not is_traceable_wrapper_subclass(tensor):
        return None
    parts = _parts(tensor)[0].values()
    inner = [part for part in parts if isinstance(part, Tensor)]
    return inner[0] if len(inner) == 1 else None


def taken_apart(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return what is inside of all wrappers, and a function that wraps it again."""
    inner = wrapped_by(tensor)
    if inner is None:
        return tensor, lambda new: new
    inside, context = _parts(tensor)
    kind: Any = type(tensor)
    layout = tensor.size(), tensor.stride()
    own = {name: part for name, part in inside.items() if part is not inner}
    names = inside.keys() - own.keys()
    innermost, again = taken_apart(inner)

    def wrap(new: Tensor) -> Tensor:
        filled = {**own, **dict.fromkeys(names, again(new))}
        return kind.__tensor_unflatten__(filled, context, *layout)

    return innermost, wrap


def _parts(tensor: Any) -> tuple[dict[str, Any], Any]:
    with no_torch_functions():
        names, context = tensor.__tensor_flatten__()
        return {name: getattr(tensor, name) for name in names}, context
