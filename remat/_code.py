"""What a function's code refers to: which global names, and whose globals they are.

Invariant: what is remembered is bounded and holds no user's globals. Rejected: walking
the globals of installed packages, which may be thousands of functions on every call.
"""

import dis
import enum
import functools
import operator
import os
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from remat._types import Fn


@dataclass(frozen=True, slots=True)
class GlobalNames:
    """Global names of a function's code.

    Attributes:
        loaded: those it loads.
        stored: those it stores or deletes.
        plain: whether it reaches for globals in no other way, and for no state either.
        handles_states: whether it reads or sets the state of a random stream.
        only_computes: whether it surely does nothing to what it is passed but compute
            with it.
        differentiates: whether it may call autograd.
    """

    loaded: tuple[str, ...]
    stored: tuple[str, ...]
    plain: bool
    handles_states: bool
    only_computes: bool
    differentiates: bool


_REFLECTION = {"__import__", "eval", "exec", "getattr", "globals", "locals", "vars"}


# Names in code that reads or sets states: it may put back a stream that it has moved,
# or set one, or a setting, where it was anyway.
STATES = {
    *("clone_state", "fork_rng", "get_rng_state", "get_state", "getstate"),
    *("initial_seed", "manual_seed", "set_rng_state", "set_state", "setstate"),
    *("deepcopy", "jumped", "set_default_dtype", "set_autocast_dtype"),
    *("use_deterministic_algorithms", "set_float32_matmul_precision"),
}
_CALLED = "seed"  # one more, but many a number is called so: it has to be called


# What names in code have in them that may set something on a tensor, or in it past its
# version, read what others set there, or run a backward; and names that tell it less.
_EFFECTS = re.compile("backward|data|grad|hook|storage|^set_|^_")
_MORE_EFFECTS = {
    *("delattr", "detach_", "next_functions", "optim", "setattr"),
    *("share_memory_", "swap_tensors", "vector_to_parameters"),
}
_SETTERS = {"DELETE_ATTR", "STORE_ATTR"}
# Without one of these names nobody calls autograd, or makes a tensor require grad.
_DIFFERENTIATES = {"autograd", "backward", "grad", "requires_grad_"}


# Oldest first. By identity: hashing a code object reads all of it.
_NAMES: dict[int, tuple[types.CodeType, GlobalNames]] = {}
_NAMES_SIZE = 4096


def global_names(code: types.CodeType) -> GlobalNames:
    """Return the global names that `code`, or code nested in it, refers to."""
    known = _NAMES.get(id(code))
    if known is None:
        if len(_NAMES) >= _NAMES_SIZE:
            del _NAMES[next(iter(_NAMES))]
        # The code is held, so that its identity is not used again.
        known = _NAMES[id(code)] = (code, _find_names(code))
    return known[1]


def _find_names(code: types.CodeType) -> GlobalNames:
    found: dict[str, dict[str, None]] = {"LOAD": {}, "STORE": {}, "DELETE": {}}
    todo = [code]
    plain, states, computes = True, False, True
    names = set[str]()
    while todo:
        here = todo.pop()
        names.update(here.co_names)
        for step in dis.get_instructions(here):
            action, _, where = step.opname.partition("_")
            if where in ("GLOBAL", "NAME") and action in found:
                found[action][str(step.argval)] = None
            plain = plain and step.opname != "IMPORT_NAME"
            computes = computes and step.opname not in _SETTERS
            if step.argval == _CALLED:
                is_method = step.opname == "LOAD_METHOD" or "NULL" in step.argrepr
                states = states or is_method
        states = states or not STATES.isdisjoint(here.co_names)
        words = _words(here, found["LOAD"])
        computes = computes and not any(map(_has_effect, words))
        todo += [c for c in here.co_consts if isinstance(c, types.CodeType)]
    stored = (*found["STORE"], *found["DELETE"])
    plain = plain and not stored and not (_REFLECTION & found["LOAD"].keys())
    plain = plain and not states
    loaded = tuple(found["LOAD"])
    differentiates = not _DIFFERENTIATES.isdisjoint(names)
    return GlobalNames(loaded, stored, plain, states, computes, differentiates)


def _words(code: types.CodeType, loaded: Container[str]) -> Iterator[str]:
    """Yield the names in code, and texts that may be used as such.

    But of what is loaded from globals, a private helper say, without the underscores.
    """
    yield from (n.lstrip("_") if n in loaded else n for n in code.co_names)
    yield from (c for c in code.co_consts if type(c) is str and c.isidentifier())


def _has_effect(name: str) -> bool:
    return name in _MORE_EFFECTS or _EFFECTS.search(name) is not None


_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
_OURS = os.path.join(os.path.dirname(__file__), "")
_LIBRARIES = (*(sysconfig.get_paths()[k] for k in _PATHS), _OURS)


@functools.lru_cache(maxsize=4096)
def _is_library_file(file: str) -> bool:
    return file.startswith(_LIBRARIES)


def is_library(scope: dict[str, Any]) -> bool:
    """Say whether a module's globals are those of the standard library or a package."""
    file = scope.get("__file__")
    if file is None:
        return scope.get("__name__") in sys.builtin_module_names
    return _is_library_file(file)


