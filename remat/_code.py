"""Which global names a function's code refers to.

Invariant: answers are kept by identity of the code and of the globals, and both are held
so that no identity is used again. Rejected: hashing code objects, which reads all of them.
"""

import dis
import sysconfig
import types
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class GlobalNames:
    """Global names that code loads, and that it stores or deletes."""

    loaded: tuple[str, ...]
    stored: tuple[str, ...]


_NAMES: dict[int, tuple[types.CodeType, GlobalNames]] = {}


def global_names(code: types.CodeType) -> GlobalNames:
    """Return the global names that `code`, or code nested in it, refers to."""
    known = _NAMES.get(id(code))
    if known is None:
        known = _NAMES[id(code)] = (code, _find_names(code))
    return known[1]


def _find_names(code: types.CodeType) -> GlobalNames:
    found: dict[str, dict[str, None]] = {"LOAD": {}, "STORE": {}, "DELETE": {}}
    todo = [code]
    while todo:
        here = todo.pop()
        for step in dis.get_instructions(here):
            action, _, where = step.opname.partition("_")
            if where in ("GLOBAL", "NAME") and action in found:
                found[action][str(step.argval)] = None
        todo += [c for c in here.co_consts if isinstance(c, types.CodeType)]
    return GlobalNames(tuple(found["LOAD"]), (*found["STORE"], *found["DELETE"]))


_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_LIBRARIES = tuple(sysconfig.get_paths()[k] for k in _PATHS)
_INSTALLED: dict[int, tuple[dict[str, Any], bool]] = {}


def is_installed(fn: types.FunctionType) -> bool:
    """Say whether `fn` comes from the standard library or an installed package."""
    scope = fn.__globals__
    known = _INSTALLED.get(id(scope))
    if known is None:
        file = str(scope.get("__file__", ""))
        known = _INSTALLED[id(scope)] = (scope, file.startswith(_LIBRARIES))
    return known[1]
