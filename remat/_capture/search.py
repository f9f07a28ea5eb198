"""Find what a call refers to: its arguments, and what its function reaches besides.

`Search` walks arguments, closures, defaults, globals, bound objects, modules and plain
objects. The tensors that it finds are inputs of the call. What it finds else is kept as
nodes, which are a snapshot: each mutable object as it is now.

Invariant: whatever can hold a tensor or change is either walked or listed as inert, and
a value is walked once. Globals of installed packages are not walked, for time, and
neither are the hooks of modules, which may lead to the whole model.
Rejected: a snapshot of what a call turns out to use. When that is known it has changed.
"""

import enum
import functools
import types
import weakref
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Generator,
    Iterable,
    Sequence,
)
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from remat._base.code import known_code, static_of
from remat._base.types import TENSORS
from remat._capture.callables import (
    CellNode,
    FunctionNode,
    MethodNode,
    PartialNode,
    WrapperNode,
)
from remat._capture.containers import (
    ContainerNode,
    CopyNode,
    DictNode,
    IteratorNode,
    LargeNode,
    SequenceNode,
)
from remat._capture.kinds import (
    COPIED_ITERATORS,
    INERT,
    SEQUENCES,
    can_be_made_anew,
    is_buffer,
    is_left_alone,
    is_sharded,
    is_spent_by_use,
)
from remat._capture.modules import ModuleNode
from remat._capture.nodes import Composite, Node, ObjectNode, TensorNode
from remat._capture.objects import by_class, defines
from remat._capture.sources import (
    Sources,
    has_defaults,
    has_own_code,
    is_compiled,
    is_scripted,
    is_stream,
)
from remat._capture.structure import Path, written
from remat._capture.trees import IS_ON, Tree, TreeNode, tree_of


def holds_tensors(value: Any) -> bool:
    """Say whether an object that is no pytree holds tensors, or will make them."""
    if type(value) in INERT:
        return False
    if isinstance(value, (Generator, Coroutine, AsyncGenerator)):
        return True
    search = Search()
    search.visit(value, None)
    return bool(search.tensors)


_LARGE = 1000  # entries, above which a container is not copied in each call


