"""The arguments of a call: taken apart into leaves, and made up of leaves again.

Invariant: structure holds no tensor. Arguments that are all positional tensors have the
treedef `None`, and the layout of others is kept for the next call: flattening a
dictionary of twelve parameters costs as much as six operations on them.
Rejected: a signature of the arguments by hand. Nested containers are optree's work.
"""

import inspect
import operator
import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from remat import _tree
from remat._code import CONSTANT
from remat._errors import CaptureError
from remat._types import TENSORS, Fn, Leaf


_LEAVES = TENSORS | CONSTANT


def flatten_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Leaf], _tree.Treedef | None]:
    """Return the leaves of a call's arguments and what rebuilds them."""
    if not kwargs:
        for value in args:
            if type(value) is not Tensor:
                break
        else:
            return list(args), None
    return _tree.flatten((args, kwargs))


def apply(fn: Fn, treedef: _tree.Treedef | None, leaves: Sequence[Leaf]) -> Any:
    """Call `fn` on the arguments that `leaves` make up.

    Raises:
        CaptureError: it changed a container among them.
    """
    if treedef is None:
        return fn(*leaves)
    args, kwargs = _tree.unflatten(treedef, leaves)
    result = fn(*args, **kwargs)
    try:
        now = _tree.flatten_up_to(treedef, (args, kwargs))
    except ValueError:
        raise CaptureError(_CHANGED_ARGUMENT) from None
    if not all(map(operator.is_, now, leaves)):
        raise CaptureError(_CHANGED_ARGUMENT)
    return result


class Layout:
    """How tensors and constants alone make up arguments.

    Attributes:
        treedef: what rebuilds the arguments.
        key: what equals for layouts that are built alike.
        are_tensors: which leaves are tensors.
        where: their positions.
        constants: the positions of the others.
        is_kept: whether it is compared with the next arguments: they hold no container
            in another, and the keys are names.
    """

    __slots__ = (
        "_keys",
        "_names",
        "_types",
        "are_tensors",
        "constants",
        "is_kept",
        "key",
        "treedef",
        "where",
    )

    def __init__(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Leaf],
        treedef: _tree.Treedef,
    ) -> None:
        self._names, self._types = [*kwargs], [*map(type, leaves)]
        values = *args, *kwargs.values()
        self.is_kept = all(map(_is_flat, values))
        self._keys = [*map(_keys, values)]
        self.are_tensors = [kind in TENSORS for kind in self._types]
        self.where = [k for k, is_tensor in enumerate(self.are_tensors) if is_tensor]
        self.constants = [k for k, is_one in enumerate(self.are_tensors) if not is_one]
        self.treedef = treedef
        # By its hash: a treedef holds the keys of dictionaries, which may be anything.
        self.key = hash(treedef)

    def leaves_of(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Leaf] | None:
        """Return the leaves of arguments, if they are surely built like this."""
        values = args
        if kwargs or self._names:
            values = *args, *kwargs.values()
            if [*kwargs] != self._names:
                return None
        # A treedef does not tell dictionaries of another order apart.
        if [*map(_keys, values)] != self._keys:
            return None
        try:
            leaves = _tree.flatten_up_to(self.treedef, (args, kwargs))
        except ValueError:
            return None
        # So none is a container, either.
        return leaves if [*map(type, leaves)] == self._types else None


def take_apart(
    args: tuple[Any, ...], kwargs: dict[str, Any], layout: Layout | None
) -> tuple[list[Leaf], _tree.Treedef | None, Layout | None]:
    """Return the leaves, the treedef and the layout of arguments.

    The last is None where a leaf is of another kind, and of positional tensors, where
    there is no use for one.
    """
    if layout is not None:
        known = layout.leaves_of(args, kwargs)
        if known is not None:
            return known, layout.treedef, layout
    leaves, treedef = flatten_arguments(args, kwargs)
    if treedef is None or not _LEAVES.issuperset(map(type, leaves)):
        return leaves, treedef, None
    return leaves, treedef, Layout(args, kwargs, leaves, treedef)


def _keys(value: Any) -> tuple[str, ...] | None:
    return tuple(value) if type(value) is dict else None


def _is_flat(value: Any) -> bool:
    """Say whether a value holds no container in another, and only names as keys."""
    if type(value) is dict:
        names = {str}.issuperset(map(type, value))
        return names and _LEAVES.issuperset(map(type, value.values()))
    parts = value if type(value) in (list, tuple) else (value,)
    return _LEAVES.issuperset(map(type, parts))


def argument_name(fn: Fn, treedef: _tree.Treedef | None, position: int) -> str:
    """Write the leaf at `position` of the arguments as `fn`'s author would.

    Example:
        >>> treedef = flatten_arguments((1,), {"params": {"w": [2]}})[1]
        >>> argument_name(lambda x, params: x, treedef, 1)
        "params['w'][0]"
    """
    path = f"[0][{position}]" if treedef is None else _tree.paths(treedef)[position]
    which, first, *rest = re.findall(r"\[[^\]]*\]|\.\w+", path)
    if which == "[1]":
        return first[2:-2] + "".join(rest)
    return _parameter(fn, int(first[1:-1])) + "".join(rest)


def _parameter(fn: Fn, position: int) -> str:
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        parameters = ()
    for k, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{position - k}]"
        if k == position:
            return parameter.name
    return f"args[{position}]"


_CHANGED_ARGUMENT = (
    "remat: the function changed a container that it was passed, which a recomputation "
    "would do again. Return the new value instead."
)
