"""`remat`: the decorator, and what it refuses.

Invariant: all that can be refused is refused here, at the user's line, and each message
says what to write instead.
Rejected: one class for functions and modules. A module is registered with its parent,
saved and moved, and a callable that refers to it is none of that. Python's own messages
of arguments. Users may pass options of other checkpoint APIs, which it does not know.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from remat._base.package import advise_on
from remat._base.source import shown
from remat._offload.inputs import check_where
from remat._partial.options import OffloadInputs, Options, Prune, Rng
from remat._torch.tracing import must_inline, not_scriptable
from remat._transform.module import view_of
from remat._transform.rematerialized import SCRIPTED, Rematerialized
from remat.policies import Decision, Policy, as_policy, nothing_saveable


def refuse_arguments(fn: Any, others: Sequence[Any], unknown: Sequence[str]) -> None:
    """Refuse more than one positional argument, unknown names, and a bare policy."""
    if isinstance(fn, Policy) or isinstance((*others, None)[0], Policy):
        raise TypeError(_POLICY.format(first="fn, " if others else ""))
    if others:
        raise TypeError(_CALLED)
    if unknown:
        name = unknown[0]
        reason = _NOT_NEEDED.get(name)
        advice = f"`{name}` is not needed: {reason}" if reason else _UNKNOWN
        raise TypeError(_UNEXPECTED.format(name=name, advice=advice))


def refuse_function(fn: Any) -> None:
    """Refuse anything that is not a function of tensors."""
    if isinstance(fn, classmethod):
        fn = fn.__func__
    if not callable(fn):
        raise TypeError(_not_callable(fn))
    if isinstance(fn, type):
        which = "a module" if issubclass(fn, nn.Module) else "an object"
        raise TypeError(_CLASS.format(name=fn.__qualname__, which=which))
    while not isinstance(fn, types.FunctionType):  # behind methods and partials
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, (types.MethodType, staticmethod)):
            fn = fn.__func__
        else:
            return
    flags = fn.__code__.co_flags
    is_generator = flags & (inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR)
    if is_generator or flags & inspect.CO_COROUTINE:
        kind = "generator" if is_generator else "coroutine"
        raise TypeError(_LATER.format(name=fn.__qualname__, kind=kind))


def _not_callable(value: Any) -> str:
    """Return the message that something is not a function; it may be long to print."""
    what, advice = f"an object of type {type(value).__name__}", ""
    if value is None:
        what, advice = "None", ": write remat(fn), @remat, or remat(policy=...)(fn)"
    elif isinstance(value, Tensor):
        what, advice = "a tensor", ": write remat(fn)(x), not remat(fn(x))"
    elif isinstance(value, (list, tuple)) and isinstance((*value, 0)[0], nn.Module):
        what = f"a {type(value).__name__} of modules"
        advice = ". Apply remat to each, or use remat.nn.apply(model)"
    return _NO_FUNCTION.format(what=what, advice=advice)


def has_forward(module: nn.Module) -> bool:
    """Say whether a module has a `forward`, which an `nn.ModuleList` has not."""
    # A scripted class has no attribute of this name.
    forward = getattr(type(module), "forward", None)
    return forward is not nn.Module.forward or "forward" in vars(module)


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
_NO_FUNCTION = (
    "remat: got {what}, which is not callable. Pass a function or a module{advice}."
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
    "remat: `{name}` is a {kind} function. Its body runs after the call has ended. "
    "Apply remat to the function that computes each value."
)


# To a type checker the result is `fn`: a function binds, overrides a method and is
# generic as it did. Of a module, it is a module of the same class.
F = TypeVar("F", bound=Callable[..., Any])
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
    | Mapping[Any, Any]
    | None
)

_NOT_GIVEN: Any = object()


@overload
def remat(
    fn: F,
    /,
    *,
    policy: PolicyLike = None,
    prune: Prune = "auto",
    rng: Rng = "replay",
    higher_order: bool = False,
    offload_inputs: OffloadInputs = False,
) -> F: ...
@overload
def remat(
    *,
    policy: PolicyLike = None,
    prune: Prune = "auto",
    rng: Rng = "replay",
    higher_order: bool = False,
    offload_inputs: OffloadInputs = False,
) -> Callable[[F], F]: ...
def remat(
    fn: Any = _NOT_GIVEN,
    /,
    *others: Any,
    policy: PolicyLike = None,
    prune: Prune = "auto",
    rng: Rng = "replay",
    higher_order: bool = False,
    offload_inputs: OffloadInputs = False,
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
    partial, a callable object or a module.

    For a module the result is a module of the same class, with the same parameters,
    names, attributes and hooks: it shares them. Only its `forward` is recomputed. Write
    `self.block = remat(nn.Linear(8, 8))`, or `remat(self.block)(x)` where it is called.
    `remat.nn.apply` changes the blocks of a model in place.

    Args:
        fn: the function. Its arguments and results are tensors, and containers and
            objects that hold tensors; see `remat.register`. Other values pass through.
        policy: which results to save. It is one of `remat.policies`, or anything that
            `remat.policies.as_policy` accepts, such as a function of an operation.
            `None` saves no result. A call within another call follows both policies.
            Under forward mode around reverse mode nothing is saved.
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
            under "torch.func and higher order" what `higher_order=True` refuses.
        offload_inputs: whether what only the recompute needs of the inputs goes to
            pinned host memory, or with `"disk"` to a file, until then. The next call's
            comes back meanwhile. Parameters stay, and what is still there is used. In
            forward mode and in compiled code nothing moves, which is told once.
        *others: not accepted.
        **unknown: not accepted.

    Returns:
        A callable with the signature, name and docstring of `fn`. Its `__wrapped__` is
        `fn`. For a module: a module. Type checkers take it for `fn` itself; they know
        `inspect.unwrap(f)`, and not `f.__wrapped__`.

    Raises:
        TypeError: `fn` is not callable, or is a class, a generator function, a
            coroutine function or a module without `forward`; or `policy` is not a
            policy; or there are other arguments. The message says what to write
            instead.
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
    options = options_of(policy, prune, rng, higher_order, offload_inputs)
    where = "compiled code" if torch.compiler.is_compiling() else caller()
    if fn is _NOT_GIVEN:
        return functools.partial(_decorated, where=where, options=options)
    return _decorated(fn, where, options)


def _decorated(fn: Any, where: str, options: Options) -> Any:
    refuse_function(fn)
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(_decorated(fn.__func__, where, options))
    # A tracer knows the module, and not what is made while it traces.
    if isinstance(fn, nn.Module) and not must_inline():
        if not has_forward(fn):  # a container, of which there is nothing to recompute
            has_call = type(fn).__call__ is not nn.Module.__call__
            message = _OWN_CALL if has_call else _NO_FORWARD
            raise TypeError(message.format(kind=type(fn).__qualname__))
        return view_of(fn, where, options)
    return Rematerialized(fn, where, options)


def caller(depth: int = 2) -> str:
    """Return the line of the user's code that called the function that asks."""
    frame = sys._getframe(depth)
    return f"{shown(frame.f_code.co_filename)}:{frame.f_lineno}"


def options_of(
    policy: PolicyLike = None,
    prune: Any = "auto",
    rng: Any = "replay",
    higher_order: Any = False,
    offload_inputs: Any = False,
) -> Options:
    if prune not in ("auto", True, False):
        raise ValueError(f"remat: prune={prune!r}: use 'auto', True or False")
    if rng not in ("replay", "error"):
        raise ValueError(f"remat: rng={rng!r}: use 'replay' or 'error'")
    if higher_order not in (False, True):
        raise ValueError(f"remat: higher_order={higher_order!r}: use True or False")
    check_where(offload_inputs)
    checked = as_policy(policy)
    checked = None if checked == nothing_saveable else checked
    return Options(checked, prune, rng, higher_order, offload_inputs)


checkpoint = remat
not_scriptable(remat, SCRIPTED)
advise_on(remat, "remat")
