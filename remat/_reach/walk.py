"""A walk over what one root of a call reaches.

Invariant: each value is visited once, and all that is visited is held until the walk
ends: no other value gets the identity of one.
Rejected: recursion. A linked list may be longer than Python's stack.
"""

import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Sequence
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from remat._base.code import is_library, known_code
from remat._base.interpreter import nested
from remat._base.types import ATOMS, TENSORS
from remat._reach.holders import (
    MISSING,
    OWNED,
    PARTS,
    SLOTS,
    HolderKind,
    container_kind,
    kinds_of,
    refers_to,
    variable_value,
)
from remat._reach.objects import (
    HOOKS,
    REGISTRIES,
    TEMPLATE,
    can_be_made_anew,
    dict_of,
    is_left_alone,
    is_left_alone_in,
    is_rematerialized,
    is_sharded,
    is_spent_by_use,
    is_view,
    slots_of,
)
from remat._reach.stream_search import (
    CodeFacts,
    StreamSearch,
    held_by_function,
    is_scripted,
    is_stream,
    methods_with_state,
    user_bases,
)
from remat._reach.watched import has_objects, is_bare_buffer, is_buffer
from remat._torch.process import MODULE_HOOKS
from remat._torch.tracing import is_compiled


_FROZEN = tuple, frozenset
_BELOW = *_FROZEN, *PARTS  # no owners, though weak references may be made
_LARGE = 1000  # entries, above which numbers are not copied in each call


