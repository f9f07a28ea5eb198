"""What an operation does besides returning values, and what it costs.

Invariant: the schema and the tags of an operation tell, or what it was seen to do. An
operator that nobody knows is taken to do whatever it may. Costs are of metadata alone,
so that two processes decide alike, but for a budget with `costs="measured"`.
Rejected: a list of all operations. torch has thousands, and users add to them. To time
all operations: that waits for the device, and decides by the noise of the machine.
"""

import functools
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from remat._ambient.draws import is_tagged_random
from remat._ambient.streams import global_streams
from remat._base.absent import LIKE, tensors_of
from remat._base.op import Op, Value
from remat._partial.plan import CallPlan, Fate, Record, Step, filled
from remat._torch.modes import call_kernel
from remat._torch.operators import OpOverload
from remat.policies._functions import family
from remat.policies._operations import COSTS


_READ_BY_PYTHON = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
_OF_TORCH = {"aten", "prim", "prims", "profiler"}
_EXCHANGES_STORAGE = {"set_", "resize_", "_resize_output_", "resize_as_"}


Argument = tuple[int, str]  # its index in the schema, and its name


@dataclass(frozen=True, slots=True)
class Traits:
    """What an operation does besides returning values, whatever its arguments."""

    may_draw: bool = False  # by its tag
    is_of_others: bool = True  # and not of torch, so that tags may be missing
    is_read_by_python: bool = True  # or what it does is not known
    writes: tuple[Argument, ...] = ()  # to, by its schema
    is_counted: bool = True  # below a mode, too; torch counts none of lists
    # The running statistics that a batch norm updates, which its schema does not say,
    # and the argument that says whether it does.
    statistics: tuple[Argument, ...] = ()
    training: Argument | None = None

    @property
    def may_move_a_stream(self) -> bool:
        """Whether it may move a random stream, as far as is known."""
        return self.may_draw or self.is_of_others


# Reading a schema or tags costs more than the rest of recording.
@functools.lru_cache(maxsize=4096)
def traits_of(func: Any) -> Traits:
    """Return what an operation does besides returning values."""
    may_draw = is_tagged_random(func)
    if not isinstance(func, OpOverload):
        return Traits(may_draw)
    exchanges = func.overloadpacket.__name__ in _EXCHANGES_STORAGE
    arguments = [*enumerate(func._schema.arguments)]
    by_name = {argument.name: (k, argument.name) for k, argument in arguments}
    is_batch_norm = func.overloadpacket in _BATCH_NORMS
    return Traits(
        may_draw,
        func.namespace not in _OF_TORCH,
        exchanges or not _READ_BY_PYTHON.isdisjoint(func.tags),
        tuple(by_name[a.name] for _, a in arguments if _is_written(func, a)),
        not func.__name__.startswith("_foreach_"),
        tuple(map(by_name.__getitem__, _STATISTICS)) if is_batch_norm else (),
        by_name.get("training") if is_batch_norm else None,
    )


def _is_written(func: Any, argument: Any) -> bool:
    info = argument.alias_info
    if info is not None:
        return info.is_write
    # Collectives write in place, and their schemas do not say so.
    in_place = func.namespace == "c10d" and func.__name__.partition(".")[0][-1] == "_"
    return in_place and argument.name.startswith(("output", "tensors"))


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    call = traits_of(func), args, kwargs
    return [*declared_writes(*call), *updated_statistics(*call)]


def declared_writes(
    traits: Traits, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    # Most write to none.
    given = [_given(each, args, kwargs) for each in traits.writes]
    return tensors_of(given) if given else []


def updated_statistics(
    traits: Traits, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the running statistics that a batch norm updates."""
    names, training = traits.statistics, traits.training
    if not names or (training and not _given(training, args, kwargs)):
        return []
    return tensors_of([_given(argument, args, kwargs) for argument in names])


def _given(argument: Argument, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what was passed for an argument; None if it was left out."""
    k, name = argument
    return args[k] if k < len(args) else kwargs.get(name)


_STATISTICS = ("running_mean", "running_var")
_BATCH_NORMS = {
    getattr(torch.ops.aten, name)
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("batch_norm_update_stats", "batch_norm_gather_stats"),
        "batch_norm_gather_stats_with_counts",
    )
}


_DRAWS_IN_PLACE = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_"),
}


@functools.lru_cache(maxsize=4096)
def metadata_only_outputs(func: Any, count: int) -> tuple[int, ...]:
    """Return the outputs of an operation that do not depend on its arguments' values.

    Nor does the number of its draws.
    """
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return ()
    name = func.overloadpacket.__name__
    in_place = name in _DRAWS_IN_PLACE and func._overloadname != "Tensor"
    if name in LIKE or in_place:
        return (*range(count),)
    if name == "native_dropout":
        return (1,)
    return (0,) if func is torch.ops.aten.bernoulli.p else ()


class DrawDetector:
    """Tells, by tag or by the streams, whether an operation draws: made before it."""

    __slots__ = ("_before", "_tagged")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        traits = traits_of(func)
        self._tagged = traits.may_draw and _dropout(func, args, kwargs) != 0.0
        unknown = not self._tagged and traits.is_of_others
        self._before = global_streams().read() if unknown else None

    def has_drawn(self) -> bool:
        """Say whether the operation drew."""
        moved = self._before is not None and self._before != global_streams().read()
        return self._tagged or moved


