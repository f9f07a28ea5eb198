"""The four styles that what is checkpointed is written in, and a step of it.

A pure function is passed all that it computes with. A closure closes over numbers, and
reads others from its module and from a default. A module is wrapped itself, or its
``forward`` is, as in ``layer.forward = remat(layer.forward)``.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from _systems import TensorFn, Wrapper
from torch import Tensor, nn


Step = Callable[[], None]

STYLES = FUNCTION, CLOSURE, MODULE, METHOD = (
    "function",
    "closure",
    "module",
    "module.forward",
)


@dataclass(frozen=True)
class Work:
    """One call to checkpoint, and the leaves that it is differentiated by."""

    fn: TensorFn
    args: tuple[Any, ...]
    leaves: Sequence[Tensor]

    def step(self, wrap: Wrapper) -> Step:
        """Return forward and backward, after which the leaves have no gradients."""
        wrapped = wrap(self.fn)

        def step() -> None:
            wrapped(*self.args).sum().backward()
            for leaf in self.leaves:
                leaf.grad = None

        return step


def module_work(module: nn.Module, x: Tensor, style: str) -> Work:
    """Return the call of a module in one of the two styles of modules."""
    fn = module.forward if style == METHOD else module
    return Work(fn, (x,), [x, *module.parameters()])
