"""Names of a package whose modules are imported where a name is first used (PEP 562).

To import all rooms takes half as long again as to import what every call needs.

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
