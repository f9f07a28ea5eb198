"""Finds what a call refers to: its arguments, and what its function reaches besides.

Tensors become inputs of the call, and what else is found becomes nodes, a snapshot. A
visit says what is done at one kind of value, and returns its node; None if nothing has
to be made again.

Invariant: whatever can hold a tensor or change is either walked or listed as inert, and
a value is remembered before its parts are walked, for it may hold itself. Not walked
are globals of installed packages, for time, and the hooks of modules.
Rejected: a snapshot of what a call turns out to use: by then it has changed. A method
of each node in place of visits: a walk may decide that it needs no node.
"""

import copy
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from remat._base.code import known_code
from remat._base.interpreter import mapping_of
from remat._base.pytree import REGISTERED, Registered
from remat._base.types import INERT
from remat._capture.compared import Iterated, Large
from remat._capture.container_kinds import container_kind
from remat._capture.containers import ContainerNode, RegisteredNode, WholeNode
from remat._capture.holders import made_of, refers_to
from remat._capture.modules import ModuleNode, ViewNode
from remat._capture.nodes import (
    CellNode,
    FunctionNode,
    MadeNode,
    Node,
    ObjectNode,
    TensorNode,
)
from remat._capture.objects import (
    COPIED_ITERATORS,
    SEQUENCES,
    by_class,
    can_be_made_anew,
    is_buffer,
    is_left_alone,
    is_rematerialized,
    is_sharded,
    is_spent_by_use,
    is_stateless,
    is_view,
)
from remat._capture.paths import Path, written
from remat._capture.stream_search import (
    has_defaults,
    has_user_code,
    is_scripted,
    is_stream,
)
from remat._capture.walk import ValueWalk, Visit
from remat._torch import is_compiled


_LARGE = 1000  # entries, above which a container is not copied in each call


def visit_tensor(walk: ValueWalk, value: Tensor, path: Path) -> Node:
    """Add a tensor."""
    return TensorNode.of(walk.found.index_of(value, path))


def visit_as_it_is(walk: ValueWalk, value: Any, path: Path) -> None:
    """Use a value as it is, and look for random streams in it."""
    del path
    walk.found.is_contained = False
    walk.found.stream_search.walk(value)


# --- Containers ---


def visit_container(walk: ValueWalk, value: Any, path: Path) -> Node | None:
    """Walk the keys and the items of a container."""
    kind, found = type(value), walk.found
    if _is_compared(value):
        return _visit_whole(walk, value, Large(value, _name(path)).as_it_was)
    how = container_kind(kind)
    assert how is not None
    if how.frozen and kind in SEQUENCES and INERT.issuperset(map(type, value)):
        found.note_constants(value)
        return None
    node = ContainerNode(value, how)
    walk.remember(value, node)
    keys = node.keys
    found.note_constants((*keys, *node.items))
    for i, key in enumerate(keys):
        if type(key) not in INERT:
            child = walk.visit(key, path)
            if child is not None:
                node.hold_key(i, child)
    names = keys if how.keyed else range(len(node.items))
    for i, part in enumerate(node.items):
        if type(part) not in INERT:
            child = walk.visit(part, (path, names[i], None))
            if child is not None:
                node.hold_item(i, child)
    walk.walk_parts(value, node, path)
    if how.frozen and not (node.children or node.tensors):
        walk.remember(value, None)
        return None
    return node


def _is_compared(value: Any) -> bool:
    """Say whether a container is compared, and not copied."""
    if len(value) <= _LARGE:
        return False
    items = value.values() if isinstance(value, dict) else value
    return INERT.issuperset({*map(type, value), *map(type, items)})


def _visit_whole(walk: ValueWalk, value: Any, give: Callable[[], Any]) -> Node:
    node = WholeNode(give)
    walk.remember(value, node)
    return node


def _name(path: Path) -> str:
    return written(path)[1].lstrip(".")


def visit_iterator(walk: ValueWalk, value: Any, path: Path) -> Node | None:
    """Note how far an iterator was read that cannot be copied."""
    streams = walk.found.stream_search.streams
    before = len(streams)
    visit_as_it_is(walk, value, path)
    if len(streams) > before:
        return None  # it draws: its stream is set back, and it is used as it is
    return _visit_whole(walk, value, Iterated(value, _name(path)).again)


