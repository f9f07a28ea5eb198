"""The repeated blocks of a model.

Invariant: no block is in another.
Rejected: to ask libraries which of their classes are blocks. Each says it differently,
and a user's own model says nothing. Rejected: single layers. To recompute a linear
layer saves nothing: it stores its input in any case.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from remat._transform.refused import has_forward
from remat.policies import Policy


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model: what `remat.nn.apply` recomputes.

    A block is an item of an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential` that
    consists of several layers, if the class of one such item of the list occurs twice:
    in a list, or in lists that are not inside of items of other classes. A layer is a
    module that has a parameter of two or more dimensions. If no item consists of
    several layers, those that consist of one layer and an activation, say, count too.

    A *stage* is no block, but the items of its lists are. It is an item that is an
    `nn.Sequential` of blocks, or that has lists of blocks and at most one submodule
    with layers besides.

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
        rule = _BlockRule(fewest, frozenset())
        rule = _BlockRule(fewest, frozenset(_kinds(model, rule)))
        for name, module in _blocks_in(model, "", rule):
            if all(module is not other for other in found.values()):
                found[name] = module
        if found:
            break
    return found


_LISTS = nn.ModuleList, nn.ModuleDict, nn.Sequential
# A class, by its name: libraries derive one for each module, of the same name.
_ClassName = tuple[str, str]


class _BlockRule(NamedTuple):
    """What is a block."""

    fewest: int  # the layers that it has at least
    kinds: frozenset[_ClassName]  # the classes that occur twice


def _kinds(model: nn.Module, rule: _BlockRule) -> Iterator[_ClassName]:
    """Return the classes of all blocks."""
    for module in model.modules():
        yield from _repeated(_in_list(module, rule).values())
    yield from _repeated(_outermost_items(model, rule))


def _repeated(modules: Iterable[nn.Module]) -> Iterator[_ClassName]:
    """Return the classes that occur twice, but Sequential: that says nothing."""
    counts = Counter(_kind(m) for m in modules if type(m) is not nn.Sequential)
    return (kind for kind, count in counts.items() if count > 1)


def _outermost_items(module: nn.Module, rule: _BlockRule) -> Iterator[nn.Module]:
    """Return the items of lists that are in no other item."""
    for _, child in _items(module):
        is_item = isinstance(module, _LISTS) and type(child) is not nn.Sequential
        if is_item and _is_compound(child, rule):
            yield child
        else:
            yield from _outermost_items(child, rule)


def _blocks_in(
    module: nn.Module, name: str, rule: _BlockRule
) -> Iterator[tuple[str, nn.Module]]:
    blocks = _in_list(module, rule)
    for key, child in _items(module):
        path = f"{name}.{key}" if name else key
        if key in blocks and not _is_stage(child, rule):
            yield path, child
        else:
            yield from _blocks_in(child, path, rule)


def _in_list(module: nn.Module, rule: _BlockRule) -> dict[str, nn.Module]:
    """Return the items of a list that are blocks, or stages."""
    if not isinstance(module, _LISTS):
        return {}
    items = {key: item for key, item in _items(module) if _is_compound(item, rule)}
    counts = Counter(map(_kind, items.values()))
    is_repeated = any(count > 1 or kind in rule.kinds for kind, count in counts.items())
    return items if is_repeated else {}


def _items(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Return the children of a module; those of a list in a list are its own."""
    for key, child in module._modules.items():
        if child is None:
            continue
        if type(module) is type(child) is nn.ModuleList:
            yield from ((f"{key}.{inner}", item) for inner, item in _items(child))
        else:
            yield key, child


def _is_compound(module: nn.Module, rule: _BlockRule) -> bool:
    if not has_forward(module):
        return False
    # An adapter around a layer is a layer.
    inside = getattr(module, "base_layer", module)
    return any(inside.children()) and _layers(inside) >= rule.fewest


def _is_stage(module: nn.Module, rule: _BlockRule) -> bool:
    if _in_list(module, rule):
        return True
    lists = [child for child in module.children() if _in_list(child, rule)]
    others = [m for m in module.children() if m not in lists and _layers(m)]
    return bool(lists) and len(others) <= 1


def _layers(module: nn.Module) -> int:
    """Count the modules that have a parameter of two or more dimensions."""
    return sum(
        any(is_lazy(p) or p.ndim > 1 for p in m.parameters(recurse=False))
        for m in module.modules()
    )


def _kind(module: nn.Module) -> _ClassName:
    kind = type(module)
    return kind.__module__, kind.__qualname__


def with_blocks(
    model: nn.Module, blocks: Sequence[tuple[str, Policy | None]]
) -> tuple[nn.Module, dict[str, Policy | None]]:
    """Return the module that has the blocks, and their policies by its names."""
    policies = dict(blocks)
    while "" not in policies:
        for module in model.modules():
            if policies.keys() <= {name for name, _ in module.named_modules()}:
                return module, policies
        policies = {k.partition(".")[2]: p for k, p in policies.items()}
    return model, dict(blocks)
