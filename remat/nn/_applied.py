"""What recomputes which module of a model: to list it, and to refuse a second.

Invariant: what is listed is read from the model itself. So copies, pickles and parts of
a model have it, and it is gone with what it speaks of.

A library recomputes blocks, too. In transformers and diffusers, modules with a true
attribute `gradient_checkpointing` call the function in another attribute at each block,
and the switch of the model sets both. No library is imported.
"""

import inspect
import types
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from remat._base.interpreter import nested
from remat._transform.module import RematModule
from remat.policies import Policy


REMAT, APPLY, ENABLE = "remat.remat", "remat.nn.apply", "remat.nn.enable"
PLAN = "remat.fit"
LIBRARY = FLAG = "gradient_checkpointing"
FUNCTION = "_gradient_checkpointing_func"


@dataclass(frozen=True, slots=True)
class Applied:
    """What recomputes a module, in its own words.

    Attributes:
        by: "remat.remat", "remat.nn.apply", "remat.nn.enable" or, for a plan that was
            applied, "remat.fit"; "gradient_checkpointing" for that of a library.
        policy: which results are saved; None for none. A plan for a whole step says
            which ones itself.
        where: the line that asked for it; "" if that is not known.

    Example:
        >>> import remat
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        >>> model = remat.nn.apply(nn.Sequential(layer(), layer()))
        >>> remat.nn.applied(model)["0"].by
        'remat.nn.apply'
    """

    by: str
    policy: Policy | None = None
    where: str = ""


class Claiming:
    """A hook before calls of a module that says what recomputes the module."""

    def claim(self, module: nn.Module) -> Applied | None:
        """Return what recomputes the module; None if nothing does at present."""
        raise NotImplementedError


def applied(model: nn.Module) -> dict[str, Applied]:
    """Return which modules of a model are recomputed, by what, with which policy.

    This lists what `remat.remat`, `remat.nn.apply`, `remat.nn.enable` and plans of
    `remat.fit` recompute, and the gradient checkpointing of transformers and diffusers.
    Where a library has its switch in a module that calls the blocks, that module is
    listed. A plan for a whole step is listed with the module whose calls follow it.
    `print(model)` shows those of `remat.remat` and `remat.nn.apply`.

    Args:
        model: the model. It is not changed.

    Returns:
        What recomputes a module, by the name of the module in `model.named_modules()`.

    Raises:
        TypeError: `model` is not a module.

    Example:
        >>> import remat
        >>> from remat import policies
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        >>> model = nn.Sequential(layer(), layer(), nn.Linear(4, 2))
        >>> model = remat.nn.apply(model, {"0": None, "1": policies.dots_saveable})
        >>> {name: found.policy for name, found in remat.nn.applied(model).items()}
        {'0': None, '1': dots_saveable}
        >>> model
        Sequential(
          (0): remat Sequential(
            (0): Linear(in_features=4, out_features=4, bias=True)
            (1): Tanh()
            (2): Linear(in_features=4, out_features=4, bias=True)
          )
          (1): remat(policy=dots_saveable) Sequential(
            (0): Linear(in_features=4, out_features=4, bias=True)
            (1): Tanh()
            (2): Linear(in_features=4, out_features=4, bias=True)
          )
          (2): Linear(in_features=4, out_features=2, bias=True)
        )
    """
    refuse_no_module("applied", model)
    found = {name: claim_on(module) for name, module in model.named_modules()}
    return {name: each for name, each in found.items() if each is not None}


def refuse_no_module(function: str, model: Any, like: str = "") -> None:
    """Refuse what is no model."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(_NO_MODULE.format(function=function, kind=kind, like=like))


_NO_MODULE = "remat.nn.{function}: {kind} is not a module. Pass a model{like}."


def claim_on(module: nn.Module) -> Applied | None:
    """Return what recomputes a module; None if nothing does."""
    for hook in module._forward_pre_hooks.values():
        claimed = hook.claim(module) if isinstance(hook, Claiming) else None
        if claimed is not None:
            return claimed
    if isinstance(module, RematModule):
        spec = module._remat_spec
        # Such a block stands in for a plan, which is listed itself.
        is_listed = not spec.options.unless_followed
        return Applied(spec.by, spec.options.policy, spec.where) if is_listed else None
    return Applied(LIBRARY) if recomputes(module) else None


def refuse_others(
    model: nn.Module, function: str, allowed: Container[str] = ()
) -> None:
    """Refuse a model of which something else recomputes modules."""
    for name, found in applied(model).items():
        if found.by in allowed:
            continue
        module = model.get_submodule(name)
        what = f"{shown_name(name)} ({type(module).__name__})"
        message = _OURS.format(by=found.by, where=found.where)
        if found.by == LIBRARY:
            message = _LIBRARYS.format(library=library_of(module))
        raise ValueError(f"{function}: {what} is recomputed already, by {message}")


def shown_name(name: str) -> str:
    """Return how a message calls a module of a model."""
    return f"`{name}`" if name else "the model itself"


_OURS = (
    "{by}, since {where}. A model has one of these at a time: call "
    "remat.nn.remove(model) first."
)
_LIBRARYS = (
    "the gradient checkpointing of {library}. Switch that off first, in the model or "
    "in the arguments of its trainer. Or call only remat.nn.enable(model), which takes "
    "the place of it."
)


# --- The switches of libraries ---


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

    In newer models of transformers it is; in others, a module has the switch that calls
    the blocks.
    """
    return hasattr(type(module), FLAG)


def recomputes(module: nn.Module) -> bool:
    """Say whether a module is recomputed by its switch, or calls what is."""
    if not is_on(module):
        return False
    # A stack of layers has a switch, too, but does nothing with it. An attention of T5
    # has one, which is read nowhere.
    inside = (m for m in switchable(module) if m is not module)
    return is_layer(module) or (_calls_blocks(type(module)) and not any(inside))


def _calls_blocks(kind: type) -> bool:
    """Say whether methods of a class name the function that recomputes blocks."""
    found = (inspect.unwrap(m) for cls in kind.__mro__ for m in vars(cls).values())
    fns = (fn for fn in found if isinstance(fn, types.FunctionType))
    return any(FUNCTION in code.co_names for fn in fns for code in nested(fn.__code__))


def library_of(module: nn.Module) -> str:
    """Return the name of the library that a module is of."""
    return type(module).__module__.partition(".")[0]


class Refusing:
    """The hook before calls that refuses a switch which was put on too late."""

    def __init__(self, by: str, where: str) -> None:
        self.shown = {"by": by, "where": where}

    def __call__(self, module: nn.Module, _: Any) -> None:
        if is_on(module) and torch.is_grad_enabled():
            kind, library = type(module).__name__, library_of(module)
            raise ValueError(_LATE.format(kind=kind, library=library, **self.shown))


def refuse_later(model: nn.Module, by: str, where: str) -> None:
    """Have a model refuse its switch from now on, when it is called."""
    for module in switchable(model):
        module.register_forward_pre_hook(Refusing(by, where), prepend=True)


_LATE = (
    "remat: the gradient checkpointing of {library} is on in this {kind}, and "
    "{by} recomputes blocks already, since {where}. To have these stay, switch that "
    "off, in the model or in the arguments of its trainer. To have those of {library}, "
    "call remat.nn.remove(model) and remat.nn.enable(model)."
)