def visit_copied(walk: ValueWalk, value: Any, path: Path) -> Node:
    """Copy an iterator or a buffer."""
    del path
    return _visit_whole(walk, value, functools.partial(copy.copy, copy.copy(value)))


def visit_buffer(walk: ValueWalk, value: Any, path: Path) -> Node | None:
    """Copy a buffer of numbers, if it is small."""
    rows = len(value) if getattr(value, "shape", True) else 1  # without dimensions
    return visit_copied(walk, value, path) if rows <= _LARGE else None


# --- What can be called ---


def visit_function(walk: ValueWalk, fn: types.FunctionType, path: Path) -> Node | None:
    """Walk the variables of a function, and the globals that its code names."""
    walk.found.code.append(fn.__code__)
    known = known_code(fn)
    has_more = fn.__dict__ or has_defaults(fn)
    if known.is_settled and not (fn.__closure__ or has_more):
        walk.remember(fn, None)
        return None
    walk.found.stream_search.look_at_function(fn, known)
    outer = walk.is_compiled
    # Compiled code reads globals from where it was compiled.
    walk.is_compiled = outer or is_compiled(fn.__dict__)
    names = ((), ()) if walk.is_compiled else (known.open, known.names.stored)
    node = FunctionNode(fn, *names)
    if node.is_settled and not has_more:
        walk.remember(fn, None)
        found = None
    else:
        found = walk.walk_parts(fn, node, path)
    walk.is_compiled = outer
    return found


def visit_cell(walk: ValueWalk, cell: types.CellType, path: Path) -> Node:
    """Walk what a variable of an outer function holds."""
    node = CellNode(cell)
    walk.cells.append(node)
    walk.walk_parts(cell, node, path)
    walk.cells.pop()
    return node


def visit_builtin(walk: ValueWalk, value: Any, path: Path) -> Node | None:
    """Walk the owner of a method of a built-in class."""
    walk.found.code.append(value.__name__)
    visit_as_it_is(walk, value, path)
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        return None
    return visit_parts(walk, value, path)


def visit_parts(walk: ValueWalk, value: Any, path: Path) -> Node | None:
    """Walk what a partial, a method or a read-only view is made of."""
    make = functools.partial(made_of, type(value))
    texts = ("", "self") if type(value) in _METHODS else ("", "", "", "")
    return walk.walk_fixed(value, MadeNode(make, [*refers_to(value)], texts), path)


_METHODS = types.MethodType, types.BuiltinFunctionType


def visit_wrapper(walk: ValueWalk, value: Any, path: Path) -> Node | None:
    """Walk the function of another remat."""
    walk.found.code.append(value.__remat_options__[-1].key)
    kind, rest = type(value), value.__remat_options__

    def make(parts: list[Any]) -> Any:
        return kind(*parts, *rest)

    return walk.walk_fixed(value, MadeNode(make, [value.__wrapped__], ("",)), path)


# --- Objects ---


def visit_object(walk: ValueWalk, value: Any, path: Path) -> Node | None:
    """Walk the attributes of an object, unless it is used as it is."""
    kind = type(value)
    if kind in REGISTERED:
        return visit_registered(walk, value, REGISTERED[kind], path)
    if is_left_alone(kind):
        return visit_as_it_is(walk, value, path)
    look_at_class(walk, kind)
    if is_scripted(kind):
        walk.found.stream_search.compiled = True
    if is_stateless(kind):
        walk.found.code.append(kind)
        return visit_as_it_is(walk, value, path)
    node = ObjectNode(value)
    if not (node.entries or can_be_made_anew(kind)):
        return visit_as_it_is(walk, value, path)  # of an extension module
    return walk.walk_parts(value, node, path)


def visit_registered(walk: ValueWalk, value: Any, how: Registered, path: Path) -> Node:
    """Walk what the class of a value says that it holds."""
    node = RegisteredNode(value, how)
    walk.found.note_constants(node.items)
    return walk.walk_parts(value, node, path)


def visit_proxy(walk: ValueWalk, value: Any, path: Path) -> Node | None:
    """Walk the mapping that a read-only view is of."""
    if mapping_of(value) is None:
        return visit_as_it_is(walk, value, path)
    return visit_parts(walk, value, path)


