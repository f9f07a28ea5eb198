"""`remat`: the decorator, and the callable that it returns.

Users call these. A call of that callable asks `lowering` what becomes of it, and passes
it to `saved` or `function`.

Invariant: with nothing to differentiate, calling it is calling the function.
Rejected: a closure for the callable. It could not be pickled, and a call around it
could not rebuild it with other captured tensors.
"""

import functools
import importlib
import sys
import types
from collections.abc import Callable
from typing import (
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    TypeAlias,
    TypeVar,
    overload,
)

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from remat._ambient.draws import without_draws
from remat._base.labels import Label, label_of
from remat._base.source import shown
from remat._base.tracebacks import hide_frames
from remat._partial.options import Options, Prune, Rng
from remat._torch import is_traced_symbolically, not_scriptable
from remat._transform.call import Call
from remat._transform.function import evaluate_differentiably
from remat._transform.lowering import Lowering, lowering_of
from remat._transform.primal import Primal
from remat._transform.refused import refuse_arguments, refuse_function
from remat._transform.saved import call_saved
from remat.policies import Decision, Policy, as_policy, nothing_saveable


P = ParamSpec("P")
R = TypeVar("R")
# A method: of `S`, and called with what is left.
S = TypeVar("S")
Q = ParamSpec("Q")
T = TypeVar("T")
# What `as_policy` accepts.
PolicyLike: TypeAlias = (
    Policy
    | Decision
    | CheckpointPolicy
    | Callable[..., Any]
    | list[Any]
    | tuple[Any, ...]
    | set[Any]
    | frozenset[Any]
    | None
)


@overload
def remat(
    fn: Callable[P, R],
    /,
    *,
    policy: PolicyLike = None,
    prune: Prune = "auto",
    rng: Rng = "replay",
    higher_order: bool = False,
) -> "Rematerialized[P, R]": ...
@overload
def remat(
    fn: None = None,
    /,
    *,
    policy: PolicyLike = None,
    prune: Prune = "auto",
    rng: Rng = "replay",
    higher_order: bool = False,
) -> "Callable[[Callable[P, R]], Rematerialized[P, R]]": ...
def remat(
    fn: Callable[..., Any] | None = None,
    /,
    *others: Any,
    policy: PolicyLike = None,
    prune: Prune = "auto",
    rng: Rng = "replay",
    higher_order: bool = False,
    **unknown: Any,
) -> Any:
    """Return a function equal to `fn` that recomputes values instead of storing them.

    Between the forward and the backward only the inputs of a call stay alive, and the
    results that a policy keeps and the backward reads. The inputs are the tensors in
    its arguments, and those that `fn` reaches through closures, defaults, globals,
    bound objects and modules. The backward runs `fn` again on the same tensors, in the
    same random, autocast and device state.

    Under `.backward()` the graph is the one that plain code makes, and gradients are
    those of plain code bit for bit. The second run computes the tensors that the graph
    saves, and ends with the last of them. Under `torch.func` a call is one function
    whose backward is itself such a call, so that the same holds under its transforms
    and for higher derivatives. With nothing to differentiate, calling the result is
    calling `fn`, and no policy is asked.

    The first call of a kind records what `fn` does. Later recomputes leave out the
    operations that the backward does not read. Once that has worked, calls do not keep
    inputs that no recompute reads. A record only saves work: where it does not fit
    a call, `fn` runs as it is.

    Use it as `remat(fn)`, `@remat` or `@remat(...)`, on functions, methods, partials,
    callable objects and modules. A module is called, not wrapped: keep the module
    itself registered with its parent, and write `remat(self.block)(x)`.

    Args:
        fn: the function. Its arguments and results are pytrees. Leaves that are not
            tensors pass through.
        policy: which results are kept: one of `remat.policies`, or what
            `remat.policies.as_policy` accepts, such as a function of an operation.
            `None` keeps none. A call within another call follows the policies of both.
            In forward mode nothing is kept.
        prune: whether a recompute leaves out what the backward does not read.
            `True` for always, `False` for never, `"auto"` where that saves more than
            following the record costs, by its FLOPs and bytes. A policy is followed
            anyhow, so with one `"auto"` is always. Results never depend on it.
        rng: `"replay"` restores the global random streams for a recompute.
            `"error"` refuses a `fn` that draws from them.
        higher_order: whether `.backward()` differentiates a call as `torch.func` does.
            Then the backward is itself such a call, and a second derivative
            (`create_graph=True`) recomputes as well. Otherwise what a first backward
            with `create_graph=True` computes stays in memory, as in plain code. See
            "Higher derivatives" in the docs for what it refuses in return.
        *others: refused, as are other options.
        **unknown: refused.

    Returns:
        A callable with the signature, name and docstring of `fn`, which is its
        `__wrapped__`.

    Raises:
        TypeError: `fn` is not callable, is a class, a generator function or a coroutine
            function, `policy` is not a policy, or there are other arguments. The
            message says what to write instead.
        ValueError: an option has no such value.
        RecomputeError: in a backward, where `fn` does something else than it did in the
            forward, or reads an input that no recompute had read before and that
            was not kept. `prune=False` keeps them all.
        RematError: on a call, where `fn` does what cannot be recomputed.

    Source: JAX's `jax.checkpoint`. The exchange of time for memory is from Griewank,
    "Achieving logarithmic growth of temporal and spatial complexity in reverse
    automatic differentiation" (1992).

    Example:
        >>> from remat import policies
        >>> from remat.testing import count_ops
        >>> def f(w, x):
        ...     return torch.tanh(w @ torch.tanh(w @ x)).sum()
        >>> w, x = torch.ones(2, 2) / 4, torch.ones(2, 2)
        >>> def tanhs_and_products(f):
        ...     with count_ops() as ops:
        ...         torch.func.grad(f, argnums=(0, 1))(w, x)
        ...     return ops["tanh"], ops["mm"]
        >>> tanhs_and_products(f)
        (2, 6)
        >>> tanhs_and_products(remat(f, prune=True))
        (4, 8)
        >>> tanhs_and_products(remat(f, policy=policies.dots_saveable))
        (4, 6)
    """
    refuse_arguments(fn, others, [*unknown])
    if higher_order not in (False, True):
        raise ValueError(f"remat: higher_order={higher_order!r}: use True or False")
    options = Options(_checked(policy, prune, rng), prune, rng, higher_order)
    where = "compiled code" if torch.compiler.is_compiling() else _caller()
    if fn is None:
        return functools.partial(_decorated, where=where, options=options)
    return _decorated(fn, where, options)


