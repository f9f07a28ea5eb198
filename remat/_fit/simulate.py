"""A training step as data, and the peak of a copy of it, changed as a plan says.

Where calls have policies it runs twice: the first call of a policy records what the
function does, and later ones may hold more, or less.

Invariant: a step is a function of what is passed. Nothing of the user's is touched, no
memory is allocated, no number is drawn.
Rejected: a formula for the peak. Whatever autograd, remat and a model do with memory is
done here as it is done in training.
"""

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from remat._base import pytree
from remat._base.context import is_recomputing
from remat._base.errors import CaptureError, RematError
from remat._fit.meter import Meter, MissingValueError
from remat._partial.decide import CACHES
from remat._report.inputs import one_by_one, streams_kept, tensors_in
from remat._report.timeline import without_collections
from remat._torch.autograd import tells_of
from remat._torch.shards import (
    copied_without_sending,
    holds_gradients,
    in_buckets,
    replicas_in,
    shards_in,
)
from remat._torch.tensors import (
    AddressAnswers,
    copied_as_fake,
    fake_mode,
    foreach_of_fakes,
    is_fake,
    scales_put_back,
    without_log_of_fakes,
)
from remat.nn._followed import has_sharded_parts


T = TypeVar("T")


class TrainingStep(NamedTuple):
    """A step: what is called, and the loss of its result."""

    fn: Any  # a model, or a function
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any] | None  # of the result; None for the default
    accumulates: bool = False  # whether all parameters have gradients before it
    optimizer: Any = None  # one, or what makes it of parameters
    around: Callable[[], Any] = nullcontext  # the call and the loss
    around_call: Callable[[], Any] = nullcontext
    buckets: tuple[Tensor, ...] = ()  # what its replicas send

    def parts(self) -> list[Any]:
        """Return what is called, or whose method is, and what is passed."""
        owner = getattr(self.fn, "__self__", self.fn)
        return [owner, *pytree.flatten((self.args, self.kwargs))[0]]

    def modules(self) -> list[nn.Module]:
        """Return the modules that are called, or passed."""
        return [each for each in self.parts() if isinstance(each, nn.Module)]

    def model(self) -> nn.Module | None:
        """Return the model: what is called, or the first module that is passed."""
        return next(iter(self.modules()), None)

    def leaves(self) -> list[Tensor]:
        """Return the tensors of modules, and those that are passed."""
        found: list[Tensor] = []
        for value in self.parts():
            if isinstance(value, nn.Module):
                found += [*value.parameters(), *value.buffers()]
            elif isinstance(value, Tensor):
                found.append(value)
        return found

    def to_loss(self) -> tuple[Any, list[Tensor]]:
        """Call, and compute the loss; return the result, and what is differentiated."""
        with self.around():
            with self.around_call(), one_by_one("fit", self.args):
                result = self.fn(*self.args, **self.kwargs)
            return result, self._losses(result)

    def _losses(self, result: Any) -> list[Tensor]:
        if self.loss is not None:
            result = self.loss(result)
        elif isinstance(getattr(result, "loss", None), Tensor):
            result = result.loss
        found = [t for t in tensors_in(result) if t.requires_grad]
        if not found:
            raise RefusedStepError(_NO_GRAD)
        return found


def backward(outs: list[Tensor]) -> None:
    """Run the backward of a step; of outputs that are no scalars, that of their sum."""
    try:
        torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])
    except RuntimeError as error:
        if tells_of("a graph that is gone", error):
            raise RefusedStepError(BACKWARD) from error
        raise


def functional_gradients(step: TrainingStep) -> Any:
    """Return what `torch.func.grad` does of a step, by the parameters of its model."""
    whole = _Whole(step)
    learned = {k: p.detach() for k, p in whole.named_parameters() if p.requires_grad}

    def loss(given: Any) -> Any:
        return torch.func.functional_call(whole, given, ())

    return torch.func.grad(loss)(learned)


class _Whole(nn.Module):
    """A step as a module, whose parameters may be exchanged."""

    def __init__(self, step: TrainingStep) -> None:
        super().__init__()
        self.model, self._step = step.model(), step

    @override
    def forward(self) -> Tensor:
        each = [out.sum() for out in self._step.to_loss()[1]]
        return each[0] if len(each) == 1 else torch.stack(each).sum()


class RefusedStepError(ValueError):
    """A step that there is no plan for, whatever the values are."""


