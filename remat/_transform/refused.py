"""Refuse wrong arguments of `remat`, and functions that it cannot rematerialize.

`api` calls this when a function is decorated, so the error is raised at that line.

Invariant: each message says what to write instead.
Rejected: Python's own messages. Users may pass options of other checkpoint APIs, and
Python does not know these.
"""

import functools
import inspect
import types
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from remat.policies import Policy


def refuse_arguments(fn: Any, others: Sequence[Any], unknown: Sequence[str]) -> None:
    """Refuse arguments that `remat` does not have.

    Args:
        fn: the first argument.
        others: further positional arguments.
        unknown: the names of keyword arguments that `remat` does not have.

    Raises:
        TypeError: there are such arguments, or `fn` is a policy.
    """
    if isinstance(fn, Policy):
        raise TypeError(_POLICY.format(first=""))
    if others and isinstance(others[0], Policy):
        raise TypeError(_POLICY.format(first="fn, "))
    if others:
        raise TypeError(_CALLED)
    if unknown:
        name = unknown[0]
        reason = _NOT_NEEDED.get(name)
        advice = f"`{name}` is not needed: {reason}" if reason else _UNKNOWN
        raise TypeError(_UNEXPECTED.format(name=name, advice=advice))


def refuse_function(fn: Any) -> None:
    """Refuse anything that is not a function of tensors.

    Raises:
        TypeError: `fn` is not callable, or is a class, a generator function or a
            coroutine function.
    """
    if isinstance(fn, classmethod):
        fn = fn.__func__
    if not callable(fn):
        raise TypeError(_not_callable(fn))
    if isinstance(fn, type):
        which = "a module" if issubclass(fn, nn.Module) else "an object"
        raise TypeError(_CLASS.format(name=fn.__qualname__, which=which))
    function = _innermost(fn)
    is_python = isinstance(function, types.FunctionType)
    flags = function.__code__.co_flags if is_python else 0
    kind = ""
    if flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        kind = "generator function"
    if flags & inspect.CO_COROUTINE:
        kind = "coroutine function"
    if kind:
        raise TypeError(_LATER.format(name=function.__qualname__, kind=kind))


def _not_callable(value: Any) -> str:
    """Return the message that something is not a function; it may be long to print."""
    if value is None:
        return _NONE
    if isinstance(value, Tensor):
        return _RESULT
    is_listed = isinstance(value, (list, tuple)) and bool(value)
    if is_listed and all(isinstance(item, nn.Module) for item in value):
        return _MODULES.format(kind=type(value).__name__)
    return _NO_FUNCTION.format(kind=type(value).__name__)


def has_forward(module: nn.Module) -> bool:
    """Say whether a module has a `forward`, which an `nn.ModuleList` has not."""
    # A scripted class has no attribute of this name.
    forward = getattr(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


def refuse_without_forward(module: nn.Module) -> None:
    """Refuse a module that is a container, of which there is nothing to recompute.

    Raises:
        TypeError: it has no `forward`.
    """
    if not has_forward(module):
        has_call = type(module).__call__ is not nn.Module.__call__
        message = _OWN_CALL if has_call else _NO_FORWARD
        raise TypeError(message.format(kind=type(module).__qualname__))


def _innermost(fn: Any) -> Any:
    """Return the function behind methods and partials."""
    while True:
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, (types.MethodType, staticmethod)):
            fn = fn.__func__
        else:
            return fn


_POLICY = "remat: pass a policy by name: remat({first}policy=...)"
_CALLED = (
    "remat: remat takes one positional argument, the function. It returns a function. "
    "Call the returned function, as in remat(fn)(x)."
)
_UNEXPECTED = "remat() got an unexpected keyword argument {name!r}. {advice}"
_UNKNOWN = "The options are policy, prune, rng and higher_order."
_NOT_NEEDED = {
    "static_argnums": "arguments that are not tensors pass through as they are.",
    "prevent_cse": "a recompute is never merged with the forward.",
    "concrete": "the function always runs on concrete values.",
    "use_reentrant": "there is one implementation, which works under every transform.",
    "preserve_rng_state": "the random state is always restored.",
    "determinism_check": "under .backward() the shape, dtype and node of every saved "
    "tensor are compared. `remat.testing.check_replay` compares values.",
    "context_fn": "pass policy=... to choose what to save.",
    "debug": "an error names the operations that differ.",
    "early_stop": "a recompute always ends with the last value that is read.",
}
_RESULT = (
    "remat: got a tensor, the result of a call. Pass the function: write remat(fn)(x), "
    "not remat(fn(x))."
)
_NONE = (
    "remat: got None in place of the function. Write remat(fn), @remat, or "
    "remat(policy=...)(fn). If a decorator or a factory made it, that returned nothing."
)
_MODULES = (
    "remat: got a {kind} of modules, which is not callable. Apply remat to each, or "
    "use remat.nn.apply(model)."
)
_NO_FUNCTION = (
    "remat: got an object of type {kind}, which is not callable. Pass a function or a "
    "module."
)
_CLASS = (
    "remat: {name} is a class. Apply remat to {which} of that class, or decorate its "
    "method that computes, such as `forward`."
)
_NO_FORWARD = (
    "remat: got a {kind}, which has no `forward`, so nothing would be recomputed. "
    "Apply remat to each module in it, or use remat.nn.apply(model)."
)
_OWN_CALL = (
    "remat: got a {kind}, which has a `__call__` of its own and no `forward`. Apply "
    "remat to that method: remat(module.__call__)."
)
_LATER = (
    "remat: `{name}` is a {kind}. Its body runs after the call has ended. Apply remat "
    "to the function that computes each value."
)
