"""Lists the storages that a run met: where each comes from, and how many refer to it.

Called by `residuals`, which counts bytes by it, and by `examine`, which has it put back
what the run wrote to.

Invariant: the list does not keep a storage alive, and what was there before the run is
unchanged afterwards. Rejected: to list tensors. A view keeps all bytes of its storage
alive, and many tensors may keep the same bytes.
"""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from remat._base import pytree
from remat._base.parts import parts
from remat._base.source import user_line
from remat._partial.effects import written_by
from remat._report.render import short
from remat._torch import (
    StorageRef,
    base_tensor,
    call_kernel,
    preserved_version,
    storage_id,
)


CONSTANT, ARGUMENT, CAPTURED, MADE = range(4)


@dataclass(frozen=True, slots=True)
class Residual:
    """One storage that stays alive for the backward.

    Attributes:
        dtype: the dtype of the tensor, or None for the state of a random stream.
        shape: the shape of the tensor that the storage was made for, or that was
            passed.
        device: the device of the storage.
        nbytes: the bytes of the whole storage, even if only a view of it was saved.
        origin: where the storage comes from: "from the argument x['w'][0]", "from the
            captured `self.up.weight`", "output of sin", "named 'y'" if
            `checkpoint_name` gave that name, or "from a constant" if the origin is
            unknown.
        source: the user's line that made or named it ("file.py:12, in block", or in a
            notebook "Cell In[9]:10"), or "".
        readers: the operations whose backward reads it, in the order of the forward.
            Empty if torch does not tell, as for a Function written in C++.
        place: "pinned host" or "disk" if it was offloaded there, else "".
        is_parameter: whether it is of a parameter: a leaf that requires grad, which is
            alive without the graph too.

    Example:
        >>> from remat import saved_residuals
        >>> (found,) = saved_residuals(lambda x: x.sin(), torch.ones(3))
        >>> found.origin, found.nbytes, found.readers
        ('from the argument x', 12, ('sin',))
    """

    dtype: torch.dtype | None
    shape: tuple[int, ...]
    device: torch.device
    nbytes: int
    origin: str
    source: str
    readers: tuple[str, ...]
    place: str = ""
    is_parameter: bool = False

    def __str__(self) -> str:
        source = f" from {self.source}" if self.source else ""
        place = f", offloaded to {self.place}" if self.place else ""
        readers = f", read by {', '.join(self.readers)}" if self.readers else ""
        what = short(self.dtype, self.shape) if self.dtype else "state"
        origin = f"{self.origin}{source}{place}"
        return f"{what} {origin}: {self.nbytes:,} bytes{readers}"


@dataclass(slots=True)
class Entry:
    """What is known of a storage, without keeping it alive."""

    ref: StorageRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    rank: int
    origin: str
    source: str = ""
    place: str = ""
    readers: dict[str, None] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    is_parameter: bool = False

    def nbytes(self) -> int:
        """Return its size, 0 once it is freed."""
        storage = self.ref.get()
        return 0 if storage is None else storage.nbytes()

    def residual(self, nbytes: int) -> Residual:
        """Return what is reported of it, given the size that it had."""
        meta = self.dtype, self.shape, self.device, nbytes
        where = self.origin, self.source, tuple(self.readers), self.place
        return Residual(*meta, *where, self.is_parameter)


class Ledger(TorchDispatchMode):
    """Notes each storage that a run meets, and how to undo what is written to it.

    Args:
        stack: gets the callbacks that undo it.

    Attributes:
        entries: the storages by address, in the order in which they were met.
    """

    supports_higher_order_operators = True

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self.entries: dict[int, Entry] = {}
        self._stack = stack
        self._preserved: set[int] = set()

    def know(
        self, tensor: Tensor, rank: int, origin: str, source: str = ""
    ) -> list[Entry]:
        """Return the entries of a tensor's storages, new ones if there are none."""
        found = []
        for part in parts(tensor):
            entry = self.entries.get(storage_id(part))
            if entry is None:
                meta = (part.dtype, tuple(part.shape), part.device)
                ref = StorageRef(part.untyped_storage())
                entry = Entry(ref, *meta, rank, origin, source)
                entry.is_parameter = rank != MADE and is_parameter(tensor)
                self.entries[ref.address] = entry
            found.append(entry)
        return found

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        for t in tensors_in((args, kwargs)):
            self.know(t, CONSTANT, "from a constant")
        written = written_by(func, args, kwargs)
        for t in written:
            self._preserve(t)
        result = self._call(func, args, kwargs)
        origin, source = origin_text(func), user_line()
        for t in tensors_in(result):
            self.know(t, MADE, origin, source)
        for t in written:
            for entry in self.know(t, MADE, origin, source):
                if entry.rank == MADE:
                    entry.origin, entry.source = origin, source
                    entry.names = ()  # of the value that was there before
        return result

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation."""
        return call_kernel(func, *args, **kwargs)

    def name(self, tensor: Tensor, name: str) -> None:
        """Give a name to what an operation made."""
        for part in parts(base_tensor(tensor)):
            # A recorder around would take `untyped_storage` for the user's reading it.
            entry = self.entries.get(storage_id(part))
            if entry is None or entry.rank != MADE or name in entry.names:
                continue
            entry.names = (*entry.names, name)
            entry.origin = origin_text(None, entry.names)
            entry.source = user_line()

    def has_met(self, tensor: Tensor) -> bool:
        """Say whether all storages of a tensor are known."""
        return all(storage_id(part) in self.entries for part in parts(tensor))

    def _preserve(self, tensor: Tensor) -> None:
        """Have a tensor that is older than the run put back as it is now."""
        for part in parts(tensor):
            number = storage_id(part)
            if self.entries[number].rank == MADE or number in self._preserved:
                continue
            self._preserved.add(number)
            if not part.is_inference():
                self._stack.enter_context(preserved_version(part))
            storage = part.untyped_storage()  # a fake tensor's is on another device
            if storage.device.type != "meta":
                self._stack.callback(_put_back, storage, storage.clone())


def _put_back(storage: torch.UntypedStorage, before: torch.UntypedStorage) -> None:
    if storage.nbytes() != before.nbytes():
        storage.resize_(before.nbytes())
    storage.copy_(before)


# --- Tensors ---


def is_parameter(tensor: Tensor) -> bool:
    """Say whether a tensor is a leaf to differentiate with respect to.

    It is alive anyway: a graph that saves it keeps no more memory alive.
    """
    if not tensor.is_leaf:
        return False
    return tensor.requires_grad or isinstance(tensor, nn.Parameter)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a pytree."""
    return [t for t in pytree.flatten(tree)[0] if isinstance(t, Tensor)]


def origin_text(func: Any, names: Sequence[str] = ()) -> str:
    """Return, in JAX's words, the origin of what an operation made."""
    if names:
        return f"named {', '.join(map(repr, names))}"
    packet = getattr(func, "overloadpacket", func)
    return f"output of {getattr(packet, '__name__', func)}"


def counts(entries: Iterable[Entry]) -> dict[int, int]:
    """Return how many references there are to each storage."""
    return {e.ref.address: e.ref.count() for e in entries}
