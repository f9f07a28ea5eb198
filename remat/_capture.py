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
import operator
import sys
import types
import weakref
from collections import defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
)
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from remat import _tree
from remat._code import code_of, is_library
from remat._errors import CaptureError
from remat._kinds import INERT, STANDARD_CONTAINERS, module_kind
from remat._objects import attributes, by_class, defines
from remat._outlines import Outline, find_tree, learn
from remat._rebuild import (
    Composite,
    FunctionNode,
    MethodNode,
    ObjectNode,
    PartialNode,
    SetNode,
    SubclassNode,
    TreeNode,
    WrapperNode,
)
from remat._replicas import ModuleNode, Node, TensorNode
from remat._sources import Sources, is_scripted, is_stream
from remat._structure import Found, Path
from remat._trees import OutlinedNode, Tree


_Parts: TypeAlias = Iterable[tuple[Any, Any, str]]
_requires_grad = operator.attrgetter("requires_grad")


def holds_tensors(value: Any) -> bool:
    """Say whether an object that is no pytree holds tensors, or will make them."""
    if type(value) in INERT:
        return False
    if isinstance(value, (Generator, Coroutine, AsyncGenerator)):
        return True
    search = Search()
    search.visit(value, None)
    return bool(search.found.tensors)


class Search:
    """One walk over what a call refers to."""

    __slots__ = (
        "_code",
        "_compiled",
        "_index",
        "_memo",
        "_modules",
        "_nodes",
        "_outlined",
        "_sources",
        "found",
    )

    def __init__(self) -> None:
        self.found = Found()
        # The code found, in order: of functions, and types of what else is rebuilt.
        self._code: list[Any] = []
        # Types and modes of modules: apart, for those of a model are added at once.
        self._modules: list[Any] = []
        # Those walked under one module, and those that were not.
        self._nodes: list[ModuleNode] | None = None
        self._outlined: list[OutlinedNode] = []
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

    @property
    def signature(self) -> list[Any]:
        """What code was found, see `Call.signature`."""
        return [*self._modules, *self._code]

    def visit(self, value: Any, path: Path) -> Node | None:
        """Return how to rebuild `value`; `None` if no tensor is reached through it."""
        kind = type(value)
        return None if kind in INERT else _visit_of(kind)(self, value, path)

    def tensor(self, value: Tensor, path: Path) -> int:
        """Return the index of `value` among the tensors found."""
        index = self._index.get(id(value))
        if index is None:
            index = self._index[id(value)] = len(self.found.tensors)
            self.found.tensors.append(value)
            self.found.origins.append(path)
        return index

    def _index_of(self, value: Tensor, path: Path, registered: bool) -> int:
        known = len(self.found.tensors)
        index = self.tensor(value, path)
        if index == known and not value.requires_grad:
            self.found.buffers[index] = registered
        return index

    def _tensor(self, value: Tensor, path: Path) -> Node:
        return TensorNode.of(self._index_of(value, path, registered=False))

    def _inert(self, value: Any, path: Path) -> None:
        del value, path

    def _source(self, value: Any, path: Path) -> None:
        del path
        self._sources.walk(value)

    def _builtin(self, value: Any, path: Path) -> None:
        self._code.append(value.__name__)
        self._source(value, path)

    def _composite(self, node: Composite, parts: _Parts, path: Path) -> Node | None:
        """Visit the `(key, value, text)` parts of a value, unless that was done."""
        if self._outlined:
            self._note_branches()
        value = node.value
        if id(value) in self._memo:
            return self._memo[id(value)][1]
        self._memo[id(value)] = (value, node)
        self._code.append(weakref.ref(type(value)))
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
        self._code.append(code_of(fn))
        if installed and not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__):
            return None
        outer = self._compiled
        # Compiled code looks its own parts up in the globals it was compiled with.
        self._compiled = outer or hasattr(fn, "_torchdynamo_orig_callable")
        with_globals = not (self._compiled or installed)
        node = FunctionNode(fn, with_globals=with_globals, frozen=not installed)
        settled = self._composite(node, node.parts(), path)
        self._compiled = outer
        return settled

    def _tree(self, value: Any, path: Path) -> Node | None:
        kind = type(value)
        if kind in STANDARD_CONTAINERS:
            if kind is defaultdict:
                self._source(value.default_factory, path)
            if not value:
                return None
            items = value.values() if issubclass(kind, dict) else value
            if INERT.issuperset(map(type, items)):
                return None  # a long list of numbers or words, in one go
        else:
            self._sources.walk_all(attributes(value).values())
        leaves, treedef = _tree.flatten(value)
        if all(type(leaf) in INERT for leaf in leaves):
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
        self._code.append(value.__remat_options__.key)
        parts = [("fn", value.__wrapped__, "")]
        return self._composite(WrapperNode(value), parts, path)

    def _module(self, module: nn.Module, path: Path) -> Node | None:
        if self._outlined:
            self._note_branches()
        if id(module) in self._memo:
            return self._memo[id(module)][1]
        if self._nodes is not None:
            return self._walk_module(module, path)
        found = find_tree(module)
        known = None if found is None else self._tree_of_modules(*found, path)
        if known is not None:
            return known
        nodes: list[ModuleNode] = []
        self._nodes, first = nodes, len(self.found.tensors)
        try:
            node = self._walk_module(module, path)
        finally:
            self._nodes = None
        learn(module, nodes, first)
        return node

    def _tree_of_modules(
        self, outline: Outline, tree: Tree, tensors: list[Tensor], path: Path
    ) -> Node | None:
        """Add a tree that was searched before, unless some of it was found here too."""
        _, _, modules, entries = tree
        if self._memo and not self._memo.keys().isdisjoint(map(id, modules)):
            return None
        found, first = self.found, len(self.found.tensors)
        index = dict(zip(map(id, tensors), itertools.count(first), strict=False))
        index |= self._index
        if len(index) < first + len(tensors):
            return None
        for k, name, text in outline.walked:
            if self.visit(entries[k][name], (path, text)) is not None:
                return None
        self._index = index
        found.tensors += tensors
        found.origins += zip(itertools.repeat(path), outline.texts, strict=False)
        flags = [*map(_requires_grad, tensors)]
        if False in flags:
            pairs = zip(flags, outline.registered, strict=True)
            found.buffers |= {i: b for i, (f, b) in enumerate(pairs, first) if not f}
        self._modules += outline.signature
        for kind in outline.open_classes():
            self._sources.of_class(kind)
        node = OutlinedNode(tree, first)
        self._outlined.append(node)
        return node

    def _note_branches(self) -> None:
        """Note the modules of trees added at once: something else may refer to them."""
        for node in self._outlined:
            branches = {id(m): (m, n) for m, n in node.branches()}
            self._memo.update(branches)
        self._outlined.clear()

    def _walk_module(self, module: nn.Module, path: Path) -> Node:
        kind = type(module)
        known = module_kind(kind)
        if known.is_scripted:
            name: Any = module.original_name
            raise CaptureError(_SCRIPTED.format(name=name))
        if known.has_own_code:
            self._sources.of_class(kind)
        node = ModuleNode(module)
        self._memo[id(module)] = (module, node)
        assert self._nodes is not None
        self._nodes.append(node)
        self._modules += node.mode()
        for name in known.visited(node.entries):
            child = self.visit(node.entries[name], (path, f".{name}"))
            if child is not None:
                node.children[name] = child
        parameters, buffers, _ = node.registries
        if parameters:
            node.parameters = self._registered(parameters, path, is_buffer=False)
        if buffers:
            node.buffers = self._registered(buffers, path, is_buffer=True)
        for name, value in node.modules.items():
            child = self.visit(value, (path, f".{name}"))
            if child is not None:
                node.submodules.append((name, child))
        return node

    def _registered(
        self, entries: dict[str, Any], path: Path, is_buffer: bool
    ) -> dict[str, int | None]:
        indices: dict[str, int | None] = {}
        for name, value in entries.items():
            if type(value) is not nn.Parameter and is_lazy(value):
                where = "".join(_texts((path, f".{name}"))).lstrip(".")
                raise CaptureError(_LAZY.format(name=where))
            indices[name] = None
            if value is not None:
                indices[name] = self._index_of(value, (path, f".{name}"), is_buffer)
        return indices

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
        parts = ((k, v, f".{k}") for k, v in node.entries.items())
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
    types.BuiltinFunctionType: Search._builtin,
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
