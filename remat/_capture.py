"""Lift the tensors that a function refers to without being passed them.

`Search` walks a function's closure, defaults, globals, bound arguments and modules, and the opaque objects among its arguments.
What it finds become inputs of the call; `build` rebuilds what was searched around other tensors, for one run.

Invariant: nothing the user owns changes, save that `pass_on` hands over what the function itself assigned in its first run. A
function is rebuilt with new cells, a module or object as a shallow replica, so no other thread and no plain call ever sees our tensors.
Rejected: swapping the parameters of the user's own modules for the duration. Code in another thread then reads a stand-in for
`module.weight`, lock or no lock. Differentiating the user's own tensors would run their gradient hooks twice.
"""

import dis
import enum
import functools
import itertools
import sys
import sysconfig
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from remat import _tree
from remat._errors import CaptureError
from remat._types import Fn


# --- What a search finds -------------------------------------------------------------------------------------------


class Found:
    """The tensors and generators that one call refers to.

    Attributes:
        tensors: each once, those passed first.
        origins: the path of each.
        generators: each `torch.Generator`, once.
        buffers: the tensors that `fn` may update in place, as it would without remat: index and whether it is a
            registered buffer.
    """

    __slots__ = ("buffers", "generators", "origins", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.origins: list[Path] = []
        self.generators: list[torch.Generator] = []
        self.buffers: dict[int, bool] = {}


# The position of an argument, `None` for the function itself, or a chain of `(parent, text)` down from one of them.
Path: TypeAlias = tuple[Any, str] | int | None


class _Node:
    """How to rebuild one value around other tensors."""

    __slots__ = ()

    def build(self, run: "_Run") -> Any:
        raise NotImplementedError


class _TensorNode(_Node):
    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index

    def build(self, run: "_Run") -> Any:
        return run.tensors[self.index]


class _GeneratorNode(_TensorNode):
    __slots__ = ()

    def build(self, run: "_Run") -> Any:
        return run.generators[self.index]


class _Composite(_Node):
    """A value that may refer to itself: built once a run."""

    __slots__ = ("children", "live", "value")

    def __init__(self, value: Any) -> None:
        self.value = value
        # Until the search of it has ended, it may turn out to hold a tensor.
        self.live = True
        self.children: dict[Any, _Node] = {}

    def build(self, run: "_Run") -> Any:
        built = run.built.get(id(self))
        if built is None:
            built = self._build(run) if self.live else self.value
            run.built[id(self)] = built
        return built

    def _build(self, run: "_Run") -> Any:
        raise NotImplementedError

    def settle(self) -> _Node | None:
        """End the search of this value."""
        self.live = any(
            not isinstance(child, _Composite) or child.live
            for child in self.children.values()
        )
        return self if self.live else None


class _TreeNode(_Composite):
    __slots__ = ("leaves", "treedef")

    def _build(self, run: "_Run") -> Any:
        leaves = list(self.leaves)
        for i, child in self.children.items():
            leaves[i] = child.build(run)
        copy = _tree.unflatten(self.treedef, leaves)
        run.copies.append((self.value, copy, self.treedef, leaves))
        return copy


class _PartialNode(_Composite):
    __slots__ = ()

    def _build(self, run: "_Run") -> Any:
        partial, built = self.value, self.children["parts"].build(run)
        return type(partial)(built[0], *built[1], **built[2])


class _MethodNode(_Composite):
    __slots__ = ()

    def _build(self, run: "_Run") -> Any:
        return types.MethodType(
            *(
                self.children[k].build(run) if k in self.children else part
                for k, part in enumerate((self.value.__func__, self.value.__self__))
            )
        )


class _WrapperNode(_Composite):
    __slots__ = ()

    def _build(self, run: "_Run") -> Any:
        return self.value.__remat_rewrap__(self.children["fn"].build(run))


class _FunctionNode(_Composite):
    """A Python function: rebuilt with new cells, defaults and globals where those hold tensors."""

    __slots__ = ()

    def _build(self, run: "_Run") -> Any:
        fn = self.value
        cells = [
            types.CellType() if ("cell", i) in self.children else cell
            for i, cell in enumerate(fn.__closure__ or ())
        ]
        names = [k for k in self.children if k[0] == "global"]
        scope = dict(fn.__globals__) if names else fn.__globals__
        new = types.FunctionType(
            fn.__code__, scope, fn.__name__, fn.__defaults__, tuple(cells)
        )
        new.__kwdefaults__ = fn.__kwdefaults__
        new.__dict__.update(fn.__dict__)
        new.__qualname__, new.__module__ = fn.__qualname__, fn.__module__
        # Before the children are built: one of them may be this very function.
        run.built[id(self)] = new
        for (kind, key), child in self.children.items():
            built = child.build(run)
            if kind == "cell":
                cells[key].cell_contents = built
                run.cells.append((fn.__closure__[key], cells[key], built))
            elif kind == "global":
                scope[key] = built
            else:
                setattr(new, kind, built)
        if names:
            run.scopes.append((fn, scope, dict(scope)))
        return new


class _SetNode(_Composite):
    __slots__ = ()

    def _build(self, run: "_Run") -> Any:
        children = self.children
        parts = enumerate(self.value)
        return type(self.value)(
            children[k].build(run) if k in children else v for k, v in parts
        )


def _attributes(value: Any) -> dict[str, Any]:
    """Return what an object holds, in its `__dict__` and its slots."""
    attributes = dict(getattr(value, "__dict__", ()))
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                attributes[name] = getattr(value, name)
    return attributes


class _ObjectNode(_Composite):
    """A module or an object: a replica with entries of its own."""

    __slots__ = ()

    def _build(self, run: "_Run") -> Any:
        cls = type(self.value)
        replica = cls.__new__(cls)
        # Before the children are built: one of them may refer to this very object.
        run.built[id(self)] = replica
        entries = _attributes(self.value)
        own = {mapping for mapping, _ in self.children if mapping is not None}
        for mapping in own:
            entries[mapping] = entries[mapping].copy()
        for (mapping, name), child in self.children.items():
            (entries if mapping is None else entries[mapping])[name] = child.build(run)
        for name, value in entries.items():
            object.__setattr__(replica, name, value)
        for mapping in own:
            registry = vars(self.value)[mapping]
            run.registries.append((registry, entries[mapping], entries[mapping].copy()))
        run.replicas.append((self.value, replica, entries))
        return replica


# --- The search ----------------------------------------------------------------------------------------------------

_INERT = frozenset(
    {
        bool, bytes, complex, float, int, str, range, slice, type, type(None), type(...), type(NotImplemented),
        types.BuiltinFunctionType, types.CodeType, types.ModuleType, types.WrapperDescriptorType,
        types.MethodDescriptorType, torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format,
        staticmethod, classmethod, property, threading.Thread, weakref.ref, weakref.WeakKeyDictionary,
    }
)  # fmt: skip


def refers_to_nothing(fn: Fn) -> bool:
    """Say quickly that a function plainly refers to no tensor: the common case, on every call."""
    if type(fn) is not types.FunctionType:
        return False
    if fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__:
        return False
    scope = fn.__globals__
    return all(type(scope.get(n)) in _INERT for n in _names(fn.__code__).loaded)


class Search:
    """One walk over what a call refers to."""

    __slots__ = ("_compiled", "_index", "_memo", "found")

    def __init__(self) -> None:
        self.found = Found()
        self._compiled = False
        self._index: dict[int, int] = {}
        self._memo: dict[int, _Node | None] = {}

    def visit(self, value: Any, path: Path) -> _Node | None:
        """Return how to rebuild `value`, or `None` where no tensor is reached through it."""
        kind = type(value)
        if kind in _INERT:
            return None
        return _visit_of(kind)(self, value, path)

    def tensor(self, value: Tensor, path: Path) -> int:
        """Return the index of `value` among the tensors found."""
        index = self._index.get(id(value))
        if index is None:
            index = self._index[id(value)] = len(self.found.tensors)
            self.found.tensors.append(value)
            self.found.origins.append(path)
        return index

    def _tensor(self, value: Tensor, path: Path, registered: bool = False) -> _Node:
        known = len(self.found.tensors)
        index = self.tensor(value, path)
        if index == known and not value.requires_grad:
            self.found.buffers[index] = registered
        return _TensorNode(index)

    def _generator(self, value: torch.Generator, path: Path) -> _Node:
        del path
        generators = self.found.generators
        index = next((i for i, g in enumerate(generators) if g is value), None)
        if index is None:
            index = len(generators)
            generators.append(value)
        return _GeneratorNode(index)

    def _composite(
        self,
        node: _Composite,
        children: Iterator[tuple[Any, Any, str]],
        path: Path,
    ) -> _Node | None:
        """Visit `(key, value, text)` children of a value not met before."""
        known = id(node.value)
        if known in self._memo:
            return self._memo[known]
        self._memo[known] = node
        for key, value, text in children:
            if type(value) not in _INERT:
                child = self.visit(value, (path, text))
                if child is not None:
                    node.children[key] = child
        self._memo[known] = node.settle()
        return self._memo[known]

    def _function(self, fn: types.FunctionType, path: Path) -> _Node | None:
        if not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__) and _is_installed(fn):
            return None
        outer = self._compiled
        # Compiled code looks its own parts up in the globals it was compiled with: those cannot be other ones.
        self._compiled = outer or hasattr(fn, "_torchdynamo_orig_callable")
        searched = not (self._compiled or _is_installed(fn))
        parts = _function_parts(fn, with_globals=searched)
        node = self._composite(_FunctionNode(fn), parts, path)
        self._compiled = outer
        return node

    def _tree(self, value: Any, path: Path) -> _Node | None:
        if not value:
            return None
        if id(value) in self._memo:
            return self._memo[id(value)]
        leaves, treedef = _tree.flatten(value)
        if all(type(leaf) in _INERT for leaf in leaves):
            return None
        node = _TreeNode(value)
        node.leaves, node.treedef = leaves, treedef
        texts = _tree.paths(treedef)
        parts = zip(itertools.count(), leaves, texts, strict=False)
        return self._composite(node, parts, path)

    def _partial(self, value: Any, path: Path) -> _Node | None:
        parts = (value.func, value.args, value.keywords)
        node = self._tree(parts, path)
        if node is None:
            return None
        partial = _PartialNode(value)
        partial.children["parts"] = node
        return partial

    def _method(self, value: types.MethodType, path: Path) -> _Node | None:
        parts = iter([(0, value.__func__, ""), (1, value.__self__, "self")])
        return self._composite(_MethodNode(value), parts, path)

    def _wrapper(self, value: Any, path: Path) -> _Node | None:
        parts = iter([("fn", value.__wrapped__, "")])
        return self._composite(_WrapperNode(value), parts, path)

    def _module(self, module: nn.Module, path: Path) -> _Node | None:
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(_SCRIPTED.format(name=module.original_name))
        if id(module) in self._memo:
            return self._memo[id(module)]
        node = self._memo[id(module)] = _ObjectNode(module)
        for name, value in vars(module).items():
            if name == "_parameters" or name == "_buffers":
                self._registered(node, name, value, path)
            elif type(value) not in _INERT:
                self._entry(node, name, value, path)
        self._memo[id(module)] = node.settle()
        return self._memo[id(module)]

    def _registered(
        self, node: _Composite, mapping: str, entries: dict[str, Any], path: Path
    ) -> None:
        for name, value in entries.items():
            if value is not None:
                child = self._tensor(value, (path, f".{name}"), mapping == "_buffers")
                node.children[mapping, name] = child

    def _entry(self, node: _Composite, name: str, value: Any, path: Path) -> None:
        if name == "_modules":
            for key, submodule in value.items():
                child = self.visit(submodule, (path, f".{key}"))
                if child is not None:
                    node.children[name, key] = child
            return
        child = self.visit(value, (path, f".{name}"))
        if child is not None:
            node.children[None, name] = child

    def _object(self, value: Any, path: Path) -> _Node | None:
        if isinstance(value, (type, enum.Enum)) or _is_standard(value):
            return None
        return self._namespace(value, path)

    def _namespace(self, value: Any, path: Path) -> _Node | None:
        parts = (((None, k), v, f".{k}") for k, v in _attributes(value).items())
        return self._composite(_ObjectNode(value), parts, path)

    def _set(self, value: Any, path: Path) -> _Node | None:
        parts = ((k, v, f"[{k}]") for k, v in enumerate(value))
        return self._composite(_SetNode(value), parts, path)


