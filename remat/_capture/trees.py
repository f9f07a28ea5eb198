"""What a search found in a module, remembered until something in the module changes.

A block of a model is a dozen modules and what they hold, which hardly ever changes
between calls. A `Tree` is what one search found in a module: its nodes, and a
fingerprint of all that they stand for. While the fingerprint holds, a search takes the
tree over, and a recompute runs on the module as it is.

Invariant: a tree is used only where a search would find the same. It holds no tensor
and no module, so that it keeps no model alive. A module is remembered only if it leads
to nothing but modules without hooks, plain objects, lists, dicts, tensors and numbers.
Rejected: to be told of assignments. Attributes are in a dict, and Python 3.11 lets
nobody watch a dict. With `REMAT_NO_CACHE=1` in the environment nothing is remembered.
"""

import contextlib
import enum
import itertools
import operator
import os
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from remat._base.types import INERT
from remat._capture.callables import MethodNode, WrapperNode
from remat._capture.containers import ContainerNode
from remat._capture.kinds import can_be_made_anew
from remat._capture.modules import TEMPLATE, ModuleNode, hooks_of, registries_of
from remat._capture.nodes import Building, Composite, Node, ObjectNode, TensorNode
from remat._capture.objects import identities, slots_of
from remat._capture.structure import written


_CONTAINERS = frozenset((list, tuple, set, frozenset, dict, OrderedDict))
_INDEXED = frozenset((list, tuple, dict, OrderedDict))
# Values that no search walks, and that hold no state.
_FIXED = (type, enum.Enum, types.BuiltinFunctionType)
_MISSES = 3  # a module that changed so often in a row is searched in each call
_FEW = 3  # values; fewer are searched faster than compared


class NotRememberedError(Exception):
    """A module cannot be remembered."""


class Fingerprint:
    """Tells whether modules and objects hold what they held.

    All identities are compared at once. An identity tells a value only while the value
    is alive. So constants are held here, and the others are watched by weak references.

    Args:
        modules: the modules.
        others: the other objects, which have a `__dict__`.
        walked: the identities of all that the search walked.

    Attributes:
        classes: the classes among what they hold.
    """

    __slots__ = (
        *("_alive", "_constants", "_count", "_dicts", "_getters", "_keys", "_refs"),
        *("_then", "classes"),
    )

    def __init__(
        self, modules: Sequence[nn.Module], others: Sequence[Any], walked: Any
    ) -> None:
        self._count = len(modules)
        self._refs = [*map(weakref.ref, (*modules, *others))]
        self._getters = [*map(_getter_of, (*modules, *others))]
        self._keys = [*_container_keys([*map(vars, (*modules, *others))])]
        kinds = enumerate(map(type, self.containers()))
        self._dicts = [i for i, kind in kinds if issubclass(kind, dict)]
        held, self._then = self._now()
        self._constants = [*filter(_is_constant, held)]
        rest = [v for v in held if type(v) not in INERT and type(v) not in _CONTAINERS]
        if not all(isinstance(v, _FIXED) or id(v) in walked for v in rest):
            raise NotRememberedError
        self.classes = [v for v in rest if isinstance(v, type)]
        self._alive = [weakref.ref(value) for value in rest]

    def holds(self) -> bool:
        """Say whether they hold the same now."""
        try:
            is_same = self._now()[1] == self._then
        except (TypeError, LookupError):  # one is gone, or holds something else
            return False
        # By type: a tensor would be compared with None.
        return is_same and _NONE not in {type(ref()) for ref in self._alive}

    def tells_of(self, tensors: Iterable[Tensor]) -> bool:
        """Say whether it would notice that one of these tensors was exchanged."""
        return {*map(id, tensors)} <= {id(ref()) for ref in self._alive}

    def _now(self) -> tuple[tuple[Any, ...], Any]:
        """Return all that they hold, and what tells it from anything else."""
        values = [*map(operator.call, self._refs)]
        dicts: list[Any] = [*map(vars, values)]
        of_modules = dicts[: self._count]
        if any(flatten(map(hooks_of, of_modules))):
            raise LookupError
        containers = self._containers_in(dicts)
        registered = [*flatten(map(registries_of, of_modules))]
        registered += map(containers.__getitem__, self._dicts)
        held = (
            *flatten(map(operator.call, self._getters, dicts)),
            *flatten(containers),
            *flatten(registered),
            *flatten(map(dict.values, registered)),
        )
        sizes = [*map(len, (*dicts, *containers, *registered))]
        return held, (identities(held), sizes, [*map(type, values)])

    def containers(self) -> list[Any]:
        """Return the containers among what they hold."""
        return self._containers_in([vars(ref()) for ref in self._refs])

    def _containers_in(self, dicts: Sequence[dict[str, Any]]) -> list[Any]:
        containers: list[Any] = []
        for where, key in self._keys:
            container = (dicts[where] if where >= 0 else containers[~where])[key]
            containers.append(container)
        return containers


