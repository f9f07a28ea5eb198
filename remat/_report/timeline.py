"""`memory_timeline`: the bytes that are alive during a call, operation by operation.

The profiler reports each allocation and each free, on the CPU too, and the operations
that were running then. Tensors without values allocate nothing: `Alive` counts their
storages, each from the operation that makes it until its last reference is gone, with
the bytes that an allocator takes for it. It has one number all that time.

Invariant: bytes are exact, and the function runs once, as it is. No storage is held.
Rejected: the observer for all tensors. It sees what operations return, but not what
they take while they run.
"""

import gc
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import profile
from typing_extensions import override

from remat._base.absent import Absent, tensors_of
from remat._base.operators import Observer
from remat._reach.reach import Reach
from remat._report import inputs as _inputs, render as _render
from remat._torch.autograd import current_node
from remat._torch.tensors import storage_id


class Alive(Observer):
    """Numbers storages, and counts their bytes."""

    is_of_call = False

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []  # in the order in which they were met
        self.live = 0
        self._numbers: dict[int, tuple[int, Any, torch.device]] = {}

    def hold(self, tensor: Tensor) -> int:
        """Count the storage of a tensor until it is freed; return its number, or -1."""
        if not has_storage(tensor):
            return -1
        key = storage_id(tensor)
        known = self._numbers.get(key)
        if known is not None:
            return known[0]
        return self._count(tensor.untyped_storage(), key, tensor.device)

    def _count(self, storage: Any, key: int, device: torch.device) -> int:
        number, size = len(self.sizes), allocated(storage.nbytes(), device)
        freed = weakref.ref(storage, partial(self._free, key, number))
        self._numbers[key] = number, freed, device
        self.sizes.append(size)
        self.live += size
        return number

    def resized(self, storage: Any) -> tuple[int, int]:
        """Count a storage anew whose size was changed; return its numbers, or -1."""
        key = storage._cdata
        if key not in self._numbers:
            return -1, -1
        before, _, device = self._numbers[key]
        self._free(key, before, None)
        return before, self._count(storage, key, device)

    def is_held(self, tensor: Tensor) -> bool:
        """Say whether the storage of a tensor is counted."""
        return has_storage(tensor) and storage_id(tensor) in self._numbers

    def _free(self, key: int, number: int, _: Any) -> None:
        del self._numbers[key]
        self.live -= self.sizes[number]
        self.freed(number)

    def freed(self, number: int) -> None:
        """Be told that a storage was freed."""


def has_storage(tensor: Tensor) -> bool:
    """Say whether the bytes of a tensor are those of one storage."""
    if type(tensor) is Absent or tensor.layout is not torch.strided:
        return False
    return not tensor.is_nested


