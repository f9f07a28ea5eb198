"""Plans as files: a value as JSON has it, and a value of a class from that.

Invariant: what is read has the types that the class says, or an error names the file
and the key. Rejected: pickle. It runs what is in a file.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from remat._scope.following import OfBlock, Placed
from remat.policies import Policy


_VERSION = "remat.Plan"


def write(path: Any, plan: Any) -> None:
    """Write a plan to a file."""
    found = {_VERSION: 1, **_plain(plan)}
    del found["is_applied"]
    Path(path).write_text(json.dumps(found), encoding="utf-8")


def read(path: Any, kind: type) -> Any:
    """Read a plan from a file; an error says what is wrong with it."""
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        version = found.pop(_VERSION)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(_NO_PLAN.format(path=path)) from error
    if version != 1:
        raise ValueError(_OTHER_VERSION.format(path=path, version=version))
    try:
        return _made(kind, found | {"is_applied": False}, "")
    except _WrongError as error:
        raise ValueError(_WRONG.format(path=path, what=error)) from None


class _WrongError(Exception):
    """What is wrong with a value, and at which key."""


def _plain(value: Any) -> Any:
    if isinstance(value, OfBlock):
        value = value.placed
    if dataclasses.is_dataclass(value):
        each = (f.name for f in dataclasses.fields(value) if f.init)
        return {name: _plain(getattr(value, name)) for name in each}
    if isinstance(value, frozenset):
        return sorted(value)
    return [*map(_plain, value)] if isinstance(value, tuple) else value


def _made(kind: Any, value: Any, key: str) -> Any:
    """Return a value of a type, of which JSON has the parts."""
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # or None
        return None if value is None else _made(inside[0], value, key)
    if kind is Policy:
        return OfBlock(_made(Placed, value, key))
    if dataclasses.is_dataclass(kind):
        return _object(kind, value, key)
    if kind is Placed:
        inside = tuple(typing.get_type_hints(Placed).values())
        found = Placed(*_items(inside, value, key))
        lengths = {*map(len, found[1:5])}
        if len(lengths) > 1 or any(n >= len(found.names) for n in found.spares):
            raise _WrongError(f"{key} has lists of several lengths")
        return found
    if origin in (tuple, frozenset):
        return origin(_items(inside, value, key))
    if origin is typing.Literal and value not in inside:
        raise _WrongError(f"{key} is {value!r}, and should be one of {inside}")
    if (
        type(value) is kind
        or origin is typing.Literal
        or (kind is float and type(value) is int)
    ):
        return value
    shown = repr(value) if len(repr(value)) < _LONG else f"a {type(value).__name__}"
    raise _WrongError(f"{key} is {shown}, and should be of type {kind.__name__}")


def _object(kind: Any, value: Any, key: str) -> Any:
    hints = typing.get_type_hints(kind)
    names = {f.name for f in dataclasses.fields(kind) if f.init}
    inside = f"{key}." if key else ""
    if not isinstance(value, dict):
        raise _WrongError(f"{key} is no object with keys")
    if names ^ value.keys():
        name = min(names ^ value.keys())
        is_there = "is missing" if name in names else "is not known"
        raise _WrongError(f"{inside}{name} {is_there}")
    return kind(**{n: _made(hints[n], value[n], f"{inside}{n}") for n in names})


def _items(kinds: Any, value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise _WrongError(f"{key} is no list")
    if kinds[-1] in (kinds[0], Ellipsis) and len(kinds) < 3:
        kinds = kinds[:1] * len(value)
    if len(kinds) != len(value):
        raise _WrongError(f"{key} has {len(value)} items, and should have {len(kinds)}")
    each = zip(kinds, value, strict=True)
    return [_made(of, item, f"{key}[{k}]") for k, (of, item) in enumerate(each)]


_LONG = 40
_NO_PLAN = "remat: {path} holds no plan: plan.save(path) writes one."
_OTHER_VERSION = (
    "remat: {path} holds a plan of version {version!r}, and this is version 1. Make it "
    "again: remat.fit(...)."
)
_WRONG = (
    "remat: {path} holds a plan that was changed or damaged: {what}. Make it again: "
    "remat.fit(...), and plan.save(path)."
)
