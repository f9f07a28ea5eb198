"""What objects hold, and instances like them.

Invariant: no property, setter or constructor of the user's runs. Rejected: `copy.copy`
for all of them, which runs `__reduce__` and `__setstate__`.
"""

import copy
import functools
import operator
from collections.abc import Mapping
from typing import Any


def attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds, in its `__dict__` and its slots."""
    held: dict[str, Any] = getattr(value, "__dict__", _NONE).copy()
    for name in _slots(type(value)):
        if hasattr(value, name):
            held[name] = getattr(value, name)
    return held


_NONE: dict[str, Any] = {}


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> frozenset[str]:
    names = set()
    for cls in kind.__mro__:
        slots = cls.__dict__.get("__slots__", ())
        names |= {
            _mangled(cls, slot)
            for slot in ((slots,) if isinstance(slots, str) else slots)
            if slot not in ("__dict__", "__weakref__")
        }
    return frozenset(names)


def _mangled(cls: type, name: str) -> str:
    private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if private else name


def set_attributes(value: Any, entries: Mapping[str, Any]) -> None:
    """Give an object what `attributes` returned, past its properties and setters."""
    slots = _slots(type(value))
    if not slots:
        value.__dict__.update(entries)
        return
    for name, entry in entries.items():
        if name in slots:
            object.__setattr__(value, name, entry)
        else:
            value.__dict__[name] = entry


def replica_of(value: Any) -> Any:
    """Return an instance of the class of `value`, without its attributes."""
    try:
        return object.__new__(type(value))
    except TypeError:  # a subclass of str, say, which holds more than attributes
        return copy.copy(value)


def changed(value: Any, before: dict[str, Any]) -> dict[str, Any]:
    """Return the attributes of `value` that are others than `before`."""
    now = attributes(value) if _slots(type(value)) else value.__dict__
    return differing(now, before)


def differing(now: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of `now` that are others than `before`."""
    same = len(now) == len(before)
    # Most often nothing changed, which this tells without a loop in Python.
    if same and all(map(operator.is_, now.values(), before.values())):
        same = [*now] == [*before]
        return _NONE if same else now
    return {k: v for k, v in now.items() if k not in before or before[k] is not v}
