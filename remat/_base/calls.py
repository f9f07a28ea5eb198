"""Which call of which module runs: the places of operations.

A place is the class of the outermost module that is called and which call of one that
is, the path of the module that is called in it, and which call of that. It is the same
for a copy of a model, and in a wrapper, so a record and a step share places. What is
rematerialized has a root (`root_of`), and an operation in it the path from there.

Invariant: hooks on all modules are there only while somebody asks, and do nothing in
other threads.
Rejected: hooks on each module. They stay in a model, are copied and pickled with it,
and compiled code is made again without them.
Rejected: to look at the stack. Two calls of one module look alike.
"""

import functools
import inspect
import re
import sys
import threading
import types
import weakref
from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain, count
from typing import Any, TypeAlias

import torch
from torch import nn

from remat._base.code import VIEWED, content_of
from remat._base.context import here
from remat._base.package import from_above
from remat._base.source import ModulePaths, Where, class_names, full_name, names_in
from remat._base.types import Fn
from remat._torch.nodes import modules_of_node
from remat._torch.process import hook_all_modules, unhook_all_modules


# The outermost class, which call; the path, which call.
CallPlace: TypeAlias = tuple[str, int, str, int]

OUTSIDE: CallPlace = ("", 0, "", 0)

# Their calls are those of what they wrap.
_WRAPPERS = {"DistributedDataParallel", "DataParallel", "OptimizedModule"}


class ModuleCall:
    __slots__ = ("cursor", "module", "place", "where")

    def __init__(self, place: CallPlace, module: nn.Module | None) -> None:
        self.place, self.module = place, module
        self.where: Where | None = None  # once a policy asks
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
        self._turns: Counter[str] = Counter()  # calls of outermost modules
        self._counts: Counter[str] = Counter()  # calls within the outermost that runs
        self._root, self._turn = "", 0
        self._names = ModulePaths(None)
        self._copies: dict[int, str] = {}  # the paths of modules that stand for others
        self.has_begun = False  # whether what is rematerialized runs

    def enter(self, module: nn.Module) -> None:
        if len(self._stack) == 1 and not self._begin(module):
            return
        path = self._path_of(module)
        number = self._counts[path]
        self._counts[path] = number + 1
        self.current = ModuleCall((self._root, self._turn, path, number), module)
        self._stack.append(self.current)

    def _path_of(self, module: nn.Module) -> str:
        path = self._copies.get(id(module))
        return self._names.of(module, self.current.place[2]) if path is None else path

    def where_of(self, called: Any) -> tuple[Where, Sequence[Where]]:
        """Return where a call of a module or a Function would be, and all modules."""
        path, around = self.where
        if not isinstance(called, nn.Module):
            owner = next(each for each in called.__mro__ if "forward" in vars(each))
            return (path, (full_name(owner), *around)), ()
        names = self._names if len(self._stack) > 1 else names_in(called)
        if self.current.module is not called:
            path = self._path_of(called) if len(self._stack) > 1 else ""
            around = (*class_names(type(called)), *around)
        return (path.lstrip("/"), tuple(dict.fromkeys(around))), names.all()

    @property
    def all(self) -> Sequence[Where]:
        """Where calls of each module of what is rematerialized are."""
        return self._names.all()

    @contextmanager
    def at(self, where: Where) -> Iterator[None]:
        """Let operations of the body be at a place."""
        stack, root = self._stack, self.current.place[:2]
        self.current = call = ModuleCall((*root, where[0], 0), None)
        call.where = where
        stack.append(call)
        try:
            yield
        finally:
            del stack[stack.index(call) :]
            self.current = stack[-1]

    def _begin(self, module: nn.Module) -> bool:
        """Begin the call of an outermost module; say whether it is one."""
        root = self._root_of(type(module))
        if root is None:
            return False
        self._root, self._turn = root, self._turns[root]
        self._turns[root] += 1
        self._counts.clear()
        self._names = names_in(module)
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
        stack, ended = self._stack, self.ended
        if self.current.module is not module:  # a hook raised, or it was passed over
            if all(call.module is not module for call in stack):
                return
            while stack[-1].module is not module:
                ended.append(stack.pop())
        ended.append(stack.pop())
        self.current = stack[-1]

    @contextmanager
    def knowing(self, root: nn.Module) -> Iterator[None]:
        """Know a module that runs, and those in it, if it is a copy of the call's."""
        before, path = self._copies, self.current.place[2]
        if len(self._stack) > 1 and not self._names.has(root):
            inner = root.named_modules(prefix=path)
            self._copies = before | {id(module): name for name, module in inner}
        try:
            yield
        finally:
            self._copies = before

    @property
    def where(self) -> Where:
        """Which module runs: its path, and the classes of it and of those around."""
        call = self.current
        self.ended.clear()  # nobody asks for those here
        if call.where is None:
            modules = (each.module for each in reversed(self._stack))
            names = (class_names(type(m)) for m in modules if m is not None)
            path = call.place[2].lstrip("/")
            call.where = path, tuple(dict.fromkeys(chain.from_iterable(names)))
        return call.where

    def __enter__(self) -> "Calls":
        _TRACKERS.calls.append(self)
        with _LOCK:
            _ENTERED.append(self)
            if len(_ENTERED) == 1:
                hook_all_modules(_entered, _left)
        return self

    def __exit__(self, *_: object) -> None:
        with _LOCK:
            _ENTERED.remove(self)
            if not _ENTERED:
                unhook_all_modules()
        _TRACKERS.calls.remove(self)