def allocated(nbytes: int, device: torch.device) -> int:
    """Return the bytes that an allocator takes for a storage."""
    block = 512 if device.type == "cuda" else 1
    return -(-nbytes // block) * block


# --- Storages that are alive ---


@dataclass(frozen=True, repr=False)
class MemoryTimeline(_render.Shown):
    """The report of `memory_timeline`. It prints as a table of operations.

    Attributes:
        label: the name of the function.
        bytes: the bytes alive after each allocation and each free, in order.
        ops: what allocated or freed at each of these points: an operation ("mm"), a
            node of the backward that frees what it saved ("CosBackward0"), or "" if
            Python did, as for `del x`.

    Example:
        >>> import torch
        >>> memory_timeline(lambda x: x.sin().cos(), torch.ones(1000))
        <MemoryTimeline of `<lambda>`: 3 events, peak of 7.8 KiB in cos>
    """

    label: str
    bytes: tuple[int, ...]
    ops: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The most bytes that were alive at any one time."""
        return max(self.bytes, default=0)

    @property
    def peak_op(self) -> str:
        """The operation that ran when the peak was first reached."""
        return self.ops[self.bytes.index(self.peak)] if self.bytes else ""

    def plot(self, ax: Any = None, label: str = "") -> Any:
        """Draw the live bytes over allocations and frees, and mark the peak.

        Args:
            ax: the matplotlib axes to draw on; None for new ones. Pass those of another
                timeline to compare the two.
            label: what the legend calls this timeline, beside its peak; "" for the peak
                and the operation in which it is.

        Returns:
            The axes.
        """
        name = f"{label}: {_render.size(self.peak)}" if label else self._peak
        sizes = [nbytes / _render.MIB for nbytes in self.bytes]
        axes = "allocations and frees so far", "memory alive, MiB"
        series, title = {name: sizes} if sizes else {}, f"memory of {self.label}"
        return _render.lines(range(len(sizes)), series, axes, title, ax)

    @override
    def __repr__(self) -> str:
        events = f"{len(self.bytes)} events"
        return f"<MemoryTimeline of {self.label}: {events}, {self._peak}>"

    @property
    def _peak(self) -> str:
        where = f" in {self.peak_op}" if self.peak_op else ""
        return f"peak of {_render.size(self.peak)}{where}"

    @override
    def _table(self) -> _render.Table:
        rows: dict[str, list[int]] = {}
        for op, now, before in zip(
            self.ops, self.bytes, (0, *self.bytes), strict=False
        ):
            row = rows.setdefault(op or "Python", [0, 0, 0, 0])
            row[0] += now > before
            row[1] += max(now - before, 0)
            row[2] += max(before - now, 0)
            row[3] = max(row[3], now)
        last = self.bytes[-1] if self.bytes else 0
        return _render.Table(
            title=f"memory of {self.label}",
            columns=("operation", "#allocations", "#allocated", "#freed", "#peak"),
            rows=tuple((op, *map("{:,}".format, row)) for op, row in rows.items()),
            notes=(f"peak: {self.peak:,} bytes; at the end: {last:,}",),
        )


def memory_timeline(
    fn: Callable[..., object], /, *args: Any, **kwargs: Any
) -> MemoryTimeline:
    """Run a function and list the bytes alive after each allocation and each free.

    The function runs once, as it is. To see the memory of a training step, pass a
    function that runs the forward and the backward. The count starts at zero: tensors
    that exist before the call do not count, and are not subtracted when ``fn`` frees
    them. The result of ``fn`` stays alive until the last entry. Cyclic garbage is
    collected before the call and not during it.

    If the function is given, or refers to, a meta or fake tensor, or a model with such
    parameters, the bytes are those that its storages would have: of a model larger than
    memory, say. What operations take while they run is not counted then.

    Args:
        fn: Called once. State that a first call sets up (such as a cache) counts as
            alive. To leave it out, call ``fn`` once before.
        *args: Its arguments.
        **kwargs: Its keyword arguments.

    Returns:
        The live bytes on all devices together, after each event in order, each with the
        operation that ran.

    Example:
        >>> import torch
        >>> x = torch.ones(1000)
        >>> found = memory_timeline(lambda x: x.sin().cos(), x)
        >>> found.bytes, found.ops
        ((4000, 8000, 4000), ('sin', 'cos', ''))
    """
    run = partial(fn, *args, **kwargs)
    label = _inputs.label_of_function(fn)
    # The function may refer to the model, as a lambda does. No name holds the tensors:
    # the run may free some.
    has_values = all(map(_inputs.has_values, Reach(fn, label, args, kwargs).tensors))
    found = changes_in(run) if has_values else _changes_without_values(run)
    return timeline_of(label, found)


class MemoryChange(NamedTuple):
    """One allocation or free."""

    nbytes: int  # negative for a free
    place: Any  # the device and the address of the memory
    running: tuple[str, ...]  # what was running on the thread, the outermost first


def timeline_of(label: str, changes: Sequence[MemoryChange]) -> MemoryTimeline:
    """Return the bytes alive after each change, and the operation that ran."""
    live = accumulate(change.nbytes for change in changes)
    ops = tuple(running_operation(change.running) for change in changes)
    return MemoryTimeline(label, tuple(live), ops)


def changes_in(fn: Callable[[], object]) -> list[MemoryChange]:
    """Run a function and return its allocations and frees, in order."""
    # Kineto writes two lines to stderr at each start. It reads this at its first start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    profiler = profile(profile_memory=True)
    with without_collections():
        with profiler:
            result = fn()
        del result  # freed after the profiler stopped, so it still counts as alive
    # The profiler's public `events()` folds memory events into the ops around them and
    # loses their order; read `events()` instead of this once it keeps them apart.
    recorded: Any = profiler.kineto_results
    found = [*_changes(recorded.experimental_event_tree())]
    return [change for _, change in sorted(found, key=itemgetter(0))]


def _changes_without_values(fn: Callable[[], object]) -> list[MemoryChange]:
    """Run a function on tensors without values, and return what it would allocate."""
    storages = _MadeWithoutValues()
    with without_collections(), storages:
        result = fn()
        found = [*storages.changes]
    del result  # freed after the last change that is told of
    return found


class _MadeWithoutValues(Alive):
    """Notes when storages are made and freed, and in what."""

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[MemoryChange] = []
        self._running = ""

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        passed = filter(has_storage, tensors_of((args, kwargs)))
        given = {storage_id(t) for t in passed}
        self._running = func.__name__.partition(".")[0]
        result = super().run(func, args, kwargs)
        for tensor in filter(has_storage, tensors_of(result)):
            if not (storage_id(tensor) in given or self.is_held(tensor)):
                self._change(self.hold(tensor), 1)
        self._running = ""
        return result

    @override
    def freed(self, number: int) -> None:
        self._change(number, -1)

    def _change(self, number: int, sign: int) -> None:
        node = current_node()
        where = self._running or (node.name() if node is not None else "")
        running = (where,) if where else ()
        change = MemoryChange(sign * self.sizes[number], number, running)
        self.changes.append(change)


@contextmanager
def without_collections() -> Iterator[None]:
    """Collect cyclic garbage now, and not inside the block."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _changes(roots: Iterable[Any]) -> Iterator[tuple[int, MemoryChange]]:
    """Yield each allocation and free with its time, thread by thread."""
    outermost: tuple[str, ...] = ()
    todo = [(event, outermost) for event in roots][::-1]
    while todo:
        event, running = todo.pop()
        if event.name == "[memory]":
            of = event.extra_fields
            place = str(of.device), of.ptr
            yield event.start_time_ns, MemoryChange(of.alloc_size, place, running)
        inside = (*running, event.name)
        todo += [(child, inside) for child in reversed(event.children)]


def running_operation(running: Sequence[str]) -> str:
    """Return the outermost operation that is running, else the node of the backward."""
    names = [name.removeprefix(_ENGINE) for name in running]
    ops = [name for name in names if "::" in name and not name.startswith(_TORCH)]
    if ops:
        return ops[0].removeprefix("aten::")
    return names[0].removeprefix(_TORCH) if names else ""


_ENGINE = "autograd::engine::evaluate_function: "
_TORCH = "torch::autograd::"
