"""The tensors of a run: what it is given, and where each storage that it meets is from.

Invariant: no graph that was there before is added to or changed, and what was there is
as it was afterwards: tensors, gradients, random streams. A list of storages keeps none
of them alive.
Rejected: copies of the arguments. A model that only just fits in memory leaves no room
for them.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain, repeat
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from remat._ambient.streams import global_streams, stream_of
from remat._base import pytree
from remat._base.errors import CaptureError
from remat._base.observer import Observer
from remat._base.parts import parts
from remat._base.source import user_line
from remat._base.types import Fn
from remat._live.names import CallNames
from remat._live.reach import Reach
from remat._partial.effects import written_by
from remat._report.render import short_array
from remat._torch import (
    StorageRef,
    base_tensor,
    device_generators,
    preserved_version,
    storage_id,
    use_count,
)
from remat._transform.module import recomputed_by


CONSTANT, ARGUMENT, CAPTURED, MADE = range(4)


@dataclass(frozen=True, slots=True)
class SavedResidual:
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
        what = short_array(self.dtype, self.shape) if self.dtype else "state"
        origin = f"{self.origin}{source}{place}"
        return f"{what} {origin}: {self.nbytes:,} bytes{readers}"


@dataclass(slots=True)
class StorageNote:
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

    def residual(self, nbytes: int) -> SavedResidual:
        """Return what is reported of it, given the size that it had."""
        meta = self.dtype, self.shape, self.device, nbytes
        where = self.origin, self.source, tuple(self.readers), self.place
        return SavedResidual(*meta, *where, self.is_parameter)


class Ledger(Observer):
    """Notes each storage that a run meets, and how to undo what is written to it."""

    unseen = frozenset[Any]()

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        # By address, in the order in which they were met.
        self.entries: dict[int, StorageNote] = {}
        self._stack = stack
        self._preserved: set[int] = set()

    def know(
        self, tensor: Tensor, rank: int, origin: str, source: str = ""
    ) -> list[StorageNote]:
        """Return the entries of a tensor's storages, new ones if there are none."""
        found = []
        for part in parts(tensor):
            entry = self.entries.get(storage_id(part))
            if entry is None:
                meta = (part.dtype, tuple(part.shape), part.device)
                ref = StorageRef(part.untyped_storage())
                entry = StorageNote(ref, *meta, rank, origin, source)
                entry.is_parameter = rank != MADE and is_parameter(tensor)
                self.entries[ref.address] = entry
            found.append(entry)
        return found

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for t in tensors_in((args, kwargs)):
            self.know(t, CONSTANT, "from a constant")
        written = written_by(func, args, kwargs)
        for t in written:
            self._preserve(t)
        result = self.call(func, args, kwargs)
        origin, source = origin_text(func), user_line()
        for t in tensors_in(result):
            self.know(t, MADE, origin, source)
        for t in written:
            for entry in self.know(t, MADE, origin, source):
                if entry.rank == MADE:
                    entry.origin, entry.source = origin, source
                    entry.names = ()  # of the value that was there before
        return result

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        return super().run(func, args, kwargs)

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


L = TypeVar("L", bound=Ledger)


