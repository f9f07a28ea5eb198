"""`remat.register`: makes a user's class a pytree, for remat and for torch.

Invariant: a class is registered in both registries or in neither, and once.
Rejected: to register with remat alone. The `in_dims` of vmap, and the outputs of a
function that torch.func transforms, are pytrees of torch.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from remat._base.pytree import REGISTERED, Registered, register_functions
from remat._base.types import INERT
from remat._torch import TORCH_NODES


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
        <class 'remat._base.register.Box'>
        >>> sine = remat.remat(lambda box: Box(box.value.sin()))
        >>> out, pullback = torch.func.vjp(sine, Box(torch.zeros(2)))
        >>> pullback(Box(torch.ones(2)))[0].value
        tensor([1., 1.])
    """
    _refuse_class(cls)
    if flatten is None and unflatten is None:
        flatten, unflatten = _methods_of(cls)
    name = cls.__qualname__
    if not (callable(flatten) and callable(unflatten)):
        raise TypeError(_FUNCTIONS.format(name=name))
    _check_takes(flatten, 1, name, "flatten")
    _check_takes(unflatten, 2, name, "unflatten")
    known, how = REGISTERED.get(cls), Registered(flatten, unflatten)
    if known is not None and all(map(_is_same, known, how)):
        return cls
    if known is not None:
        raise ValueError(_TWICE.format(name=name))
    if cls in TORCH_NODES:
        raise ValueError(_BY_TORCH.format(name=name))
    register_functions(cls, how)
    return cls


def _refuse_class(cls: Any) -> None:
    if not isinstance(cls, type):
        raise TypeError(_NO_CLASS.format(what=repr(cls)))
    if cls in INERT or cls is object:
        raise TypeError(_REFUSED.format(name=cls.__qualname__, why="holds no tensors"))
    for base, why in _REFUSED_BASES.items():
        if issubclass(cls, base):
            raise TypeError(_REFUSED.format(name=cls.__qualname__, why=why))


_CONTAINER = "is a container that needs no registration"
_REFUSED_BASES: Mapping[type, str] = {
    Tensor: "is a tensor, which is an input itself",
    nn.Module: "is a module, whose parameters are found",
    **dict.fromkeys((dict, list, tuple), _CONTAINER),
}


def _methods_of(cls: Any) -> tuple[Any, Any]:
    """Return what a class itself says of how it is taken apart and rebuilt."""
    if not (hasattr(cls, "tree_flatten") and hasattr(cls, "tree_unflatten")):
        raise TypeError(_FUNCTIONS.format(name=cls.__qualname__))
    return cls.tree_flatten, cls.tree_unflatten


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
    "remat: {name} is registered already, with other functions. A class is registered "
    "once: define the class again first, or leave this out."
)
_BY_TORCH = (
    "remat: {name} is registered already with torch.utils._pytree, which remat asks as "
    "well. Leave this out."
)
