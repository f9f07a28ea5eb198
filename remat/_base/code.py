"""What a function's code refers to, and whether that is the user's.

A package is installed in a folder called `site-packages` or `dist-packages`, wherever
that is. A link there leads to where a file is, as of an editable install.

Invariant: what is remembered is bounded, and holds nothing of the user's globals. What
is not known to be installed is the user's.
Rejected: walking the globals of installed packages, which may be thousands of functions
on every call. To read what installers note of their packages: to walk one that they
put elsewhere takes time, and is right.
"""

import abc
import builtins
import enum
import functools
import inspect
import operator
import os
import re
import sys
import sysconfig
import types
from typing import Any, NamedTuple

import torch
from torch import Tensor

from remat._base.errors import OURS
from remat._base.interpreter import NamesUsed, is_made_by_statement, names_used, nested
from remat._base.types import CONSTANTS, TENSORS


_PATHS = sysconfig.get_paths()
STANDARD = tuple(os.path.join(_PATHS[k], "") for k in ("stdlib", "platstdlib"))
# Also where a checkout of it is installed.
TORCH = os.path.join(os.path.dirname(os.path.abspath(torch.__file__ or "")), "")
_IN_PACKAGES = re.compile(r".*[\\/](?:site|dist)-packages[\\/]", re.DOTALL).match


@functools.lru_cache(maxsize=4096)
def is_installed(file: str) -> bool:
    """Say whether a file is Python's or an installed package's."""
    if file.startswith((TORCH, OURS)) or is_standard(file):
        return True
    return _IN_PACKAGES(os.path.realpath(file)) is not None


def is_standard(file: str) -> bool:
    return file.startswith(STANDARD) and not _IN_PACKAGES(file)


# Names in code that handles the state of a stream, or a setting. Such code may put a
# stream back after a draw, or set what was set already: no difference would show.
STATES = {
    *("clone_state", "fork_rng", "get_rng_state", "get_state", "getstate"),
    *("initial_seed", "manual_seed", "set_rng_state", "set_state", "setstate"),
    *("deepcopy", "jumped", "set_default_dtype", "set_autocast_dtype"),
    *("use_deterministic_algorithms", "set_float32_matmul_precision"),
}
_CALLED = "seed"  # only where it is called: many a number has this name
# Builtins that tell an object from another one like it.
IDENTITY = frozenset({"hash", "id"})
# Of tensors, what tells one from another one with its values. `repr` names the node.
MARKS = frozenset(
    {
        *("grad_fn", "is_leaf", "output_nr", "get_gradient_edge", "gradient_edge"),
        *("_base", "_cdata", "_is_view", "_version"),
        *("_backward_hooks", "_post_accumulate_grad_hooks", "retains_grad"),
    }
)
# Of these, what the edge of a tensor tells. `is_leaf` whether it has one.
EDGES = frozenset(
    {"grad_fn", "output_nr", "get_gradient_edge", "gradient_edge", "repr"}
)
_ASKING = IDENTITY | {"repr"}


class KnownCode(NamedTuple):
    """What a function's code refers to, in the globals of that function."""

    code: types.CodeType  # held, so that its identity is not used again
    names: NamesUsed
    open: tuple[str, ...]  # names loaded that may stand for something of the user's
    settled: dict[str, Any]  # others, of builtins or packages, and what they were then
    uses_stream_states: bool  # it reads or sets the state of a random stream
    asks: frozenset[str]  # names that tell an object from another one like it
    is_settled: bool  # nothing is open, assigned, or done to a stream


# Oldest first. By identity: hashing a code object reads all of it.
_KNOWN: dict[int, KnownCode] = {}
_KNOWN_SIZE = 4096


def known_code(fn: types.FunctionType) -> KnownCode:
    """Return what the code of a function, and code nested in it, refers to."""
    known = _KNOWN.get(id(fn.__code__))
    if known is not None:
        present = map(fn.__globals__.get, known.settled)
        if all(map(operator.is_, present, known.settled.values())):
            return known
    elif len(_KNOWN) >= _KNOWN_SIZE:
        _KNOWN.pop(next(iter(_KNOWN)), None)
    known = _KNOWN[id(fn.__code__)] = _find_known(fn)
    return known