_STANDARD = tuple(sysconfig.get_paths()[k] for k in ("stdlib", "platstdlib"))
_TORCH = os.path.dirname(torch.__file__)


@functools.lru_cache(maxsize=4096)
def _is_trusted_file(file: str) -> bool:
    if file.startswith((_TORCH, _OURS)):
        return True
    return file.startswith(_STANDARD) and "site-packages" not in file


def is_trusted(scope: dict[str, Any]) -> bool:
    """Say whether a module is torch's or the standard library's: no user's tensors."""
    file = scope.get("__file__")
    if file is None:
        return scope.get("__name__") in sys.builtin_module_names
    return _is_trusted_file(file)


# Not that of a notebook or a prompt.
_GENERATED = ("<string>", "<frozen", "<eval_with_key>")


def user_line() -> str:
    """Return the innermost line of the stack that is neither torch's nor remat's."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        file = code.co_filename
        if not file.startswith(_GENERATED) and not _is_trusted_file(file):
            return f"{file}:{frame.f_lineno}, in {code.co_name}"
        frame = frame.f_back
    return "an unknown line"


def code_of(fn: types.FunctionType) -> "weakref.ref[types.CodeType]":
    """Return what stands for a function's code in a signature.

    There is one for each code object, and its hash, which reads all of the code, is
    computed once.
    """
    return weakref.ref(fn.__code__)


CONSTANT = frozenset(
    {
        *(bool, bytes, complex, float, int, str, type(None), type(...)),
        *(torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format),
    }
)


def is_constant(value: Any) -> bool:
    """Say whether a value is of a kind that reaches nothing else."""
    return type(value) in CONSTANT


def is_static(value: Any) -> bool:
    """Say whether a value is hashable and refers to nothing of the user's."""
    if type(value) is types.BuiltinFunctionType:
        return _is_constant(value)
    return is_constant(value) or isinstance(value, enum.Enum)


class Contained:
    """A function that provably reaches no tensor, and the functions that it calls.

    Attributes:
        fn: the function.
        only_computes: whether they surely do nothing to what is passed but compute.
        differentiates: whether they may call autograd.
    """

    __slots__ = (
        "_functions",
        "_held",
        "_scopes",
        "_states",
        "differentiates",
        "fn",
        "only_computes",
    )

    def __init__(self, functions: Sequence[types.FunctionType]) -> None:
        self.fn, self._functions = functions[0], functions
        self._states = [(f.__code__, None, {}, None, None) for f in functions]
        self.only_computes, self.differentiates = True, False
        loaded: dict[int, tuple[Any, dict[str, None]]] = {}
        for f in functions:
            names, scope = global_names(f.__code__), f.__globals__
            self.only_computes = self.only_computes and names.only_computes
            self.differentiates |= names.differentiates
            found = loaded.setdefault(id(scope), (scope.get, {}))[1]
            found.update(dict.fromkeys(names.loaded))
        scopes = [(get, tuple(names)) for get, names in loaded.values()]
        # Held, so that nothing else has the same identities.
        self._held = [[*map(get, names)] for get, names in scopes]
        self.differentiates |= any(map(_is_autograd, chain(*self._held)))
        ids = [[*map(id, values)] for values in self._held]
        pairs = zip(scopes, ids, strict=True)
        self._scopes = [(get, names, numbers) for (get, names), numbers in pairs]

    def is_still(self, fn: Fn) -> bool:
        """Say whether this is about `fn`, and all is as it was.

        It costs a third of looking again.
        """
        if self.fn is not fn or [*map(_state, self._functions)] != self._states:
            return False
        for get, names, ids in self._scopes:
            if [*map(id, map(get, names))] != ids:
                return False
        return True


def _is_autograd(value: Any) -> bool:
    kind = type(value)
    return kind is types.ModuleType and value.__name__.startswith("torch.autograd")


_state = operator.attrgetter(
    "__code__", "__closure__", "__dict__", "__defaults__", "__kwdefaults__"
)


def contained(fn: Fn) -> Contained | None:
    """Return a function as one that reaches no tensor, if it provably does not.

    It refers to nothing but builtins, torch and the standard library, and functions
    like it.
    """
    if type(fn) is not types.FunctionType:
        return None
    found = [fn]
    for f in found:  # which grow
        names = global_names(f.__code__)
        if not names.plain or _state(f)[1:] != (None, {}, None, None):
            return None
        scope: dict[str, Any] = f.__globals__
        for name in names.loaded:
            value: Any = scope.get(name)
            kind = type(value)
            if kind is types.ModuleType:
                if not is_trusted(value.__dict__):
                    return None
            elif kind is types.FunctionType:
                if value not in found:
                    found.append(value)
            elif (value is None and name in scope) or not _is_constant(value):
                return None
    return Contained(found)


def _is_constant(value: Any) -> bool:
    if value is None:  # a name of builtins
        return True
    if type(value) is not types.BuiltinFunctionType:
        return False
    owner: Any = value.__self__
    return owner is None or type(owner) is types.ModuleType
