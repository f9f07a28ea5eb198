"""Counts the bytes that are alive while a step runs on fake tensors, and its work.

Called by `simulate`. A step is cut into windows: one for each call of a block, and one
for what lies between two calls. The backward of an operation belongs to the window in
which the forward ran it.

Invariant: bytes are counted by storage, from the operation that makes one until its
last reference is gone, as an allocator counts them. Nothing is allocated.
Rejected: a walk over a record of the step. It would have to know what autograd, remat
and the user's code hold at each moment; running them tells.
"""

import bisect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.absent import IGNORED, Absent, tensors_of
from remat._base.errors import CaptureError
from remat._base.op import Op
from remat._base.source import user_line
from remat._base.tensors import describe
from remat._fit.workspace import copied_inside, held_inside
from remat._partial.cost import flops, seconds
from remat._partial.plan import Step
from remat._partial.values import Arguments, Results
from remat._torch import (
    NO_VALUES,
    LeanDispatchMode,
    call_kernel,
    current_node,
    current_task,
    eager_only,
    is_fake,
    is_view_op,
    nodes_made,
    sequence_number,
    storage_id,
)


@dataclass(slots=True)
class Window:
    """A part of the forward, and the backward of its operations.

    Attributes:
        name: of the block that is called; "" between two calls.
        first: the number of the first node that it makes.
        entered: the bytes alive when it begins.
        highest: the most bytes alive in it, and in its backward.
        seconds: of its operations at nominal rates, in the forward.
        again: the same of its backward, with what is recomputed.
        flops: of both.
    """

    name: str
    first: int
    entered: int
    highest: int
    seconds: float = 0.0
    again: float = 0.0
    flops: int = 0


class Meter(LeanDispatchMode):
    """Counts bytes and work.

    Attributes:
        live: the bytes alive now.
        peak: the most bytes alive so far.
        where: the operation and the window of the peak.
        windows: those that have begun, in order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.where = "", "", False
        self.windows: list[Window] = []
        self._alive: dict[int, tuple[int, Any]] = {}
        self._current: Window | None = None
        # What an accumulation of gradients replaced, and the bytes alive beside it.
        self._replaced: tuple[int, int, str] | None = None
        self._costs = False

    def begin(self, *, costs: bool) -> None:
        """Start to measure a step: forget the windows and the peak before.

        Args:
            costs: whether its work is counted, besides its bytes.
        """
        self._settle()
        self._costs = costs
        self.peak = self.live
        self.windows = list[Window]()
        self.enter("")

    def enter(self, name: str) -> int:
        """Begin a window; return its index."""
        self._settle()
        made = Window(name, nodes_made(), self.live, self.live)
        self.windows.append(made)
        self._current = made
        return len(self.windows) - 1

    def end(self) -> None:
        """Take the last operation into account."""
        self._settle()

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of a tensor, until it is freed."""
        if not has_storage(tensor):
            return
        number = storage_id(tensor)
        if number in self._alive:
            return
        storage = tensor.untyped_storage()
        size = allocated(storage.nbytes(), tensor.device)
        freed = weakref.ref(storage, partial(self._free, number))
        self._alive[number] = size, freed
        self.live += size

    def is_counted(self, tensor: Tensor) -> bool:
        """Say whether the storage of a tensor is counted."""
        return has_storage(tensor) and storage_id(tensor) in self._alive

    def _free(self, number: int, _: Any) -> None:
        size, _ = self._alive.pop(number)
        self.live -= size

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in IGNORED:
            return func(*args, **kwargs)
        self._settle()
        task = current_task()
        if task != -1:
            self._find_window()
        before = self.live
        with values_refused(func, args, kwargs, self.is_counted):
            result = call_kernel(func, *args, **kwargs)
        for tensor in tensors_of(result):
            self.hold(tensor)
        if task != -1 and may_accumulate(func, args, result):
            self._replaced = storage_id(args[0]), self.live, name_of(func)
        else:
            copies = copied_inside(func, args)
            inside = max(self.live, before + held_inside(func, args))
            self._note(inside + copies, name_of(func))
        self._count(func, args, kwargs, result, in_backward=task != -1)
        return result

    def _find_window(self) -> None:
        """Note in which window the operations ran whose backward runs now."""
        node = current_node()
        number = -1 if node is None else sequence_number(node)
        # The accumulation of a gradient is of no window.
        if 0 <= number < _NO_NUMBER:
            k = bisect.bisect_right(self.windows, number, key=lambda w: w.first) - 1
            self._current = self.windows[max(k, 0)]

    def _settle(self) -> None:
        """Note the bytes after an accumulation of gradients.

        The engine adds in place where nothing else holds the sum so far. Under a mode
        it never does. So the sum counts once if it is freed at once.
        """
        if self._replaced is not None:
            number, live, name = self._replaced
            self._replaced = None
            self._note(live if number in self._alive else self.live, name)

    def _note(self, live: int, name: str) -> None:
        window = self._current
        if window is not None:
            window.highest = max(window.highest, live)
        if live > self.peak:
            self.peak = live
            block = "" if window is None else window.name
            self.where = name, block, current_task() != -1

    def _count(
        self, func: Any, args: Any, kwargs: Any, result: Any, *, in_backward: bool
    ) -> None:
        window = self._current
        if window is None or not self._costs or is_view_op(func):
            return
        spent, count = work_of(func, args, kwargs, result)
        window.flops += count
        if in_backward:
            window.again += spent
        else:
            window.seconds += spent


