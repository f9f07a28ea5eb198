"""Pytrees: the only importer of optree, to decide namespace and `None` once.

`remat.register` makes a user's class a pytree, for remat and for torch.

Invariant: `unflatten(treedef, leaves)` undoes `flatten(tree)`. `None` is part of the
structure, as in JAX. Dataclasses, and classes registered only with torch.utils._pytree,
are registered in our namespace when first met. A user's class is registered in both
registries or in neither, for the outputs of what torch.func transforms are of torch's.
Rejected: torch.utils._pytree, ten times slower and without key paths for every node.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import optree
from torch import Tensor, nn

from remat._base.types import CONSTANTS, INERT, TENSORS, Leaf
from remat._torch.operators import TORCH_NODES, register_torch_node


_NAMESPACE = "remat"
# Typed for classes that are collections, which a pytree node need not be.
_register: Any = optree.register_pytree_node
_unregister: Any = optree.unregister_pytree_node
Treedef: TypeAlias = optree.PyTreeSpec


def flatten(tree: Any) -> tuple[list[Leaf], Treedef]:
    """Return the leaves of a pytree, dictionaries by sorted key, and what rebuilds it.

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


def parts(treedef: Treedef, tree: Any) -> list[Any]:
    """Return what a pytree has in the places of leaves; a ValueError if it has others.

    Example:
        >>> parts(flatten([1, {"a": 2}])[1], [None, {"a": (3, 4)}])
        [None, (3, 4)]
    """
    return treedef.flatten_up_to(tree)


def map_leaves(fn: Callable[[Leaf], Leaf], tree: Any) -> Any:
    """Return a pytree with another value in place of each leaf."""
    leaves, treedef = flatten(tree)
    return unflatten(treedef, map(fn, leaves))


def paths(treedef: Treedef) -> list[str]:
    """Return each leaf's path as it would be written in Python.

    Example:
        >>> paths(flatten({"head": [1, {"bias": 2}]})[1])
        ["['head'][0]", "['head'][1]['bias']"]
    """
    return [accessor.codify("") for accessor in treedef.accessors()]


class Frame(NamedTuple):
    """A pytree with `TENSOR` in place of its tensors."""

    treedef: Treedef
    leaves: Sequence[Leaf]

    def filled(self, tensors: Iterable[Any]) -> Any:
        each = iter(tensors)
        if self is _ONE_TENSOR:
            return next(each)
        leaves = [next(each) if leaf is TENSOR else leaf for leaf in self.leaves]
        return unflatten(self.treedef, leaves)

    @property
    def is_constant(self) -> bool:
        """Whether all but the tensors never changes."""
        return all(leaf is TENSOR or type(leaf) in CONSTANTS for leaf in self.leaves)


TENSOR = object()


def tensors_and_frame(tree: Any) -> tuple[list[Tensor], Frame]:
    """Return the tensors of a pytree, and the rest."""
    if type(tree) is Tensor:  # as most carries of chains
        return [tree], _ONE_TENSOR
    if tree is None:
        return [], _NONE
    leaves, treedef = flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rest = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tensors, Frame(treedef, rest)


_ONE_TENSOR = Frame(optree.treespec_leaf(namespace=_NAMESPACE), (TENSOR,))
_NONE = Frame(optree.treespec_none(namespace=_NAMESPACE), ())


# A size is one value: torch takes it apart, and makes a tuple of it.
_LEAVES = TENSORS | CONSTANTS


def _adopt(cls: type) -> bool:
    """Register `cls` if it is a pytree elsewhere; say whether it was."""
    if cls in _LEAVES or issubclass(cls, (Tensor, nn.Module)):
        return False
    if cls in TORCH_NODES:
        _register(cls, *_of_torch(cls), namespace=_NAMESPACE)
    elif _is_dataclass(cls) and not issubclass(cls, (dict, list, tuple)):
        unflatten_node = functools.partial(_unflatten_attributes, cls)
        _register(cls, _flatten_dataclass, unflatten_node, namespace=_NAMESPACE)
        _ADOPTED.add(cls)
    else:
        return False
    return True


