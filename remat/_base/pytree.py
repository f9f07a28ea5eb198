"""Pytrees: the only importer of optree, to decide namespace and `None` once.

Invariant: `unflatten(treedef, leaves)` undoes `flatten(tree)`. `None` is part of the
structure, as in JAX. Dataclasses, and classes registered only with torch.utils._pytree,
are registered in our namespace when first met.
Rejected: torch.utils._pytree, ten times slower and without key paths for every node.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import optree
from torch import Tensor, nn

from remat._base.types import CONSTANTS, TENSORS, Leaf
from remat._torch import TORCH_NODES, register_torch_class, register_torch_node


_NAMESPACE = "remat"
# Typed for classes that are collections, which a pytree node need not be.
_register: Any = optree.register_pytree_node
_unregister: Any = optree.unregister_pytree_node
Treedef: TypeAlias = optree.PyTreeSpec


def flatten(tree: Any) -> tuple[list[Leaf], Treedef]:
    """Return the leaves of a pytree and what rebuilds it.

    Args:
        tree: any nesting of dict, list, tuple, namedtuple, dataclass and registered
            classes.

    Returns:
        The leaves in order (dictionaries by sorted key), and the treedef.

    Example:
        >>> leaves, treedef = flatten({"b": [1, None], "a": 2})
        >>> leaves
        [2, 1]
        >>> unflatten(treedef, leaves)
        {'b': [1, None], 'a': 2}
    """
    leaves, treedef = optree.tree_flatten(tree, namespace=_NAMESPACE)
    if not _LEAVES.issuperset(map(type, leaves)):
        for leaf in leaves:
            if type(leaf) not in _LEAVES and _adopt(type(leaf)):
                return flatten(tree)
    return leaves, treedef


def unflatten(treedef: Treedef, leaves: Iterable[Leaf]) -> Any:
    """Rebuild the pytree that `flatten` took apart, around `leaves`."""
    return optree.tree_unflatten(treedef, leaves)


def map_leaves(fn: Callable[[Leaf], Leaf], tree: Any) -> Any:
    """Return a pytree with another value in place of each leaf."""
    leaves, treedef = flatten(tree)
    return unflatten(treedef, map(fn, leaves))


def flatten_up_to(treedef: Treedef, tree: Any) -> list[Any]:
    """Return the parts of a tree where a treedef has leaves.

    Raises:
        ValueError: it is built otherwise.
    """
    return treedef.flatten_up_to(tree)


def paths(treedef: Treedef) -> list[str]:
    """Return each leaf's path as it would be written in Python.

    Example:
        >>> paths(flatten({"head": [1, {"bias": 2}]})[1])
        ["['head'][0]", "['head'][1]['bias']"]
    """
    return [accessor.codify("") for accessor in treedef.accessors()]


# A size is one value: torch takes it apart, and makes a tuple of it.
_LEAVES = TENSORS | CONSTANTS


def _adopt(cls: type) -> bool:
    """Register `cls` if it is a pytree elsewhere; say whether it was."""
    if cls in _LEAVES or issubclass(cls, (Tensor, nn.Module)):
        return False
    if cls in TORCH_NODES:
        _adopt_torch(cls)
    elif _is_dataclass(cls) and not issubclass(cls, (dict, list, tuple)):
        _register(cls, _flatten_dataclass, _Unflatten(cls), namespace=_NAMESPACE)
        _ADOPTED.add(cls)
    else:
        return False
    return True


_ADOPTED: set[type] = set()  # dataclasses, which may be registered later


def _is_dataclass(cls: type) -> bool:
    # Without asking the metaclass, which may have any attribute.
    return any("__dataclass_fields__" in base.__dict__ for base in cls.__mro__)


def _adopt_torch(cls: type) -> None:
    node = TORCH_NODES[cls]
    unflatten_node = _unflatten_with(node)
    _register(cls, node.flatten_fn, unflatten_node, namespace=_NAMESPACE)


def _flatten_dataclass(
    instance: Any,
) -> tuple[list[Any], tuple[str, ...], tuple[str, ...]]:
    # What an instance holds, declared as a field or not, is what a copy must hold.
    held = getattr(instance, "__dict__", None)
    declared = [f.name for f in dataclasses.fields(instance)]
    names = tuple(held if held is not None else declared)
    return [getattr(instance, name) for name in names], names, names


class _Unflatten:
    """Rebuild a dataclass past `__init__`, which may compute, refuse or forget."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __call__(self, names: tuple[str, ...], children: Iterable[Any]) -> Any:
        instance = object.__new__(self.cls)
        for name, child in zip(names, children, strict=True):
            object.__setattr__(instance, name, child)
        return instance


def register_attributes(
    cls: type, name: str, children: Sequence[str], static: Sequence[str] = ()
) -> None:
    """Make a class of ours a pytree node, here and for torch.func and torch.compile.

    It is rebuilt past `__init__`: what a tree is mapped to need not be valid.

    Args:
        cls: the class.
        name: that it is known by in a saved program.
        children: the attributes that are subtrees.
        static: the attributes that are part of the structure, comparable and of types
            that JSON has.
    """

    def flatten_node(instance: Any) -> tuple[list[Any], list[Any]]:
        subtrees = [getattr(instance, n) for n in children]
        return subtrees, [getattr(instance, n) for n in static]

    def flatten_named(instance: Any) -> tuple[list[Any], list[Any], Sequence[str]]:
        return *flatten_node(instance), children

    def unflatten_node(subtrees: Iterable[Any], context: Iterable[Any]) -> Any:
        instance = object.__new__(cls)
        for n, value in zip((*children, *static), (*subtrees, *context), strict=True):
            object.__setattr__(instance, n, value)
        return instance

    def unflatten_named(context: Iterable[Any], subtrees: Iterable[Any]) -> Any:
        return unflatten_node(subtrees, context)

    _register(cls, flatten_named, unflatten_named, namespace=_NAMESPACE)
    register_torch_node(cls, name, children, flatten_node, unflatten_node)


class Registered(NamedTuple):
    """How a class that a user registered is taken apart and rebuilt.

    Attributes:
        flatten: takes an instance, and returns its children and what else there is.
        unflatten: takes what else there is, and children.
    """

    flatten: Callable[[Any], tuple[Iterable[Any], Any]]
    unflatten: Callable[[Any, Iterable[Any]], Any]


REGISTERED: dict[type, Registered] = {}


def register_functions(cls: type, how: Registered) -> None:
    """Make a user's class a pytree node, here and for torch.func and torch.compile."""

    def flatten_node(instance: Any) -> tuple[list[Any], Any]:
        children, context = how.flatten(instance)
        return [*children], context

    def unflatten_torch(children: Iterable[Any], context: Any) -> Any:
        return how.unflatten(context, children)

    register_torch_class(cls, flatten_node, unflatten_torch)
    if cls in _ADOPTED:
        _unregister(cls, namespace=_NAMESPACE)
        _ADOPTED.remove(cls)
    _register(cls, flatten_node, how.unflatten, namespace=_NAMESPACE)
    REGISTERED[cls] = how


def registration_of(cls: type) -> Registered | None:
    """Return how a class is taken apart, if it is registered here or with torch."""
    if cls in REGISTERED:
        return REGISTERED[cls]
    if cls not in TORCH_NODES:
        return None
    node = TORCH_NODES[cls]
    return Registered(node.flatten_fn, _unflatten_with(node))


def _unflatten_with(node: Any) -> Callable[[Any, Iterable[Any]], Any]:
    def unflatten_node(context: Any, children: Iterable[Any]) -> Any:
        return node.unflatten_fn([*children], context)

    return unflatten_node