def copied(step: TrainingStep, mode: Any, device: torch.device) -> TrainingStep:
    """Return a copy of a step, with the gradients there are.

    Its tensors are fake if `mode` is one of fake tensors, and real if it is none.
    """
    if any(map(is_lazy, step.leaves())):
        raise CaptureError(_LAZY)

    is_real, modules = isinstance(mode, nullcontext), step.modules()
    replicas, shards = replicas_in(modules), shards_in(modules)
    if is_real:
        made = copied_without_sending(step, replicas)
    else:
        made = copied_as_fake(step, mode, device, replicas, shards)
    views = {
        id(t) for each in replicas if holds_gradients(each) for t in in_buckets(each)
    }
    for tensor, twin in zip(step.leaves(), made.leaves(), strict=True):
        if tensor.grad is not None and id(tensor) not in views:
            grad = tensor.grad.detach()
            # A deep copy of a view has all of its storage.
            twin.grad = grad.clone() if is_real else copied_as_fake(grad, mode, device)
        elif (step.accumulates or id(tensor) in views) and twin.requires_grad:
            with mode:
                twin.grad = torch.zeros_like(twin)
    with mode:
        buckets = [*_buckets(replicas)]
    return made._replace(buckets=tuple(buckets))


def _buckets(replicas: Iterable[Any]) -> Iterator[Tensor]:
    """Yield what replicas send, unless it is the gradients themselves."""
    for replica in replicas:
        for tensor in () if holds_gradients(replica) else in_buckets(replica):
            yield torch.empty_like(tensor, requires_grad=False)


def begins_with_gradients(step: TrainingStep) -> bool:
    """Say whether gradients are there when a step begins."""
    there = any(grad is not None for _, grad in gradients_of(step))
    replicas = replicas_in(step.modules())
    return step.accumulates or there or any(map(holds_gradients, replicas))


def without_values_if_possible(
    step: TrainingStep, run: Callable[[bool], T]
) -> tuple[T, bool]:
    """Run a step on fake tensors; on real ones if it asks for values or addresses.

    Returns what `run` returns, and what it was told: whether tensors are real. What a
    user's code or a kernel raises for a fake tensor may be any error. If that is a
    mistake of the code itself, the real step raises it.
    """
    try:
        return run(False), False
    except Exception as error:
        is_ours = isinstance(error, (RematError, RefusedStepError))
        if is_ours and not isinstance(error, MissingValueError):
            raise
        if any(t.is_meta or is_fake(t) for t in step.leaves()):
            if not is_ours:
                error.add_note(_NOT_THERE)
            raise
        if any(map(has_sharded_parts, step.modules())):
            error.add_note(_SENDS)
            raise
    return run(True), True


def resident(step: TrainingStep) -> Iterator[Tensor]:
    """Yield what exists before a step: parameters, buffers, gradients and arguments."""
    yield from step.buckets
    for tensor in step.leaves():
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def gradients_of(step: TrainingStep) -> list[tuple[Tensor, Any]]:
    """Return the parameters of a step, with the gradients that they have."""
    return [(t, t.grad) for t in resident(step) if t.is_leaf and t.requires_grad]


def put_back(grads: list[tuple[Tensor, Any]]) -> None:
    """Give parameters the gradients that they had."""
    for tensor, grad in grads:
        tensor.grad = grad


# --- What a copy of it does ---


@dataclass(frozen=True, slots=True)
class Simulation:
    """What a step does."""

    peak: int
    resident: int  # the bytes that are there before
    peak_at: str  # "in mm in the backward of layers.3"


@contextmanager
def isolated() -> Iterator[None]:
    """Leave random streams as they are, and collect no garbage in the block."""
    with (
        streams_kept(),
        without_collections(),
        without_log_of_fakes(),
        torch.inference_mode(False),
        torch.enable_grad(),
        warnings.catch_warnings(),
    ):
        # Of a choice that nobody made, and of the user's code in each run.
        warnings.simplefilter("ignore")
        yield


def simulate(
    step: TrainingStep,
    device: torch.device,
    change: Callable[[TrainingStep], TrainingStep],
    blocks: Iterable[str] = (),
    *,
    is_real: bool = False,
    is_functional: bool = False,
    times: int = 1,
) -> Simulation:
    """Run a copy of a step, where it is `isolated`; return the most of its runs."""
    mode = nullcontext() if is_real else fake_mode()
    # Choices before have left records of calls of the same kinds.
    with CACHES.set_aside():
        made = copied(step, mode, device)
        grads = gradients_of(made)
        made = change(made)  # before the hooks, which are to be outermost
        meter, model = Meter(), made.model()
        if model is not None:
            for name in blocks:
                _hook(meter, model.get_submodule(name), name)
        with mode, AddressAnswers(), scales_put_back(), meter:
            before = meter.hold_all(resident(made))
            meter.begin()
            for _ in range(times):
                meter.enter("")
                if is_functional:
                    result, outs = functional_gradients(made), ()
                else:
                    result, outs = made.to_loss()
                    meter.enter("")
                    backward(outs)
                del result, outs
                meter.settle()
                put_back(grads)
    return Simulation(meter.peak, before, meter.peak_at)


def _hook(meter: Meter, block: nn.Module, name: str) -> None:
    """Tell a meter of calls of a block, outside of what is recomputed."""

    def enter(*_: Any) -> None:
        if not is_recomputing():
            meter.enter(name)

    def leave(*_: Any) -> None:
        if not is_recomputing():
            meter.enter("")

    block.register_forward_pre_hook(enter, prepend=True)
    block.register_forward_hook(leave)