class Walk:
    """A walk over what a function, a module or another object reaches, each value once.

    Attributes:
        objects: those that have a dict and weak references.
        functions: of Python.
        classes: the user's.
        slotted: objects with slots.
        scripted: modules of TorchScript.
        linked: modules that are no part of the root, which have layouts of their own.
        builtins: functions in C.
        variables: context variables.
        vacant: of modules, by their number in `objects`, the hook dicts that are empty.
        scopes: for each namespace, by identity, a function or a Python module of the
            user's that has it, and the names that code refers to.
        seen: all that was visited, held: no other value gets the identity of one.
        kinds: how holders that are no owners are read, by identity.
        special: the identities of iterators, buffers and large containers.
        spaces: the user's Python modules.
        root: where it starts.
        facts: what the code that is reached does.
    """

    def __init__(self, root: Any) -> None:
        self.objects: list[Any] = []
        self.functions: list[Any] = []
        self.classes: list[type] = []
        self.slotted: list[Any] = []
        self.scripted: list[Any] = []
        self.linked: list[Any] = []
        self.builtins: list[Any] = []
        self.variables: list[Any] = []
        self.vacant: list[tuple[int, tuple[str, ...]]] = []
        self.scopes: dict[int, tuple[Any, dict[str, None]]] = {}
        self.seen: dict[int, Any] = {}
        self.kinds: dict[int, tuple[HolderKind, ...]] = {}
        self.special: set[int] = set()
        self.spaces: list[types.ModuleType] = []
        self.facts = CodeFacts()
        self._search = StreamSearch(self.facts)
        self._class_ids: set[int] = set()
        self._attributes: set[str] = set()
        self._todo: deque[Any] = deque()
        # Hooks of modules. What only they lead to comes last.
        self._hooks: deque[Any] = deque()
        self.root, self._is_hooked = root, False
        if root is MODULE_HOOKS.module:
            self.spaces.append(root)
            self.scopes[id(vars(root))] = root, dict.fromkeys(MODULE_HOOKS.names)
            self._todo += MODULE_HOOKS.dicts
        else:
            self._reach(root, is_own=True)
        while self._todo or self._hooks:
            if not self._todo:
                self._todo, self._hooks, self._is_hooked = self._hooks, deque(), True
            self._reach(self._todo.popleft())
            if not self._todo:
                self._reach_attributes_of_spaces()

    def _reach(self, value: Any, *, is_own: bool = False) -> None:
        kind = type(value)
        if (
            kind in ATOMS
            or kind in TENSORS
            or value is MISSING
            or id(value) in self.seen
        ):
            return
        self.seen[id(value)] = value
        if issubclass(kind, Tensor):
            return
        if kind is types.FunctionType:
            self._reach_function(value)
        elif issubclass(kind, nn.Module):
            if is_own:
                self._reach_module(value)
            elif self._is_hooked and any(m is self.root for m in value.modules()):
                # A hook may hold the whole model, and each block of that may be a root:
                # of a module that the root is in the attributes, and no other modules.
                self._reach_class(kind)
                self.objects.append(value)
                held = vars(value).items()
                self._todo += (v for name, v in held if name not in TEMPLATE)
            else:
                self.linked.append(value)
        elif issubclass(kind, type):
            self._reach_class(value)
        elif is_stream(kind):
            self.facts.add_stream(value)
        elif kind is ContextVar:
            self.variables.append(value)
            self._todo.append(variable_value(value))
        else:
            self._reach_other(value, kind)

    def _reach_other(self, value: Any, kind: type) -> None:
        how = container_kind(kind)
        if how is not None:
            self._reach_container(value, how)
        elif issubclass(kind, PARTS):
            self._reach_part(value, kind)
        elif is_spent_by_use(kind):
            self._search.walk(value)
            self.special.add(id(value))
            self.facts.has_iterators = True
        elif is_buffer(kind):
            if not has_objects(value):
                self.special.add(id(value))
            if not is_bare_buffer(kind):
                self._reach_held(value, kind)
        elif is_used_as_it_is(value, kind):
            self._search.walk(value)
            if kind is types.ModuleType and not is_library(vars(value)):
                self.spaces.append(value)
        else:
            self._reach_held(value, kind)

    def _reach_part(self, value: Any, kind: type) -> None:
        if is_of_library(value):
            self.builtins.append(value)
        elif not is_of_atoms(value):
            self._reach_held(value, kind)

    def _reach_attributes_of_spaces(self) -> None:
        """Walk what code may read of the user's modules, as `settings.scale`."""
        for module in self.spaces:
            held = vars(module)
            _, names = self.scopes.setdefault(id(held), (module, {}))
            if module is not MODULE_HOOKS.module:
                new = [n for n in held if n in self._attributes and n not in names]
                names.update(dict.fromkeys(new))
                self._todo += map(held.__getitem__, new)

    def _reach_container(self, value: Any, how: HolderKind) -> None:
        items = [*how.items(value)]
        if len(items) > _LARGE and _are_plain(items):
            self.special.add(id(value))
            return
        if type(value) in _FROZEN and ATOMS.issuperset(map(type, items)):
            return  # it is as good as a number
        self._reach_held(value, type(value))

    def _reach_function(self, fn: types.FunctionType) -> None:
        known = known_code(fn)
        self.facts.add_function(fn, known)
        self.functions.append(fn)
        self._todo += held_by_function(fn)
        if is_compiled(fn.__dict__):
            return
        scope, own = fn.__globals__, (*known.open, *known.names.stored)
        # What is settled leads nowhere, but its name may be given to something else.
        names = dict.fromkeys((*own, *(n for n in known.settled if n in scope)))
        if not is_library(scope):
            self._attributes |= names_in(fn.__code__)
        if names:
            self.scopes.setdefault(id(scope), (fn, {}))[1].update(names)
            self._todo += (scope.get(name, MISSING) for name in own)

    def _reach_class(self, cls: type) -> None:
        for i, name in methods_with_state(cls):
            self._todo.append(vars(cls.__mro__[i]).get(name))
        for i in user_bases(cls):
            base = cls.__mro__[i]
            if id(base) in self._class_ids:
                continue
            self._class_ids.add(id(base))
            self._reach_class(type(base))
            self.seen[id(base)] = base
            self.classes.append(base)
            held = base.__dict__
            self._todo += (held[name] for name in held if name not in _MAKING)

    def _reach_held(self, value: Any, kind: type) -> None:
        """Walk a container, an object, or what can be called or read through."""
        self._reach_class(kind)
        is_owner = bool(kind.__weakrefoffset__) and not issubclass(kind, _BELOW)
        for how in kinds_of(value, kind):
            keys, items = how.held(value)
            self._todo += (*items, *keys)
            if is_owner and how is OWNED:
                self.objects.append(value)
            elif is_owner and how is SLOTS:
                self.slotted.append(value)
            else:
                self._hold(value, how)

    def _reach_module(self, root: nn.Module) -> None:
        """Walk a module and those that are registered in it."""
        todo: deque[tuple[Any, bool]] = deque([(root, False)])
        while todo:
            module, sharded = todo.popleft()
            self.seen[id(module)] = module
            kind = type(module)
            sharded = sharded or is_sharded(kind)
            if issubclass(kind, torch.jit.ScriptModule):
                self.scripted.append(module)
                self.facts.compiled = True
                continue
            self._reach_class(kind)
            if slots_of(kind):
                self.slotted.append(module)
                self._todo += SLOTS.items(module)
            if is_view(kind):
                todo.append((module._remat_module, sharded))
                continue
            self._reach_registered(module, sharded)
            below = (m for m in module._modules.values() if m is not None)
            todo += ((m, sharded) for m in below if id(m) not in self.seen)

    def _reach_registered(self, module: Any, sharded: bool) -> None:
        held = vars(module)
        if held.get("inplace"):  # of torch: their code is not read
            self.facts.writes = True
        self.objects.append(module)
        self._todo += (v for name, v in held.items() if name not in TEMPLATE)
        hooked = [name for name in HOOKS if held.get(name)]
        registered = REGISTRIES[1:] if sharded else REGISTRIES  # not the parameters
        for registry in map(held.__getitem__, (*registered, *hooked)):
            self._hold(registry, kinds_of(registry, type(registry))[0])
        tensors = (*held["_parameters"].values(), *held["_buffers"].values())
        self.facts.is_lazy |= any(
            t is not None and type(t) is not nn.Parameter and is_lazy(t)
            for t in tensors
        )
        for name in hooked:
            self._hooks += itertools.filterfalse(_is_left_alone, held[name].values())
        vacant = tuple(name for name in HOOKS if name in held and not held[name])
        self.vacant.append((len(self.objects) - 1, vacant))

    def _hold(self, value: Any, how: HolderKind) -> None:
        """List a value that is no owner as a holder."""
        self.seen[id(value)] = value
        self.kinds[id(value)] = (*self.kinds.get(id(value), ()), how)


