"""The gradient checkpointing of other libraries' models, done by remat.

Invariant: what else a library does when its checkpointing is on stays: it leaves out
caches, for instance. Which blocks it recomputes is up to its switch, also later; what
recomputes them is up to `enable`, until `remove`.
Rejected: `remat.nn.apply` for these models. A decoder layer that is recomputed must not
be handed a cache, and only the library knows where.
"""

import functools
import inspect
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from torch import nn
from typing_extensions import override

from remat._partial.options import Options
from remat._transform.api import caller, options_of
from remat._transform.module import RematModule, recompute_in_place, undone
from remat._transform.rematerialized import Rematerialized
from remat.nn._applied import (
    ENABLE,
    FLAG,
    FUNCTION,
    LIBRARY,
    REMAT,
    Applied,
    Claiming,
    function_of,
    is_layer,
    is_on,
    library_of,
    recomputes,
    refuse_no_module,
    refuse_others,
    switchable,
)
from remat.nn._followed import unfollow
from remat.nn._select import meaning


M = TypeVar("M", bound=nn.Module)
_SWITCH = "_set_gradient_checkpointing"
_EVERY = "every_n_layers"


def enable(
    model: M,
    *,
    policy: Any = None,
    every_n_layers: int | None = None,
    prune: Any = "auto",
    rng: Any = "replay",
    higher_order: bool = False,
    offload_inputs: Any = False,
) -> M:
    """Switch on the gradient checkpointing of a model, with remat as its checkpoint.

    For models of transformers, diffusers, and peft around them. The model recomputes
    the blocks that its library would, in training mode, and its caches are off where
    the library switches them off. `remat.nn.remove` undoes it.

    Until then the model's own switch says which blocks are recomputed, and remat
    recomputes them: also where a trainer calls
    `model.activation_checkpointing_enable(every_n_layers=2)` later, or has called it
    before.

    Args:
        model: the model.
        policy: as of `remat.remat`, or a text as of `remat.nn.apply`, such as "dots".
        every_n_layers: recompute the first of every so many layers, and store what the
            others compute. None for the layers that are switched on already, or for all
            if none is. Only for models of transformers, from version 5.23 on.
        prune: as of `remat.remat`.
        rng: as of `remat.remat`.
        higher_order: as of `remat.remat`.
        offload_inputs: as of `remat.remat`. transformers' `offload=True` means this.

    Returns:
        The model.

    Raises:
        TypeError: `model` is not a module; or it has no gradient checkpointing that
            takes a function. The message says what to use instead.
        ValueError: the library cannot leave out layers; or its checkpointing is on with
            options that remat does not have, such as `context_fn`; or
            `remat.nn.apply` or a plan recomputes modules of the model; or a text is no
            policy.

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
    refuse_no_module("enable", model, ", such as pipeline.unet")
    text, (every, policy) = policy, meaning(policy, "enable, policy")
    if every != 1:
        if every_n_layers is not None:
            raise ValueError(_LAYERS.format(text=text))
        every_n_layers = every
    options = options_of(policy, prune, rng, higher_order, offload_inputs)
    owners = _owners(model)
    if not owners:
        raise TypeError(_NOT_SUPPORTED.format(model=type(model).__name__))
    refuse_others(model, ENABLE, (REMAT, ENABLE, LIBRARY))
    if every_n_layers not in (None, 1):
        _refuse_choice(owners, every_n_layers)
    checkpoint = Checkpoint(caller(), options)
    chosen = [m for m in switchable(model) if is_on(m) or _is_ours(m)]
    for module in chosen:
        checkpoint = checkpoint.in_place_of(function_of(module), module)
    _undo(model)
    every = every_n_layers or 1
    skipping = {_EVERY: every} if every > 1 else {}
    for owner in owners:
        switch: Any = getattr(owner, _SWITCH)
        switch(enable=True, gradient_checkpointing_func=checkpoint, **skipping)
    for module in switchable(model):
        if every_n_layers is None and chosen and module not in chosen:
            setattr(module, FLAG, False)
        _keep(module, checkpoint)
    return model


def _taken_by_switch(module: nn.Module) -> Container[str]:
    """Return the names of what the switch of a model takes; none if it has none."""
    switch = getattr(type(module), _SWITCH, None)
    return () if switch is None else inspect.signature(switch).parameters


def _owners(model: nn.Module) -> list[nn.Module]:
    """Return the outermost models whose switch takes a function for its modules."""
    owners = [
        module
        for module in model.modules()
        if "gradient_checkpointing_func" in _taken_by_switch(module)
        and any(True for _ in switchable(module))
    ]
    inner = {id(m) for owner in owners for m in owner.modules() if m is not owner}
    return [owner for owner in owners if id(owner) not in inner]


def switch_off(model: nn.Module) -> None:
    """Switch off what `enable` switched on. Its hooks stay."""
    for module in switchable(model):
        if any(isinstance(h, _Keeping) for h in module._forward_pre_hooks.values()):
            vars(module)[FLAG] = False
            vars(module).pop(FUNCTION, None)


def _undo(model: nn.Module) -> None:
    """Undo an earlier call."""
    switch_off(model)
    for module in switchable(model):
        if _is_ours(module):
            undone(module)
        unfollow(module)


@dataclass(frozen=True)
class Checkpoint:
    """What a model calls at each block."""

    where: str  # the line that asked for it
    options: Options

    def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function so that a backward recomputes it."""
        return Rematerialized(function, self.where, self.options)(*args, **kwargs)

    def in_place_of(self, function: Any, module: nn.Module) -> "Checkpoint":
        """Return what takes the place of a function; refuse if it does something else.

        That of transformers for `offload=True` offloads inputs; so does ours then.
        """
        does = _does(function)
        if does == "offload":
            away = self.options.offload_inputs or True
            return replace(self, options=replace(self.options, offload_inputs=away))
        if does or isinstance(function, Checkpoint):
            return self
        shown = getattr(function, "__qualname__", repr(function))
        of = {"kind": type(module).__name__, "library": library_of(module)}
        raise ValueError(_OPTIONS.format(shown=shown, where=self.where, **of))


