"""Find what a call refers to: its arguments, and what its function reaches besides.

A `Search` walks arguments, closures, defaults, globals, bound objects, modules and
plain objects. The tensors that it finds are inputs of the call. What else it finds
becomes nodes, which are a snapshot: each mutable object as it is now. This file says
what is done at which kind of value.

Invariant: whatever can hold a tensor or change is either walked or listed as inert, and
a value is walked once. Globals of installed packages are not walked, for time, and
neither are the hooks of modules, which may lead to the whole model.
Rejected: a snapshot of what a call turns out to use. When that is known it has changed.
"""

import enum
import functools
import types
import weakref
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from remat._capture.kinds import (
    COPIED_ITERATORS,
    SEQUENCES,
    is_buffer,
    is_rematerialized,
    is_spent_by_use,
)
from remat._capture.module_visits import visit_module
from remat._capture.objects import by_class
from remat._capture.stream_search import is_stream
from remat._capture.visits import (
    visit_as_it_is,
    visit_buffer,
    visit_builtin,
    visit_cell,
    visit_copied,
    visit_dict,
    visit_function,
    visit_iterator,
    visit_method,
    visit_object,
    visit_partial,
    visit_proxy,
    visit_sequence,
    visit_tensor,
    visit_wrapper,
)
from remat._capture.walk import Visit, Walk


_OF_CLASS: dict[type, Visit] = {
    types.FunctionType: visit_function,
    types.MethodType: visit_method,
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
    (functools.partial, visit_partial),
    (SEQUENCES, visit_sequence),
    (dict, visit_dict),
)


class Search(Walk):
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
