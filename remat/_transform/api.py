"""`remat`: the decorator, and the callable that it returns.

Users call both. The callable asks `lowering` how to run a call, and passes the call to
`saved` or `function`.

Invariant: if there is nothing to differentiate, the callable just calls the function.
Rejected: a closure for the callable. A closure cannot be pickled, and an enclosing call
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
from remat._base.types import Fn
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
# A method: `S` is the type of `self`, and `Q` are the other parameters.
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

    The forward computes the same values as `fn`. It does not store the values that the
    backward needs. It saves the inputs of the call, and the results that the policy
    chooses. The backward runs `fn` again on the same inputs, and computes the other
    values then. This run has the random, autocast and device state of the forward.

    The inputs are the tensors in the arguments, and the tensors that `fn` reaches
    through closures, defaults, globals, bound objects and modules.

    Under `.backward()` the graph is that of plain code. Gradients equal those of plain
    code bit for bit. The recompute ends with the last value that the graph needs. Under
    `torch.func` a call is one function, and its backward is such a call again. So it
    works under every transform and for higher derivatives. If there is nothing to
    differentiate, the result just calls `fn`, and asks no policy.

    With a policy or pruning, the first call of a kind records what `fn` does. Later
    recomputes skip the operations that the backward does not need. Later calls do not
    save the inputs that no recompute reads. A record only saves work: if it does not
    fit a call, `fn` runs in full.

    Write `remat(fn)`, `@remat` or `@remat(...)`. `fn` is a function, a method, a
    partial, a callable object or a module. A module is called, not wrapped: keep the
    module itself registered with its parent, and write `remat(self.block)(x)`.

    Args:
        fn: the function. Its arguments and results are pytrees. Leaves that are not
            tensors pass through.
        policy: which results to save. It is one of `remat.policies`, or anything that
            `remat.policies.as_policy` accepts, such as a function of an operation.
            `None` saves no result. A call within another call follows both policies. In
            forward mode nothing is saved.
        prune: whether a recompute skips operations that the backward does not need.
            `True` always skips them, and `False` never. `"auto"` skips them if that
            saves more FLOPs and bytes than it costs; with a policy it always does.
            Results never depend on it.
        rng: `"replay"` restores the global random streams for a recompute.
            `"error"` refuses a `fn` that draws from them.
        higher_order: whether `.backward()` differentiates a call as `torch.func` does.
            If True, the backward is such a call again, and a second derivative
            (`create_graph=True`) recomputes too. If False, the values of a backward
            with `create_graph=True` stay in memory, as in plain code. The docs list
            under "Higher derivatives" what `higher_order=True` refuses.
        *others: not accepted.
        **unknown: not accepted.

    Returns:
        A callable with the signature, name and docstring of `fn`. Its `__wrapped__` is
        `fn`.

    Raises:
        TypeError: `fn` is not callable, or is a class, a generator function or a
            coroutine function; or `policy` is not a policy; or there are other
            arguments. The message says what to write instead.
        ValueError: an option has an unknown value.
        RecomputeError: in a backward, if the recompute of `fn` differs from the
            forward. Also if it reads an input that no earlier recompute read and that
            was not saved; `prune=False` saves all inputs.
        RematError: on a call, if `fn` does something that cannot be recomputed.

    Source: JAX's `jax.checkpoint`. The exchange of time for memory is from Griewank,
    "Achieving logarithmic growth of temporal and spatial complexity in reverse
    automatic differentiation" (1992).

    Example:
        >>> from remat import policies
        >>> from remat.testing import count_ops
        >>> def f(w, x):
        ...     return torch.tanh(w @ torch.tanh(w @ x)).sum()
        >>> w, x = torch.ones(2, 2) / 4, torch.ones(2, 2)
        >>> def tanhs_and_matmuls(f):
        ...     with count_ops() as ops:
        ...         torch.func.grad(f, argnums=(0, 1))(w, x)
        ...     return ops["tanh"], ops["mm"]
        >>> tanhs_and_matmuls(f)
        (2, 6)
        >>> tanhs_and_matmuls(remat(f, prune=True))
        (4, 8)
        >>> tanhs_and_matmuls(remat(f, policy=policies.dots_saveable))
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


def call_lowered(
    lowering: Lowering,
    fn: Fn,
    label: Label,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    """Call a function so that a backward recomputes it."""
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


class Rematerialized(Generic[P, R]):
    """What `remat` returns.

    Attributes:
        __wrapped__: the function. Other attributes are looked up on the function.
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
        # Made by the first call that needs it, because Dynamo cannot trace it.
        self._label: Label | None = None

    def __call__(self, /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function. A backward recomputes it."""
        fn, options = self.__wrapped__, self._options
        lowering = lowering_of(options)
        if lowering is Lowering.INLINED:
            return fn(*args, **kwargs)
        label = self._label or self.__remat_label__
        return call_lowered(lowering, fn, label, args, kwargs, options)

    @overload
    def __get__(
        self, instance: None, owner: type | None = None
    ) -> "Rematerialized[P, R]": ...
    @overload
    def __get__(
        # Typed as a callable: not every type checker splits the class's own parameters.
        self: Callable[Concatenate[S, Q], T],
        instance: S,
        owner: type | None = None,
    ) -> Callable[Q, T]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A builtin function binds no instance, so its rematerialized form must not.
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
            # TorchScript asks a method for its globals, and shows this error's message.
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
        """The name of the function in messages."""
        if self._label is None:
            self._label = label_of(self._name, self._where)
        return self._label

    @property
    def __remat_options__(self) -> tuple[str, Options]:
        """What is needed to rematerialize another function in the same way."""
        return self._where, self._options


_SCRIPTED = (
    "remat: TorchScript cannot compile a rematerialized function. Script the function "
    "without remat (`fn.__wrapped__`), trace it with torch.jit.trace, or use "
    "torch.compile."
)
_SYMBOLIC = (
    "remat: torch.fx cannot trace {label} itself. Trace the function without remat "
    "(`fn.__wrapped__`), or trace a function that calls {label}. A trace holds no "
    "recompute."
)
not_scriptable(remat, _SCRIPTED)


def _find(decorated: Any) -> Any:
    """Return what the name of `decorated` refers to: itself, if it was decorated."""
    try:
        found: Any = importlib.import_module(decorated.__module__)
        for part in decorated.__qualname__.split("."):
            found = getattr(found, part)
    except (AttributeError, ImportError):
        return None
    return found