def has_storage(tensor: Tensor) -> bool:
    """Say whether the bytes of a tensor are those of one storage."""
    if type(tensor) is Absent or tensor.layout is not torch.strided:
        return False
    return not tensor.is_nested


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, int]:
    """Return the seconds of an operation at nominal rates, and its FLOPs."""
    arguments = Arguments(args, kwargs)
    results = Results(result, arguments)
    op = Op(func, *arguments.described, tuple(results.values))
    step = Step(op, result=results.form)
    return seconds(step), flops(step)


@contextmanager
def values_refused(
    func: Any, args: Any, kwargs: Any, is_known: Callable[[Tensor], bool]
) -> Iterator[None]:
    """Run an operation of a copy of a step; say what a copy cannot do.

    Args:
        func: the operation.
        args: its arguments.
        kwargs: its arguments by name.
        is_known: whether the storage of a tensor is the copy's.

    Raises:
        CaptureError: it reads a parameter of the user's.
        MissingValueError: it asks for a value, and tensors are fake.
    """
    _refuse_others(func, (args, kwargs), is_known)
    try:
        yield
    except NO_VALUES as error:
        where = user_line() or "the step"
        raise MissingValueError(_VALUE.format(where=where, op=name_of(func))) from error


class MissingValueError(CaptureError):
    """A step on fake tensors asks for the value of one."""


def _refuse_others(func: Any, args: Any, is_known: Callable[[Tensor], bool]) -> None:
    """Refuse a parameter of the user's, to which the backward would add a gradient."""
    for tensor in tensors_of(args):
        if type(tensor) is Absent or not tensor.requires_grad or is_fake(tensor):
            continue
        if not is_known(tensor):
            what = f"{name_of(func)} reads {describe(tensor)}"
            raise CaptureError(_REAL.format(what=what))


_REAL = (
    "remat.fit: the step uses a tensor that requires grad and was not passed: {what}. "
    "Pass the model that it is of as an argument: fit(step, model, batch, budget=...)."
)


_VALUE = (
    "remat.fit: {where} depends on the value of a tensor, by {op}. The step is run "
    "without values, so what it would do is not known. Pass a function that computes "
    "the same without reading the value, or fit a part that does not read it."
)


def name_of(func: Any) -> str:
    """Return the name of an operation for messages."""
    return getattr(getattr(func, "overloadpacket", func), "__name__", str(func))


def may_accumulate(func: Any, args: Any, result: Any) -> bool:
    """Say whether gradients may be added, in place where no mode sees it.

    The engine adds two gradients of a tensor. A derivative of `t[indices]` adds to
    zeros that it has made.
    """
    if torch.is_grad_enabled():
        return False
    if func is torch.ops.aten.index_put.default:
        return not args[0]._is_view()
    if func is not torch.ops.aten.add.Tensor:
        return False
    a, b = args[0], args[1]
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    # A view shares its storage with its base, as the gradient of a linear weight does.
    may_write = not a._is_view() and a.dtype == result.dtype
    return may_write and a.shape == b.shape == result.shape


def allocated(nbytes: int, device: torch.device) -> int:
    """Return the bytes that an allocator takes for a storage.

    Example:
        >>> [allocated(12, torch.device(kind)) for kind in ("cpu", "cuda")]
        [12, 512]
    """
    block = 512 if device.type == "cuda" else 1
    return -(-nbytes // block) * block


_NO_NUMBER = 2**64 - 1