def _find_known(fn: types.FunctionType) -> KnownCode:
    code, scope = fn.__code__, fn.__globals__
    names = names_used(code)
    states = _CALLED in names.called
    states = states or not all(STATES.isdisjoint(c.co_names) for c in nested(code))
    settled: dict[str, Any] = {}
    opened: tuple[str, ...] = ()
    if not is_library(scope):
        settled = {n: scope.get(n) for n in names.loaded if _is_settled(n, scope)}
        opened = tuple(n for n in names.loaded if n not in settled)
    asks = _ASKING.intersection(names.loaded) | _marks_asked(code)
    if fn.__name__ == "__hash__":  # which mostly hashes what an object holds
        asks -= {"hash"}
    if is_standard(code.co_filename):  # as the `__repr__` of every dataclass
        asks = frozenset()
    touches = opened or names.stored or states or fn.__name__ in STATES or asks
    return KnownCode(code, names, opened, settled, states, asks, not touches)


def _marks_asked(code: types.CodeType) -> frozenset[str]:
    """Return which marks of tensors code names, also for `getattr`."""
    words = (word for c in nested(code) for word in (*c.co_names, *c.co_consts))
    return MARKS.intersection(word for word in words if type(word) is str)


def _is_settled(name: str, scope: dict[str, Any]) -> bool:
    """Say whether a global is a builtin, or a package's and so none of the user's."""
    if name not in scope:
        return hasattr(builtins, name)
    value = scope[name]
    kind = type(value)
    if kind is types.ModuleType:
        return is_library(vars(value))
    if kind is types.FunctionType:
        held = value.__closure__ or value.__defaults__ or value.__kwdefaults__
        held = held or value.__name__ in STATES
        return is_library(value.__globals__) and not held
    return issubclass(kind, type) and is_library_class(value)


def is_library_class(cls: type) -> bool:
    """Say whether a class is the standard library's or a package's, or of remat's."""
    if MADE in cls.__dict__:
        return True
    module: Any = sys.modules.get(str(cls.__module__))
    if module in _MAKERS:
        return is_named(cls) or not is_made_by_statement(cls)
    return module is not None and is_library(vars(module))


# Modules that classes seem to be of which are made by calls there, as `type` with an
# abstract base, or in code that was executed without a module's name.
_MAKERS = builtins, abc, types


def is_named(cls: type) -> bool:
    """Say whether a module has a class under its name, or a class there may have it."""
    name = cls.__qualname__
    scope = vars(sys.modules.get(str(cls.__module__), types))
    return scope.get(name) is cls or ("." in name and "<locals>" not in name)


def has_marks(kind: type) -> bool:
    """Say whether what is set on tensors of a class is the user's.

    In attributes of a class that sees operations are the tensors that it wraps.
    """
    sees_none = getattr(kind, "__torch_dispatch__", None) is Tensor.__torch_dispatch__
    return kind in TENSORS or (sees_none and not is_library_class(kind))


def class_without_us(cls: type) -> type:
    """Return the class that a class of remat was made of; any other as it is."""
    return cls.__dict__.get(MADE, cls)


MADE = "_remat_base"  # of a class that remat makes: the class that it was made of
VIEWED = "_remat_module"  # the slot of a view of a module, which holds the module


def is_library(scope: dict[str, Any]) -> bool:
    """Say whether a module's globals are those of the standard library or a package."""
    file = scope.get("__file__")
    if file is None:
        return scope.get("__name__") in sys.builtin_module_names
    return is_installed(file)


def static_of(value: Any) -> Any:
    """Return what stands for an argument in a signature.

    None if it does not hash, or refers to something of the user's.
    """
    kind = type(value)
    owner = value.__self__ if kind is types.BuiltinFunctionType else kind
    is_builtin = owner is None or type(owner) is types.ModuleType
    if not (is_builtin or kind in CONSTANTS or isinstance(value, enum.Enum)):
        return None
    # A number may be annealed.
    return float if kind is float else (kind, value)


def mentions(fn: Any, names: frozenset[str]) -> bool:
    """Say whether the code of a function, or of one that it calls, has such a name."""
    todo = [fn]
    known: set[int] = set()
    for each in todo:  # which grow
        each = getattr(each, "func", each)  # of a partial
        code = getattr(each, "__code__", None)
        if code is None and not isinstance(each, type):
            each = inspect.getattr_static(type(each), "__call__", None)
            code = getattr(each, "__code__", None)
        if not isinstance(code, types.CodeType) or id(code) in known:
            continue
        known.add(id(code))
        found = {name for inner in nested(code) for name in inner.co_names}
        if not names.isdisjoint(found):
            return True
        scope = getattr(each, "__globals__", {})
        called = [scope.get(name) for name in found]
        called += map(content_of, getattr(each, "__closure__", None) or ())
        todo += [f for f in called if isinstance(f, types.FunctionType)]
    return False


def content_of(cell: Any) -> Any:
    """Return what a cell holds; None for nothing."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing is assigned yet
        return None
