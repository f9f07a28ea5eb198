"""Recompute blocks of a model in place, and undo it.

Invariant: the model stays what it is: its parameters, keys, names and hooks. Only the
class of each selected module changes, and only in its `forward` and in what it prints.
(Modules with a switch of their library get a hook, which refuses to use both.)
Rejected: to put a wrapper where each block was. Code that refers to the blocks, and
checkpoints on disk, would have to know of the wrappers.
"""

import fnmatch
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn

from remat._transform.api import caller, options_of
from remat._transform.module import (
    RematModule,
    has_remat_class,
    recompute_in_place,
    undone,
)
from remat._transform.refused import has_forward
from remat.nn._applied import (
    APPLY,
    REMAT,
    refuse_later,
    refuse_no_module,
    refuse_others,
    shown_name,
)
from remat.nn._blocks import blocks
from remat.nn._enable import switch_off
from remat.nn._followed import unfollow
from remat.policies import Decision, Policy


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
) -> M:
    """Recompute the `forward` of submodules in the backward, instead of storing values.

    The model is changed in place, and computes the same values and gradients. The
    parameters, the keys of its `state_dict`, names, hooks and `repr` stay. Hooks of a
    selected module run outside of the recompute, once. A selected module can be copied
    and pickled, also by `torch.save`.

    Args:
        model: the model.
        select: which modules. A class; a name as in `named_modules()`, in which `*`
            stands for one part (`"layers.*"`) and `**` for several; a function of a
            module, or of its name and the module, that returns a bool; or a list of
            these. A mapping from these to policies gives each module the policy of the
            first that selects it. `None` selects the repeated blocks of the model: see
            `remat.nn.blocks`.
        policy: as of `remat.remat`. Not with a mapping.
        prune: as of `remat.remat`.
        rng: as of `remat.remat`.
        higher_order: as of `remat.remat`.
        offload_inputs: as of `remat.remat`.

    Returns:
        The model.

    Raises:
        ValueError: a selector selects nothing, or only modules without `forward`, such
            as an `nn.ModuleList`; or a module is selected that is recomputed already;
            or both a mapping and a policy are given; or modules are recomputed by
            `remat.nn.enable`, a plan, or the checkpointing of transformers or
            diffusers. If that is switched on later, the next call raises this.
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
    """
    refuse_no_module("apply", model)
    refuse_others(model, APPLY, (REMAT, APPLY))
    flags = prune, rng, higher_order, offload_inputs
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
    chosen = _chosen(model, select, policy)
    options = [options_of(policy, *flags) for _, _, policy in chosen]
    for name, module, _ in chosen:
        _refuse(name, module)
    for (_, module, _), each in zip(chosen, options, strict=True):
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


def _chosen(
    model: nn.Module, select: Any, policy: Any
) -> list[tuple[str, nn.Module, Any]]:
    """Return the names and modules that are selected, and the policy of each."""
    if select is None:
        found = blocks(model)
        if not found:
            raise ValueError(_NO_BLOCKS.format(model=type(model).__name__))
        return [(name, module, policy) for name, module in found.items()]
    selectors = as_selectors(select)
    if not selectors:
        raise ValueError(_NO_SELECTORS.format(select=select))
    policies = [policy] * len(selectors)
    if isinstance(select, Mapping):
        if policy is not None:
            raise ValueError(_TWO_POLICIES)
        policies = [*select.values()]
    return [(n, module, policies[k]) for n, module, k in selected(model, selectors)]


def _refuse(name: str, module: nn.Module) -> None:
    """Refuse a module that is recomputed already, or cannot be."""
    if isinstance(module, RematModule):
        kind, where = type(module).__name__, module._remat_spec.where
        raise ValueError(_TWICE.format(name=shown_name(name), kind=kind, where=where))
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(_SCRIPT.format(name=shown_name(name)))


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
_NO_BLOCKS = (
    "remat.nn.apply: this {model} has no list of blocks: no ModuleList, ModuleDict or "
    "Sequential has two items of a class that has submodules. Say which modules you "
    "mean: pass a class, a name such as 'layers.*', or a function of a module."
)
_NO_SELECTORS = (
    "remat.nn.apply: {select!r} selects nothing. Pass selectors, or None for the "
    "repeated blocks of the model."
)
_TWO_POLICIES = (
    "remat.nn.apply: `select` gives each module a policy, so leave out `policy`."
)