def _is_standard(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in sys.stdlib_module_names


_SCRIPTED = (
    "remat: {name} is a TorchScript module, whose parameters cannot be swapped for the recomputation. "
    "Pass the eager module instead."
)
_VISITS: dict[type, Callable[[Search, Any, Path], _Node | None]] = {
    Tensor: Search._tensor,
    nn.Parameter: Search._tensor,
    torch.Generator: Search._generator,
    types.FunctionType: Search._function,
    types.MethodType: Search._method,
    functools.partial: Search._partial,
    types.SimpleNamespace: Search._namespace,
    **dict.fromkeys((list, tuple, dict), Search._tree),
    **dict.fromkeys((set, frozenset), Search._set),
}


@functools.lru_cache(maxsize=1024)
def _visit_of(kind: type) -> Callable[[Search, Any, Path], _Node | None]:
    if kind in _VISITS:
        return _VISITS[kind]
    if issubclass(kind, Tensor):
        return Search._tensor
    if issubclass(kind, nn.Module):
        return Search._module
    if hasattr(kind, "__remat_rewrap__"):
        return Search._wrapper
    if issubclass(kind, torch.Generator):
        return Search._generator
    if issubclass(kind, functools.partial):
        return Search._partial
    if issubclass(kind, (list, tuple, dict)) or _tree.is_node(kind):
        return Search._tree
    return Search._object


def _function_parts(
    fn: types.FunctionType, *, with_globals: bool
) -> Iterator[tuple[Any, Any, str]]:
    for i, cell in enumerate(fn.__closure__ or ()):
        try:
            yield ("cell", i), cell.cell_contents, fn.__code__.co_freevars[i]
        except ValueError:  # a variable not assigned yet
            continue
    if fn.__defaults__:
        yield ("__defaults__", 0), fn.__defaults__, "defaults"
    if fn.__kwdefaults__:
        yield ("__kwdefaults__", 0), fn.__kwdefaults__, "defaults"
    if with_globals:
        scope = fn.__globals__
        for name in _names(fn.__code__).loaded:
            yield ("global", name), scope.get(name), name


@dataclass(frozen=True, slots=True)
class _Names:
    loaded: tuple[str, ...]
    stored: tuple[str, ...]


# By identity: hashing a code object reads all of it. The code is held so that its identity is not used again.
_NAMES: dict[int, tuple[types.CodeType, _Names]] = {}


def _names(code: types.CodeType) -> _Names:
    """Return the global names that `code`, or code nested in it, loads and stores."""
    known = _NAMES.get(id(code))
    if known is None:
        found: dict[str, dict[str, None]] = {"LOAD": {}, "STORE": {}, "DELETE": {}}
        todo = [code]
        while todo:
            here = todo.pop()
            for step in dis.get_instructions(here):
                action, _, where = step.opname.partition("_")
                if where in ("GLOBAL", "NAME") and action in found:
                    found[action][str(step.argval)] = None
            todo += [c for c in here.co_consts if isinstance(c, types.CodeType)]
        names = _Names(tuple(found["LOAD"]), (*found["STORE"], *found["DELETE"]))
        known = _NAMES[id(code)] = (code, names)
    return known[1]


_LIBRARIES = tuple(
    sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib", "purelib", "platlib")
)
_INSTALLED: dict[int, tuple[dict[str, Any], bool]] = {}


def _is_installed(fn: types.FunctionType) -> bool:
    """Say whether `fn` comes from the standard library or an installed package, whose globals are not searched."""
    scope = fn.__globals__
    known = _INSTALLED.get(id(scope))
    if known is None:
        file = str(scope.get("__file__", ""))
        known = _INSTALLED[id(scope)] = (scope, file.startswith(_LIBRARIES))
    return known[1]


# --- Running on other tensors --------------------------------------------------------------------------------------


class _Run:
    """What building for one run has made, with what it was made from."""

    __slots__ = ("built", "cells", "copies", "generators", "registries", "replicas", "scopes", "tensors")

    def __init__(
        self, tensors: Sequence[Tensor], generators: Sequence[torch.Generator]
    ) -> None:
        self.tensors, self.generators = tensors, generators
        self.built: dict[int, Any] = {}
        self.cells: list[tuple[Any, Any, Any]] = []
        self.scopes: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []
        self.copies: list[tuple[Any, Any, Any, list[Any]]] = []
        self.registries: list[tuple[dict[str, Any], ...]] = []
        self.replicas: list[tuple[Any, Any, dict[str, Any]]] = []


def build(
    nodes: Mapping[int, _Node],
    tensors: Sequence[Tensor],
    generators: Sequence[torch.Generator],
) -> tuple[dict[int, Any], _Run]:
    """Rebuild searched values around `tensors` and `generators`.

    Args:
        nodes: what `Search.visit` returned, under any keys.
        tensors: stand in for `Found.tensors`.
        generators: stand in for `Found.generators`.

    Returns:
        The values, and the run that `pass_on` takes.
    """
    run = _Run(tensors, generators)
    return {key: node.build(run) for key, node in nodes.items()}, run


def pass_on(run: _Run) -> None:
    """Let what the function assigned to captured names and attributes reach those.

    Raises:
        CaptureError: it changed a captured container that holds tensors.
    """
    for original, cell, ours in run.cells:
        if cell.cell_contents is not ours:
            original.cell_contents = cell.cell_contents
    for fn, scope, before in run.scopes:
        for name in _names(fn.__code__).stored:
            if scope.get(name) is not before.get(name):
                fn.__globals__[name] = scope[name]
    for original, ours, before in run.registries:
        for name in ours.keys() | before.keys():
            if name not in ours:
                original.pop(name, None)
            elif ours[name] is not before.get(name):
                original[name] = ours[name]
    for original, replica, before in run.replicas:
        now = _attributes(replica)
        for name in now.keys() | before.keys():
            if name not in now:
                object.__delattr__(original, name)
            elif now[name] is not before.get(name):
                object.__setattr__(original, name, now[name])
    for original, copy, treedef, leaves in run.copies:
        now, now_treedef = _tree.flatten(copy)
        if now_treedef != treedef or any(
            a is not b for a, b in zip(now, leaves, strict=True)
        ):
            raise CaptureError(_CHANGED.format(kind=type(original).__name__))


_CHANGED = (
    "remat: the function changed a captured {kind} that holds tensors, which a recomputation would do again. "
    "Return the new value instead, or pass the {kind} as an argument."
)
