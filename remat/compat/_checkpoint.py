"""`checkpoint`: a call of torch's checkpoint, as a call of `remat`.

Invariant: in a trace it is what `remat` is there. Only contexts that no graph can hold
are left to torch's own checkpoint, which refuses them.
Rejected: a `Rematerialized` for each call. To copy the names and attributes of the
function costs as much as to search a small one. Rejected: to run a function under the
contexts of selective checkpointing. They store all that the policy saves, read or not.
"""

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import checkpoint as theirs
from torch.utils.checkpoint import noop_context_fn
from typing_extensions import override

from remat._base.context import here
from remat._base.errors import Label, RematError, hide_frames, label_of
from remat._base.operators import Observer
from remat._base.source import shown
from remat._base.types import Fn, Opaque
from remat._partial.options import Options
from remat._reach.names import code_of_arguments
from remat._report.check_replay import RunOperation, around, operation_of
from remat._torch.process import checkpoint_settings, selective_policy
from remat._torch.tracing import constant_in_traces, eager_only
from remat._transform.api import PolicyLike, refuse_function
from remat._transform.lowering import Lowering, call_lowered, lowering_of
from remat._transform.rematerialized import Rematerialized
from remat._transform.traced import call_as_node, call_in_graph, call_traced, key_of
from remat.policies import Policy, as_policy
from remat.policies._functions import Selective, checked_hash
from remat.policies._policy import Function


ContextFn = Callable[
    [], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
]
_checkpoint_of_torch = theirs.checkpoint


class Asked(NamedTuple):
    """What `checkpoint` was asked for."""

    context_fn: ContextFn = noop_context_fn
    determinism_check: str = "default"
    debug: bool = False
    early_stop: bool = True
    respect_saved_tensors_hooks: bool | None = None
    policy: Policy | None = None


_DEFAULTS = Asked()
_OPTIONS = Options()
_NOTHING_SET = None, None


@eager_only
def checkpoint(
    function: Any = None,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: ContextFn = noop_context_fn,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    respect_saved_tensors_hooks: bool | None = None,
    policy: PolicyLike = None,
    **kwargs: Any,
) -> Any:
    """Call a function so that a backward recomputes what its graph would store.

    It takes what `torch.utils.checkpoint.checkpoint` takes, and does what `remat` does:
    `remat(function)(*args, **kwargs)`. So does it in compiled code, where contexts must
    be those of a policy, and nothing compares the recompute.

    Args:
        function: the function. Without it, the result is a decorator.
        *args: its arguments.
        use_reentrant: not needed. There is one implementation, with the results of
            torch's `use_reentrant=False`.
        context_fn: returns two contexts. The function runs under the first, and a
            recompute under the second. Contexts that
            `create_selective_checkpoint_contexts` made give the call their policy.
        determinism_check: "default" compares the shape, dtype and node of what a
            recompute saves with what the forward saved. "none" compares only how many
            tensors they save.
        debug: whether an error of a recompute shows the operations of both runs.
        early_stop: whether a recompute ends with the last value that is read. If not,
            it runs the function to its end.
        preserve_rng_state: without effect. A recompute always draws the numbers of the
            forward. With others, the gradients would be those of another function.
        respect_saved_tensors_hooks: whether hooks for saved tensors around the call are
            given what a policy saves. Only False keeps it from them.
        policy: which results to save, as for `remat`: a dict by place, as is proposed
            for torch's checkpoint, or anything else that is a policy. It is passed on
            if the function itself has an argument of that name.
        **kwargs: keyword arguments of the function.

    Returns:
        What the function returns; or the decorator.

    Raises:
        ValueError: an argument has an unknown value, or two exclude each other.
        TypeError: `policy` is not a policy.
        RecomputeError: in a backward, if the recompute differs from the forward. It is
            a `CheckpointError`.

    Source: `torch.utils.checkpoint`.

    Example:
        >>> import torch
        >>> from remat import compat
        >>> from remat.testing import count_ops
        >>> x = torch.ones(3, requires_grad=True)
        >>> with count_ops() as ops:
        ...     compat.checkpoint(lambda x: x.sin().exp(), x).sum().backward()
        >>> ops["sin"], ops["exp"]
        (2, 2)
    """
    chosen = None
    if policy is not None:
        if _has_argument(function, "policy"):
            kwargs["policy"] = policy
        else:
            chosen = as_policy(policy)
    hooks = respect_saved_tensors_hooks
    asked = Asked(context_fn, determinism_check, debug, early_stop, hooks, chosen)
    del preserve_rng_state  # they are always preserved
    if asked != _DEFAULTS:
        _check(asked, use_reentrant)
    if function is None and not args:
        if kwargs:
            raise ValueError(_NO_FUNCTION.format(names=", ".join(kwargs)))
        return functools.partial(_decorated, asked)
    if torch.compiler.is_compiling():
        return _traced(function, args, kwargs, asked)
    return call_checkpointed(function, args, kwargs, asked, sys._getframe(1))