def _dropout(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the dropout probability of attention; None for other operations."""
    for k, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = _given((k, argument.name), args, kwargs)
            return argument.default_value if given is None else given
    return None


class Exposures(TorchFunctionMode):
    """Tells of tensors whose memory Python takes, other than by operations.

    `expose` is told of each; `assign` of each to whose `.data` another is assigned.
    """

    is_remats_check = True

    def __init__(
        self,
        expose: Callable[[Tensor], None],
        assign: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._expose, self._assign = expose, assign

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        # One look-up, for this is asked of everything that Python calls.
        if func in _NOTICED:
            if func == _ASSIGNS and self._assign is not None:
                self._assign(*args)
            elif func != _ASSIGNS and args and isinstance(args[0], Tensor):
                self._expose(args[0])
        return func(*args, **(kwargs or {}))


_TENSOR: Any = Tensor
_ASSIGNS = _TENSOR.data.__set__
_NOTICED = {
    *(_ASSIGNS, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr),
    *(Tensor.storage, Tensor.untyped_storage, Tensor.tolist, _TENSOR.const_data_ptr),
    *(Tensor.__deepcopy__, Tensor.__reduce_ex__, Tensor.share_memory_),
}


# --- Costs: FLOPs, bytes moved, time at nominal rates or measured ---

# FLOPs and bytes per second of one CPU core and of an accelerator, to an order of
# magnitude.
_RATES = {"cpu": (2e10, 1e10)}
_ACCELERATOR = (5e13, 1e12)
_MODE = 8e-6  # seconds that a dispatch mode spends on each operation
_START = 2e-6  # seconds that it takes to start an operation, however small it is


def flops(step: Step) -> int:
    """Return the FLOPs of an operation, if torch's `FlopCounterMode` counts them; or 0.

    Example:
        >>> shapes = (2, 3), (3, 4), (2, 4)
        >>> a, b, c = (Value(s, torch.float32, torch.device("cpu")) for s in shapes)
        >>> flops(Step(Op(torch.ops.aten.mm.default, (a, b), outputs=(c,))))
        48
    """
    op = step.op
    own = COSTS.get(family(op.func)) if COSTS else None
    if own is not None:
        return int(own(op))
    count: Any = flop_registry.get(op.packet)
    if count is None:
        return 0
    # The form keeps a None that was returned, as the gradient of an input may be.
    result = filled(step.result, [*map(_shape, op.outputs)], [*map(_shape, op.inputs)])
    kwargs = {name: _shape(v) for name, v in op.kwargs}
    return int(count(*map(_shape, op.args), **kwargs, out_val=result))


def _shape(arg: Any) -> Any:
    if isinstance(arg, Value):
        return torch.Size(arg.shape)
    return [*map(_shape, arg)] if isinstance(arg, tuple) else arg


def bytes_moved(op: Op) -> int:
    """Return the bytes that an operation reads and writes."""
    return op.nbytes + sum(value.nbytes for value in op.inputs)


def seconds(step: Step) -> float:
    """Return about how long an operation takes."""
    op = step.op
    kinds = {value.device.type for value in op.outputs}
    rates = [_RATES.get(kind, _ACCELERATOR) for kind in kinds] or [_ACCELERATOR]
    flops_per_second, bytes_per_second = map(min, zip(*rates, strict=True))
    return max(flops(step) / flops_per_second, bytes_moved(op) / bytes_per_second)


def work(step: Step) -> float:
    """Return what it costs to run an operation again, in seconds at nominal rates."""
    return 0.0 if step.is_view else _START + seconds(step)


def reason_against(record: Record, plan: CallPlan) -> str:
    """Say why a plan is not worth a dispatch mode; "" if it is."""
    pairs = zip(record.steps, plan.fates, strict=True)
    dead = [step for step, fate in pairs if fate is Fate.DEAD and not step.is_view]
    saved, cost = sum(map(seconds, dead)), len(record.steps) * _MODE
    if saved > cost:
        return ""
    return (
        f"it would save about {saved * 1e6:.0f} us of work, and cost "
        f"{cost * 1e6:.0f} us of bookkeeping"
    )


_SECONDS: dict[Hashable, float] = {}
_MOST = 2**16  # operations that are remembered


class Timing:
    """Calls operations, and notes how long they take."""

    _last = 0.0

    def __call__(self, func: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call an operation, and wait until it is done."""
        _wait()
        start = time.perf_counter()
        result = call_kernel(func, *args, **kwargs)
        _wait()
        self._last = time.perf_counter() - start
        return result

    def note(self, op: Op) -> None:
        """Note what the last operation was, unless it was timed before."""
        if len(_SECONDS) < _MOST and not any(
            v.device.type == "meta" for v in op.outputs
        ):
            _SECONDS.setdefault(_key(op), self._last)


def _wait() -> None:
    # What was asked of an accelerator before must not count.
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _key(op: Op) -> Hashable:
    return op.func, op.args, op.kwargs


def measured_work(step: Step) -> float:
    """Return what it costs to run an operation again, as timed or else estimated."""
    if step.is_view:
        return 0.0
    seconds = _SECONDS.get(_key(step.op))
    return work(step) if seconds is None else seconds