_NOT_THERE = (
    "remat.fit: the step ran on tensors without values, as the model or an argument "
    "is on the meta device or fake. If a kernel asks for addresses or values, pass a "
    "model and arguments that are there: then a copy of the step runs on real tensors."
)
_SENDS = (
    "remat.fit: the step ran on tensors without values, and a real copy would send "
    "something to other processes. Plan for the model before it is sharded."
)
BACKWARD = (
    "remat.fit: the function or the loss runs the backward itself. Have it return the "
    "loss instead: fit runs the backward."
)
_NO_GRAD = (
    "remat.fit: nothing in the result requires grad, so there is no backward to keep "
    "values for. Pass loss=, a function that returns a loss of the result and runs no "
    "backward, or let parameters require grad."
)
_LAZY = (
    "remat.fit: the model holds a lazy module, whose parameters are not initialized "
    "yet. Call the model once before."
)


# --- What an optimizer takes: its states, and what its step holds while it runs ---
#
# Its step runs after the backward of a copy, twice: the first time it makes its states,
# which are there in later steps. No number is needed. Not by bytes per parameter: what
# an optimizer holds depends on its options, such as `foreach`, and on the device.


class Update(NamedTuple):
    """What the step of an optimizer takes."""

    states: int = 0  # the bytes of what is there from then on
    peak: int = 0
    peak_at: str = ""  # "in _foreach_sqrt in the step of AdamW"


NO_UPDATE = Update()


def updated(step: TrainingStep, result: Any) -> Update:
    """Run the optimizer of a step twice, with what the step still holds."""
    optimizer = _optimizer_of(step)
    meter = UpdateMeter(type(optimizer).__name__)
    with meter, torch.no_grad(), foreach_of_fakes():
        before = meter.hold_all([*resident(step), *tensors_in(result)])
        meter.hold_all(_tensors_held(optimizer))
        meter.begin()
        for _ in range(2):
            optimizer.step()
    return Update(meter.live - before, meter.peak, meter.peak_at)


def _optimizer_of(step: TrainingStep) -> Any:
    """Return the optimizer of a step: it is there, or is made for the parameters."""
    if isinstance(step.optimizer, Optimizer):
        optimizer = step.optimizer
    else:
        model = step.model()
        learned = [t for t, _ in gradients_of(step)]
        try:
            optimizer = step.optimizer(learned if model is None else model.parameters())
        except Exception as error:
            message = _MAKING.format(kind=type(error).__name__, error=error)
            raise RefusedStepError(message) from error
    if not callable(getattr(optimizer, "step", None)):
        raise RefusedStepError(_KIND.format(got=type(optimizer).__name__))
    parameters = inspect.signature(optimizer.step).parameters.values()
    if any(p.name == "closure" and p.default is p.empty for p in parameters):
        raise RefusedStepError(_CLOSURE.format(kind=type(optimizer).__name__))
    return optimizer


def refuse_optimizer(optimizer: Any, step: TrainingStep) -> None:
    """Refuse what is no optimizer, or one of other parameters than those of a step."""
    if optimizer is None:
        return
    if not (isinstance(optimizer, Optimizer) or callable(optimizer)):
        raise TypeError(_KIND.format(got=f"{optimizer!r}"))
    if isinstance(optimizer, Optimizer):
        known = {id(t) for t in resident(step)}
        if not any(id(t) in known for t in _tensors_held(optimizer)):
            raise ValueError(_OTHERS.format(kind=type(optimizer).__name__))


class UpdateMeter(Meter):
    """Counts bytes while an optimizer runs."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.outside = f"step of {name}"

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and is_fake(args[0]):
            return 1.0 if args[0].dtype.is_floating_point else 1
        return super().run(func, args, kwargs)


def _tensors_held(optimizer: Any) -> list[Tensor]:
    """Return the tensors of an optimizer: parameters, options and states."""
    if not isinstance(optimizer, Optimizer):
        return []
    found = pytree.flatten([optimizer.param_groups, [*optimizer.state.values()]])[0]
    return [t for t in found if isinstance(t, Tensor)]


_MAKING = (
    "remat.fit: optimizer= was called with the parameters of the model, which is a "
    "{kind}: {error}. Pass a function of them that returns the optimizer, such as "
    "functools.partial(AdamW, foreach=False), or the optimizer itself."
)
_KIND = (
    "remat.fit: optimizer is a class such as torch.optim.AdamW, a function of "
    "parameters that returns an optimizer, or an optimizer; got {got}."
)
_CLOSURE = (
    "remat.fit: {kind}.step needs a closure, which runs forward and backward itself. "
    "Leave out optimizer=, and subtract its states from the budget."
)
_OTHERS = (
    "remat.fit: the optimizer, {kind}, has none of the parameters of the step. Pass "
    "the one of this model, or its class."
)
