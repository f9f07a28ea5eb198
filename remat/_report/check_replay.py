"""`check_replay`: whether a recompute computes what the forward did, bit for bit.

The function runs twice: as the forward of a rematerialized call, and as its recompute.
A mode copies the results of each operation in the first run, and compares them in the
second. `compat` shows operations with it.

Invariant: a value is compared as soon as it is made, so the report names the operation
where the two runs first differ. Equal means equal in every bit: a NaN equals itself,
and 0 differs from -0.
Rejected: `torch.equal`, for which it is the other way round. And to stop at the first
difference: the operations after it show whether the function took another path.
Rejected: keeping hashes, which take no memory. Reporting the distance of two values
would need a third run, which may differ again.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._ambient.draws import without_draws
from remat._base.absent import inputs_of, tensors_of
from remat._base.context import within
from remat._base.errors import RecomputeError
from remat._base.operators import Observer
from remat._base.source import user_line
from remat._base.tensors import describe_meta, parts
from remat._base.types import CONSTANTS, Fn
from remat._partial.decide import CACHES
from remat._partial.effects import written_by
from remat._partial.values import Storages
from remat._reach.reach import Reach
from remat._reach.result_walk import Result
from remat._reach.results import Out
from remat._report import inputs as _inputs
from remat._report.inputs import Inputs
from remat._torch.levels import below_all_levels, unwrap_dead
from remat._torch.modes import undisturbed
from remat._transform.leaves import ONLY_MARKS
from remat._transform.saved import Filling, Saved, recompute


@dataclass(frozen=True, slots=True)
class Agreement:
    """What `check_replay` compared and found equal.

    Attributes:
        operations: the number of operations that the function ran.
        values: the number of tensors compared: those that operations made or wrote, and
            those that existed before and were read.
        nbytes: the bytes of the compared tensors.

    Example:
        >>> import torch
        >>> check_replay(lambda x: x.sin().exp(), torch.ones(3))
        Agreement(operations=2, values=3, nbytes=36)
    """

    operations: int
    values: int
    nbytes: int


def check_replay(fn: Fn, /, *args: Any, **kwargs: Any) -> Agreement:
    """Run a function and its recompute, and compare everything they compute.

    Use this if gradients are wrong, or if `RecomputeError` is raised. The comparison is
    bit for bit. It names the operation where the recompute first differs from the
    forward, and says how. Both runs are in full, without a policy or pruning. Buffers
    are updated and random streams moved once, as by one call.

    Host memory holds a copy of every result, and of the inputs that operations read.
    Some values are not compared: uninitialized memory (`empty`, `new_empty`, ...), the
    states of random streams that attention returns, and the scratch memory of kernels
    of batch norm and recurrent layers.

    Args:
        fn: the function, rematerialized or not. Compiled functions run eagerly here.
        *args: its arguments. If no tensor that is passed or referred to requires grad,
            every floating argument is treated as if it did.
        **kwargs: its keyword arguments.

    Returns:
        How much was compared.

    Raises:
        RecomputeError: the recompute ran another operation, or an operation gave other
            bits.
        RuntimeError: `check_replay` is called under a transform of torch.func,
            forward-mode AD or torch.compile; or an input is a meta or fake tensor.

    Example:
        >>> import time, torch
        >>> from remat import remat
        >>> check_replay(remat(lambda x: x.sin().sin()), torch.ones(3))
        Agreement(operations=2, values=3, nbytes=36)
        >>> f = lambda x: x * time.perf_counter()
        >>> check_replay(f, torch.ones(3))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        remat.RecomputeError: remat: recomputing `<lambda>` does something...
    """
    instead = "the transformed function: check_replay(torch.func.grad(f), x)"
    _inputs.refuse_transforms("check_replay", instead)
    fn, label, options = _inputs.unwrapped(fn)
    if options.rng == "error":
        fn = without_draws(fn, label)
    inputs = Inputs(fn, args, kwargs)
    args, kwargs = inputs.args, inputs.kwargs
    reach = Reach(fn, label, args, kwargs)
    leaves = [*map(unwrap_dead, reach.take_tensors())]
    if not all(map(_inputs.has_values, leaves)):
        raise RuntimeError(_NO_VALUES)
    needs = [t.requires_grad for t in leaves]
    call = _Twice(reach, replace(options, prune=False), leaves, needs)
    first = RunValues()
    CACHES.clear()  # nested calls are first calls in both runs
    with _inputs.one_by_one("check_replay", args):
        result = call.run_forward(fn, args, kwargs, leaves, first)
    CACHES.clear()
    second = RunValues(first.steps)
    failed: Exception | None = None
    try:
        call.run_recompute(second)
    except Exception as error:  # noqa: BLE001 - raised below
        failed = error
    if second.difference is not None:
        raise RecomputeError(second.described(label)) from failed
    if failed is not None:
        raise failed
    del result  # its graph holds the handles
    return Agreement(len(first.steps), first.values, first.nbytes)


_NO_VALUES = (
    "remat: check_replay compares values, and a meta or fake tensor has none. Pass "
    "tensors with values."
)
_GRADLESS = (
    "remat: recomputing {label} gave outputs that require grad: {now}, where in the "
    "forward: {then}. The function must compute the same thing twice."
)


# --- Operations ---


@dataclass(slots=True)
class RunOperation:
    """One operation of a run."""

    func: Any
    arguments: str  # as text, with `_` for each tensor
    source: str
    reads: tuple[int, ...] = ()  # the number of the storage of each tensor argument
    # Copies of what it made, wrote, or was the first to read, each with a description.
    values: list[tuple[str, list[Tensor]]] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.func}  # {self.source}"


def operation_of(func: Any, args: Any, kwargs: dict[str, Any]) -> RunOperation:
    """Return an operation that is about to run, with the line of the user."""
    named = [f"{name}={_text(value)}" for name, value in kwargs.items()]
    arguments = f"({', '.join([*map(_text, args), *named])})"
    return RunOperation(func, arguments, user_line())


def _text(value: Any) -> str:
    if isinstance(value, Tensor):
        return "_"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return repr(value) if type(value) in CONSTANTS else type(value).__name__


def around(title: str, steps: Sequence[RunOperation], i: int) -> Iterator[str]:
    """Write the operations of a run around the i-th, line by line."""
    yield f"  {title} ({len(steps)} operations):"
    first = max(0, i - 2)
    for k, step in enumerate(steps[first : i + 3], first):
        yield f"  {'>' if k == i else ' '} {k}: {step}"
    if i >= len(steps):
        yield "  > nothing more"


_NOTHING: tuple[str, list[Tensor]] = "nothing", []


class RunValues(Observer):
    """Keeps what the operations of a run make, or compares it with an earlier run."""

    def __init__(self, then: Sequence[RunOperation] | None = None) -> None:
        super().__init__()
        self.steps: list[RunOperation] = []
        self.values = self.nbytes = 0  # how many were looked at, and their bytes
        self.difference: str | None = None  # what differs first
        self._then, self._at = then, 0
        # What the earlier run looked at next.
        self._left: Iterator[tuple[str, list[Tensor]]] = iter(())
        self._storages = Storages()

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        step = operation_of(func, args, kwargs)
        self.steps.append(step)
        if self._then is not None and self.difference is None:
            self._compare_operation(step, self._then)
        inputs, known = inputs_of(args, kwargs), len(self._storages)
        step.reads = tuple(map(self._number, inputs))
        for k, t in enumerate(inputs):
            if step.reads[k] >= known and step.reads[k] not in step.reads[:k]:
                self._look(step, f"input {k}", t)
        result = super().run(func, args, kwargs)
        outputs, written = tensors_of(result), written_by(func, args, kwargs)
        given, scratch = {id(t) for t in outputs}, _scratch_of(func)
        views = {*step.reads} - {*map(self._number, written)}
        for k, t in enumerate(outputs):
            if self._number(t) not in views and k not in scratch:
                self._look(step, f"output {k}", t)
        for k, t in enumerate(written):
            if not (scratch or id(t) in given):
                self._look(step, f"what it wrote to ({k})", t)
        return result

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's first storage; -1 if it has none."""
        part = next(parts(tensor), None)
        return -1 if part is None else self._storages.number(part)

    def _look(self, step: RunOperation, what: str, tensor: Tensor) -> None:
        self.values += 1
        bits = [_on_host(part) for part in parts(tensor) if _inputs.has_values(part)]
        self.nbytes += sum(t.nbytes for t in bits)
        if self._then is None:
            step.values.append((what, bits))
        elif self.difference is None:
            was, before = next(self._left, _NOTHING)
            if was != what:
                self.difference = f"has {what}, where the forward had {was}."
            elif found := _differences(bits, before):
                is_outside = what.startswith("input")
                is_same = step.reads == self._then[self._at].reads
                why = _OUTSIDE if is_outside else _ITSELF if is_same else _ANOTHER
                self.difference = f"differs: {what} {found}.{why}"

    def _compare_operation(
        self, step: RunOperation, earlier: Sequence[RunOperation]
    ) -> None:
        self._at = at = len(self.steps) - 1
        if at >= len(earlier):
            self.difference = "is one more than the forward ran."
            return
        then = earlier[at]
        self._left = iter(then.values)
        if step.func is not then.func:
            self.difference = f"was {then.func} in the forward."
        elif step.arguments != then.arguments:
            before = f"in the forward {then.arguments}"
            self.difference = f"has the arguments {step.arguments}, {before}."

    def end(self) -> None:
        """Note if operations of the earlier run did not run."""
        if self.difference is None and len(self.steps) < len(self._then or ()):
            self._at, self.difference = len(self.steps), "did not run."

    def described(self, label: str) -> str:
        """Return the message: what differs, and the operations around it."""
        i, now, then = self._at, self.steps, self._then or ()
        step = now[i] if i < len(now) else then[i]
        where = {"i": i, "func": step.func, "source": step.source}
        message = _MESSAGE.format(label=label, difference=self.difference, **where)
        lines = *around("forward", then, i), *around("recompute", now, i)
        return "\n".join([message, *lines])


