"""What `remat` returns for a function: a callable whose calls are recomputed.

Invariant: if there is nothing to differentiate, the callable just calls the function.
Rejected: a closure. A closure cannot be pickled, and an enclosing call could not
rebuild it with other captured tensors.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from remat._base.context import here
from remat._base.errors import Label, hide_frames, label_of
from remat._partial.options import Options
from remat._torch.tracing import is_traced_symbolically
from remat._transform.lowering import Lowering, call_lowered, lowering_of
from remat._transform.traced import call_in_graph


class Rematerialized:
    """What `remat` returns. Other attributes are looked up on the function."""

    __wrapped__: Callable[..., Any]

    def __init__(
        self, fn: Callable[..., Any], where: str, options: Options, called: str = ""
    ) -> None:
        if isinstance(fn, nn.Module) or not hasattr(fn, "__qualname__"):
            self.__wrapped__ = fn
            name = self.__name__ = type(fn).__qualname__
        else:
            functools.update_wrapper(self, fn)
            # Dynamo knows no other name of a function.
            is_traced = torch.compiler.is_compiling()
            name = fn.__name__ if is_traced else fn.__qualname__
        # What messages call it: by default, by the name of the function.
        self._name, self._where, self._options = called or name, where, options
        # Made by the first call that needs it, because Dynamo cannot trace it.
        self._label: Label | None = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function. A backward recomputes it."""
        fn, options = self.__wrapped__, self._options
        lowering = lowering_of(options)
        if lowering is Lowering.TRACED:
            return call_in_graph(fn, self._name, self._where, options, *args, **kwargs)
        if lowering is Lowering.INLINED:
            return fn(*args, **kwargs)
        label = self._label or self.__remat_label__
        reporter = here().reporter
        if reporter is not None:
            lowering, options = reporter.asked(self, lowering, args)
        try:
            return call_lowered(lowering, fn, label, args, kwargs, options)
        except Exception as error:
            hide_frames(error)
            raise

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None or not _binds(type(self.__wrapped__)):
            return self
        if torch.compiler.is_compiling():  # Dynamo makes no methods of other classes
            return functools.partial(self, instance)
        bind = BoundMethod if isinstance(instance, nn.Module) else types.MethodType
        return bind(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "__code__" and is_traced_symbolically():
            raise TypeError(_SYMBOLIC.format(label=self.__remat_label__))
        if name.startswith("__") and name != "__code__":  # which torch.export reads
            # TorchScript asks a method for its globals, and shows this error's message.
            raise AttributeError(SCRIPTED if name == "__globals__" else name)
        return getattr(self.__wrapped__, name)

    def __prepare_scriptable__(self) -> Any:
        """Refuse to be compiled by TorchScript."""
        raise TypeError(SCRIPTED)

    def __repr__(self) -> str:
        return f"remat({self.__wrapped__!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        if _find(self) is self:
            return self.__qualname__
        rest = self._where, self._options, self._name
        return Rematerialized, (self.__wrapped__, *rest)

    @property
    def __remat_label__(self) -> Label:
        """The name of the function in messages."""
        if self._label is None:
            self._label = label_of(self._name, self._where)
        return self._label

    @property
    def __remat_options__(self) -> tuple[str, Options]:
        """What is needed to rematerialize another function in the same way."""
        return self._where, self._options


class BoundMethod(functools.partial[Any]):
    """A recomputed method of a module, bound to the module.

    It is none of Python's: Dynamo looks for the file of the function of those.
    """

    @property
    def __self__(self) -> Any:
        return self.args[0]

    @property
    def __func__(self) -> Any:
        return self.func

    @property
    def __name__(self) -> str:
        return str(self.func.__name__)

    @property
    def __globals__(self) -> Any:
        return self.func.__globals__  # an error: see `Rematerialized.__getattr__`

    @override
    def __eq__(self, other: object) -> bool:
        is_same = type(other) is type(self) and self.func is other.func
        return is_same and self.__self__ is other.__self__

    @override
    def __hash__(self) -> int:
        return hash((id(self.func), id(self.__self__)))


SCRIPTED = (
    "remat: TorchScript cannot compile a rematerialized function. Script the function "
    "without remat (`fn.__wrapped__`), trace it with torch.jit.trace, or use "
    "torch.compile."
)
_SYMBOLIC = (
    "remat: torch.fx cannot trace {label} itself. Trace the function without remat "
    "(`fn.__wrapped__`), or trace a function that calls {label}. A trace holds no "
    "recompute."
)


def _binds(kind: type) -> bool:
    """Say whether functions of a class bind an instance; those in C do not."""
    if issubclass(kind, functools.partial):  # in Python 3.13 it has a method that warns
        return sys.version_info >= (3, 14)
    return hasattr(kind, "__get__")


def _find(decorated: Any) -> Any:
    """Return what the name of `decorated` refers to: itself, if it was decorated."""
    try:
        found: Any = importlib.import_module(decorated.__module__)
        for part in decorated.__qualname__.split("."):
            found = getattr(found, part)
    except (AttributeError, ImportError):
        return None
    return found