@contextmanager
def undoing(
    fn: Fn, args: Any, kwargs: Any, mode: Callable[[ExitStack], L] = Ledger
) -> Iterator[tuple["Inputs", L]]:
    """Yield what to run on, and a mode; put back what a run under the mode changes."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        inputs = Inputs(fn, args, kwargs)
        stack.enter_context(inputs.restored())
        torch.clear_autocast_cache()  # casts in it may be of another graph
        stack.callback(torch.clear_autocast_cache)
        yield inputs, mode(stack)


# --- Tensors ---


def is_parameter(tensor: Tensor) -> bool:
    """Say whether a tensor is a leaf to differentiate for, which is alive anyway."""
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
    if isinstance(func, str):
        return f"kept of {func}"
    packet = getattr(func, "overloadpacket", func)
    return f"output of {getattr(packet, '__name__', func)}"


def counts(entries: Iterable[StorageNote]) -> dict[int, int]:
    """Return how many references there are to each storage."""
    return {e.ref.address: e.ref.count() for e in entries}


class Inputs:
    """The arguments to run on, and the tensors and streams that a function reaches.

    `tensors` are passed or captured; `run_on` has each itself, or its stand-in. `args`
    and `kwargs` are what to run on.
    """

    def __init__(self, fn: Fn, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        fn = _named(fn)
        reach = Reach(fn, "", args, kwargs)
        if reach.is_lazy:
            raise CaptureError(_LAZY)
        self._names, self._streams = CallNames(fn, args, kwargs), reach.streams
        self.tensors = self._names.tensors
        leaves, treedef = pytree.flatten((args, kwargs))
        stand_ins = _stand_ins(leaves, any(t.requires_grad for t in self.tensors))
        self.run_on = [stand_ins.get(id(t), t) for t in self.tensors]
        self._passed = len({id(value) for value in leaves if isinstance(value, Tensor)})
        leaves = [stand_ins.get(id(value), value) for value in leaves]
        self.args, self.kwargs = pytree.unflatten(treedef, leaves)

    def described(self, index: int) -> tuple[int, str]:
        """Return the rank and the origin of a tensor."""
        name, is_passed = self._names.origin_of(index)
        if is_passed:
            return ARGUMENT, f"from the argument {name}"
        return CAPTURED, f"from the captured `{name}`"

    def references(self) -> list[int]:
        """Return how many references there are to each tensor.

        Python's references count only for arguments: a captured tensor is held by the
        object that captured it, which a call may hold.
        """
        ours = self.run_on[: self._passed]
        pythons = chain(map(sys.getrefcount, ours), repeat(0))
        return [use_count(t) + n for t, n in zip(self.run_on, pythons, strict=False)]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Leave streams and gradients as they are now."""
        grads = [t.grad if t.is_leaf else None for t in self.tensors]
        try:
            with streams_kept(self._streams):
                yield
        finally:
            for t, grad in zip(self.tensors, grads, strict=True):
                if t.is_leaf and t.grad is not grad:
                    t.grad = grad


@contextmanager
def streams_kept(others: Iterable[Any] = ()) -> Iterator[None]:
    """Leave the random streams of the process, and others, as they are now."""
    devices = filter(None, map(stream_of, device_generators()))
    streams = [*global_streams().streams, *devices, *others]
    states = [stream.read() for stream in streams]
    try:
        yield
    finally:
        for stream, state in zip(streams, states, strict=True):
            if stream.read() != state:
                stream.write(state)


def _named(fn: Any) -> Any:
    """Return the function that is wrapped, whose parameter names the user knows."""
    while (found := recomputed_by(fn)) is not None:
        fn, _ = found
    return fn


def _stand_ins(leaves: Iterable[Any], differentiated: bool) -> dict[int, Tensor]:
    """Return stand-ins for tensors that have a graph, which is not to be touched.

    If nothing is `differentiated`, all tensors that can require grad have one.
    """
    anchor = torch.zeros((), requires_grad=True)
    found = {}
    for t in leaves:
        if not isinstance(t, Tensor) or t.is_inference():
            continue
        can_be = t.is_floating_point() or t.is_complex()
        if (t.requires_grad and not t.is_leaf) if differentiated else can_be:
            with preserved_version(t):
                found[id(t)] = _NonLeaf.apply(t.detach(), anchor)
    return found


_LAZY = (
    "remat: the function holds a lazy module, whose parameters are not initialized "
    "yet. A report would be on a call that makes them: call it once before."
)


class _NonLeaf(Function):
    """Returns a tensor that requires grad and is not a leaf: it may be changed."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, _anchor: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        ctx.mark_dirty(tensor)
        return tensor