_MESSAGE = (
    "remat: recomputing {label} does something else than its forward did. "
    "Operation {i}, {func} at {source}, {difference} The function must compute the "
    "same thing twice: what it reads, pass as an argument."
)
_OUTSIDE = " It is from outside of the function, and had another value in the forward."
_ANOTHER = " It reads another tensor."
_ITSELF = (
    " It read the same tensors: the operation itself gives another result each time "
    "(see torch.use_deterministic_algorithms), or reads something that changed."
)


# --- Values ---


# Kernels whose output of index 3 is scratch memory.
_SCRATCH = {
    *("cudnn_batch_norm", "_cudnn_rnn", "mkldnn_rnn_layer"),
    *("_batch_norm_with_update", "batch_norm_with_update"),
}
_STATES = {"rng_state", "unused", "debug_attn_mask", "philox_seed", "philox_offset"}
_UNWRITTEN = {
    *("empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided", "resize", "resize_", "_resize_output_"),
}


def _scratch_of(func: Any) -> set[int]:
    """Return the outputs of an operation whose values mean nothing."""
    packet = getattr(getattr(func, "overloadpacket", func), "__name__", "")
    if getattr(func, "namespace", "") != "aten":
        return set()
    returns = func._schema.returns
    if packet in _UNWRITTEN:
        return {*range(len(returns))}
    tensors = [r.name for r in returns if str(r.type) == "Tensor"]
    states = {k for k, name in enumerate(tensors) if name in _STATES}
    return {*states, 3} if packet in _SCRATCH else states


