"""Kinds of values: what holds nothing, what is a container, what a module's class is.

Invariant: what is remembered of a class is looked up by the class, and checked where
instances may differ. Rejected: asking each attribute of each module what it is.
"""

import threading
import types
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import torch

from remat._objects import by_class
from remat._sources import has_own_code


INERT = frozenset(
    {
        *(bool, bytes, complex, float, int, str, range, slice, type(None), type(...)),
        *(property, staticmethod, classmethod, types.CodeType, threading.Thread),
        *(types.MethodDescriptorType, types.WrapperDescriptorType),
        *(torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)


CONTAINERS = frozenset({OrderedDict, dict, list, set, tuple})
STANDARD_CONTAINERS = frozenset({*CONTAINERS, Counter, defaultdict, deque})


class _ModuleKind:
    """What is known of a class of modules.

    Attributes:
        is_scripted: whether they are TorchScript's.
        has_own_code: whether it is not a package's.
    """

    def __init__(self, kind: type) -> None:
        self.is_scripted = issubclass(kind, torch.jit.ScriptModule)
        self.has_own_code = has_own_code(kind)
        # How the attributes of its instances were last, most often those of all.
        self._kinds: list[type] = []
        self._empty = slice(0)
        self._visited: list[int] = []

    def visited(self, entries: dict[str, Any]) -> list[str]:
        """Return the attributes to walk: most are flags and empty dicts of hooks."""
        values = [*entries.values()]
        if [*map(type, values)] != self._kinds or any(values[self._empty]):
            self._learn(values)
        if not self._visited:
            return []
        names = [*entries]
        return [names[k] for k in self._visited]

    def _learn(self, values: list[Any]) -> None:
        self._kinds = kinds = [*map(type, values)]
        known = [kind in INERT or kind in CONTAINERS for kind in kinds]
        is_empty = [k and not v for k, v in zip(known, values, strict=True)]
        # The longest run of nothing that starts with the first empty container.
        starts = [k for k, kind in enumerate(kinds) if kind in CONTAINERS]
        start = next((k for k in starts if is_empty[k]), len(values))
        end = is_empty.index(False, start) if False in is_empty[start:] else len(values)
        self._empty = slice(start, end)
        self._visited = [
            k
            for k, kind in enumerate(kinds)
            if kind not in INERT and not start <= k < end
        ]


module_kind = by_class(_ModuleKind)
