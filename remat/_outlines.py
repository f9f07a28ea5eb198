"""What the last search of a module found, in so far as it is still so.

Most models are trees of modules that hold parameters, buffers, flags and empty dicts of
hooks, and most calls find them as the call before did. Then nothing is walked: one
comparison says that each module holds the same objects.

Invariant: an outline is used only where a search would find the same tensors in the
same order by the same names; tensors are read anew each time. It keeps nothing of the
user's alive but constants: what else may die is known by weak references, and the
outline goes with it, for its address may be used again.
Rejected: an outline kept in the module, which copies and pickles of it would hold.
"""

import functools
import gc
import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress
from typing import Any

from torch import Tensor, nn

from remat._closed import ClosedCode
from remat._code import CONSTANT
from remat._objects import identities, slots_of
from remat._replicas import ModuleNode, registries_of
from remat._sources import has_own_code
from remat._trees import Part, Tree


_dict_of = operator.attrgetter("__dict__")
_HELD = frozenset({*CONSTANT, bytes, range, types.CodeType})
_WATCHED = frozenset({OrderedDict, set})
_HEAP_TYPE = 1 << 9  # CPython: made by a class statement


class Outline:
    """A tree of modules, without its tensors.

    Args:
        nodes: of its modules, in the order of the search.
        first: the index of its first tensor in that search.

    Attributes:
        parts: its modules.
        texts: how each tensor is written from the root.
        registered: which tensors are buffers.
        signature: types and modes of the modules.
        walked: the attributes to be walked in any case: module, name, and how they are
            written from the root.
    """

    __slots__ = (
        "_alive",
        "_classes",
        "_code",
        "_empty",
        "_filled",
        "_held",
        "_identities",
        "_lengths",
        "_modules",
        "_names",
        "_present",
        "_registries_of",
        "_types",
        "_vacant",
        "_with_modules",
        "_with_tensors",
        "parts",
        "registered",
        "signature",
        "texts",
        "walked",
    )

    def __init__(self, nodes: Sequence[ModuleNode], first: int) -> None:
        place = {id(node): k for k, node in enumerate(nodes)}
        self.parts = [_part(node, place, first) for node in nodes]
        places = dict(_places(self.parts, 0, ""))
        self.texts, self.registered = _described(self.parts, places)
        modes = [node.mode() for node in nodes]
        self.signature = [*chain.from_iterable(modes)]
        kinds = dict.fromkeys(type(node.value) for node in nodes)
        self._classes = [weakref.ref(kind) for kind in kinds if has_own_code(kind)]
        self._code = ClosedCode.of([kind for kind in kinds if has_own_code(kind)])
        self._look([node.value for node in nodes])
        self.walked = [
            (k, name, f"{places[k]}.{name}")
            for k, node in enumerate(nodes)
            for name, value in node.entries.items()
            if not _is_settled(value)
        ]

    def _look(self, modules: list[nn.Module]) -> None:
        dicts = [*map(_dict_of, modules)]
        registries = [*chain.from_iterable(map(registries_of, dicts))]
        self._filled = [len(registry) > 0 for registry in registries]
        self._vacant = [not filled for filled in self._filled]
        self._with_modules = [f and k % 3 == 2 for k, f in enumerate(self._filled)]
        self._with_tensors = [f and k % 3 != 2 for k, f in enumerate(self._filled)]
        filled = [*compress(registries, self._filled)]
        self._names = [*chain.from_iterable(filled)]
        self._lengths = [*map(len, chain(dicts, filled))]
        values = gc.get_referents(*dicts)
        self._registries_of = _getter(registries, values)
        values += gc.get_referents(*compress(registries, self._with_modules))
        self._identities = identities(values)
        self._empty = [type(v) in _WATCHED and not v for v in values]
        tensors = self._tensors(registries)
        self._types = [*map(type, tensors)]
        self._present = [t is not None for t in tensors]
        self._alive = alive = [True]

        def forget(_: object) -> None:
            alive.clear()

        self._modules = [weakref.ref(m, forget) for m in modules]
        watched = [weakref.ref(v, forget) for v in compress(values, self._empty)]
        constants = [v for v in values if _is_settled(v) and type(v) not in _WATCHED]
        self._held = [*watched, *constants]

    def open_classes(self) -> list[type]:
        """Return those classes of the modules whose code may lead to a stream."""
        if self._code is not None and self._code.is_as_it_was():
            return []
        self._code = None
        kinds = [ref() for ref in self._classes]
        return [kind for kind in kinds if kind is not None]

    def match(self) -> tuple[Tree, list[Tensor]] | None:
        """Return the tree and its tensors as they are now, unless it is another."""
        if not self._alive:
            return None
        try:
            return self._match()
        except (AttributeError, IndexError, TypeError):  # somebody replaced a registry
            return None

    def _match(self) -> tuple[Tree, list[Tensor]] | None:
        modules: list[Any] = [ref() for ref in self._modules]
        dicts = [*map(_dict_of, modules)]
        values = gc.get_referents(*dicts)
        registries: Sequence[Any] = self._registries_of(values)
        filled = [*compress(registries, self._filled)]
        values += gc.get_referents(*compress(registries, self._with_modules))
        if (
            any(compress(registries, self._vacant))
            or [*map(len, chain(dicts, filled))] != self._lengths
            or identities(values) != self._identities
            or any(compress(values, self._empty))
            or [*chain.from_iterable(filled)] != self._names
        ):
            return None
        tensors = self._tensors(registries)
        if not all(map(operator.is_, map(type, tensors), self._types)):
            return None
        if False in self._present:
            tensors = [*compress(tensors, self._present)]
        entries = [*map(dict.copy, dicts)]
        return Tree(self.parts, len(self.texts), modules, entries), tensors

    def _tensors(self, registries: Sequence[dict[str, Any]]) -> list[Any]:
        with_tensors = compress(registries, self._with_tensors)
        return [*chain.from_iterable(map(dict.values, with_tensors))]


