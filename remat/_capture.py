"""Find the tensors that a function refers to without being passed them.

`Search` walks a function's closure, defaults, globals, bound arguments and modules, and
the opaque objects among its arguments. What it finds become inputs of the call.

Invariant: whatever can hold a tensor is either walked or listed as inert, and a value
is walked once. Globals of installed packages are not walked, for time; a differentiated
tensor that is missed is an error on the first use (`_checks`).
Rejected: differentiating the user's own tensors, whose gradient hooks would run twice.
"""

import enum
import functools
import itertools
import sys
import threading
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Iterator,
)
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from remat import _tree
from remat._code import CONSTANT, code_of, global_names, is_library
from remat._errors import CaptureError
from remat._objects import attributes, by_class, defines
from remat._rebuild import (
    Composite,
    FunctionNode,
    MethodNode,
    Node,
    ObjectNode,
    PartialNode,
    SetNode,
    SubclassNode,
    TensorNode,
    TreeNode,
    WrapperNode,
)
from remat._sources import Sources, is_scripted, is_stream


# The position of an argument, `None` for the function, or a chain of `(parent, text)`.
Path: TypeAlias = tuple[Any, str] | int | None
_Parts: TypeAlias = Iterable[tuple[Any, Any, str]]
_INERT = frozenset(
    {
        *(bool, bytes, complex, float, int, str, range, slice, type(None), type(...)),
        *(property, staticmethod, classmethod, types.CodeType, threading.Thread),
        *(types.MethodDescriptorType, types.WrapperDescriptorType),
        *(torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)


_CONTAINERS = frozenset({OrderedDict, dict, list, set, tuple})
_STANDARD_CONTAINERS = frozenset({*_CONTAINERS, Counter, defaultdict, deque})


class Found:
    """The tensors that one call refers to.

    Attributes:
        tensors: each once, those passed first.
        origins: the path of each.
        buffers: the tensors that the function may update in place, as it would without
            remat: index, and whether it is a module's registered buffer.
    """

    __slots__ = ("buffers", "origins", "tensors")

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.origins: list[Path] = []
        self.buffers: dict[int, bool] = {}


def holds_tensors(value: Any) -> bool:
    """Say whether an object that is no pytree holds tensors, or will make them."""
    if type(value) in _INERT:
        return False
    if isinstance(value, (Generator, Coroutine, AsyncGenerator)):
        return True
    search = Search()
    search.visit(value, None)
    return bool(search.found.tensors)


class Search:
    """One walk over what a call refers to."""

    __slots__ = ("_compiled", "_index", "_memo", "_sources", "found", "signature")

    def __init__(self) -> None:
        self.found = Found()
        # The code found, in order: of functions, types and modes of what else is met.
        self.signature: list[Any] = []
        self._sources = Sources()
        self._compiled = False
        self._index: dict[int, int] = {}
        # Each value walked is held, so that its identity is not used again.
        self._memo: dict[int, tuple[Any, Node | None]] = {}

    @property
    def streams(self) -> list[Any]:
        """The random streams found."""
        return [*self._sources.streams.values()]

    @property
    def always(self) -> bool:
        """Whether some code found reads or sets the state of a stream itself."""
        return self._sources.handles_states

    @property
    def compiled(self) -> bool:
        """Whether something found is compiled code, of torch.compile or TorchScript."""
        return self._sources.compiled

    def visit(self, value: Any, path: Path) -> Node | None:
        """Return how to rebuild `value`; `None` if no tensor is reached through it."""
        kind = type(value)
        return None if kind in _INERT else _visit_of(kind)(self, value, path)

    def tensor(self, value: Tensor, path: Path) -> int:
        """Return the index of `value` among the tensors found."""
        index = self._index.get(id(value))
        if index is None:
            index = self._index[id(value)] = len(self.found.tensors)
            self.found.tensors.append(value)
            self.found.origins.append(path)
        return index

    def _tensor(self, value: Tensor, path: Path, registered: bool = False) -> Node:
        known = len(self.found.tensors)
        index = self.tensor(value, path)
        if index == known and not value.requires_grad:
            self.found.buffers[index] = registered
        return TensorNode.of(index)

    def _inert(self, value: Any, path: Path) -> None:
        del value, path

    def _source(self, value: Any, path: Path) -> None:
        del path
        self._sources.walk(value)

    def _composite(self, node: Composite, parts: _Parts, path: Path) -> Node | None:
        """Visit the `(key, value, text)` parts of a value, unless that was done."""
        value = node.value
        if id(value) in self._memo:
            return self._memo[id(value)][1]
        self._memo[id(value)] = (value, node)
        self.signature.append(type(value))
        for key, part, text in parts:
            child = self.visit(part, (path, text))
            if child is not None:
                node.children[key] = child
        settled = node.settle()
        self._memo[id(value)] = (value, settled)
        return settled

    def _function(self, fn: types.FunctionType, path: Path) -> Node | None:
        installed = is_library(fn.__globals__)
        self._sources.of_function(fn)
        self.signature.append(code_of(fn))
        if installed and not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__):
            return None
        outer = self._compiled
        # Compiled code looks its own parts up in the globals it was compiled with.
        self._compiled = outer or hasattr(fn, "_torchdynamo_orig_callable")
        with_globals = not (self._compiled or installed)
        constants = _constants(fn) if with_globals else {}
        node = FunctionNode(fn, constants, frozen=not installed)
        parts = _function_parts(node, with_globals=with_globals)
        settled = self._composite(node, parts, path)
        self._compiled = outer
        return settled

    def _tree(self, value: Any, path: Path) -> Node | None:
        kind = type(value)
        if kind in _STANDARD_CONTAINERS:
            if kind is defaultdict:
                self._source(value.default_factory, path)
            if not value:
                return None
            items = value.values() if issubclass(kind, dict) else value
            if _INERT.issuperset(map(type, items)):
                return None  # a long list of numbers or words, in one go
        else:
            self._sources.walk_all(attributes(value).values())
        leaves, treedef = _tree.flatten(value)
        if all(type(leaf) in _INERT for leaf in leaves):
            return None
        if len(leaves) == 1 and leaves[0] is value:
            return self._subclass(value, path)
        node = TreeNode(value, leaves, treedef)
        texts = _tree.paths(treedef)
        parts = zip(itertools.count(), leaves, texts, strict=False)
        return self._composite(node, parts, path)

    def _subclass(self, value: Any, path: Path) -> Node | None:
        if isinstance(value, tuple):
            return self._object(value, path)
        items = value.items() if isinstance(value, dict) else enumerate(value)
        parts = ((k, v, f"[{k!r}]") for k, v in list(items))
        return self._composite(SubclassNode(value), parts, path)

    def _set(self, value: Any, path: Path) -> Node | None:
        parts = ((k, v, f"[{k}]") for k, v in enumerate(value))
        return self._composite(SetNode(value), parts, path)

    def _partial(self, value: Any, path: Path) -> Node | None:
        parts = [("parts", (value.func, value.args, value.keywords), "")]
        return self._composite(PartialNode(value), parts, path)

    def _method(self, value: types.MethodType, path: Path) -> Node | None:
        parts = [(0, value.__func__, ""), (1, value.__self__, "self")]
        return self._composite(MethodNode(value), parts, path)

    def _wrapper(self, value: Any, path: Path) -> Node | None:
        parts = [("fn", value.__wrapped__, "")]
        return self._composite(WrapperNode(value), parts, path)

    def _module(self, module: nn.Module, path: Path) -> Node | None:
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(_SCRIPTED.format(name=module.original_name))
        if id(module) in self._memo:
            return self._memo[id(module)][1]
        self._sources.of_class(type(module))
        self.signature += type(module), module.training
        node = ObjectNode(module)
        registries = node.registries
        self._memo[id(module)] = (module, node)
        for name, value in node.entries.items():
            kind = type(value)
            # Most of a module's attributes are flags and empty dicts of hooks.
            if kind in _INERT or (kind in _CONTAINERS and not value):
                continue
            if name not in registries:
                self._entry(node, (None, name), value, path)
        for name, items in registries.items():
            if name == "_modules":
                for key, child in items.items():
                    self._entry(node, (name, key), child, path)
            elif items:
                self._registered(node, name, items, path)
        settled = node.settle()
        self._memo[id(module)] = (module, settled)
        return settled

    def _registered(
        self, node: Composite, registry: str, entries: dict[str, Any], path: Path
    ) -> None:
        for name, value in entries.items():
            if is_lazy(value):
                where = "".join(_texts((path, f".{name}"))).lstrip(".")
                raise CaptureError(_LAZY.format(name=where))
            if value is not None:
                is_buffer = registry == "_buffers"
                child = self._tensor(value, (path, f".{name}"), is_buffer)
                node.children[registry, name] = child

    def _entry(
        self, node: Composite, key: tuple[str | None, str], value: Any, path: Path
    ) -> None:
        if type(value) in _INERT:
            return
        child = self.visit(value, (path, f".{key[1]}"))
        if child is not None:
            node.children[key] = child

    def _object(self, value: Any, path: Path) -> Node | None:
        kind = type(value)
        root = str(kind.__module__).partition(".")[0]
        if root in sys.stdlib_module_names or issubclass(kind, (type, enum.Enum)):
            return self._source(value, path)
        self._sources.of_class(kind)
        if is_scripted(kind):
            self._sources.compiled = True
        return self._namespace(value, path)

    def _namespace(self, value: Any, path: Path) -> Node | None:
        node = ObjectNode(value)
        if not node.entries or issubclass(type(value), (tuple, deque)):
            self._sources.walk(value)
        parts = (((None, k), v, f".{k}") for k, v in node.entries.items())
        return self._composite(node, parts, path)


def _texts(path: Path) -> list[str]:
    return [*_texts(path[0]), path[1]] if isinstance(path, tuple) else []


_LAZY = (
    "remat: `{name}` is not initialized yet. Run the lazy module once without remat."
)
_SCRIPTED = (
    "remat: {name} is a TorchScript module, whose parameters cannot be stood in for. "
    "Pass the eager module instead."
)
# Those of torch.ops and torch.library, which hold the kernels that were registered.
_OPERATORS = ("torch._ops", "torch._library")
_Visit: TypeAlias = Callable[[Search, Any, Path], Node | None]
_VISITS: dict[type, _Visit] = {
    Tensor: Search._tensor,
    nn.Parameter: Search._tensor,
    types.FunctionType: Search._function,
    types.MethodType: Search._method,
    types.SimpleNamespace: Search._namespace,
    types.BuiltinFunctionType: Search._source,
    types.ModuleType: Search._source,
    weakref.ref: Search._source,
    **dict.fromkeys((set, frozenset), Search._set),
}
_VISITS_OF_SUBCLASSES: tuple[tuple[Any, _Visit], ...] = (
    (Tensor, Search._tensor),
    (nn.Module, Search._module),
    (types.ModuleType, Search._source),
    (functools.partial, Search._partial),
    ((list, tuple, dict), Search._tree),
)


@by_class
def _visit_of(kind: type) -> _Visit:
    if kind in _VISITS:
        return _VISITS[kind]
    if is_stream(kind):
        return Search._source
    for cls, visit in _VISITS_OF_SUBCLASSES:
        if issubclass(kind, cls):
            return visit
    if defines(kind, "__remat_rewrap__"):
        return Search._wrapper
    if str(kind.__module__).startswith(_OPERATORS):
        return Search._inert
    return Search._tree if _tree.is_node(kind) else Search._object


def _constants(fn: types.FunctionType) -> dict[str, Any]:
    """Return the global constants, which a notebook's loop may rebind."""
    scope = fn.__globals__
    names = global_names(fn.__code__).loaded
    return {n: scope[n] for n in names if n in scope and type(scope[n]) in CONSTANT}


def _function_parts(
    node: FunctionNode, *, with_globals: bool
) -> Iterator[tuple[Any, Any, str]]:
    fn: types.FunctionType = node.value
    for i, name, content in node.variables():
        yield ("cell", i), content, name
    for where in ("__defaults__", "__kwdefaults__"):
        if getattr(fn, where):
            yield (where, ""), getattr(fn, where), f"{fn.__name__}.{where}"
    if with_globals:
        for name in global_names(fn.__code__).loaded:
            yield ("global", name), fn.__globals__.get(name), name
