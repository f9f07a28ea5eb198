"""The gradient checkpointing of other libraries' models, done by remat.

Models of transformers and diffusers call a function at each block if their gradient
checkpointing is on. `enable` switches it on, and puts in a function of ours.

Invariant: what else a library does when its checkpointing is on stays: it leaves out
caches, for instance.
Rejected: `remat.nn.apply` for these models. A decoder layer that is recomputed must not
be handed a cache, and only the library knows where.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from remat._partial.options import Options
from remat._transform.api import caller, options_of
from remat._transform.rematerialized import Rematerialized


M = TypeVar("M", bound=nn.Module)
_FUNCTION = "_gradient_checkpointing_func"
_SWITCH = "_set_gradient_checkpointing"


def enable(
    model: M,
    *,
    policy: Any = None,
    prune: Any = "auto",
    rng: Any = "replay",
    higher_order: bool = False,
) -> M:
    """Switch on the gradient checkpointing of a model, with remat as its checkpoint.

    For models of transformers, diffusers, and peft around them. The model recomputes
    the blocks that its library would, in training mode, and its caches are off where
    the library switches them off. `remat.nn.remove` undoes it. A later call of
    `model.gradient_checkpointing_enable()`, also by a trainer that is told to, puts
    torch's checkpoint in again.

    Args:
        model: the model.
        policy: as of `remat.remat`.
        prune: as of `remat.remat`.
        rng: as of `remat.remat`.
        higher_order: as of `remat.remat`.

    Returns:
        The model.

    Raises:
        TypeError: `model` is not a module; or it has no gradient checkpointing that
            takes a function. The message says what to use instead.

    Example:
        >>> import remat
        >>> try:
        ...     from transformers import BertConfig, BertModel
        ... except ImportError:
        ...     pass
        ... else:
        ...     config = BertConfig(
        ...         hidden_size=8, num_attention_heads=2, intermediate_size=8
        ...     )
        ...     model = remat.nn.enable(BertModel(config))
    """
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(_NO_MODULE.format(kind=kind))
    options = options_of(policy, prune, rng, higher_order)
    checkpoint = Checkpoint(caller(), options)
    owners = [m for m in model.modules() if _takes_function(m) and _has_blocks(m)]
    if not owners:
        raise TypeError(_NOT_SUPPORTED.format(model=type(model).__name__))
    for owner in _outermost(owners):
        getattr(owner, _SWITCH)(enable=True, gradient_checkpointing_func=checkpoint)
    return model


def switch_off(model: nn.Module) -> None:
    """Switch off what `enable` switched on."""
    for module in filter(_is_ours, model.modules()):
        vars(module)["gradient_checkpointing"] = False
        delattr(module, _FUNCTION)


@dataclass(frozen=True)
class Checkpoint:
    """What a model calls at each block.

    Attributes:
        where: the line that asked for it.
        options: of `remat`.
    """

    where: str
    options: Options

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function so that a backward recomputes it."""
        return Rematerialized(function, self.where, self.options)(*args, **kwargs)


def _takes_function(module: nn.Module) -> bool:
    switch = getattr(type(module), _SWITCH, None)
    if switch is None:
        return False
    return "gradient_checkpointing_func" in inspect.signature(switch).parameters


def _has_blocks(owner: nn.Module) -> bool:
    """Say whether a module in there asks whether to call the function."""
    return any(hasattr(m, "gradient_checkpointing") for m in owner.modules())


def _outermost(owners: list[nn.Module]) -> list[nn.Module]:
    inner = {id(m) for owner in owners for m in owner.modules() if m is not owner}
    return [owner for owner in owners if id(owner) not in inner]


def _is_ours(module: nn.Module) -> bool:
    return type(vars(module).get(_FUNCTION)) is Checkpoint


_NO_MODULE = (
    "remat.nn.enable: {kind} is not a module. Pass a model, such as pipeline.unet."
)
_NOT_SUPPORTED = (
    "remat.nn.enable: {model} has no gradient checkpointing that calls a function of "
    "the user's. Use remat.nn.apply(model), which finds the blocks itself, or "
    "remat.compat.patch(), which replaces torch.utils.checkpoint in libraries."
)