def _getter(
    parts: Sequence[object], values: Sequence[object]
) -> Callable[[Sequence[object]], Sequence[object]]:
    """Return what takes `parts` out of `values` by position."""
    places = {id(value): k for k, value in enumerate(values)}
    return operator.itemgetter(*[places[id(part)] for part in parts])


def _part(node: ModuleNode, place: dict[int, int], first: int) -> Part:
    parameters, buffers = (
        tuple((n, -1 if i is None else i - first) for n, i in registry.items())
        for registry in (node.parameters, node.buffers)
    )
    modules = tuple((name, place[id(child)]) for name, child in node.submodules)
    return Part(parameters, buffers, modules)


def _places(parts: list[Part], k: int, text: str) -> Iterator[tuple[int, str]]:
    """Yield modules, and how they are written from the root."""
    yield k, text
    for name, child in parts[k].modules:
        yield from _places(parts, child, f"{text}.{name}")


def _described(
    parts: list[Part], places: dict[int, str]
) -> tuple[list[str], list[bool]]:
    """Return how each tensor is written, and whether it is a buffer."""
    texts: list[str] = []
    registered: list[bool] = []
    for k, part in enumerate(parts):
        for registry in part.parameters, part.buffers:
            names = [name for name, i in registry if i >= 0]
            texts += [f"{places[k]}.{name}" for name in names]
            registered += [registry is part.buffers] * len(names)
    return texts, registered


def _is_settled(value: Any) -> bool:
    """Say whether the identity of a value, and its being empty, says what it holds."""
    kind = type(value)
    if kind is tuple:
        return _HELD.issuperset(map(type, value))
    return kind in _HELD or (kind in _WATCHED and not value)


def is_regular(nodes: Sequence[ModuleNode], first: int) -> bool:
    """Say whether an outline can describe what a search found under a module."""
    indices: list[int] = []
    for node in nodes:
        both = chain(node.parameters.values(), node.buffers.values())
        indices += (i for i in both if i is not None)
        if node.children or len(node.submodules) != len(node.modules):
            return False
    place = {id(node) for node in nodes}
    below = [id(child) for node in nodes for _, child in node.submodules]
    return (
        indices == [*range(first, first + len(indices))]
        and len(below) == len({*below}) == len(nodes) - 1
        and place.issuperset(below)
        and all(_is_plain(type(node.value)) for node in nodes)
    )


def _is_plain(kind: type) -> bool:
    """Say whether instances are made of a `__dict__` alone, which may be asked for."""
    own = kind.__mro__[: kind.__mro__.index(nn.Module)]
    asked = any("__getattribute__" in cls.__dict__ for cls in own)
    heap = all(cls.__flags__ & _HEAP_TYPE for cls in kind.__mro__[:-1])
    return heap and not asked and not slots_of(kind)


# --- What is known of the modules that were searched ---


class _Known:
    __slots__ = ("misses", "outline", "root")

    def __init__(self, root: "weakref.ref[nn.Module]") -> None:
        self.root = root
        self.outline: Outline | None = None
        self.misses = 0


_KNOWN: dict[int, _Known] = {}


def _forget(key: int, _: object) -> None:
    _KNOWN.pop(key, None)


def find_tree(root: nn.Module) -> tuple[Outline, Tree, list[Tensor]] | None:
    """Return what is known of the tree under a module, if it is as it was last."""
    known = _KNOWN.get(id(root))
    if known is None or known.outline is None:
        return None
    found = known.outline.match()
    if found is None:
        return None
    known.misses = 0
    return known.outline, *found


def learn(root: nn.Module, nodes: Sequence[ModuleNode], first: int) -> None:
    """Remember what a search found under a module."""
    key = id(root)
    known = _KNOWN.get(key)
    if known is None or known.root() is not root:
        known = _KNOWN[key] = _Known(weakref.ref(root, functools.partial(_forget, key)))
    known.misses += 1
    # One seen for the first time may be the last: a replica. And one that changes with
    # each call is looked at ever more rarely.
    if known.misses > 1 and not known.misses & (known.misses - 1):
        regular = is_regular(nodes, first)
        known.outline = Outline(nodes, first) if regular else None
