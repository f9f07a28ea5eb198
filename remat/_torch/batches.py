"""Tensors below all levels of torch.func, and at these levels again.

Invariant: what is raised is batched as what was lowered, by the vmaps that batch some
arguments in both places. Rejected: the numbers of levels. A backward has others.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch._C._functorch import (
    _add_batch_dim,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_interpreter_stack,
    get_unwrapped,
    is_batchedtensor,
    maybe_get_bdim,
    maybe_get_level,
)
from torch._functorch.vmap import unwrap_batched, wrap_batched

from remat._torch.levels import VMAP, Flat, kind_of, unwrap_dead
from remat._torch.tensors import EMPTY


# Deleted by: a public stack of the transforms that are active.
def lowered(
    tensors: Sequence[Tensor], args: Sequence[Tensor]
) -> tuple[Sequence[Tensor], list[Flat]] | None:
    """Return tensors below all levels, and how each vmap that batches `args` does so.

    None if another vmap batches them.
    """
    found: list[Flat] = []
    for level, is_vmap, batches in _levels_of(args):
        if not is_vmap:
            tensors = [_unwrap_for_grad(t, level) for t in tensors]
            continue
        tensors, dims = unwrap_batched(tuple(tensors), level) if tensors else ((), ())
        if not batches and {*dims} - {None}:
            return None
        found += [dims] if batches else []
    return tensors, found


# Deleted by: a public stack of the transforms that are active.
def raised(
    tensors: Sequence[Tensor], dims: Sequence[Flat], args: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Return tensors at the levels here, whose vmaps batch `args` as they did."""
    levels = [level for level, _, batches in _levels_of(args) if batches and tensors]
    for level, how in reversed([*zip(levels, dims, strict=False)]):
        tensors = wrap_batched(tuple(tensors), how, level)
    return tensors


def _levels_of(args: Sequence[Tensor]) -> list[tuple[int, bool, bool]]:
    """Return each level, the innermost first: is it a vmap, and does it batch args."""
    found: list[tuple[int, bool, bool]] = []
    for layer in reversed(get_interpreter_stack() or ()):
        level, is_vmap, dims = layer.level(), kind_of(layer) == VMAP, ()
        if not is_vmap:
            args = [_unwrap_for_grad(t, level) for t in args]
        elif args:
            args, dims = unwrap_batched(tuple(args), level)
        found.append((level, is_vmap, any(d is not None for d in dims)))
    return found


unwrapped = get_unwrapped


# Deleted by: public wrappers of torch.func that can be made again.
class Wrapping(NamedTuple):
    """How a tensor of torch.func wraps another one."""

    level: int
    dim: int | None  # of a batch
    shell: Tensor  # of that level, if it is one of grad

    @classmethod
    def of(cls, tensor: Tensor) -> "Wrapping":
        level = maybe_get_level(tensor)
        if is_batchedtensor(tensor):
            return cls(level, maybe_get_bdim(tensor), EMPTY)
        return cls(level, None, _wrap_for_grad(EMPTY, level))

    @property
    def is_dead(self) -> bool:
        """Whether it is of a level of grad that has ended."""
        return unwrap_dead(self.shell) is not self.shell

    def wrap(self, tensor: Tensor) -> Tensor:
        """Wrap another tensor so, where the level is."""
        if self.dim is not None:
            return _add_batch_dim(tensor, self.dim, self.level)
        return _wrap_for_grad(tensor, self.level)
