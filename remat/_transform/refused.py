"""Refuses wrong arguments of `remat`, and functions that it cannot rematerialize.

`api` calls it when a function is decorated, so that the error is at that line.

Invariant: each message says what to write instead.
Rejected: Python's own messages. They do not know the options of other checkpoint APIs,
which users may pass.
"""

import inspect
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from remat.policies import Policy


def refuse_arguments(fn: Any, others: Sequence[Any], unknown: Sequence[str]) -> None:
    """Refuse arguments that `remat` does not have.

    Args:
        fn: the first argument.
        others: those that were passed by position after it.
        unknown: the names of keyword arguments that it does not know.

    Raises:
        TypeError: there are some, or the first is a policy.
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
    """Refuse what is not a function of tensors.

    Raises:
        TypeError: it is a class, a generator function or a coroutine function.
    """
    if isinstance(fn, classmethod):
        raise TypeError("remat: write @classmethod above @remat, not below")
    if not callable(fn):
        raise TypeError(f"remat: {fn!r} is not callable")
    if isinstance(fn, type):
        which = "a module" if issubclass(fn, nn.Module) else "an object"
        raise TypeError(_CLASS.format(name=fn.__qualname__, which=which))
    function = fn.__func__ if isinstance(fn, types.MethodType) else fn
    is_python = isinstance(function, types.FunctionType)
    flags = function.__code__.co_flags if is_python else 0
    if flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR):
        raise TypeError(_LATER.format(name=fn.__qualname__, kind="generator function"))
    if flags & inspect.CO_COROUTINE:
        raise TypeError(_LATER.format(name=fn.__qualname__, kind="coroutine function"))


_POLICY = "remat: a policy is passed by name: remat({first}policy=...)"
_CALLED = (
    "remat: remat takes one positional argument, the function. It returns a function: "
    "call that, as in remat(fn)(x)."
)
_UNEXPECTED = "remat() got an unexpected keyword argument {name!r}. {advice}"
_UNKNOWN = "The options are policy, prune, rng and higher_order."
_NOT_NEEDED = {
    "static_argnums": "what is not a tensor is passed to the function as it is.",
    "prevent_cse": "a recompute is never merged with the forward.",
    "concrete": "the function runs as it is, on values.",
    "use_reentrant": "there is one implementation, which works under every transform.",
    "preserve_rng_state": "the random state is always restored.",
    "determinism_check": "under .backward() the shape, dtype and node of what is saved "
    "are compared. `remat.testing.check_replay` compares values.",
    "context_fn": "pass policy=... to choose what is saved.",
    "debug": "an error names the operations that differ.",
    "early_stop": "a recompute ends with the last value that is read.",
}
_CLASS = (
    "remat: {name} is a class. Apply remat to {which} of it, or decorate the method "
    "that computes, `forward` say."
)
_LATER = (
    "remat: `{name}` is a {kind}, whose body runs after the call has ended. Apply "
    "remat to the function that computes each value."
)
