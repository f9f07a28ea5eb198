"""Modules that are imported where a name of theirs is first used.

A package names them (PEP 562), or a room below them does. `import remat` takes an
eighth of what it takes to import all that a call needs.

Invariant: a name is looked up once. From then on it is an attribute as any other.
Rejected: a class of module with properties. Tools that read modules would meet a class
that they do not know.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def later(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the `__getattr__` and the `__dir__` of a package.

    `names` are those of each module. Those of the package itself are modules in it.

    >>> get, listed = later("email", {"email": ["mime"], "email.message": ["Message"]})
    >>> get("Message"), get("mime").__name__
    (<class 'email.message.Message'>, 'email.mime')
    """
    namespace = vars(sys.modules[package])
    homes = {name: module for module in names for name in names[module]}

    def get(name: str) -> Any:
        if name == "__all__":  # `import *` asks for it, and else finds what is imported
            return [name for name in listed() if not name.startswith("_")]
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = homes[name]
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        namespace[name] = getattr(importlib.import_module(home), name)
        return namespace[name]

    def listed() -> list[str]:
        return sorted({*namespace, *homes})

    return get, listed


# All that rooms ask of rooms above them. The import contracts do not see these.
_ABOVE = {"ask_at_calls": "remat.rules._keep", "fit": "remat._fit.api"}


def from_above(name: str) -> Any:
    """Return what a room above defines.

    >>> from_above("fit").__module__
    'remat._fit.api'
    """
    return getattr(importlib.import_module(_ABOVE[name]), name)
