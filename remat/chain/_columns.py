"""What a chain collects of its steps: one tensor for all of them.

Invariant: no row is held longer than its step. A row that is a view of a carry would
keep the carry alive.
Rejected: a list of rows that is stacked at the end, which holds all of them twice.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat._torch import current_layer, is_fake, is_legacy_batch
from remat.chain._steps import COLLECTED, Live, refuse_other_form


class Collected(NamedTuple):
    """What is collected of one step.

    Attributes:
        tensors: those of it, without their graphs.
        frame: the rest of it.
        needs: which of the tensors require grad.
    """

    tensors: Sequence[Tensor]
    frame: Any
    needs: Sequence[bool]


class Columns:
    """What is collected of all steps, each tensor of it stacked.

    A tensor is written to its place at once. A row that is a view of a carry would keep
    the carry alive.

    Attributes:
        frame: of each step; None if nothing is collected.
        needs: which of the tensors require grad, in any step.
    """

    def __init__(self, length: int, label: str, *, is_reversed: bool) -> None:
        self._length, self._label, self._is_reversed = length, label, is_reversed
        self._columns: list[Any] = []
        self._count = 0
        self.frame: Any = None
        self.needs: list[bool] = []

    def add(self, row: Collected) -> None:
        """Add what was collected of the next step."""
        if self.frame is None:
            self.frame, self.needs = row.frame, [*row.needs]
            self._columns = [*map(self._column, row.tensors)]
        else:
            # Of a whole column, so that no row of the first step is held.
            then = Live([column[0] for column in self._columns], self.frame, ())
            now = Live(row.tensors, row.frame, ())
            refuse_other_form(now, then, self._count, self._label, COLLECTED)
        self.needs = [*map(operator.or_, self.needs, row.needs)]
        for column, t in zip(self._columns, row.tensors, strict=True):
            if isinstance(column, list):
                column.append(t)
            else:
                last = self._length - 1
                column[last - self._count if self._is_reversed else self._count] = t
        self._count += 1

    def _column(self, first: Tensor) -> Any:
        if not can_be_written(first):
            return list[Tensor]()
        return first.new_empty((self._length, *first.shape))

    def stacked(self) -> list[Tensor]:
        """Return the tensors, stacked, and forget them."""
        columns, self._columns = self._columns, list[Any]()
        return [self._stacked(c) if isinstance(c, list) else c for c in columns]

    def _stacked(self, rows: list[Tensor]) -> Tensor:
        return torch.stack(rows[::-1] if self._is_reversed else rows)


def can_be_written(row: Tensor) -> bool:
    """Say whether a tensor that holds rows like this one can be written to.

    Below a vmap it would need a dimension that it does not have.
    """
    if current_layer() is not None or is_legacy_batch(row):
        return False
    return row.layout is torch.strided and (type(row) is Tensor or is_fake(row))