def _has_argument(function: Any, name: str) -> bool:
    # Where torch's checkpoint has no such argument, code may pass it to its function.
    code, _ = code_of_arguments(function)
    count = 0 if code is None else code.co_argcount + code.co_kwonlyargcount
    return count > 0 and name in code.co_varnames[:count]


def _check(asked: Asked, use_reentrant: bool | None) -> None:
    """Refuse arguments that torch's checkpoint refuses."""
    check = asked.determinism_check
    if check not in ("default", "none"):
        message = f"remat: determinism_check={check!r}: use 'default' or 'none'"
        raise ValueError(message)
    has_contexts = asked.context_fn is not noop_context_fn
    if has_contexts and asked.policy is not None:
        raise ValueError(_TWO_POLICIES)
    hooks = asked.respect_saved_tensors_hooks
    if use_reentrant and (has_contexts or asked.debug or hooks is not None):
        raise ValueError(_REENTRANT)


_NO_FUNCTION = (
    "remat: checkpoint has no argument {names}. Without a function it returns a "
    "decorator, which takes only the options of checkpoint."
)
_REENTRANT = (
    "remat: context_fn, debug and respect_saved_tensors_hooks need "
    "use_reentrant=False, as in torch. Leave use_reentrant out: remat has one "
    "implementation."
)
_TWO_POLICIES = (
    "remat: checkpoint takes a policy or a context_fn, and got both. Join what the "
    "context_fn saves to the policy: policy | [operators]."
)


def _decorated(asked: Asked, function: Fn) -> Fn:
    """Return a function each of whose calls is a checkpoint."""
    refuse_function(function)

    @functools.wraps(function, updated=())
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return _traced(function, args, kwargs, asked)
        return call_checkpointed(function, args, kwargs, asked, sys._getframe(1))

    return checkpointed


# --- In a trace ---


def _traced(fn: Fn, args: Any, kwargs: dict[str, Any], asked: Asked) -> Any:
    """Call a function in a trace of Dynamo, or for an export."""
    context_fn, options = asked.context_fn, _OPTIONS
    if asked.policy is not None:
        options = Options(asked.policy)
    if context_fn is noop_context_fn or torch.compiler.is_exporting():
        return call_traced(fn, "checkpoint", _COMPILED, options, *args, **kwargs)
    if not torch.is_grad_enabled():
        return fn(*args, **kwargs)
    key = _key_of(context_fn)
    if key:
        return call_as_node(key, fn, *args, **kwargs)
    # Not by the name of a module: `patch` may have put ours there.
    return _checkpoint_of_torch(
        fn, *args, use_reentrant=False, context_fn=context_fn, **kwargs
    )


@constant_in_traces
def _key_of(context_fn: ContextFn) -> str:
    """Return what tells the node of a call with a policy; "" for other contexts."""
    policy = policy_of(context_fn()[0])
    if policy is None:
        return ""
    return key_of("checkpoint", _COMPILED, Options(policy))


_COMPILED = "compiled code"


# --- Outside of traces ---


