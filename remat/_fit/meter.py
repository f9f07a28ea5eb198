"""Sees the operations of a step, and counts the bytes that are alive.

The peak is said to be in the block that is called, or whose backward runs.

Invariant: the bytes of a storage are counted from the operation that makes it until its
last reference is gone (`Alive`). Nothing is allocated.
"""

import bisect
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.absent import Absent, tensors_of
from remat._base.errors import CaptureError
from remat._base.op import Op
from remat._base.source import user_line
from remat._base.tensors import describe, parts
from remat._fit.workspace import copied_inside, held_inside, hidden_in
from remat._partial.effects import flops, seconds
from remat._partial.plan import Step
from remat._partial.values import Arguments, Results
from remat._report.timeline import Alive
from remat._torch.autograd import (
    current_node,
    current_task,
    nodes_made,
    sequence_number,
)
from remat._torch.modes import call_kernel
from remat._torch.operators import is_view_op
from remat._torch.shards import (
    is_sending,
    is_wrapper,
    sent_to_nobody,
    telling_of_resized,
)
from remat._torch.tensors import NO_VALUES, fake_mode_here, is_fake, storage_id
from remat._torch.tracing import eager_only


class Measured(NamedTuple):
    """What was measured of an operation."""

    reads: Sequence[int]  # the storages of its arguments, if a meter asks for them
    makes: Sequence[int]  # those that it made
    inside: int  # the bytes that it holds while it runs, beside what it reads and makes
    result: Any