def _getter_of(value: Any) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return what gets the attributes of an object from its `__dict__`."""
    names = vars(value).keys()
    if isinstance(value, nn.Module):
        names = [name for name in names if name not in TEMPLATE]
        names.append("training")
    if not names:
        return tuple
    # One name twice, for with a single one no tuple is returned.
    return operator.itemgetter(*names, *names if len(names) == 1 else ())


_NONE = type(None)
flatten = itertools.chain.from_iterable


def _is_constant(value: Any) -> bool:
    """Say whether a value is the same as long as it is alive."""
    kind = type(value)
    is_tuple = kind is tuple or kind is frozenset
    return kind in INERT or (is_tuple and INERT.issuperset(map(type, value)))


def _container_keys(dicts: list[dict[str, Any]]) -> Iterable[tuple[int, Any]]:
    """Yield where each container is: the number of what holds it, and its key there.

    Dicts are numbered from 0 up, containers that hold others from -1 down.
    """
    todo = [(i, name, v) for i, d in enumerate(dicts) for name, v in d.items()]
    todo = [(i, name, v) for i, name, v in todo if name not in TEMPLATE]
    count = 0
    for where, key, value in todo:  # which grow
        kind = type(value)
        if kind not in _CONTAINERS or _is_constant(value):
            continue
        yield where, key
        is_dict = issubclass(kind, dict)
        items = value.items() if is_dict else enumerate(value)
        inside = [(~count, k, v) for k, v in items if type(v) in _CONTAINERS]
        if inside and kind not in _INDEXED:
            raise NotRememberedError
        todo += inside
        count += 1


class Tree:
    """What a search found in a module.

    Args:
        module: the module.
        search: a new one.

    Attributes:
        module: a weak reference to it.
        node: how to make it again.
        tensors: weak references to the tensors found.
        texts: how each is written after the module.
        registered: whether each is a buffer of a module.
        owners: for each tensor, by index, what holds it.
        code: the code found.
        kinds: the classes found.
        functions: weak references to the functions found.
        fingerprint: of all that was found.
    """

    __slots__ = (
        *("code", "fingerprint", "functions", "kinds", "module", "node", "owners"),
        *("registered", "tensors", "texts"),
    )

    def __init__(self, module: nn.Module, search: Any) -> None:
        self.node: Any = search.visit(module, None)
        self.module: Callable[[], Any] = weakref.ref(module)
        found = search.found
        self.tensors = [*map(weakref.ref, found.tensors)]
        self.texts = [written(path)[1] for path in found.origins]
        self.code = found.code
        walked = search.walked()
        if len(walked) < _FEW:
            raise NotRememberedError  # to search it is faster than to compare
        nodes = [node for _, node in walked if node is not None]
        modules = [(v, n) for v, n in walked if isinstance(n, ModuleNode)]
        buffers = {i for _, node in modules for i in node.buffers.values()}
        self.registered = [i in buffers for i in range(len(self.tensors))]
        self.owners: dict[int, list[Composite]] = {}
        for node in nodes:
            for i in _indices_in(node):
                self.owners.setdefault(i, []).append(node)
        functions = [v for v, _ in walked if type(v) is types.FunctionType]
        self.functions = [*map(weakref.ref, functions)]
        others = [v for v, n in walked if isinstance(n, _OTHERS)]
        others = [v for v in others if not isinstance(v, nn.Module)]
        draws = found.streams or found.handles_states or found.compiled
        is_plain = not (found.is_lazy or found.scripted or draws)
        if not is_plain or not all(_is_remembered(*pair) for pair in walked):
            raise NotRememberedError
        ids = {id(value) for value, _ in walked}
        ids |= {*map(id, found.tensors)}
        self.fingerprint = Fingerprint([v for v, _ in modules], others, ids)
        if not self.fingerprint.tells_of(found.tensors):
            raise NotRememberedError  # another thread is exchanging them
        kinds = {type(v) for v, n in walked if isinstance(n, ObjectNode)}
        self.kinds = [*{*kinds, *self.fingerprint.classes}]


_OTHERS = ObjectNode, WrapperNode
_ALIKE = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(tuple, frozenset),
)


def _is_remembered(value: Any, node: Composite | None) -> bool:
    """Say whether what was walked is of a kind that a fingerprint tells about."""
    kind = type(value)
    if isinstance(node, ObjectNode):
        is_plain = not slots_of(kind) and can_be_made_anew(kind)
        if isinstance(node, ModuleNode):
            return is_plain and not node.hooks and not node.is_sharded
        return is_plain
    if isinstance(node, ContainerNode):
        return kind in _CONTAINERS
    if isinstance(node, WrapperNode):
        return not node.has_policy
    return isinstance(node, MethodNode) or (node is None and kind in _ALIKE)


def _indices_in(node: Composite) -> Iterable[int]:
    """Yield the tensors that a node itself holds, by index."""
    yield from (n.index for n in node.children.values() if isinstance(n, TensorNode))
    if isinstance(node, ContainerNode):
        yield from (i for _, i in node.tensors)
    if isinstance(node, ModuleNode):
        held = (*node.parameters.values(), *node.buffers.values())
        yield from (i for i in held if i is not None)


class TreeNode(Node):
    """A module by its tree.

    Attributes:
        tree: the tree.
        indices: of its tensors, among those that this search found.
        live: as of nodes.
    """

    __slots__ = ("indices", "live", "tree")

    def __init__(self, tree: Tree, indices: Sequence[int]) -> None:
        self.tree, self.indices = tree, indices
        self.live = tree.node.live

    @override
    def build(self, run: Building) -> Any:
        return run.make_tree(self)


class _Known:
    """What is remembered of one module."""

    __slots__ = ("misses", "ref", "tree")

    def __init__(self, ref: Any) -> None:
        self.ref, self.misses = ref, 0
        self.tree: Tree | None = None


_KNOWN: dict[int, _Known] = {}
IS_ON = not os.environ.get("REMAT_NO_CACHE")


def tree_of(module: nn.Module, search: Callable[[], Any]) -> Tree | None:
    """Return the tree of a module as it is now; None if it is not remembered.

    Args:
        module: the module.
        search: returns a new search.
    """
    known = _KNOWN.get(id(module))
    if known is None:
        key = id(module)
        ref = weakref.ref(module, lambda _: _KNOWN.pop(key, None))
        known = _KNOWN[key] = _Known(ref)
    if known.tree is not None and known.tree.fingerprint.holds():
        known.misses = 0
        return known.tree
    # One that changes in every call is searched in every call.
    known.tree = None
    if known.misses < _MISSES:
        known.misses += 1
        with contextlib.suppress(NotRememberedError, TypeError):
            known.tree = Tree(module, search())
        if known.tree is None:
            known.misses = _MISSES
    return known.tree
