"""The repeated blocks of a model.

Called by `apply` where the user selects nothing, and by users.

Invariant: no block is in another.
Rejected: to ask libraries which of their classes are blocks. Each says it differently,
and a user's own model says nothing. Rejected: single layers. To recompute a linear
layer saves nothing: it stores its input in any case.
"""

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model: what `remat.nn.apply` recomputes.

    A block is an item of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` that
    consists of several layers, if that list, or another one of the model, has two items
    of its class. A layer is a module that has a parameter of two or more dimensions. If
    no item consists of several layers, items that consist of one layer and others, such
    as an activation, count too.

    Lists in a list are one list. A *stage* is no block, but the items of its lists are.
    It is an item that is an `nn.Sequential` of blocks, or that has lists of blocks and
    at most one submodule with layers besides.

    Args:
        model: the model. It is not changed.

    Returns:
        The blocks by their names in `model.named_modules()`.

    Example:
        >>> from remat.nn import blocks
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        >>> model = nn.ModuleDict({"body": nn.ModuleList([layer(), layer()])})
        >>> [*blocks(model)]
        ['body.0', 'body.1']
    """
    found: dict[str, nn.Module] = {}
    for fewest in 2, 1:
        rule = _Rule(fewest, frozenset())
        rule = _Rule(fewest, frozenset(_kinds(model, rule)))
        for name, module in _blocks_in(model, "", rule):
            if all(module is not other for other in found.values()):
                found[name] = module
        if found:
            break
    return found


# A class, by its name: libraries derive one for each module, of the same name.
_Kind = tuple[str, str]


class _Rule(NamedTuple):
    """What is a block.

    Attributes:
        fewest: the layers that it has at least.
        kinds: the classes of which some list has two items.
    """

    fewest: int
    kinds: frozenset[_Kind]


def _kinds(model: nn.Module, rule: _Rule) -> Iterator[_Kind]:
    """Return the classes of all blocks."""
    for module in model.modules():
        for block in _repeated(module, rule).values():
            if type(block) is not nn.Sequential:  # says nothing of what is in it
                yield _kind(block)


def _blocks_in(
    module: nn.Module, name: str, rule: _Rule
) -> Iterator[tuple[str, nn.Module]]:
    repeated = _repeated(module, rule)
    for key, child in _items(module):
        path = f"{name}.{key}" if name else key
        if key in repeated and not _is_stage(child, rule):
            yield path, child
        else:
            yield from _blocks_in(child, path, rule)


def _repeated(module: nn.Module, rule: _Rule) -> dict[str, nn.Module]:
    """Return the items of a list that may be blocks."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
        return {}
    items = [(key, item) for key, item in _items(module) if _is_compound(item, rule)]
    counts = Counter(_kind(item) for _, item in items)
    return {
        key: item
        for key, item in items
        if counts[_kind(item)] > 1 or _kind(item) in rule.kinds
    }


def _items(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the children of a module; those of a list in a list are its own."""
    for key, child in module._modules.items():
        if child is None:
            continue
        if type(module) is type(child) is nn.ModuleList:
            yield from ((f"{key}.{inner}", item) for inner, item in _items(child))
        else:
            yield key, child


def _is_compound(module: nn.Module, rule: _Rule) -> bool:
    if type(module) in {nn.ModuleList, nn.ModuleDict}:  # they have no `forward`
        return False
    # An adapter around a layer is a layer.
    inside = getattr(module, "base_layer", module)
    return any(inside.children()) and _layers(inside) >= rule.fewest


def _is_stage(module: nn.Module, rule: _Rule) -> bool:
    if _repeated(module, rule):
        return True
    lists = [child for child in module.children() if _repeated(child, rule)]
    others = [m for m in module.children() if m not in lists and _layers(m)]
    return bool(lists) and len(others) <= 1


def _layers(module: nn.Module) -> int:
    """Count the modules that have a parameter of two or more dimensions."""
    return sum(
        any(is_lazy(p) or p.ndim > 1 for p in m.parameters(recurse=False))
        for m in module.modules()
    )


def _kind(module: nn.Module) -> _Kind:
    kind = type(module)
    return kind.__module__, kind.__qualname__