class Search:
    """One walk over what a call refers to.

    Args:
        shallow: whether tensors that require no grad are used as they are where a
            container has very many of them, and modules are taken from what is known.

    Attributes:
        tensors: each once, those passed first.
        origins: the path of each.
        buffers: the tensors that the function may update in place, as it would without
            remat: index, and whether it is a module's registered buffer.
        constants: in the arguments, in order.
        code: the code found, in order: of functions, types of objects, modes of
            modules.
        in_arguments: whether what is searched is an argument.
        is_contained: whether nothing was found but functions, numbers and packages.
        is_lazy: whether some module has no parameters yet.
        scripted: the name of a TorchScript module, if there is one.
    """

    __slots__ = (
        *("_index", "_is_compiled", "_memo", "_shallow", "_sharded", "_sources"),
        *("buffers", "code", "constants", "in_arguments", "is_contained", "is_lazy"),
        *("origins", "scripted", "tensors"),
    )

    def __init__(self, *, shallow: bool = False) -> None:
        self.tensors: list[Tensor] = []
        self.origins: list[Path] = []
        self.buffers: dict[int, bool] = {}
        self.code: list[Any] = []
        self.constants: list[Any] = []
        self.in_arguments = self.is_contained = True
        self.is_lazy, self.scripted = False, ""
        self._shallow, self._sharded, self._is_compiled = shallow, False, False
        self._sources: Sources | None = None
        self._index: dict[int, int] = {}
        # Each value walked is held, so that its identity is not used again.
        self._memo: dict[int, tuple[Any, Node | None]] = {}

    @property
    def streams(self) -> Sequence[Any]:
        """The random streams found."""
        return () if self._sources is None else [*self._sources.streams.values()]

    @property
    def always(self) -> bool:
        """Whether some code found reads or sets the state of a stream itself."""
        return self._sources is not None and self._sources.handles_states

    @property
    def compiled(self) -> bool:
        """Whether something found is compiled code, of torch.compile or TorchScript."""
        return self._sources is not None and self._sources.compiled

    @property
    def sources(self) -> Sources:
        """What looks for random streams."""
        if self._sources is None:
            self._sources = Sources()
        return self._sources

    @property
    def is_moved(self) -> bool:
        """Whether random streams, their states, or compiled code were found."""
        return bool(self.streams) or self.always or self.compiled

    def walked(self) -> list[tuple[Any, Any]]:
        """Return each value walked, and its node."""
        return [*self._memo.values()]

    def originals(self) -> dict[int, Any]:
        """Return the user's own value for each node, by the identity of the node."""
        pairs = self._memo.values()
        return {id(node): value for value, node in pairs if node is not None}

    def visit(self, value: Any, path: Path) -> Node | None:
        """Return how to make a value again; None if it is the same at any time."""
        kind = type(value)
        if kind in INERT:
            return None
        if kind in TENSORS:
            return self._tensor(value, path)
        known = self._memo.get(id(value))
        if known is not None:
            return known[1]
        node = _visit_of(kind)(self, value, path)
        if isinstance(node, Composite):
            node.identity = id(value)
        return node

    def tensor(self, value: Tensor, path: Path, *, registered: bool = False) -> int:
        """Return the index of `value` among the tensors found."""
        index = self._index.get(id(value))
        if index is None:
            index = self._index[id(value)] = len(self.tensors)
            self.tensors.append(value)
            self.origins.append(path)
            if not self.in_arguments or registered:
                self.is_contained = False
                if not value.requires_grad:
                    self.buffers[index] = registered
        return index

    def _tensor(self, value: Tensor, path: Path) -> Node:
        return TensorNode.of(self.tensor(value, path))

    def _source(self, value: Any, path: Path) -> None:
        del path
        self.is_contained = False
        self.sources.walk(value)

    def _mutable(self, value: Any, node: Composite, path: Path) -> Composite:
        """Search what a value holds, which may be another thing later."""
        self._memo[id(value)] = value, node
        self.code.append(type(value))
        if type(node) is not FunctionNode and not self.in_arguments:
            self.is_contained = False
        for key, part, text in node.parts():
            if type(part) not in INERT:
                child = self.visit(part, (path, text))
                if child is not None:
                    node.hold(key, child)
        node.settle()
        return node

    def _fixed(self, value: Any, node: Composite, path: Path) -> Composite | None:
        """Search a value that is always the same if what it holds is."""
        self._mutable(value, node, path)
        if node.children:
            return node
        self._memo[id(value)] = value, None
        return None

    # --- Containers ---

    def _sequence(self, value: Any, path: Path) -> Node | None:
        if self._is_watched(value):
            return self._large(value, path)
        is_fixed = isinstance(value, (tuple, frozenset))
        if is_fixed and type(value) in SEQUENCES and INERT.issuperset(map(type, value)):
            self._constants(value)
            return None
        node = SequenceNode(value)
        self._memo[id(value)] = value, node
        self._constants(node.items)
        self._items(node, range(len(node.items)), path)
        self._mutable(value, node, path)
        if is_fixed and not (node.children or node.tensors):
            self._memo[id(value)] = value, None
            return None
        return node

    def _dict(self, value: Any, path: Path) -> Node:
        if self._is_watched(value):
            return self._large(value, path)
        node = DictNode(value)
        self._memo[id(value)] = value, node
        keys = node.keys
        self._constants((*keys, *node.items))
        for i, key in enumerate(keys):
            if type(key) not in INERT:
                child = self.visit(key, path)
                if child is not None:
                    node.hold_key(i, child)
        self._items(node, keys, path)
        return self._mutable(value, node, path)

    def _items(self, node: ContainerNode, keys: Sequence[Any], path: Path) -> None:
        """Search what a container holds."""
        for i, part in enumerate(node.items):
            if type(part) not in INERT:
                child = self.visit(part, (path, keys[i], None))
                if child is not None:
                    node.hold_item(i, child)

    def _constants(self, values: Iterable[Any]) -> None:
        """Note what an argument holds that tells calls apart."""
        if self.in_arguments:
            self.constants += map(static_of, values)

    def _is_watched(self, value: Any) -> bool:
        """Say whether a container is compared, and not copied."""
        if len(value) <= _LARGE:
            return False
        items = value.values() if isinstance(value, dict) else value
        kinds = {*map(type, value), *map(type, items)} - INERT
        if not kinds or not self._shallow:
            return not kinds
        return kinds <= TENSORS and not any(
            isinstance(v, Tensor) and v.requires_grad for v in items
        )

    def _large(self, value: Any, path: Path) -> Node:
        node = LargeNode(value, written(path)[1].lstrip("."))
        self._memo[id(value)] = value, node
        return node

    def _iterator(self, value: Any, path: Path) -> Node | None:
        before = len(self.streams)
        self._source(value, path)
        if len(self.streams) > before:
            return None  # it draws: the stream is set back, and not it
        name = written(path)[1].lstrip(".")
        what = f"the {type(value).__name__} `{name}`"
        node = IteratorNode(value, what)
        self._memo[id(value)] = value, node
        return node

    def _buffer(self, value: Any, path: Path) -> Node | None:
        return self._copied(value, path) if len(value) <= _LARGE else None

    def _copied(self, value: Any, path: Path) -> Node:
        del path
        node = CopyNode(value)
        self._memo[id(value)] = value, node
        return node

    # --- What can be called ---

    def _function(self, fn: types.FunctionType, path: Path) -> Node | None:
        self.code.append(fn.__code__)
        known = known_code(fn)
        has_more = fn.__dict__ or has_defaults(fn)
        if known.is_settled and not (fn.__closure__ or has_more):
            self._memo[id(fn)] = fn, None
            return None
        self.sources.of_function(fn)
        outer = self._is_compiled
        # Compiled code looks its own parts up in the globals it was compiled with.
        self._is_compiled = outer or is_compiled(fn.__dict__)
        names = ((), ()) if self._is_compiled else (known.open, known.names.stored)
        node = FunctionNode(fn, *names)
        if node.is_settled and not has_more:
            self._memo[id(fn)] = fn, None
            found = None
        else:
            found = self._mutable(fn, node, path)
        self._is_compiled = outer
        return found

    def _cell(self, cell: types.CellType, path: Path) -> Node:
        return self._mutable(cell, CellNode(cell), path)

    def _builtin(self, value: Any, path: Path) -> Node | None:
        self.code.append(value.__name__)
        self._source(value, path)
        owner = value.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            return None
        return self._fixed(value, MethodNode(value.__name__, owner), path)

    def _method(self, value: types.MethodType, path: Path) -> Node | None:
        node = MethodNode(value.__func__, value.__self__)
        return self._fixed(value, node, path)

    def _partial(self, value: Any, path: Path) -> Node | None:
        return self._fixed(value, PartialNode(value), path)

    def _wrapper(self, value: Any, path: Path) -> Node | None:
        self.code.append(value.__remat_options__[-1].key)
        return self._fixed(value, WrapperNode(value), path)

    # --- Objects ---

    def _object(self, value: Any, path: Path) -> Node | None:
        kind = type(value)
        if is_left_alone(kind):
            return self._source(value, path)
        self._of_class(kind)
        if is_scripted(kind):
            self.sources.compiled = True
        node = ObjectNode(value)
        if not (node.entries or can_be_made_anew(kind)):
            return self._source(value, path)  # of an extension module
        return self._mutable(value, node, path)

    def _of_class(self, kind: type) -> None:
        """Look for random streams in the code of a class."""
        if has_own_code(kind):
            self.sources.of_class(kind)

    def _module(self, module: nn.Module, path: Path) -> Node | None:
        kind = type(module)
        if issubclass(kind, torch.jit.ScriptModule):
            return self._script_module(module, path)
        if IS_ON and self._shallow and not (self._is_compiled or self._sharded):
            tree = tree_of(module, Search)
            if tree is not None and not any(map(self._refers, tree.functions)):
                return self._take_over(module, tree, path)
        self._of_class(kind)
        node, outer = ModuleNode(module), self._sharded
        self._memo[id(module)] = module, node
        self.code.append(kind)
        self.code.append(node.entries.get("training"))
        node.is_sharded = self._sharded = outer or is_sharded(kind)
        for name, part, text in node.parts():
            if type(part) not in INERT:
                child = self.visit(part, (path, text))
                if child is not None:
                    node.hold(name, child)
        parameters, buffers, modules = node.registries
        node.parameters = self._registered(parameters, path, is_buffer=False)
        node.buffers = self._registered(buffers, path, is_buffer=True)
        node.modules = {
            name: None if value is None else self.visit(value, (path, f".{name}"))
            for name, value in modules.items()
        }
        node.seal()
        self._sharded = outer
        return node

    def _refers(self, ref: Any) -> bool:
        """Say whether a function refers to something by now."""
        return self.visit(ref(), None) is not None

    def _take_over(self, module: nn.Module, tree: Tree, path: Path) -> Node:
        """Take what was found in a module before."""
        self.is_contained = False
        self.code += tree.code
        for kind in tree.kinds:
            self._of_class(kind)
        node = TreeNode(tree, self._tensors_of(tree, path))
        self._memo[id(module)] = module, node
        return node

    def _tensors_of(self, tree: Tree, path: Path) -> Sequence[int]:
        """Return the indices of a tree's tensors."""
        tensors: list[Any] = [ref() for ref in tree.tensors]
        first, ids = len(self.tensors), [*map(id, tensors)]
        origins = [(path, text) for text in tree.texts]
        if not self._index.keys().isdisjoint(ids):
            found = zip(tensors, origins, tree.registered, strict=True)
            return [self.tensor(t, o, registered=buffer) for t, o, buffer in found]
        indices = range(first, first + len(ids))
        self._index.update(zip(ids, indices, strict=True))
        self.tensors += tensors
        self.origins += origins
        for i, t, registered in zip(indices, tensors, tree.registered, strict=True):
            if not t.requires_grad and (registered or not self.in_arguments):
                self.buffers[i] = registered
        return indices

    def _script_module(self, module: Any, path: Path) -> None:
        """Note the parameters of a module that cannot be taken apart."""
        self.sources.compiled = True
        self.scripted = self.scripted or module.original_name
        for name, value in module.named_parameters():
            self.tensor(value, (path, f".{name}"))

    def _registered(
        self, entries: dict[str, Any], path: Path, is_buffer: bool
    ) -> dict[str, int | None]:
        indices: dict[str, int | None] = {}
        for name, value in entries.items():
            if value is None:
                indices[name] = None
                continue
            if type(value) is not nn.Parameter and is_lazy(value):
                self.is_lazy = True
            indices[name] = self.tensor(value, (path, f".{name}"), registered=is_buffer)
        return indices


