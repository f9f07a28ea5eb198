"""`remat`: the decorator.

Users call it. It checks its arguments, and returns a `Rematerialized` function, or a
module whose `forward` is one.

Invariant: all that can be refused is refused here, at the user's line.
Rejected: one class for functions and modules. A module is registered with its parent,
saved and moved, and a callable that refers to it is none of that.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeVar, overload

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from remat._base import hints
from remat._base.source import shown
from remat._offload.inputs import check_where
from remat._partial.options import OffloadInputs, Options, Prune, Rng
from remat._torch import must_inline, not_scriptable
from remat._transform.module import view_of
from remat._transform.refused import (
    refuse_arguments,
    refuse_function,
    refuse_without_forward,
)
from remat._transform.rematerialized import SCRIPTED, Rematerialized
from remat.policies import Decision, Policy, as_policy, nothing_saveable


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
        refuse_without_forward(fn)
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
    """Check the options of `remat`."""
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
hints.on(remat, "remat")