def look_at_class(walk: ValueWalk, kind: type) -> None:
    """Look for random streams in the code of a class."""
    if has_user_code(kind):
        walk.found.stream_search.look_at_class(kind)


# --- Modules ---


def visit_module(walk: ValueWalk, module: nn.Module, path: Path) -> Node | None:
    """Walk a module."""
    if issubclass(type(module), torch.jit.ScriptModule):
        return _visit_script_module(walk, module, path)
    if is_view(type(module)):
        return _visit_view(walk, module, path)
    return _walk_module(walk, module, path)


def _visit_view(walk: ValueWalk, view: Any, path: Path) -> Node | None:
    """Walk the module that a view is of."""
    outer = walk.is_sharded
    walk.is_sharded = outer or is_sharded(type(view))
    node = walk.walk_fixed(view, ViewNode(view), path)
    walk.is_sharded = outer
    return node


def _walk_module(walk: ValueWalk, module: nn.Module, path: Path) -> Node:
    kind = type(module)
    look_at_class(walk, kind)
    node, outer = ModuleNode(module), walk.is_sharded
    walk.remember(module, node)
    walk.found.code += kind, node.entries.get("training")
    node.is_sharded = walk.is_sharded = outer or is_sharded(kind)
    for name, part, text in node.parts():
        if type(part) not in INERT:
            child = walk.visit(part, (path, text))
            if child is not None:
                node.hold(name, child)
    parameters, buffers, modules = node.registries
    node.parameters = _indices(walk, parameters, path, is_buffer=False)
    node.buffers = _indices(walk, buffers, path, is_buffer=True)
    node.modules = {
        name: None if value is None else walk.visit(value, (path, f".{name}"))
        for name, value in modules.items()
    }
    node.registries = None  # which nodes hold now
    walk.is_sharded = outer
    return node


def _indices(
    walk: ValueWalk, registered: dict[str, Any], path: Path, *, is_buffer: bool
) -> dict[str, int | None]:
    """Return the indices of the tensors that are registered, by name."""
    found = walk.found
    indices: dict[str, int | None] = {}
    for name, value in registered.items():
        if value is None:
            indices[name] = None
            continue
        if type(value) is not nn.Parameter and is_lazy(value):
            found.is_lazy = True
        where = path, f".{name}"
        indices[name] = found.index_of(value, where, registered=is_buffer)
    return indices


def _visit_script_module(walk: ValueWalk, module: Any, path: Path) -> None:
    """Add the parameters of a module that cannot be taken apart."""
    found = walk.found
    found.stream_search.compiled = True
    found.scripted = found.scripted or module.original_name
    for name, value in module.named_parameters():
        found.index_of(value, (path, f".{name}"))


# --- Which visit ---


_OF_CLASS: dict[type, Visit] = {
    types.FunctionType: visit_function,
    types.MethodType: visit_parts,
    types.CellType: visit_cell,
    types.SimpleNamespace: visit_object,
    types.BuiltinFunctionType: visit_builtin,
    types.MappingProxyType: visit_proxy,
    types.ModuleType: visit_as_it_is,
    weakref.ref: visit_as_it_is,
    **dict.fromkeys(COPIED_ITERATORS, visit_copied),
}
# In this order: the first class that a value is an instance of.
_OF_SUBCLASSES: tuple[tuple[Any, Visit], ...] = (
    (Tensor, visit_tensor),
    (nn.Module, visit_module),
    ((types.ModuleType, type, enum.Enum), visit_as_it_is),
    (functools.partial, visit_parts),
    ((*SEQUENCES, dict), visit_container),
)


class CallSearch(ValueWalk):
    """A walk over what a call refers to."""

    __slots__ = ()

    @staticmethod
    @override
    @by_class
    def visit_of(kind: type, /) -> Visit:
        """Return what to do at the instances of a class."""
        if kind in _OF_CLASS:
            return _OF_CLASS[kind]
        if is_stream(kind):
            return visit_as_it_is
        if is_spent_by_use(kind):
            return visit_iterator
        if is_buffer(kind):
            return visit_buffer
        for cls, visit in _OF_SUBCLASSES:
            if issubclass(kind, cls):
                return visit
        return visit_wrapper if is_rematerialized(kind) else visit_object
