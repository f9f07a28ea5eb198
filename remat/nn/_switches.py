"""The switches by which libraries recompute blocks of their models themselves.

A model of transformers or diffusers has modules with an attribute
`gradient_checkpointing`. Where it is true, the module calls the function in another
attribute at each block. The switch of the model sets both.

Invariant: this only reads; `enable` writes. What has the attributes has the switch, of
whatever library and version.
Rejected: to ask for versions or classes of libraries, or to import them.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


FLAG = "gradient_checkpointing"
FUNCTION = "_gradient_checkpointing_func"


def switchable(model: nn.Module) -> Iterator[nn.Module]:
    """Return the modules in a model that ask whether to recompute."""
    # A wrapper may hand the attributes of what is in it on, as peft's does.
    return (m for m in model.modules() if FLAG in vars(m) or is_layer(m))


def is_on(module: nn.Module) -> bool:
    """Say whether a module calls a function at each block."""
    return bool(getattr(module, FLAG, False)) and callable(function_of(module))


def function_of(module: nn.Module) -> Any:
    """Return the function that a module calls at each block; None if it has none."""
    return getattr(module, FUNCTION, None)


def is_layer(module: nn.Module) -> bool:
    """Say whether a module with a switch is itself what is recomputed.

    In newer models of transformers each block has the switch, by its class. In others
    a module has it that calls the blocks.
    """
    return hasattr(type(module), FLAG)


def recomputes(module: nn.Module) -> bool:
    """Say whether a module is recomputed by its switch, or calls what is.

    A stack of layers has a switch, too, but does nothing with it.
    """
    inside = (m for m in switchable(module) if m is not module)
    return is_on(module) and (is_layer(module) or not any(inside))


def library_of(module: nn.Module) -> str:
    """Return the name of the library that a module is of."""
    return type(module).__module__.partition(".")[0]


def how_to_switch_off(model: nn.Module) -> str:
    """Return what a user does to switch off what a library recomputes in a model."""
    for owner in model.modules():
        for method in "activation_checkpointing", "gradient_checkpointing":
            if hasattr(owner, f"{method}_disable"):
                return _TRAINER.format(method=method)
        if hasattr(owner, "disable_gradient_checkpointing"):
            break
    return "call model.disable_gradient_checkpointing()"


class Refusing:
    """The hook before a forward that refuses a switch which was put on too late."""

    def __init__(self, by: str, where: str, advice: str) -> None:
        self.by, self.where, self.advice = by, where, advice

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Refuse to recompute the same blocks twice."""
        if is_on(module) and torch.is_grad_enabled():
            kind, library = type(module).__name__, library_of(module)
            shown = {"by": self.by, "where": self.where, "advice": self.advice}
            raise ValueError(_LATE.format(kind=kind, library=library, **shown))


def refuse_later(model: nn.Module, by: str, where: str) -> None:
    """Have a model refuse its switch from now on, when it is called."""
    advice = how_to_switch_off(model)
    for module in switchable(model):
        hook = Refusing(by, where, advice)
        module.register_forward_pre_hook(hook, prepend=True)


_TRAINER = "pass {method}=False to the trainer, or call model.{method}_disable()"
_LATE = (
    "remat: the gradient checkpointing of {library} is on in this {kind}, and "
    "{by} recomputes blocks already, since {where}. To have these stay, {advice}. To "
    "have those of {library}, call remat.nn.remove(model) and remat.nn.enable(model)."
)
