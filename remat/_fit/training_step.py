"""A training step as data: what is called, on what, and how its result becomes a loss.

Called by `simulate`, which copies it as fake tensors and runs the copy.

Invariant: a step is a function of what is passed. What it changes is in the copy.
Rejected: to take the step apart by its closure. A model that a function refers to would
have to be replaced in there.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from remat._base import pytree
from remat._base.errors import CaptureError
from remat._report.labels import one_by_one
from remat._torch import copied_as_fake, is_fake


class TrainingStep(NamedTuple):
    """A step: its forward and its loss.

    Attributes:
        fn: a model, or a function.
        args: its arguments.
        kwargs: its keyword arguments.
        loss: a function of its result; None for the default.
        accumulates: whether all parameters have gradients before it.
        around: makes a context in which forward and loss run.
        around_forward: makes one in which the forward runs.
    """

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Callable[[Any], Any] | None
    accumulates: bool = False
    around: Callable[[], Any] = nullcontext
    around_forward: Callable[[], Any] = nullcontext

    def model(self) -> nn.Module | None:
        """Return the model: what is called, or the first module that is passed."""
        owner = getattr(self.fn, "__self__", self.fn)
        if isinstance(owner, nn.Module):
            return owner
        leaves = pytree.flatten((self.args, self.kwargs))[0]
        return next((m for m in leaves if isinstance(m, nn.Module)), None)

    def forward(self) -> tuple[Any, list[Tensor]]:
        """Return the result, and what is differentiated."""
        with self.around():
            with self.around_forward(), one_by_one("fit", self.args):
                result = self.fn(*self.args, **self.kwargs)
            return result, losses(result, self.loss)

    def run(self) -> None:
        """Run the step. The result is alive until the end, as in a training loop."""
        result, outs = self.forward()
        backward(outs)
        del result


def losses(result: Any, loss: Callable[[Any], Any] | None) -> list[Tensor]:
    """Return what a step differentiates.

    Args:
        result: of the forward.
        loss: what the user passed.
    """
    if loss is not None:
        result = loss(result)
    elif isinstance(getattr(result, "loss", None), Tensor):
        result = result.loss
    found = [t for t in pytree.flatten(result)[0] if isinstance(t, Tensor)]
    found = [t for t in found if t.requires_grad]
    if not found:
        raise ValueError(_NO_GRAD)
    return found


def backward(outs: list[Tensor]) -> None:
    """Run the backward of a step; of outputs that are no scalars, that of their sum."""
    torch.autograd.backward(outs, [torch.ones_like(t) for t in outs])


def copied(step: TrainingStep, mode: Any, device: torch.device) -> TrainingStep:
    """Return a copy of a step whose tensors are fake, with the gradients there are."""
    refuse_lazy(step)
    made = copied_as_fake(step, mode, device)
    for tensor, twin in zip(_leaves(step), _leaves(made), strict=True):
        if tensor.grad is not None:
            twin.grad = copied_as_fake(tensor.grad, mode, device)
        elif step.accumulates and twin.requires_grad:
            with mode:
                twin.grad = torch.empty_like(twin)
    return made


def copied_for_real(step: TrainingStep) -> TrainingStep:
    """Return a copy of a step whose tensors are real, with the gradients there are."""
    made = copy.deepcopy(step)
    for tensor, twin in zip(_leaves(step), _leaves(made), strict=True):
        if tensor.grad is not None:
            twin.grad = tensor.grad.clone()
        elif step.accumulates and twin.requires_grad:
            twin.grad = torch.zeros_like(twin)
    return made


def is_there(step: TrainingStep) -> bool:
    """Say whether the tensors of a step have values."""
    return not any(t.is_meta or is_fake(t) for t in _leaves(step))


def refuse_lazy(step: TrainingStep) -> None:
    """Refuse modules whose parameters a first call makes."""
    if any(map(is_lazy, _leaves(step))):
        raise CaptureError(_LAZY)


def resident(step: TrainingStep) -> Iterator[Tensor]:
    """Yield what exists before a step: parameters, buffers, gradients and arguments."""
    for tensor in _leaves(step):
        yield tensor
        if tensor.is_leaf and tensor.grad is not None:
            yield tensor.grad


def _leaves(step: TrainingStep) -> list[Tensor]:
    owner = getattr(step.fn, "__self__", step.fn)
    values = [owner, *pytree.flatten((step.args, step.kwargs))[0]]
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, nn.Module):
            found += [*value.parameters(), *value.buffers()]
        elif isinstance(value, Tensor):
            found.append(value)
    return found


_NO_GRAD = (
    "remat.fit: nothing in the result requires grad, so there is no backward to keep "
    "values for. Pass loss=, a function of the result, or let parameters require grad."
)
_LAZY = (
    "remat.fit: the model holds a lazy module, whose parameters are not initialized "
    "yet. Call the model once before."
)