_ADOPTED: set[type] = set()  # dataclasses, which may be registered later


def _is_dataclass(cls: type) -> bool:
    # Without asking the metaclass, which may have any attribute.
    return any("__dataclass_fields__" in base.__dict__ for base in cls.__mro__)


def _flatten_dataclass(
    instance: Any,
) -> tuple[list[Any], tuple[str, ...], tuple[str, ...]]:
    # What an instance holds, declared as a field or not, is what a copy must hold.
    held = getattr(instance, "__dict__", None)
    declared = [f.name for f in dataclasses.fields(instance)]
    names = tuple(held if held is not None else declared)
    return [getattr(instance, name) for name in names], names, names


def _unflatten_attributes(
    cls: type, names: Iterable[str], children: Iterable[Any]
) -> Any:
    """Rebuild an instance past `__init__`, which may compute, refuse or forget."""
    instance = object.__new__(cls)
    for name, child in zip(names, children, strict=True):
        object.__setattr__(instance, name, child)
    return instance


_Unflatten: TypeAlias = Callable[[Any, Iterable[Any]], Any]


class Registered(NamedTuple):
    """How a class that a user registered is taken apart and rebuilt."""

    flatten: Callable[[Any], tuple[Iterable[Any], Any]]
    unflatten: _Unflatten


REGISTERED: dict[type, Registered] = {}


def registration_of(cls: type) -> Registered | None:
    """Return how a class is taken apart, if it is registered here or with torch."""
    if cls in REGISTERED:
        return REGISTERED[cls]
    return _of_torch(cls) if cls in TORCH_NODES else None


def _of_torch(cls: type) -> Registered:
    node = TORCH_NODES[cls]
    again: _Unflatten = lambda rest, children: node.unflatten_fn([*children], rest)
    return Registered(node.flatten_fn, again)


# --- `remat.register` ---

C = TypeVar("C", bound=type)


def register(
    cls: C,
    flatten: Callable[[Any], tuple[Iterable[Any], Any]] | None = None,
    unflatten: Callable[[Any, Iterable[Any]], Any] | None = None,
) -> C:
    """Make a class a pytree, for remat, torch.func and torch.compile.

    Most classes need not be registered. remat sees the tensors in dataclasses, in
    mappings, and in the attributes of any Python object. Register a class that holds
    its tensors elsewhere, such as one of a C extension. Register also a class that is
    an argument or a result of a function that `torch.func` itself transforms.

    Once registered, a class is rebuilt by `unflatten`, as an argument too.

    As in JAX, it is also a decorator, of a class with a method `tree_flatten` and a
    class method `tree_unflatten`.

    Args:
        cls: the class. An instance of a subclass is not registered with it.
        flatten: takes an instance. Returns what it holds that has tensors, in a list or
            tuple, and what else is needed to rebuild it. The latter holds no tensor.
        unflatten: takes what else is needed, and a list. Returns an instance. It must
            not check what is in the list: that need not be tensors.

    Returns:
        The class.

    Raises:
        TypeError: `cls` is not a class, or is one that cannot be registered; or a
            function cannot be called as above.
        ValueError: it is registered already, with other functions or with torch.

    Example:
        >>> import remat, torch
        >>> class Box:
        ...     def __init__(self, value):
        ...         self.value = value
        >>> remat.register(Box, lambda b: ([b.value], None), lambda _, v: Box(*v))
        <class 'remat._base.pytree.Box'>
        >>> sine = remat.remat(lambda box: Box(box.value.sin()))
        >>> out, pullback = torch.func.vjp(sine, Box(torch.zeros(2)))
        >>> pullback(Box(torch.ones(2)))[0].value
        tensor([1., 1.])
    """
    _refuse_class(cls)
    name = cls.__qualname__
    if flatten is None and unflatten is None:
        flatten = getattr(cls, "tree_flatten", None)
        unflatten = getattr(cls, "tree_unflatten", None)
    if not (callable(flatten) and callable(unflatten)):
        raise TypeError(_FUNCTIONS.format(name=name))
    _check_takes(flatten, 1, name, "flatten")
    _check_takes(unflatten, 2, name, "unflatten")
    known, how = REGISTERED.get(cls), Registered(flatten, unflatten)
    if known is not None and all(map(_is_same, known, how)):
        return cls
    if known is not None or cls in TORCH_NODES:
        where = "other functions" if known else "torch.utils._pytree, which remat asks"
        raise ValueError(_TWICE.format(name=name, where=where))
    _register_everywhere(cls, how)
    REGISTERED[cls] = how
    return cls


