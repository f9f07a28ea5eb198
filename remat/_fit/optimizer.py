"""What an optimizer takes: its states, and what its step holds while it runs.

In: a copy of a step, after its backward. Out: the bytes of the states, which are there
in later steps, and the peak of the optimizer's step. It runs twice: the first time it
makes its states.

Invariant: no number is needed. Where an optimizer asks how many steps there were, it is
told one.
Rejected: bytes per parameter. What an optimizer holds depends on its options, such as
`foreach`, and on the device.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from remat._base import pytree
from remat._fit.meter import Meter
from remat._fit.simulate import RefusedStepError, TrainingStep, gradients_of, resident
from remat._report.inputs import tensors_in
from remat._torch.tensors import foreach_of_fakes, is_fake


class Update(NamedTuple):
    """What the step of an optimizer takes."""

    states: int = 0  # the bytes of what is there from then on
    peak: int = 0
    peak_at: str = ""  # "in _foreach_sqrt in the step of AdamW"


NO_UPDATE = Update()


def updated(step: TrainingStep, result: Any) -> Update:
    """Run the optimizer of a step twice, with what the step still holds."""
    peaks: list[tuple[int, str]] = []
    optimizer = made(step)
    meter = UpdateMeter(type(optimizer).__name__)
    with meter, torch.no_grad(), foreach_of_fakes():
        before = meter.hold_all([*resident(step), *tensors_in(result)])
        meter.hold_all(_parts(optimizer))
        for _ in range(2):
            meter.begin()
            optimizer.step()
            meter.settle()
            peaks.append((meter.peak, meter.peak_at))
    return Update(meter.live - before, *max(peaks, key=lambda each: each[0]))


def made(step: TrainingStep) -> Any:
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
        if not any(id(t) in known for t in _parts(optimizer)):
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


def _parts(optimizer: Any) -> list[Tensor]:
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