def _decorated(fn: Any, where: str, options: Options) -> Any:
    refuse_function(fn)
    return Rematerialized(fn, where, options)


def _caller() -> str:
    caller = sys._getframe(2)
    return f"{shown(caller.f_code.co_filename)}:{caller.f_lineno}"


def _checked(policy: PolicyLike, prune: object, rng: object) -> Policy | None:
    if prune not in ("auto", True, False):
        raise ValueError(f"remat: prune={prune!r}: use 'auto', True or False")
    if rng not in ("replay", "error"):
        raise ValueError(f"remat: rng={rng!r}: use 'replay' or 'error'")
    checked = as_policy(policy)
    return None if checked == nothing_saveable else checked


class Rematerialized(Generic[P, R]):
    """What `remat` returns.

    Attributes:
        __wrapped__: the function. Attributes not set here are the function's.
    """

    __wrapped__: Callable[P, R]

    def __init__(self, fn: Callable[P, R], where: str, options: Options) -> None:
        if isinstance(fn, nn.Module) or not hasattr(fn, "__qualname__"):
            self.__wrapped__ = fn
            name = self.__name__ = type(fn).__qualname__
        else:
            functools.update_wrapper(self, fn)
            name = fn.__qualname__
        self._name, self._where, self._options = name, where, options
        # Made by the first call that needs it: Dynamo does not trace it.
        self._label: Label | None = None

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function, to be recomputed if something is differentiated."""
        fn, options = self.__wrapped__, self._options
        lowering = lowering_of(options)
        if lowering is Lowering.INLINED:
            return fn(*args, **kwargs)
        label = self._label or self.__remat_label__
        try:
            if lowering is Lowering.SAVED:
                return call_saved(fn, label, args, kwargs, options)
            if lowering is Lowering.FUNCTION:
                call = Call(fn, label, args, kwargs, options)
                inputs, needs = call.take_inputs()
                outs = None
                if not call.is_lazy:
                    outs = evaluate_differentiably(Primal(call), inputs, needs)
                if outs is not None:
                    return call.join(outs, inputs)
            plain = without_draws(fn, label) if options.rng == "error" else fn
            return plain(*args, **kwargs)
        except Exception as error:
            hide_frames(error)
            raise

    @overload
    def __get__(
        self, instance: None, owner: type | None = None
    ) -> "Rematerialized[P, R]": ...
    @overload
    def __get__(
        # By its `__call__`: not every type checker takes a class's own arguments apart.
        self: Callable[Concatenate[S, Q], T],
        instance: S,
        owner: type | None = None,
    ) -> Callable[Q, T]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A builtin function, for one, binds no instance, and neither does this then.
        binds = hasattr(type(self.__wrapped__), "__get__")
        unbound = instance is None or not binds
        if unbound:
            return self
        if torch.compiler.is_compiling():  # Dynamo makes no methods, and inlines it
            return self.__wrapped__.__get__(instance, owner)
        return types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "__code__" and is_traced_symbolically():
            raise TypeError(_SYMBOLIC.format(label=self.__remat_label__))
        if name.startswith("__"):
            # TorchScript asks a method for its globals, and shows the message of this.
            raise AttributeError(_SCRIPTED if name == "__globals__" else name)
        return getattr(self.__wrapped__, name)

    def __prepare_scriptable__(self) -> Any:
        """Refuse to be compiled by TorchScript."""
        raise TypeError(_SCRIPTED)

    def __repr__(self) -> str:
        return f"remat({self.__wrapped__!r})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        if _find(self) is self:
            return self.__qualname__
        return Rematerialized, (self.__wrapped__, self._where, self._options)

    @property
    def __remat_label__(self) -> Label:
        """What messages call it."""
        if self._label is None:
            self._label = label_of(self._name, self._where)
        return self._label

    @property
    def __remat_options__(self) -> tuple[str, Options]:
        """What it takes to rematerialize another function alike."""
        return self._where, self._options


_SCRIPTED = (
    "remat: TorchScript cannot compile a rematerialized function. Script the function "
    "without remat (`fn.__wrapped__`), trace it with torch.jit.trace, or use "
    "torch.compile."
)
_SYMBOLIC = (
    "remat: torch.fx cannot trace {label} itself. Trace the function without remat "
    "(`fn.__wrapped__`), or one that calls it: a trace holds no recompute."
)
not_scriptable(remat, _SCRIPTED)


def _find(decorated: Any) -> Any:
    """Return what the name of `decorated` leads to; itself, if it is a decorator."""
    try:
        found: Any = importlib.import_module(decorated.__module__)
        for part in decorated.__qualname__.split("."):
            found = getattr(found, part)
    except (AttributeError, ImportError):
        return None
    return found