_Visit: TypeAlias = Callable[[Search, Any, Path], Node | None]
_VISITS: dict[type, _Visit] = {
    Tensor: Search._tensor,
    nn.Parameter: Search._tensor,
    types.FunctionType: Search._function,
    types.MethodType: Search._method,
    types.CellType: Search._cell,
    types.SimpleNamespace: Search._object,
    types.BuiltinFunctionType: Search._builtin,
    types.ModuleType: Search._source,
    weakref.ref: Search._source,
    **dict.fromkeys(COPIED_ITERATORS, Search._copied),
}
_VISITS_OF_SUBCLASSES: tuple[tuple[Any, _Visit], ...] = (
    (Tensor, Search._tensor),
    (nn.Module, Search._module),
    ((types.ModuleType, type, enum.Enum), Search._source),
    (functools.partial, Search._partial),
    (SEQUENCES, Search._sequence),
    (dict, Search._dict),
)


@by_class
def _visit_of(kind: type) -> _Visit:
    if kind in _VISITS:
        return _VISITS[kind]
    if is_stream(kind):
        return Search._source
    if is_spent_by_use(kind):
        return Search._iterator
    if is_buffer(kind):
        return Search._buffer
    for cls, visit in _VISITS_OF_SUBCLASSES:
        if issubclass(kind, cls):
            return visit
    return Search._wrapper if defines(kind, "__remat_options__") else Search._object