# --- What is rematerialized ---


def in_place(fn: Fn, policy: Any) -> Fn:
    """Return a function whose run tells which module runs, if its policy asks.

    It tells `here().calls`.
    """
    if policy is None or not policy.asks_modules:
        return fn

    if policy.keeps_calls:
        from_above("ask_at_calls")()

    def run(*args: Any, **kwargs: Any) -> Any:
        context = here()
        before = calls = context.calls
        if calls is None or calls.has_begun:  # else it is of a record of this run
            calls = Calls()
        calls.has_begun, context.calls = True, calls
        # Under torch.func the function, and its module, may be others in each run.
        root = root_of(fn, args)
        try:
            with ExitStack() as stack:
                if root is not None:
                    for around in _TRACKERS.calls:
                        stack.enter_context(around.knowing(root))
                stack.enter_context(calls)
                if root is not None:
                    calls.enter(root)
                return fn(*args, **kwargs)
        finally:
            context.calls = before

    vars(run)["__wrapped__"] = fn  # names its arguments
    return run


@contextmanager
def at_call(called: Any) -> Iterator[None]:
    """Let operations of the body be at a call of a module or a Function."""
    with ExitStack() as stack:
        for calls in _TRACKERS.calls:
            if calls.has_begun:
                stack.enter_context(calls.at(calls.where_of(called)[0]))
        yield


def in_reach(fn: Fn, reach: Any, policy: Any) -> Fn:
    """Return the function of a call likewise, and let its recomputes tell the same."""
    if policy is None or reach.compiled:
        return fn
    if policy.keeps_calls:
        reach.around = functools.partial(in_place, policy=policy)
    return in_place(fn, policy)


def root_of(fn: Any, args: tuple[Any, ...] = ()) -> nn.Module | None:
    """Return the module that paths begin at: that of a method, or one that is passed.

    Of another function it is the module that it calls `self`, or the only one that it
    refers to. Without any, each module that it calls is a beginning.
    """
    while isinstance(fn, functools.partial) and not hasattr(fn, "__self__"):
        fn, args = fn.func, (*fn.args, *args)
    for each in (fn, getattr(fn, "__self__", None), *args[:1]):
        if isinstance(each, nn.Module):
            return each
    if not isinstance(fn, types.FunctionType):
        return None
    cells = map(content_of, fn.__closure__ or ())
    held = dict(zip(fn.__code__.co_freevars, cells, strict=True))
    modules = {k: m for k, m in held.items() if isinstance(m, nn.Module)}
    only = {*map(id, modules.values())}
    own = modules.get("self")
    return next(iter(modules.values())) if own is None and len(only) == 1 else own


