"""What all runs of a program have in common about the levels around it.

Invariant: a vmap over cotangents does not count as a level, as it batches no input.
Rejected: the depth of the stack. A backward opens levels of its own.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.program import InputIndex, OutputIndex, PerInput, Program
from remat._base.types import Outputs
from remat._torch import batch
from remat._transform.levels import Batch, Below, Dual


def levels_below(program: Program) -> list[Any]:
    """Return the levels of torch.func around a program, the outermost first.

    A vmap over cotangents does not count, as it batches no input.
    """
    found: list[Any] = []
    while isinstance(program, Below):
        is_vmap = isinstance(program, Batch) and program.batches_inputs
        if is_vmap or isinstance(program, Dual):
            found.append(program)
        program = program.program
    return found


def note_levels(program: Program, found: Sequence[Any], count: int) -> None:
    """Tell levels what an earlier run with `count` outputs found, without a run."""
    left = [*found]
    chain: list[Any] = []
    while isinstance(program, Below):
        chain.append(program)
        program = program.program
    for level in reversed(chain):
        if isinstance(level, Batch) and not level.batches_inputs:
            level.out_dims = (None,) * count
        elif left:
            level.found = left.pop()
            if isinstance(level, Dual):
                count += len(level.positions or ())


def total_needs(program: Program, needs: PerInput) -> PerInput:
    """Return which inputs some level differentiates, inside a vmap or outside."""
    total = [*needs]
    while isinstance(program, Below):
        for i, need in enumerate(program.needs):
            total[i] = total[i] or need
        program = program.program
    return total


class BatchVjp(Program):
    """The vjp of a program under a vmap, for all examples at once.

    Its inputs are those of the program, what else a node saved of it, and cotangents.
    """

    __slots__ = ("_below", "_given", "_of", "_wanted")

    def __init__(
        self,
        below: Program,
        of: Batch,
        wanted: Sequence[InputIndex],
        given: Sequence[OutputIndex],
    ) -> None:
        self._below, self._of = below, of
        self._wanted, self._given = wanted, given

    @override
    def run(self, *inputs: Tensor, mode: Any = None) -> Outputs:
        """Evaluate the vjp of the program on every element of the batch."""
        del mode
        in_dims, size, randomness = self._of.vmap
        given = [self._of.out_dims[j] for j in self._given]
        end = len(inputs) - len(given)
        if self._of.batches_inputs:
            # An output that is not batched belongs to all examples together, so its
            # cotangent must count once in the sum of their gradients.
            pairs = zip(inputs[end:], given, strict=True)
            cts = [_of_first(ct, size) if d is None else ct for ct, d in pairs]
            given = [0 if d is None else d for d in given]
            inputs = (*inputs[:end], *cts)
        dims = (*in_dims, *[None] * (end - len(in_dims)), *given)
        grads, found = batch(self._below.run, dims, size, randomness)(*inputs)
        return tuple(
            None if g is None else at_dim(g, dim, in_dims[i], size)
            for g, dim, i in zip(grads, found, self._wanted, strict=True)
        )


def _of_first(ct: Tensor, size: int) -> Tensor:
    """Return a batch of cotangents, all zero but for the first one."""
    return torch.cat([ct.unsqueeze(0), ct.new_zeros((size - 1, *ct.shape))])


def at_dim(ct: Tensor, dim: int | None, to: int | None, size: int) -> Tensor:
    """Return a cotangent whose batch dimension is that of its output."""
    if to is None:
        return ct if dim is None else ct.sum(dim)
    if dim is None:
        return ct.unsqueeze(to).expand(*ct.shape[:to], size, *ct.shape[to:])
    return ct.movedim(dim, to)
