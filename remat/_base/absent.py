"""Tensors without a value, which a replay puts in place of what it leaves out.

While the replay runs, they are plain to Python, whatever is asked of them. To torch
they are of a subclass that handles no operation, so that only a mode can, and no kernel
runs on one. Before and after, they are `Absent`.

Invariant: nobody reads one. torch refuses operations and pointers, and the replay that
left the value out is told, even where the user's code catches the error.
Rejected: a subclass. Code that asks for types takes another branch. A plain tensor
without memory: kernels read address 0. A buffer of NaN: it costs memory and time, and
who reads it gets a number.
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.op import Value
from remat._base.operators import DETACH
from remat._base.types import TENSORS
from remat._torch.tensors import (
    has_no_memory,
    no_torch_function,
    refuse_data_ptr,
    tensor_without_data,
)
from remat._torch.tracing import eager_only


_aten = torch.ops.aten


# Operations that read the metadata of an argument, and not its values.
LIKE = {
    *("empty_like", "full_like", "ones_like", "zeros_like"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    *("rand_like", "randn_like", "randint_like"),
    *("is_same_size", "_has_same_storage_numel"),
}


class MissingError(RuntimeError):
    """Something read a value that was left out."""

    def __init__(self, reader: Any) -> None:
        super().__init__(_READ.format(reader=reader))


_READ = (
    "remat: {reader} reads a value that the recompute left out, because no recorded "
    "operation reads it. Pass prune=False to recompute all values."
)


class MismatchError(RuntimeError):
    """A replay met another operation than the record has."""


class Trouble:
    """What a replay met: storages that are missed, and how operations differ."""

    __slots__ = ("absent", "differs", "missed")

    def __init__(self) -> None:
        self.absent: list[weakref.ref[Absent]] = []  # made before the function runs
        self.missed: list[int] = []
        self.differs = ""

    def __bool__(self) -> bool:
        return bool(self.missed or self.differs)


class Absent(Tensor):
    """A tensor without a value, outside of the replay that left it out."""

    # The number of the storage that is not there, and what its replay met, if there is
    # one. Attributes of the user's are beside them.
    remat_number: int = -1
    remat_trouble: Trouble | None = None

    __torch_function__ = no_torch_function

    @classmethod
    @override
    @eager_only
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        read = [t for t in inputs_of(args, kwargs) if type(t) is Absent]
        if func is DETACH or func is _aten.alias.default:
            return like(read[0])
        if func.overloadpacket.__name__ in LIKE:
            return func(*present(args), **present(kwargs or {}))
        for t in read:
            if t.remat_trouble is not None:
                t.remat_trouble.missed.append(t.remat_number)
        raise MissingError(func)

    def const_data_ptr(self) -> int:
        """Refuse the address, which torch gives where it refuses that to write to."""
        raise MissingError("Python")

    def belong(self, number: int, trouble: Trouble) -> "Absent":
        """Stand for a storage in a replay."""
        self.remat_number, self.remat_trouble = number, trouble
        trouble.absent.append(weakref.ref(self))
        return self


def absent(value: Value) -> Absent:
    """Return a tensor of the metadata given, without a value."""
    view = value.shape, value.stride, value.offset, None
    kind = value.dtype, torch.strided, value.device
    new: Absent = tensor_without_data(Absent, *view, *kind)
    refuse_data_ptr(new)
    return new


def like(tensor: Tensor) -> Absent:
    """Return an absent tensor like one that is there or is not."""
    meta = (tuple(tensor.shape), tensor.dtype, tensor.device)
    layout = tuple(tensor.stride()), int(tensor.storage_offset())
    new = absent(Value(*meta, *layout))
    if type(tensor) is Absent and tensor.remat_trouble is not None:
        new.belong(tensor.remat_number, tensor.remat_trouble)
    return new


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among an operation's results, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    found: list[Tensor] = []
    _collect((tree,), found)
    return found


def are_tensors(args: Any, kwargs: Any) -> bool:
    """Say, quickly and for most operations, that the arguments are tensors alone."""
    return not kwargs and PLAIN.issuperset(map(type, args))


# Classes that see nothing of what is done with their tensors.
PLAIN = TENSORS | {Absent}


def may_be_absent(leaf: Tensor) -> bool:
    """Say whether an input may be left out: no class of its own sees its operations."""
    return type(leaf) in PLAIN or hasattr(leaf, "fake_mode")


def inputs_of(args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments, in order."""
    if are_tensors(args, kwargs):
        return [*args]
    found: list[Tensor] = []
    _collect(args, found)
    if kwargs:
        _collect(kwargs.values(), found)
    return found


def _collect(trees: Any, found: list[Tensor]) -> None:
    for part in trees:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (list, tuple)):
            _collect(part, found)
        elif isinstance(part, dict):
            _collect(part.values(), found)


def present(tree: Any) -> Any:
    """Put tensors of unspecified values in place of absent ones."""
    if isinstance(tree, Tensor):
        if not (type(tree) is Absent or has_no_memory(tree)):
            return tree
        meta = tree.shape, tree.stride()
        return torch.empty_strided(*meta, dtype=tree.dtype, device=tree.device)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(present, tree))
    if isinstance(tree, dict):
        return {name: present(part) for name, part in tree.items()}
    return tree