class Meter(Alive):
    """Counts bytes, and finds their peak."""

    outside = "forward"  # what operations are in that are in no backward

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.peak_at = ""  # "in mm in the backward of layers.3"
        # The blocks that were entered, with the first node that each makes; "" where
        # one was left. In which of them the operations are that run.
        self._entered: list[tuple[int, str]] = []
        self._current = ""
        # What an accumulation of gradients replaced, and the bytes alive beside it.
        self._replaced: tuple[int, int, str] | None = None
        self._first = nodes_made()  # the number of the first node of the step
        self._found: set[int] = set()  # nodes that lead to what was passed, by number
        # Storages that Python resizes, as FSDP does with parameters that it gathers,
        # by number: all, and those that were made so since the last operation.
        self.gathered: set[int] = set()
        self._grown: list[int] = []
        self._is_real = False  # whether tensors have values
        self._telling: Any = None

    @override
    def __enter__(self) -> Self:
        self._is_real = fake_mode_here() is None
        self._telling = telling_of_resized(self._resized)
        self._telling.__enter__()
        return super().__enter__()

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._telling.__exit__(exc_type, exc_val, exc_tb)

    def _resized(self, storage: Any) -> None:
        self.settle()
        before, after = self.resized(storage)
        self.gathered.update((before, after))
        if after >= 0 and self.sizes[after]:
            self._grown.append(after)

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(map(is_wrapper, types)):
            return NotImplemented  # what it runs inside is counted
        return super().__torch_dispatch__(func, types, args, kwargs)

    def hold_all(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors, of a wrapper its parts; return the bytes that are alive."""
        for tensor in tensors:
            for part in parts(tensor):
                self.hold(part)
        return self.live

    def begin(self) -> None:
        """Forget the peak before."""
        self.settle()
        self.peak = self.live
        self._entered, self._current = [(nodes_made(), "")], ""

    def enter(self, name: str) -> None:
        """Be told that a block is entered; "" where one is left."""
        self.settle()
        self._entered.append((nodes_made(), name))
        self._current = name

    # --- Operations ---

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.settle()
        in_backward = current_task() != -1
        if in_backward:
            self._find_block()
        before = self.live
        self._refuse_others(func, (args, kwargs))
        known = len(self.sizes)
        reads = self.reads(args, kwargs)
        if not is_view_op(func):  # a view may be the first to see memory of others
            known = len(self.sizes)
        try:
            result = self._called(func, args, kwargs)
        except NO_VALUES as error:
            where = user_line() or "the step"
            message = _VALUE.format(where=where, op=operator_name(func))
            raise MissingValueError(message) from error
        found = [*map(self.hold, tensors_of(result))]
        if found and is_fake(tensors_of(result)[0]):
            k, hidden = hidden_in(func, args)
            if hidden:
                self.sizes[found[k]] += hidden
                self.live += hidden
        copies = copied_inside(func, args)
        held = held_inside(func, args)
        # The engine adds in place where nothing else holds the sum so far. Under a mode
        # it never does. What is alive then is known when the next operation begins.
        makes = [*dict.fromkeys(n for n in found if n >= known)]
        if not is_view_op(func):
            makes = [*self._grown, *makes]
            self._grown.clear()
        inside = max(0, held - sum(self.sizes[n] for n in makes)) + copies
        if in_backward and may_accumulate(func, args, result):
            self._note(before + inside, operator_name(func))
            self._replaced = storage_id(args[0]), self.live, operator_name(func)
        else:
            self._note(max(self.live, before + held) + copies, operator_name(func))
        self.measured(func, args, kwargs, Measured(reads, makes, inside, result))
        return result

    def _called(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if is_sending(func) and not self._is_real:
            return sent_to_nobody(func, args)
        return call_kernel(func, *args, **kwargs)

    def reads(self, args: Any, kwargs: dict[str, Any]) -> Sequence[int]:
        """Return what an operation is about to read, by number, if that is wanted."""
        del args, kwargs
        return ()

    def measured(
        self, func: Any, args: Any, kwargs: dict[str, Any], found: Measured
    ) -> None:
        """Be told of an operation that has run."""

    def settle(self) -> None:
        """Note the bytes after an accumulation, if it was the last operation.

        The sum of gradients counts once if what was replaced is freed at once.
        """
        if self._replaced is not None:
            key, live, name = self._replaced
            self._replaced = None
            is_freed = key not in self._numbers
            self._note(self.live if is_freed else live, name)
            if is_freed:
                self.added_in_place()

    def added_in_place(self) -> None:
        """Be told that the last operation adds in place, where no mode sees it."""

    def _find_block(self) -> None:
        """Note in which block the operations ran whose backward runs now."""
        node = current_node()
        number = -1 if node is None else sequence_number(node)
        # The accumulation of a gradient is of no block.
        if self._entered and 0 <= number < _NO_NUMBER:
            k = bisect.bisect_right(self._entered, number, key=lambda each: each[0]) - 1
            self._current = self._entered[max(k, 0)][1]

    def _note(self, live: int, name: str) -> None:
        if live > self.peak:
            self.peak = live
            phase = self.outside if current_task() == -1 else "backward"
            of = f" of {self._current}" if self._current else ""
            self.peak_at = f"in {name} in the {phase}{of}"

    def _refuse_others(self, func: Any, args: Any) -> None:
        """Refuse a parameter of the user's: the backward would give it a gradient."""
        for tensor in tensors_of(args):
            if type(tensor) is Absent or not tensor.requires_grad or is_fake(tensor):
                continue
            if not (self.is_held(tensor) or self._is_made_of_known(tensor)):
                what = f"{operator_name(func)} reads {describe(tensor)}"
                raise CaptureError(_REAL.format(what=what))

    def _is_made_of_known(self, tensor: Tensor) -> bool:
        """Say whether the graph of a tensor leads to what was passed alone.

        A Function may return memory of others, such as NumPy's.
        """
        todo: list[Any] = [tensor.grad_fn]
        while todo:
            node = todo.pop()
            number = -1 if node is None else sequence_number(node)
            if number == _NO_NUMBER and self.is_held(node.variable):
                continue
            if not self._first <= number < _NO_NUMBER:
                return False
            if number not in self._found:
                self._found.add(number)
                todo += [n for n, _ in node.next_functions if n is not None]
        return True


class MissingValueError(CaptureError):
    """A step on fake tensors asks for the value of one."""


_REAL = (
    "remat.fit: the step uses a tensor that requires grad and was not passed: {what}. "
    "Pass the model that it is of as an argument: fit(step, model, batch, budget=...)."
)
_VALUE = (
    "remat.fit: {where} depends on the value of a tensor, by {op}. The step is run "
    "without values, so what it would do is not known. Pass a function that computes "
    "the same without reading the value, or fit a part that does not read it."
)
_NO_NUMBER = 2**64 - 1


def work_of(func: Any, args: Any, kwargs: Any, result: Any) -> tuple[float, int]:
    """Return the seconds of an operation at nominal rates, and its FLOPs."""
    arguments = Arguments(args, kwargs)
    results = Results(result, arguments)
    op = Op(func, *arguments.described, tuple(results.values))
    step = Step(op, result=results.form)
    return seconds(step), flops(step)


def operator_name(func: Any) -> str:
    """Return the name of an operation for messages."""
    return getattr(getattr(func, "overloadpacket", func), "__name__", str(func))


def may_accumulate(func: Any, args: Any, result: Any) -> bool:
    """Say whether gradients may be added, in place where no mode sees it."""
    if torch.is_grad_enabled():
        return False
    # A derivative of `t[indices]` adds to zeros that it has made.
    if func is torch.ops.aten.index_put.default:
        return len(args) > 3 and args[3] and not args[0]._is_view()
    node = current_node()
    if node is not None and node.name() in _ADD:
        return False
    # The engine adds two gradients of a tensor.
    if func is not torch.ops.aten.add.Tensor:
        return False
    a, b = args[0], args[1]
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return False
    # A view shares its storage with its base, as the gradient of a linear weight does.
    may_write = not a._is_view() and a.dtype == result.dtype
    return may_write and a.shape == b.shape == result.shape


# Whose derivatives are sums of their own.
_ADD = {"VarMeanBackward0", "StdMeanBackward0"}
