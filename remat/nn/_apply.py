"""Recompute blocks of a model in place, and undo it.

Invariant: the model stays what it is: its parameters, keys, names and hooks. Only the
class of each selected module changes, and only in its `forward` and in what it prints.
(Modules with a switch of their library get a hook, which refuses to use both.)
Rejected: to put a wrapper where each block was. Code that refers to the blocks, and
checkpoints on disk, would have to know of the wrappers.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from remat._transform.api import caller, options_of
from remat._transform.module import (
    RematModule,
    has_remat_class,
    recompute_in_place,
    undone,
)
from remat.nn._applied import (
    APPLY,
    REMAT,
    refuse_later,
    refuse_no_module,
    refuse_others,
    shown_name,
)
from remat.nn._enable import switch_off
from remat.nn._followed import plan_at_first_call, unfollow
from remat.nn._select import budget_in, chosen, refuse_no_name


M = TypeVar("M", bound=nn.Module)


def apply(
    model: M,
    select: Any = None,
    *,
    policy: Any = None,
    prune: Any = "auto",
    rng: Any = "replay",
    higher_order: bool = False,
    offload_inputs: Any = False,
    check_fn: Callable[[nn.Module], bool] | None = None,
) -> M:
    """Recompute the `forward` of submodules in the backward, instead of storing values.

    The model is changed in place, and computes the same values and gradients. The
    parameters, the keys of its `state_dict`, names, hooks and `repr` stay. Hooks of a
    selected module run outside of the recompute, once. A selected module can be copied
    and pickled, also by `torch.save`.

    `select` and `policy` may be what a config file holds. These texts say what becomes
    of the repeated blocks, or, as the value of a key, of the modules that it selects:

    - "full": all are recomputed; "none": none is; "every_2": every second one is.
    - "dots", "save", "offload", "disk", or the name of a policy that is a constant:
      all are, under that policy.
    - "budget:24GB": the first call that a backward may follow plans a step with what
      it is passed, and calls follow the plan, as of `remat.fit`. As the value of a key,
      each call saves at most so much, as of `policies.within`.

    Args:
        model: the model.
        select: which modules. A class, or its name (`"LlamaDecoderLayer"`); a name as
            in `named_modules()`, in which `*` stands for one part (`"layers.*"`) and
            `**` for several; a module; a function of a module, or of its name and the
            module, that returns a bool; or a list of these. A mapping from these to
            policies gives each module the policy of the first that selects it. `None`
            selects the repeated blocks of the model: see `remat.nn.blocks`.
        policy: as of `remat.remat`, or one of the texts. Not with a mapping.
        prune: as of `remat.remat`.
        rng: as of `remat.remat`.
        higher_order: as of `remat.remat`.
        offload_inputs: as of `remat.remat`.
        check_fn: a function of a module that says whether it is selected, by torch's
            name for it, in place of `select`.

    Returns:
        The model.

    Raises:
        ValueError: a selector selects nothing, or only modules without `forward`, such
            as an `nn.ModuleList`; or a text is no policy; or a module is selected that
            is recomputed already; or both a mapping and a policy are given; or modules
            are recomputed by `remat.nn.enable`, a plan, or the checkpointing of
            transformers or diffusers. If that is switched on later, the next call
            raises this.
        TypeError: `model` is not a module, or something is not a selector or a policy.

    Example:
        >>> import remat
        >>> from remat.testing import count_ops
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        >>> model = remat.nn.apply(nn.Sequential(layer(), layer()))
        >>> with count_ops() as ops:
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> ops["tanh"]
        4
        >>> [*model.state_dict()][:2]
        ['0.0.weight', '0.0.bias']
        >>> model = remat.nn.apply(nn.Sequential(layer(), layer()), {"0": "dots"})
        >>> [*remat.nn.applied(model).items()][0][1].policy
        dots_saveable
    """
    refuse_no_module("apply", model)
    refuse_others(model, APPLY, (REMAT, APPLY))
    refuse_no_name("remat.nn.apply", select)
    flags = prune, rng, higher_order, offload_inputs
    if check_fn is not None:
        if select is not None:
            raise TypeError(_TWO_SELECTORS)
        select = [check_fn]
    budget = budget_in(select)
    if budget is not None:
        if (policy, *flags) != (None, "auto", "replay", False, False):
            raise ValueError(_NOT_OF_A_PLAN.format(select=select))
        return plan_at_first_call(model, budget, caller())
    return apply_from(caller(), model, select, policy, flags)


def apply_from(
    where: str,
    model: M,
    select: Any,
    policy: Any = None,
    flags: Sequence[Any] = (),
    by: str = APPLY,
) -> M:
    """Do what `apply` does, for a line of the user's."""
    found = chosen(model, select, policy)
    options = [options_of(policy, *flags) for _, _, policy in found]
    for name, module, _ in found:
        if isinstance(module, RematModule):
            of = {"kind": type(module).__name__, "where": module._remat_spec.where}
            raise ValueError(_TWICE.format(name=shown_name(name), **of))
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(_SCRIPT.format(name=shown_name(name)))
    for (_, module, _), each in zip(found, options, strict=True):
        recompute_in_place(module, where, each, by)
    refuse_later(model, by, where)
    return model


def remove(model: M) -> M:
    """Undo `remat.nn.apply`, `remat.nn.enable` and plans: the model stores its values.

    Args:
        model: the model, which is changed in place. Where `remat.remat` returned one of
            its modules, the module that was passed to it is put in.

    Returns:
        The model; if `remat.remat` returned it, the module that was passed.

    Raises:
        TypeError: `model` is not a module; or after `remat.nn.apply` a library gave one
            of its modules a class of its own, as `fully_shard` does.

    Example:
        >>> import remat
        >>> from remat.testing import count_ops
        >>> layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> model = remat.nn.remove(remat.nn.apply(layer, nn.Sequential))
        >>> with count_ops() as ops:
        ...     model(torch.ones(2, 4)).sum().backward()
        >>> ops["tanh"]
        1
    """
    refuse_no_module("remove", model)
    for name, module in model.named_modules():
        if isinstance(module, RematModule) and not has_remat_class(module):
            kind = type(module).__qualname__
            raise TypeError(_DERIVED.format(name=shown_name(name), kind=kind))
    model = _undone(model)
    switch_off(model)
    for module in model.modules():
        unfollow(module)
        children = module._modules
        for name, child in children.items():
            children[name] = _undone(child)
    return model


def _undone(module: Any) -> Any:
    while isinstance(module, RematModule):
        module = undone(module)
    return module


_TWICE = (
    "remat.nn.apply: {name} ({kind}) is recomputed already, since {where}. Call "
    "remat.nn.remove(model) first, or select other modules."
)
_SCRIPT = (
    "remat.nn.apply: {name} is a TorchScript module, whose class is fixed. Use "
    "remat(module) in its place, or apply remat before torch.jit.script."
)
_DERIVED = (
    "remat.nn.remove: {name} is of the class {kind}, which a library derived after "
    "remat.nn.apply, as fully_shard and parametrizations do. Undo that first."
)
_TWO_SELECTORS = (
    "remat.nn.apply: `check_fn` says which modules are meant, and so does `select`. "
    "Leave one out."
)
_NOT_OF_A_PLAN = (
    "remat.nn.apply: {select!r} plans a whole step, so leave out `policy`, `prune`, "
    "`rng` and `higher_order`. For a budget of each block, pass "
    "policy=policies.within(bytes)."
)