class _Keeping(Claiming):
    """The hook before calls that puts our function in place of the library's."""

    def __init__(self, checkpoint: Checkpoint, is_whole: bool) -> None:
        self.checkpoint = checkpoint
        self.is_whole = is_whole  # recomputed by us as a whole: its switch stays off

    def __call__(self, module: nn.Module, _: Any) -> None:
        """Put our function in again."""
        function = function_of(module)
        if self.is_whole:
            setattr(module, FLAG, False)
        elif is_on(module) and type(function) is not Checkpoint:
            checkpoint = self.checkpoint.in_place_of(function, module)
            setattr(module, FUNCTION, checkpoint)

    @override
    def claim(self, module: nn.Module) -> Applied | None:
        options, where = self.checkpoint.options, self.checkpoint.where
        return Applied(ENABLE, options.policy, where) if recomputes(module) else None


# They compute something else where their switch is on. In diffusers 0.42 this one does
# not scale its input.
_FAULTY = {("diffusers.models.autoencoders.vae", "EncoderTiny")}


def _keep(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Have a module keep our function, also when its library puts in another."""
    kind = type(module)
    is_whole = is_on(module) and (kind.__module__, kind.__qualname__) in _FAULTY
    if is_whole:
        setattr(module, FLAG, False)
        recompute_in_place(module, checkpoint.where, checkpoint.options, ENABLE)
    keeping = _Keeping(checkpoint, is_whole)
    module.register_forward_pre_hook(keeping, prepend=True)


def _is_ours(module: nn.Module) -> bool:
    """Say whether a module is recomputed as a whole, in place of its switch."""
    return isinstance(module, RematModule) and module._remat_spec.by == ENABLE


def _does(function: Any) -> str:
    """Say what a function of a library does: "recompute", "offload", or "" for more."""
    while isinstance(function, functools.partial):
        if function.args or not {"use_reentrant"}.issuperset(function.keywords):
            return ""
        function = function.func
    module = getattr(function, "__module__", None) or ""
    if module.startswith("transformers."):
        whole = getattr(function, "__qualname__", "")
        return "offload" if whole.endswith(_OFFLOADING) else ""
    name = getattr(function, "__name__", "")
    is_default = module.startswith("diffusers.") and name == FUNCTION
    is_torchs = module in _TORCHS and name == "checkpoint"
    known = is_default or is_torchs or type(function).__name__ == _IN_TRACES
    return "recompute" if known else ""


_OFFLOADING = "_activation_checkpointing_enable.<locals>.checkpoint_func"
# The second one has ours in place of torch's.
_TORCHS = "torch.utils.checkpoint", "remat.compat._patch"
# What Dynamo has in place of torch's.
_IN_TRACES = "TagActivationCheckpoint"


def _refuse_choice(owners: Sequence[nn.Module], every: Any) -> None:
    """Refuse a choice of layers that the library cannot make."""
    if not isinstance(every, int) or every < 1:
        raise ValueError(_NO_COUNT.format(every=every))
    for owner in owners:
        takes = _EVERY in _taken_by_switch(owner)
        if not takes or sum(map(is_layer, owner.modules())) < 2:
            of = {"kind": type(owner).__name__, "library": library_of(owner)}
            raise ValueError(_NO_CHOICE.format(every=every, **of))


_NOT_SUPPORTED = (
    "remat.nn.enable: {model} has no gradient checkpointing that calls a function of "
    "the user's. Use remat.nn.apply(model), which finds the blocks itself, or "
    "remat.compat.patch(), which replaces torch.utils.checkpoint in libraries."
)
_LAYERS = (
    "remat.nn.enable, policy: {text!r} says which layers. With every_n_layers= pass a "
    "policy that says what is saved."
)
_NO_COUNT = (
    "remat.nn.enable: every_n_layers={every!r} is not a positive number. Pass 2 to "
    "recompute every other layer."
)
_NO_CHOICE = (
    "remat.nn.enable: every_n_layers={every}, but the switch of {library} in this "
    "{kind} cannot leave out layers. Use remat.nn.apply(model, select), which can."
)
_OPTIONS = (
    "remat.nn.enable: {kind} has the gradient checkpointing of {library} on with "
    "{shown}, which does more than recompute. remat, which takes its place since "
    "{where}, would not do that: options such as context_fn, or a function of "
    "your own. Leave them out, or call remat.nn.remove(model). With remat, "
    "pass policy= to choose what is saved or offloaded."
)
