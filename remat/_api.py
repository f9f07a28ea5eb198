"""`remat`: the decorator, and the callable it returns.

Invariant: with nothing to differentiate, calling it is calling the function. Rejected: a plain closure, which could neither be
pickled nor rebuilt around other captured tensors by an outer remat.
"""
from __future__ import annotations

import functools
import sys
import types
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload, TYPE_CHECKING

import torch

from remat._compat import requires_grad_at_any_level
from remat._errors import RematError
from remat._program import Primal
from remat._transform import call

if TYPE_CHECKING:
    from collections.abc import Callable

P = ParamSpec("P")
R = TypeVar("R")


class Rematerialized(Generic[P, R]):
    def __init__(self, fn, options, where):
        if isinstance(fn, torch.nn.Module) or not hasattr(fn,'__name__'):
            self.__wrapped__ = fn
        else:
            functools.update_wrapper(self, fn)
        self._where = where
        self._label = f"`{getattr(fn,'__qualname__',type(fn).__name__)}` (rematerialized at {self._where})"

    def __call__(self, /, *args, **kwargs):
        fn = self.__wrapped__
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        program = Primal(fn, self._label, args, kwargs)
        leaves, program.leaves = program.leaves, []
        if True not in [requires_grad_at_any_level(t) for t in leaves]:
            return fn(*args, **kwargs)
        outs = call(program, leaves)
        return program.out.join(outs, leaves)

    def __get__(self, instance, owner=None):
        return self if instance is None else types.MethodType(self, instance)

    def __remat_rewrap__(self, fn):
        return Rematerialized(fn, None, self._where)


def remat(fn=None, /, *, policy=None, prune="auto", rng="replay"):
    frame = sys._getframe(1)
    where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    if fn is None:
        return lambda fn: Rematerialized(fn, None, where)
    return Rematerialized(fn, None, where)