def _register_everywhere(
    cls: type, how: Registered, *, name: str | None = None, children: Sequence[str] = ()
) -> None:
    """Make a class a pytree node, here and for torch.func and torch.compile."""

    def flatten_node(instance: Any) -> tuple[list[Any], Any]:
        subtrees, context = how.flatten(instance)
        return [*subtrees], context

    def flatten_named(instance: Any) -> tuple[list[Any], Any, Sequence[str] | None]:
        return *flatten_node(instance), children or None

    def unflatten_torch(subtrees: Iterable[Any], context: Any) -> Any:
        return how.unflatten(context, subtrees)

    named: Any = {"name": name, "children": children}
    register_torch_node(cls, flatten_node, unflatten_torch, **named)
    if cls in _ADOPTED:
        _unregister(cls, namespace=_NAMESPACE)
        _ADOPTED.remove(cls)
    _register(cls, flatten_named, how.unflatten, namespace=_NAMESPACE)


def register_attributes(cls: type, name: str, children: Sequence[str]) -> None:
    """Make a class of ours a pytree node of these attributes.

    It is rebuilt past `__init__`: what a tree is mapped to need not be valid. `name` is
    for saved programs.
    """

    def flatten_node(instance: Any) -> tuple[list[Any], list[Any]]:
        return [getattr(instance, n) for n in children], []

    def unflatten_node(_: Any, subtrees: Iterable[Any]) -> Any:
        return _unflatten_attributes(cls, children, subtrees)

    how = Registered(flatten_node, unflatten_node)
    _register_everywhere(cls, how, name=name, children=children)


def _refuse_class(cls: Any) -> None:
    if not isinstance(cls, type):
        raise TypeError(_NO_CLASS.format(what=repr(cls)))
    why = "holds no tensors" if cls in INERT or cls is object else ""
    for base in (Tensor, nn.Module, dict, list, tuple):
        if issubclass(cls, base):
            why = f"is a {base.__name__}, whose tensors are found as they are"
    if why:
        raise TypeError(_REFUSED.format(name=cls.__qualname__, why=why))


def _check_takes(fn: Callable[..., Any], count: int, name: str, what: str) -> None:
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # a built-in one may have none
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        message = _TAKES.format(name=name, what=what, signature=signature)
        raise TypeError(message) from error


def _is_same(one: Any, other: Any) -> bool:
    """Say whether functions are one, or were made by the same code run again."""
    if one == other:
        return True
    code = getattr(one, "__code__", None)
    return code is not None and code == getattr(other, "__code__", None)


_HOW = (
    "remat.register({name}, lambda value: ([value.tensor, ...], None), "
    "lambda rest, tensors: {name}(*tensors))"
)
_NO_CLASS = "remat: register takes a class, and got {what}. Write `" + (
    _HOW.format(name="Class") + "`."
)
_REFUSED = "remat: {name} cannot be registered: it {why}."
_FUNCTIONS = (
    "remat: register({name}) needs two functions: write `" + _HOW + "`. Without them, "
    "the class must have a method tree_flatten() and a class method "
    "tree_unflatten(rest, tensors)."
)
_TAKES = (
    "remat: register({name}): {what}{signature} cannot be called as it should be. "
    "flatten takes an instance, and unflatten takes what else is needed and a list of "
    "tensors: `" + _HOW + "`."
)
_TWICE = (
    "remat: {name} is registered already with {where}. A class is registered once: "
    "define the class again first, or leave this out."
)