def _on_host(tensor: Tensor) -> Tensor:
    """Return a contiguous copy in host memory."""
    with undisturbed():
        dense = tensor.detach().resolve_conj().resolve_neg()
        return dense.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _differences(now: Sequence[Tensor], then: Sequence[Tensor]) -> str:
    """Say how the parts of two tensors differ; "" if all bits are equal."""
    if len(now) != len(then):
        return f"is of {len(now)} tensors, where it was of {len(then)}"
    with undisturbed():
        return next(filter(None, map(_difference, now, then)), "")


def _difference(now: Tensor, then: Tensor) -> str:
    meta, before = (describe_meta(t.dtype, t.shape) for t in (now, then))
    if meta != before:
        return f"is {meta}, where it was {before}"
    other = _bits_of(now).ne(_bits_of(then)).any(1)
    count = int(other.sum())
    if not count:
        return ""
    apart = ""
    if not (now.dtype is torch.bool or now.is_quantized):
        wide = torch.complex128 if now.is_complex() else torch.float64
        a, b = (t.reshape(-1)[other].to(wide) for t in (now, then))
        apart = f", by up to {float((a - b).abs().max()):.6g}"
    return f"({meta}) differs in {count} of {now.numel()} elements{apart}"


def _bits_of(tensor: Tensor) -> Tensor:
    """Return the bytes of each element."""
    flat = (tensor.int_repr() if tensor.is_quantized else tensor).reshape(-1)
    return flat.view(torch.uint8).view(flat.numel(), flat.element_size())


# --- The two runs ---


_requires_grad = operator.attrgetter("requires_grad")


class _Twice(Saved):
    """A call that a mode follows, and whose recompute runs to its end."""

    __slots__ = ("_needs_grad", "_out")
    _needs_grad: list[bool]
    _out: Out

    def run_forward(
        self, fn: Fn, args: Any, kwargs: dict[str, Any], leaves: Any, mode: RunValues
    ) -> Any:
        """Run the forward; return its result, whose graph holds the handles."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            with within(self.policy, under_mode=True), mode:
                return fn(*args, **kwargs)

        result = self.forward(watched, args, kwargs, leaves)
        outs, self._out = Out.split(Result(result), leaves)
        self._needs_grad = [*map(_requires_grad, outs)]
        return result

    def run_recompute(self, mode: RunValues) -> None:
        filling = _ToTheEnd(self.alive(), self)
        tensors = self.inputs.to_run_on(ONLY_MARKS)
        below_all_levels(recompute, self, filling, tensors, mode)
        if mode.difference is None and filling.error is not None:
            raise filling.error
        if mode.difference is None and filling.left > 1:
            raise filling.differs()

    @override
    def run_again(self, tensors: Sequence[Tensor]) -> None:
        def take(value: Any, **left: Any) -> Any:
            return self._out.split_again(Result(value, **left), tensors)

        outs = self.reach.run(tensors, take=take)
        now, then = [*map(_requires_grad, outs)], self._needs_grad
        if now != then:
            raise RecomputeError(_GRADLESS.format(label=self.label, now=now, then=then))


class _ToTheEnd(Filling):
    """Lets a recompute go on when all handles are filled, and when one does not fit."""

    __slots__ = ("error",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.left += 1  # or it would stop at the last handle
        self.error: RecomputeError | None = None  # the first that `Filling` raised

    @override
    def pack(self, t: Tensor) -> Any:
        try:
            return super().pack(t)
        except RecomputeError as error:
            self.error = self.error or error
            return t if t.is_leaf else t.detach()
