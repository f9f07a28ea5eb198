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
import os
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn
from typing_extensions import override

from remat._capture.callables import MethodNode, WrapperNode
from remat._capture.containers import ContainerNode
from remat._capture.fingerprint import (
    CONTAINERS,
    Fingerprint,
    NotRememberedError,
)
from remat._capture.found import Found
from remat._capture.kinds import can_be_made_anew
from remat._capture.modules import ModuleNode
from remat._capture.nodes import Building, Composite, Node, ObjectNode, TensorNode
from remat._capture.objects import slots_of
from remat._capture.paths import written
from remat._capture.stream_search import has_user_code
from remat._capture.walk import Walk


_MISSES = 3  # a module that changed so often in a row is searched in each call
_FEW = 3  # values; fewer are searched faster than compared


@dataclass(frozen=True, eq=False, slots=True)
class Tree:
    """What a search found in a module.

    Attributes:
        module: a weak reference to it.
        node: how to make it again.
        tensors: weak references to the tensors found.
        texts: how each is written after the module.
        registered: whether each is a buffer of a module.
        owners: for each tensor, by index, the nodes that hold it.
        code: the code found.
        kinds: the classes found that have code of the user's.
        functions: weak references to the functions found.
        fingerprint: of all that was found.
    """

    module: Callable[[], Any]
    node: Any
    tensors: Sequence[Callable[[], Any]]
    texts: Sequence[str]
    registered: Sequence[bool]
    owners: Mapping[int, Sequence[Composite]]
    code: Sequence[Any]
    kinds: Sequence[type]
    functions: Sequence[Callable[[], Any]]
    fingerprint: Fingerprint


_Walked: TypeAlias = Sequence[tuple[Any, Any]]  # each value walked, and its node


def _tree_found(module: nn.Module, search: Walk) -> Tree:
    """Search a module, and return what is to be remembered of it.

    Raises:
        NotRememberedError: it cannot be remembered.
    """
    node, found = search.visit(module, None), search.found
    walked = search.walked()
    _check_is_plain(walked, found)
    fingerprint = _fingerprint_of(walked, found)
    kinds = {type(v) for v, n in walked if isinstance(n, ObjectNode)}
    functions = [v for v, _ in walked if type(v) is types.FunctionType]
    return Tree(
        weakref.ref(module),
        node,
        tensors=[*map(weakref.ref, found.tensors)],
        texts=[written(path)[1] for path in found.origins],
        registered=_are_buffers(walked, len(found.tensors)),
        owners=_owners_in(walked),
        code=found.code,
        kinds=[*filter(has_user_code, {*kinds, *fingerprint.classes})],
        functions=[*map(weakref.ref, functions)],
        fingerprint=fingerprint,
    )


def _check_is_plain(walked: _Walked, found: Found) -> None:
    if len(walked) < _FEW:
        raise NotRememberedError
    streams = found.stream_search
    may_draw = streams.streams or streams.handles_states or streams.compiled
    if found.is_lazy or found.scripted or may_draw:
        raise NotRememberedError
    if not all(_can_be_told(*pair) for pair in walked):
        raise NotRememberedError


def _fingerprint_of(walked: _Walked, found: Found) -> Fingerprint:
    modules = [v for v, n in walked if isinstance(n, ModuleNode)]
    others = [
        v
        for v, n in walked
        if isinstance(n, (ObjectNode, WrapperNode)) and not isinstance(n, ModuleNode)
    ]
    ids = {id(v) for v, _ in walked} | {*map(id, found.tensors)}
    fingerprint = Fingerprint(modules, others, ids)
    if not fingerprint.tells_of(found.tensors):
        raise NotRememberedError  # another thread is exchanging them
    return fingerprint


def _are_buffers(walked: _Walked, count: int) -> list[bool]:
    """Return which of the tensors found are registered as buffers."""
    nodes = [n for _, n in walked if isinstance(n, ModuleNode)]
    buffers = {i for node in nodes for i in node.buffers.values()}
    return [i in buffers for i in range(count)]


def _owners_in(walked: _Walked) -> dict[int, list[Composite]]:
    """Return the nodes that hold each tensor, by its index."""
    owners: dict[int, list[Composite]] = {}
    for _, node in walked:
        if node is not None:
            for i in _indices_in(node):
                owners.setdefault(i, []).append(node)
    return owners


# Values that need no node, and are told by what they hold.
_ALIKE = (
    *(types.FunctionType, types.MethodType, types.BuiltinFunctionType),
    *(tuple, frozenset),
)


def _can_be_told(value: Any, node: Composite | None) -> bool:
    """Say whether a fingerprint tells about values of this kind."""
    kind = type(value)
    if isinstance(node, ObjectNode):
        is_plain = not slots_of(kind) and can_be_made_anew(kind)
        if isinstance(node, ModuleNode):
            return is_plain and not node.hooks and not node.is_sharded
        return is_plain
    if isinstance(node, ContainerNode):
        return kind in CONTAINERS
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


def tree_of(module: nn.Module, search: Callable[[], Walk]) -> Tree | None:
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
            known.tree = _tree_found(module, search())
        if known.tree is None:
            known.misses = _MISSES
    return known.tree
