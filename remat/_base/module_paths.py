"""The paths of the modules in one, and the names of their classes.

Invariant: a path is where the module is now. A module is held weakly.
Rejected: to look at all modules for each call. What is registered is compared.
"""

import operator
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

from torch import nn


# The path of a module, and the full names of classes, from the innermost out.
Where: TypeAlias = tuple[str, tuple[str, ...]]


def class_names(kind: type) -> Iterator[str]:
    """Yield the full name of a class of modules, and of those it is derived from."""
    for each in kind.__mro__:
        if each is nn.Module:
            return
        if each.__qualname__ != "RematModule":
            yield full_name(each)


def full_name(kind: type) -> str:
    """Return the name of a class, with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


class ModulePaths:
    """The paths of the modules in one, as they were when it was looked at."""

    def __init__(self, root: nn.Module | None) -> None:
        self.root = None if root is None else weakref.ref(root)
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self.registered: Any = None  # names and identities in each
        self._all: Sequence[Where] | None = None
        self._unnamed: set[type] = set()  # the classes of modules that have none

    def _look(self) -> None:
        root = None if self.root is None else self.root()
        found = () if root is None else root.named_modules()
        self._paths = {id(each): (weakref.ref(each), name) for name, each in found}
        self.registered, self._all = self.registered_now(), None

    def registered_now(self) -> Any:
        """Return the names and identities of the modules in each."""
        modules = [ref() for ref, _ in self._paths.values()]
        if None in modules:
            return None
        tables = map(operator.attrgetter("_modules"), modules)
        held = [table for table in tables if isinstance(table, dict)]
        return [*chain.from_iterable(held)], [
            *map(id, chain.from_iterable(map(dict.values, held)))
        ]

    def all(self) -> Sequence[Where]:
        """Return where calls of each module are, from the outermost in."""
        if self._all is None:
            found: dict[str, Where] = {}
            for ref, path in self._paths.values():
                module, around = ref(), found.get(path.rpartition(".")[0], ("", ()))[1]
                own = () if module is None else (*class_names(type(module)),)
                found[path] = path, tuple(dict.fromkeys((*own, *around)))
            self._all = [*found.values()]
        return self._all

    def has(self, module: nn.Module) -> bool:
        """Say whether a module, or one whose view it is, is in the root."""
        shown = vars(module)
        root = None if self.root is None else self.root()
        return root is not None and any(vars(m) is shown for m in root.modules())

    def of(self, module: nn.Module, around: str) -> str:
        """Return the path of a module that is called in the module of another path."""
        path = self._known(module)
        if path is None and type(module) not in self._unnamed:
            self._look()
            path = self._known(module)
        if path is None:  # made in the forward, as `layers[:3]` is
            self._unnamed.add(type(module))
            path = f"{around}/{type(module).__name__}"
        return path

    def _known(self, module: nn.Module) -> str | None:
        ref, path = self._paths.get(id(module), _NOT_KNOWN)
        return path if ref() is module else None


_NOT_KNOWN: Any = (lambda: None), None
_NAMES: dict[int, ModulePaths] = {}


def names_in(root: nn.Module) -> ModulePaths:
    key = id(root)
    names = _NAMES.get(key)
    if names is None or names.root is None or names.root() is not root:
        weakref.finalize(root, _NAMES.pop, key, None)
        names = None
    if names is None or names.registered != names.registered_now():
        _NAMES[key] = names = ModulePaths(root)
    return names