def call_checkpointed(
    fn: Fn,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asked: Asked,
    caller: FrameType,
    name: str = "",
) -> Any:
    """Call a function as `checkpoint` does."""
    refuse_function(fn)
    options = _OPTIONS
    lowering = lowering_of(options)
    if lowering is Lowering.INLINED or lowering is Lowering.PLAIN:
        return fn(*args, **kwargs)
    if not name:
        own = None if isinstance(fn, nn.Module) else getattr(fn, "__qualname__", None)
        name = own or type(fn).__qualname__
    file, line = caller.f_code.co_filename, caller.f_lineno
    if asked != _DEFAULTS or checkpoint_settings() != _NOTHING_SET:
        fn, options = _prepared(fn, asked)
    if lowering is Lowering.TRACED:  # by make_fx
        where = f"{shown(file)}:{line}"
        return call_in_graph(fn, name, where, options, *args, **kwargs)
    if here().reporter is not None:  # a report, which asks each block how to run
        block = Rematerialized(fn, f"{shown(file)}:{line}", options, name)
        return block(*args, **kwargs)
    try:
        label = _label(name, file, line)
        return call_lowered(lowering, fn, label, args, kwargs, options)
    except Exception as error:
        hide_frames(error)
        raise


@functools.lru_cache(maxsize=1024)
def _label(name: str, file: str, line: int) -> Label:
    return label_of(name, f"{shown(file)}:{line}")


def _prepared(fn: Fn, asked: Asked) -> tuple[Fn, Options]:
    """Return the function under the contexts of the call, and the options."""
    describe, policy = None, asked.policy
    has_contexts = asked.context_fn is not noop_context_fn
    early_stop, debug = checkpoint_settings()
    if asked.debug if debug is None else debug:
        if has_contexts:
            raise ValueError(_DEBUG)
        first, second = _Operations(), _Operations()
        describe = functools.partial(_described, first, second)
        fn = _under(first, second, fn)
    elif has_contexts:
        first, second = asked.context_fn()
        policy = policy_of(first)
        if policy is None:
            fn = _under(first, second, fn)
    early = asked.early_stop if early_stop is None else early_stop
    return fn, Options(
        policy=policy,
        stops_early=bool(early),
        compares=asked.determinism_check == "default",
        hooks_residuals=asked.respect_saved_tensors_hooks is not False,
        describe=describe,
    )


_DEBUG = (
    "remat: debug=True and context_fn exclude each other, as in torch. Call the "
    "function without context_fn to find where a recompute differs."
)


# --- Under a user's contexts ---


def _under(first: Any, second: Any, fn: Fn) -> Fn:
    """Return a function that runs under one context first, then under another."""
    contexts = Opaque([second, first])  # the first is let go of with its run

    def under(*args: Any, **kwargs: Any) -> Any:
        is_forward = len(contexts.value) > 1
        context = contexts.value.pop() if is_forward else contexts.value[0]
        with context:
            return fn(*args, **kwargs)
        if is_forward:
            raise RematError(_SUPPRESSED)
        return None

    vars(under)["__wrapped__"] = fn  # names its arguments
    return under


_SUPPRESSED = (
    "remat: the first context of context_fn suppressed an exception of the function, "
    "so there is no result. Let the exception out of the context."
)


# --- The operations of both runs, for `debug=True` ---


_TITLE = (
    "remat: the operations of the forward and of the recompute, around the first that "
    "differs. A recompute ends at the difference, or with the last value that is read."
)


class _Operations(Observer):
    """Notes each operation of a run, and the user's line."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[RunOperation] = []

    @override
    def __enter__(self) -> Any:
        self.steps.clear()  # a retained graph is recomputed again
        return super().__enter__()

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Noted first: an operation may raise.
        self.steps.append(operation_of(func, args, kwargs))
        return super().run(func, args, kwargs)


def _described(first: _Operations, second: _Operations) -> str:
    """Write the operations of both runs around the first that differs."""
    then, now = first.steps, second.steps
    pairs = zip(then, now, strict=False)
    same = [a.func is b.func and a.arguments == b.arguments for a, b in pairs]
    i = [*same, False].index(False)
    lines = [*around("forward", then, i), *around("recompute", now, i)]
    return "\n".join([_TITLE, *lines])


# --- Policies of contexts ---


def policy_of(context: object) -> Policy | None:
    """Return the policy of the context for the forward, or None for another context."""
    policy = selective_policy(context)
    if policy is None:
        if hasattr(context, "respect_saved_tensors_hooks"):
            # A subclass, which runs as it is. The hooks around it are those of the
            # call, which count what the graph saves.
            vars(context)["respect_saved_tensors_hooks"] = False
        return None
    if isinstance(policy, list):
        return as_policy(policy)
    return Function(Selective(checked_hash(policy), is_new=True))
