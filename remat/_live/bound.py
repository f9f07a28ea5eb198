"""A function with its arguments, and what it is called under.

Invariant: it is called under the modes and the cache of parametrizations of the call,
and under no others.
Rejected: a partial, which joins its arguments to those of a partial that it is made of.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from remat._base.types import Fn
from remat._torch import (
    function_mode_count,
    function_modes,
    parametrization_cache,
    swap_parametrization_cache,
    under_function_modes,
)


class BoundFunction(NamedTuple):
    """A function and its arguments."""

    fn: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.fn(*self.args, **self.kwargs)


def call_under(fn: Fn, modes: Sequence[Any], cache: Any) -> Any:
    """Call a function under these modes and no others."""
    if not (cache is None and parametrization_cache() is None):
        fn = _with_cache(fn, cache)
    if modes or function_mode_count():
        now = function_modes()
        if len(now) != len(modes) or not all(map(operator.is_, now, modes)):
            return under_function_modes(modes, fn)
    return fn()


def _with_cache(fn: Fn, cache: dict[Any, Any] | None) -> Fn:
    """Return what calls a function with a cache of parametrizations, or with none."""
    state = ({}, 0) if cache is None else (dict(cache), 1)

    def run() -> Any:
        before = swap_parametrization_cache(state)
        try:
            return fn()
        finally:
            swap_parametrization_cache(before)

    return run
