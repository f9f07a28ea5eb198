"""Classes: of objects that changed theirs, and which a call may hold.

An object gets the class that it had at the call for a run. A class is gone with all its
instances if a function defined it; then nobody can make it again.

Invariant: a class that a call holds leads to nothing that a graph may be in. It is
code, and values that never change.
Rejected: to hold every class. One with a list in it may hold what the graph holds.
"""

import enum
import functools
import types
from collections import namedtuple
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from remat._base.code import class_without_us, is_library
from remat._base.errors import RecomputeError
from remat._base.types import ATOMS
from remat._reach.holders import GONE, HolderKind, contents_of, refers_to
from remat._reach.objects import (
    by_class,
    can_be_made_anew,
    dict_of,
    is_left_alone,
    is_stateless,
)
from remat._reach.stream_search import user_bases


# The class of an object.
CLASS_OF = HolderKind(
    lambda value: (type(value),),
    lambda value, _, kinds: object.__setattr__(value, "__class__", kinds[0]),
    fixed=1,
)


def is_of_another(value: Any, then: type | None) -> bool:
    """Say whether the class of an object was changed, other than by remat."""
    if then is None:
        raise RecomputeError(GONE.format(name="The class of an object"))
    return class_without_us(type(value)) is not class_without_us(then)


@by_class
def leads_nowhere(cls: type) -> bool:
    """Say whether nothing is in a class but code and values that never change."""
    skipped = MAKING | _TABLES if issubclass(cls, enum.Enum) else MAKING
    todo = [v for name, v in vars(cls).items() if name not in skipped]
    seen = {id(cls)}
    while todo:
        value = todo.pop()
        if id(value) in seen or type(value) in _PLAIN or _is_empty(value):
            continue
        seen.add(id(value))
        held = _parts_of(value)
        if held is None:
            return False
        todo += held
    return True


def _parts_of(value: Any) -> Iterable[Any] | None:
    """Return what code consists of; None of anything else."""
    kind = type(value)
    if kind is types.FunctionType:
        held = [*contents_of(value.__closure__ or ()), *vars(value).values()]
        held += (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        if is_library(value.__globals__):  # which has tables of its own, as a dataclass
            held = [part for part in held if _is_users(part)]
        return held
    if kind is functools.cached_property:
        return [value.func]
    if kind is functools.partialmethod:
        return [value.func, *value.args, *value.keywords.values()]
    if kind in _AROUND:
        return refers_to(value)
    if kind is types.BuiltinFunctionType:
        return [value.__self__]
    if kind is tuple:
        return value
    if issubclass(kind, enum.Enum):
        return vars(value).values()
    if isinstance(value, type) and not user_bases(kind):
        return [] if not user_bases(value) else vars(value).values()
    return None


def _is_empty(value: Any) -> bool:
    """Say whether a value is an object without attributes, as a sentinel."""
    kind = type(value)
    is_sentinel = is_left_alone(kind) and can_be_made_anew(kind) and not dict_of(value)
    return is_stateless(kind) or is_sentinel


def _is_users(value: Any) -> bool:
    kinds = types.FunctionType, type, nn.Module, Tensor
    return isinstance(value, kinds) or bool(user_bases(type(value)))


# Attributes of classes that say how these were made.
MAKING = {
    *("__abstractmethods__", "__annotations__", "__dataclass_fields__"),
    *("__dataclass_params__", "__dict__", "__doc__", "__match_args__", "__module__"),
    *("__slots__", "__weakref__", "_abc_impl", "_field_defaults"),
}
# Of enumerations, what leads to the members.
_TABLES = {
    *("_member_map_", "_member_names_", "_value2member_map_"),
    *("_unhashable_values_", "_hashable_values_"),
}
_PLAIN = ATOMS | {types.ModuleType, type(vars(namedtuple("_", "a"))["a"])}
_AROUND = {property, staticmethod, classmethod}