def module_names(root: nn.Module | None) -> tuple[str, ...]:
    """Return the paths in a root, which tell modules of one class apart."""
    return () if root is None else tuple(name for name, _ in root.named_modules())


def function_names() -> Iterator[str]:
    """Yield the full names of the custom Functions whose forwards run."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _RUNS:
        if frame.f_code.co_name == "forward" and (name := _function_of(frame.f_code)):
            yield name
        frame = frame.f_back


def _function_of(code: types.CodeType) -> str:
    """Return the full name of the Function whose forward this is; "" if of none."""
    name = _FORWARDS.get(code)
    if name is None:
        kinds = [torch.autograd.Function]
        for kind in kinds:  # which grows
            kinds += kind.__subclasses__()
            forward = inspect.unwrap(getattr(kind, "forward"))  # noqa: B009
            if "forward" in vars(kind) and hasattr(forward, "__code__"):
                _FORWARDS[forward.__code__] = full_name(kind)
        name = _FORWARDS.setdefault(code, "")
    return name


_FORWARDS = weakref.WeakKeyDictionary[types.CodeType, str]()
# What ends the part of the stack that is in what is rematerialized.
_RUNS = [code for code in in_place.__code__.co_consts if hasattr(code, "co_name")]


NOWHERE = "", (), 0


class Places:
    """Tells of each operation of a run where it is, and how many like it there were.

    `calls` are of modules, if somebody asks for them. Without `is_asked`, nobody asks
    for anything.
    """

    def __init__(self, asks: bool, calls: Any = None, *, is_asked: bool = True) -> None:
        self.calls: Any = (calls or Calls()) if asks else None
        self._is_asked = is_asked
        # Counts the operations of each operator.
        self._counts: dict[Any, Any] = defaultdict(count)

    def begin(self) -> None:
        """Let the run, which follows, tell which module runs."""
        context = here()
        self._around = context.calls
        context.calls = self.calls or context.calls

    def end(self) -> None:
        here().calls = self._around

    def of(self, func: Any) -> tuple[str, tuple[str, ...], int]:
        """Return the last fields of an `Op`: its module, the classes, which it is."""
        if not self._is_asked:
            return NOWHERE
        packet = getattr(func, "overloadpacket", func)
        nth = next(self._counts[packet])
        if self.calls is None:
            return "", (), nth
        module, classes = self.calls.where
        return module, (*function_names(), *classes), nth


class CallsOfNodes:
    """The calls of modules that nodes of Dynamo's graph tell, in one of its bodies.

    What is rematerialized is the module around, or the one in which all nodes are if
    it is called itself: its name is that of the call.
    """

    has_begun = True

    def __init__(self, graph: Any, label: str) -> None:
        around = modules_of_node()
        stacks = [s for n in graph.nodes if (s := modules_of_node(n)) is not None]
        self._depth = depth = len(around or ())
        nexts = {s[depth][0] if len(s) > depth else "" for s in stacks}
        if len(nexts) == 1 and "" not in nexts and not label.startswith("<lambda>"):
            self._depth = depth + 1
            around = stacks[0][: depth + 1]
        self._root = _path_in_graph(around[-1][0]) if around else ""

    @property
    def where(self) -> Where:
        """Which module runs: its path, and the classes of it and of those around."""
        stack = modules_of_node() or []
        inner = stack[max(0, self._depth - 1) :]
        names = (class_names(kind) for _, kind in reversed(inner))
        path = ""
        if len(stack) > self._depth:
            whole = _path_in_graph(stack[-1][0])
            path = whole.removeprefix(self._root).lstrip(".")
        return path, tuple(dict.fromkeys(chain.from_iterable(names)))


def _path_in_graph(path: str) -> str:
    """Return the path of a module without the name of the root in Dynamo."""
    return _ROOT.sub("", path).replace(f"{VIEWED}.", "")


_ROOT = re.compile(r"^[LG]\['[^']*'\]\.?")


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


_LOCK = threading.Lock()
_ENTERED: list[Calls] = []  # of all threads: hooks are there while there is one