# --- Which modules are meant: by class, by name, or by a function ---


# A class, a name with wildcards, or a function of a module, or of its name and itself.
Selector: TypeAlias = type[nn.Module] | str | Callable[..., bool]


def selected(
    model: nn.Module, selectors: Iterable[Selector]
) -> list[tuple[str, nn.Module, int]]:
    """Return modules with a `forward`, by name, and the first selector of each."""
    selectors = [*selectors]
    tests = [_test_of(selector) for selector in selectors]
    found: list[tuple[str, nn.Module, int]] = []
    useful: set[int] = set()
    left_out: dict[int, str] = {}
    for name, module in model.named_modules():
        hits = [k for k, test in enumerate(tests) if test(name, module)]
        if not has_forward(module):
            left_out.update((k, name) for k in hits if k not in left_out)
        elif hits:
            useful.update(hits)
            found.append((name, module, hits[0]))
    for k, selector in enumerate(selectors):
        if k not in useful and k in left_out:
            raise ValueError(_only_container(model, left_out[k]))
        if k not in useful:
            raise ValueError(_nothing(model, selector))
    return found


def _test_of(selector: Any) -> Callable[[str, nn.Module], bool]:
    if isinstance(selector, type) and issubclass(selector, nn.Module):
        return lambda name, module: isinstance(module, selector)
    if isinstance(selector, str):
        pattern = _pattern(selector)
        return lambda name, module: pattern.fullmatch(name) is not None
    if isinstance(selector, (Policy, Decision)):
        raise TypeError(_POLICY.format(policy=selector))
    if callable(selector) and not isinstance(selector, (type, nn.Module)):
        if _takes_one(selector):
            return lambda name, module: selector(module)
        return selector
    raise TypeError(_NO_SELECTOR.format(selector=selector))


def _takes_one(selector: Callable[..., Any]) -> bool:
    """Say whether a function takes a module, and not also its name."""
    try:
        inspect.signature(selector).bind("name", "module")
    except ValueError:  # a builtin that has no signature
        return False
    except TypeError:
        return True
    return False


def _pattern(text: str) -> re.Pattern[str]:
    """Return a pattern of names, in which `*` stands for one part of a name."""
    parts = (
        _PARTS[part]
        if part in _PARTS
        else fnmatch.translate(part).removesuffix(r"\Z").replace(".*", "[^.]*")
        for part in text.split(".")
    )
    return re.compile(r"\.".join(parts))


# The name of the model itself is empty, and has no part.
_PARTS = {"*": "[^.]+", "**": r"[^.]+(?:\.[^.]+)*"}


def as_selectors(select: Any) -> Sequence[Selector]:
    """Return one selector or several as a sequence."""
    several = isinstance(select, (Mapping, list, tuple, set, frozenset))
    return [*select] if several else [select]


def _only_container(model: nn.Module, name: str) -> str:
    kind = type(model.get_submodule(name)).__name__
    inside = f"{name}.*" if name else "*"
    return _NO_FORWARD.format(shown=shown_name(name), kind=kind, inside=inside)


def _nothing(model: nn.Module, selector: Any) -> str:
    names = [name for name, _ in model.named_modules() if name]
    more = ", ..." if len(names) > 8 else "."
    has = f"Its modules are: {', '.join(names[:8])}{more}"
    has = has if names else "It has no modules inside."
    shown = getattr(selector, "__name__", repr(selector))
    return _NOTHING.format(shown=shown, model=type(model).__name__, has=has)


_NO_SELECTOR = (
    "remat.nn.apply: {selector!r} is not a selector. Pass a class of modules, a name "
    "such as 'layers.*', a function of a module (or of its name and the module), or a "
    "list of these."
)
_POLICY = (
    "remat.nn.apply: pass a policy by name: remat.nn.apply(model, policy={policy})"
)
_NO_FORWARD = (
    "remat: {shown} is a {kind}, which has no `forward`, so nothing would be "
    "recomputed. Select the modules in it: {inside!r}."
)
_NOTHING = (
    "remat.nn.apply: {shown} selects no module of this {model}. {has} "
    "In a name `*` stands for one part and `**` for several."
)
