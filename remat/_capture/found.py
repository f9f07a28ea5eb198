"""What a search finds besides nodes: the tensors of a call, its code, its streams.

Invariant: each tensor has one index, in the order in which tensors are found.
Rejected: one list for the arguments and one for the function. A tensor may be in both.
"""

import operator
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from remat._base.code import static_of
from remat._capture.paths import Path
from remat._capture.stream_search import StreamSearch


_requires_grad = operator.attrgetter("requires_grad")


class Found:
    """What one search found.

    Attributes:
        tensors: each once, in order.
        origins: the path of each.
        buffers: the tensors that the function may update in place, as it would without
            remat: index, and whether it is a module's registered buffer.
        constants: in the arguments, in order.
        code: the code found, in order: of functions, types of objects, modes of
            modules.
        in_arguments: whether what is searched now is an argument.
        is_contained: whether nothing was found but functions, numbers and packages.
        is_lazy: whether some module has no parameters yet.
        scripted: the name of a TorchScript module, if there is one.
        stream_search: what looks for random streams, and those that it found.
    """

    __slots__ = (
        *("_index", "buffers", "code", "constants", "in_arguments", "is_contained"),
        *("is_lazy", "origins", "scripted", "stream_search", "tensors"),
    )

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.origins: list[Path] = []
        self.buffers: dict[int, bool] = {}
        self.code: list[Any] = []
        self.constants: list[Any] = []
        self.in_arguments = self.is_contained = True
        self.is_lazy, self.scripted = False, ""
        self.stream_search = StreamSearch()
        self._index: dict[int, int] = {}

    # --- Tensors ---

    def index_of(self, value: Tensor, path: Path, *, registered: bool = False) -> int:
        """Return the index of a tensor, which is added if it is new."""
        index = self._index.get(id(value))
        if index is None:
            index = self._index[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.origins.append(path)
            if not self.in_arguments or registered:
                self.is_contained = False
                if not value.requires_grad:
                    self.buffers[index] = registered
        elif registered and not value.requires_grad:
            self.buffers[index] = True
        return index

    # --- What tells calls apart ---

    def note_constants(self, values: Iterable[Any]) -> None:
        """Note what an argument holds that tells calls apart."""
        if self.in_arguments:
            self.constants += map(static_of, values)

    def end_arguments(self) -> None:
        """Go on with what the function reaches besides its arguments."""
        self.in_arguments, self.is_contained = False, not self.code
