"""Which line of the user's code is running, as text, and where modules are in one.

Invariant: it is the innermost line that is neither torch's nor remat's, `model.py:12,
in block`. A notebook's file reads `Cell In[9]`. All layers of a model in a package run
the same line, so a line of a package says which module runs it:
`modeling.py:310, in forward (layers.3.mlp)`. A path is where the module is now.
Rejected: hooks on modules to know that path. Every call would pay for them, and only
records, reports and errors ask.
"""

import functools
import operator
import sys
import types
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules import module

from remat._base.code import TORCH, is_library, is_standard
from remat._base.errors import OURS


def user_line() -> str:
    """Return the innermost line of the stack that is neither torch's nor remat's."""
    frame = user_frame()
    if frame is None:
        return "an unknown line"
    code = frame.f_code
    line = f"{shown(code.co_filename)}:{frame.f_lineno}, in {code.co_name}"
    path = _path_of(sys._getframe(1)) if is_library(frame.f_globals) else ""
    return f"{line} ({path})" if path else line


def user_frame() -> types.FrameType | None:
    """Return the innermost frame that runs neither torch's code nor remat's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _is_passed(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def short(line: str, *, with_module: bool = True) -> str:
    """Return a line without its folder and function, and perhaps without its module.

    Example:
        >>> short("/home/me/model.py:12, in block")
        'model.py:12'
        >>> short("/lib/modeling.py:310, in forward (layers.3.mlp)")
        'modeling.py:310 (layers.3.mlp)'
    """
    where, _, function = line.partition(", in ")
    name = where.replace("\\", "/").rsplit("/", 1)[-1]
    _, opening, path = function.partition(" (")
    return name + opening + path if with_module else name


def shown(file: str) -> str:
    """Return a file's name as a reader knows it: a notebook's cell by its number."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return file
    shell = getattr(ipython, "get_ipython", lambda: None)()
    name_of = getattr(getattr(shell, "compile", None), "format_code_name", None)
    cell = None if name_of is None else name_of(file)
    return file if cell is None else " ".join(cell)


# Not that of a notebook or a prompt.
_GENERATED = ("<string>", "<frozen", "<eval_with_key>")


@functools.lru_cache(maxsize=4096)  # each operation of a block asks it ten times
def _is_passed(file: str) -> bool:
    """Say whether a file's lines are torch's, remat's, or of no file at all."""
    return file.startswith((TORCH, OURS, *_GENERATED)) or is_standard(file)


# --- The module that runs a line ---


def _path_of(first: types.FrameType) -> str:
    """Return the path of the innermost module that is called, in the outermost one."""
    inner: nn.Module | None = None
    outer: nn.Module | None = None
    frame: types.FrameType | None = first
    while frame is not None:
        if frame.f_code.co_filename == module.__file__:  # that of `Module.__call__`
            found = frame.f_locals.get("self")
            if isinstance(found, nn.Module):
                inner, outer = found if inner is None else inner, found
        frame = frame.f_back
    return "" if inner is None or outer is None else _name_in(outer, inner)


def _name_in(outer: nn.Module, inner: nn.Module) -> str:
    """Return the name of a module in another one, "" if it is not in there."""
    paths = _NAMES.get(id(outer)) or names_in(outer)  # a record asks often
    if paths.known(inner) is None:
        paths.look()
    return paths.known(inner) or ""


# --- The paths of the modules in one, and the names of their classes ---


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
    return f"{kind.__module__}.{kind.__qualname__}"


class ModulePaths:
    """The paths of the modules in one, as they were when it was looked at."""

    def __init__(self, root: nn.Module | None) -> None:
        self.root = None if root is None else weakref.ref(root)
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self.registered: Any = None  # names and identities in each
        self._all: Sequence[Where] | None = None
        self._unnamed: set[type] = set()  # the classes of modules that have none

    def look(self) -> None:
        """Find the paths that modules have now."""
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
        path = self.known(module)
        if path is None and type(module) not in self._unnamed:
            self.look()
            path = self.known(module)
        if path is None:  # made in the forward, as `layers[:3]` is
            self._unnamed.add(type(module))
            path = f"{around}/{type(module).__name__}"
        return path

    def known(self, module: nn.Module) -> str | None:
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