def _code_of(hook: Any) -> Any:
    """Return the function that a hook calls, or its class."""
    while issubclass(type(hook), (partial, types.MethodType)):
        hook = hook.func if issubclass(type(hook), partial) else hook.__func__
    return hook if type(hook) is types.FunctionType else type(hook)


def _is_left_alone(hook: Any) -> bool:
    """Say whether a hook is of remat, or not searched: it may lead to a whole model."""
    module = str(_code_of(hook).__module__)
    return module.startswith("remat.") or is_left_alone_in(module)


def is_hook_of_library(hook: Any) -> bool:
    """Say whether a hook is code of an installed package."""
    code = _code_of(hook)
    if type(code) is types.FunctionType:
        return is_library(code.__globals__)
    return not user_bases(code)


def names_in(code: types.CodeType) -> set[str]:
    """Return the names of variables and attributes in code, and in what is nested."""
    return {name for here in nested(code) for name in here.co_names}


def _are_plain(items: Sequence[Any]) -> bool:
    """Say whether all items are numbers, words, and tensors without gradients."""
    kinds = {*map(type, items)} - ATOMS
    return kinds <= TENSORS and not any(
        type(v) in TENSORS and v.requires_grad for v in items
    )


# --- How a value is treated, by its class ---


def can_be_revived(kind: type) -> bool:
    """Say whether an instance need not be held to be there for a recompute.

    One with `__del__` is not held: a recompute refuses it once it is gone.
    """
    if hasattr(kind, "__del__"):
        return True
    return container_kind(kind) is not None or can_be_made_anew(kind)


def is_of_library(value: Any) -> bool:
    """Say whether a value is a function in C, and no method of a value."""
    kinds = types.BuiltinFunctionType, types.MethodWrapperType
    if not issubclass(type(value), kinds):
        return False
    owner = value.__self__
    if owner is None or isinstance(owner, (types.ModuleType, type)):
        return True
    return not hasattr(type(owner), value.__name__)  # a function that pybind11 made


def is_of_atoms(value: Any) -> bool:
    """Say whether a value is a slice of numbers, and as good as one."""
    return type(value) is slice and ATOMS.issuperset(map(type, refers_to(value)))


def is_opaque(value: Any, kind: type) -> bool:
    """Say whether a value is held as it is: a stream, an array, what is not walked."""
    if is_stream(kind) or is_buffer(kind):
        return True
    if issubclass(kind, (*_WALKED, *PARTS)) or container_kind(kind) is not None:
        return issubclass(kind, PARTS) and is_of_library(value)
    return not is_spent_by_use(kind) and is_used_as_it_is(value, kind)


_WALKED = types.FunctionType, nn.Module, type, ContextVar


def is_used_as_it_is(value: Any, kind: type) -> bool:
    """Say whether a value is neither read nor put back."""
    if is_rematerialized(kind) or kind is types.CellType:
        return False
    if issubclass(kind, (types.ModuleType, weakref.ref)) or is_scripted(kind):
        return True
    if is_left_alone(kind) and not issubclass(kind, _SEARCHED):
        return True
    return dict_of(value) is None and not slots_of(kind)


# Classes of the standard library whose instances hold what users put there.
_SEARCHED = (
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
    threading.local,
)
# Attributes of classes that say how these were made.
_MAKING = {
    *("__abstractmethods__", "__annotations__", "__dataclass_fields__"),
    *("__dataclass_params__", "__dict__", "__doc__", "__match_args__", "__module__"),
    *("__slots__", "__weakref__", "_abc_impl", "_field_defaults"),
}
