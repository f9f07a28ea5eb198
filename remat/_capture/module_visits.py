"""What a walk does at a module, and at what is registered in it.

Invariant: as of `visits`. Hooks are not walked: they may lead to the whole model.
Rejected: a module as an object like others. Its dictionaries are copied in one piece.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from remat._base.types import INERT
from remat._capture.kinds import is_sharded, is_view
from remat._capture.modules import ModuleNode, ViewNode
from remat._capture.nodes import Node
from remat._capture.paths import Path
from remat._capture.visits import look_at_class
from remat._capture.walk import Walk


def visit_module(walk: Walk, module: nn.Module, path: Path) -> Node | None:
    """Walk a module."""
    if issubclass(type(module), torch.jit.ScriptModule):
        return _visit_script_module(walk, module, path)
    if is_view(type(module)):
        return _visit_view(walk, module, path)
    return _walk_module(walk, module, path)


def _visit_view(walk: Walk, view: Any, path: Path) -> Node | None:
    """Walk the module that a view is of."""
    outer = walk.is_sharded
    walk.is_sharded = outer or is_sharded(type(view))
    node = walk.walk_fixed(view, ViewNode(view), path)
    walk.is_sharded = outer
    return node


def _walk_module(walk: Walk, module: nn.Module, path: Path) -> Node:
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
    node.seal()
    walk.is_sharded = outer
    return node


def _indices(
    walk: Walk, registered: dict[str, Any], path: Path, *, is_buffer: bool
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


def _visit_script_module(walk: Walk, module: Any, path: Path) -> None:
    """Add the parameters of a module that cannot be taken apart."""
    found = walk.found
    found.stream_search.compiled = True
    found.scripted = found.scripted or module.original_name
    for name, value in module.named_parameters():
        found.index_of(value, (path, f".{name}"))
