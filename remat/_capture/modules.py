"""Nodes of modules: what is registered in one, its attributes, its hooks.

A block of a model is a dozen modules, and each is looked at in every call and every
recompute. So a node copies the dictionaries of its module in one piece.

Invariant: that of `nodes`. Hooks are held as they are and not searched: they may lead
to the whole model. What they close over is used by reference, as in plain code.
Rejected: setting back only modules that changed. To find them costs as much.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from torch import nn
from typing_extensions import override

from remat._base.code import VIEWED
from remat._capture.nodes import Node, NodePart, ObjectNode, Rebuilding, named
from remat._capture.objects import slots_in


REGISTRIES = ("_parameters", "_buffers", "_modules")
TEMPLATE = vars(nn.Module())
# Hooks that run in a forward, or that change its graph.
HOOKS = tuple(
    name
    for name in TEMPLATE
    if name.startswith(("_forward_", "_backward_")) and "hook" in name
)
# What `nn.Module` sets, and no forward reads.
_ASIDE = tuple(
    name
    for name, value in TEMPLATE.items()
    if isinstance(value, (dict, set)) and name not in {*REGISTRIES, *HOOKS}
)
_VACANT = dict.fromkeys((*REGISTRIES, *HOOKS, *_ASIDE))
_NO_HOOKS: dict[str, Any] = {}


class ModuleNode(ObjectNode):
    """A module.

    Attributes:
        parameters: their indices among the tensors found.
        buffers: theirs.
        modules: the nodes of its modules.
        registries: the user's dictionaries of all three, until the search has ended.
        hooks: those that run in its forward, where there are some.
        is_sharded: whether FSDP exchanges its parameters. A run then uses those that it
            has at the time.
    """

    __slots__ = (
        *("buffers", "hooks", "is_sharded"),
        *("modules", "parameters", "registries"),
    )

    def __init__(self, value: nn.Module) -> None:
        super().__init__(value)
        entries = self.entries
        held = [entries.get(name) for name in HOOKS]
        self.hooks: dict[str, Any] = _NO_HOOKS
        if any(held):
            pairs = zip(HOOKS, held, strict=True)
            self.hooks = {name: hooks.copy() for name, hooks in pairs if hooks}
        self.registries: Any = [entries[name] for name in REGISTRIES]
        entries.update(_VACANT)
        self.parameters: dict[str, int | None] = {}
        self.buffers: dict[str, int | None] = {}
        self.modules: dict[str, Node | None] = {}
        self.is_sharded = False

    @override
    def parts(self) -> Iterator[NodePart]:
        return named({n: v for n, v in self.entries.items() if n not in TEMPLATE})

    @override
    def contents(self, run: Rebuilding, value: Any) -> dict[str, Any]:
        contents = super().contents(run, value)
        now = vars(nn.Module() if value is None else value)
        for name in _ASIDE:
            contents[name] = now.get(name)
        hooks = self.hooks
        for name in HOOKS:
            # A copy: a hook that a recompute sets is dropped with it.
            contents[name] = hooks[name].copy() if name in hooks else OrderedDict()
        tensors = run.tensors
        if self.is_sharded:
            contents["_parameters"] = now["_parameters"]
        else:
            contents["_parameters"] = _filled(self.parameters, tensors)
        contents["_buffers"] = _filled(self.buffers, tensors)
        modules: dict[str, Any] = {}
        contents["_modules"] = modules
        for name, node in self.modules.items():
            modules[name] = None if node is None else node.build(run)
        return contents


class ViewNode(ObjectNode):
    """A view of a module: an object that has the module's own dict of attributes.

    What it holds itself is in slots, one of which holds the module.
    """

    __slots__ = ()

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.entries = slots_in(value)

    @override
    def parts(self) -> Iterator[NodePart]:
        for name, value in self.entries.items():
            yield name, value, "" if name == VIEWED else f".{name}"

    @override
    def new(self, run: Rebuilding) -> Any:
        return run.make_view(self)


def _filled(indices: dict[str, int | None], tensors: Any) -> dict[str, Any]:
    # A loop: as a comprehension, this costs as much as the rest of a module.
    filled: dict[str, Any] = {}
    for name, i in indices.items():
        filled[name] = None if i is None else tensors[i]
    return filled
