"""Which call of which module runs: the places of a step's operations.

A place is the class of the outermost module that is called and which call of one that
is, the path of the module that is called in it, and which call of that. It is the same
for a copy of a model, and in a wrapper, so a record and a step share places.

Invariant: hooks on all modules are there only while somebody asks, and do nothing in
other threads.
Rejected: hooks on each module. They stay in a model, are copied and pickled with it,
and compiled code is made again without them.
Rejected: to look at the stack. Two calls of one module look alike.
"""

import threading
import weakref
from collections import Counter
from collections.abc import Container
from typing import Any, TypeAlias

import torch
from torch import nn

from remat._torch import hook_all_modules, unhook_all_modules


# The outermost class, which call; the path, which call.
CallPlace: TypeAlias = tuple[str, int, str, int]

OUTSIDE: CallPlace = ("", 0, "", 0)

# Their calls are those of what they wrap.
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "OptimizedModule"}


class ModuleCall:
    """A call of a module that runs."""

    __slots__ = ("cursor", "module", "place")

    def __init__(self, place: CallPlace, module: nn.Module | None) -> None:
        self.place, self.module = place, module
        self.cursor: Any = None  # of who follows a plan


class Calls:
    """The calls that run in one thread.

    `roots` are the classes of modules that a place begins at, and calls of others are
    passed over. Without them that is any module, but for wrappers.
    """

    def __init__(self, roots: Container[str] | None = None) -> None:
        self._roots = roots
        self.current = ModuleCall(OUTSIDE, None)
        self.ended: list[ModuleCall] = []  # since who asks has cleared it
        self._stack = [self.current]
        self._turns = Counter[str]()  # calls of outermost modules
        self._counts = Counter[str]()  # calls within the outermost that runs
        self._root, self._turn = "", 0
        self._names = _ModulePaths(None)

    def enter(self, module: nn.Module) -> None:
        """Be told that a call begins."""
        if len(self._stack) == 1 and not self._begin(module):
            return
        path = self._names.of(module, self.current.place[2])
        number = self._counts[path]
        self._counts[path] = number + 1
        self.current = ModuleCall((self._root, self._turn, path, number), module)
        self._stack.append(self.current)

    def _begin(self, module: nn.Module) -> bool:
        """Begin the call of an outermost module; say whether it is one."""
        root = self._root_of(type(module))
        if root is None:
            return False
        self._root, self._turn = root, self._turns[root]
        self._turns[root] += 1
        self._counts.clear()
        self._names = _names_in(module)
        return True

    def _root_of(self, kind: type) -> str | None:
        if self._roots is None:
            return None if kind.__name__ in _WRAPPERS else kind.__name__
        names = (each.__name__ for each in kind.__mro__)
        return next((name for name in names if name in self._roots), None)

    @property
    def running(self) -> list[ModuleCall]:
        """The calls that have not ended, the innermost last."""
        return [*self._stack]

    def leave(self, module: nn.Module) -> None:
        """Be told that a call ends."""
        stack, ended = self._stack, self.ended
        if (
            self.current.module is not module
        ):  # after an error of a hook, or passed over
            if all(call.module is not module for call in stack):
                return
            while stack[-1].module is not module:
                ended.append(stack.pop())
        ended.append(stack.pop())
        self.current = stack[-1]

    def __enter__(self) -> "Calls":
        _TRACKERS.calls.append(self)
        _HOOKS.need()
        return self

    def __exit__(self, *_: object) -> None:
        _HOOKS.need_no_more()
        _TRACKERS.calls.remove(self)


# --- Paths ---


class _ModulePaths:
    """The paths of the modules in one."""

    def __init__(self, root: nn.Module | None) -> None:
        self.root = None if root is None else weakref.ref(root)
        self._paths: dict[int, str] = {}
        self._unnamed: set[type] = set()  # the classes of modules that have none

    def of(self, module: nn.Module, around: str) -> str:
        """Return the path of a module that is called in the module of another path."""
        path = self._paths.get(id(module))
        if path is None and type(module) not in self._unnamed:
            root = None if self.root is None else self.root()
            found = () if root is None else root.named_modules()
            self._paths = {id(each): name for name, each in found}
            path = self._paths.get(id(module))
        if path is None:  # made in the forward, as `layers[:3]` is
            self._unnamed.add(type(module))
            path = f"{around}/{type(module).__name__}"
        return path


_NAMES: dict[int, _ModulePaths] = {}


def _names_in(root: nn.Module) -> _ModulePaths:
    key = id(root)
    names = _NAMES.get(key)
    if names is None or names.root is None or names.root() is not root:
        _NAMES[key] = names = _ModulePaths(root)
        weakref.finalize(root, _NAMES.pop, key, None)
    return names


# --- Hooks ---


class _Trackers(threading.local):
    """Who asks in a thread."""

    def __init__(self) -> None:
        self.calls: list[Calls] = []


_TRACKERS = _Trackers()


def _entered(module: nn.Module, _: Any) -> None:
    if not torch.compiler.is_compiling():
        for calls in _TRACKERS.calls:
            calls.enter(module)


def _left(module: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():
        for calls in _TRACKERS.calls:
            calls.leave(module)


class _HooksOnAll:
    """The hooks on all modules, while somebody needs them."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), 0

    def need(self) -> None:
        with self._lock:
            self._count += 1
            if self._count == 1:
                hook_all_modules(_entered, _left)

    def need_no_more(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                unhook_all_modules()


_HOOKS = _HooksOnAll()
