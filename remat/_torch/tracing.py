"""Traces: whether one is being made, and what Dynamo and TorchScript are told.

What each function says in code that is traced (`is_below_tracer` is in `graphs`):

    who traces                    Dynamo  AOTAutograd      make_fx  export  torch.fx
                                          metadata  graph
    `must_inline`                 yes     yes       yes    yes      yes     yes
    `makes_graph`                 yes     no        yes    yes      no      no
    `has_proxies`                 -       no        yes    yes      no      no
    `is_below_tracer`             -       yes       yes    yes      yes     no
    `is_traced_symbolically`      no      no        no     no       no      yes

Dynamo cannot trace what has a "-", and `makes_graph` says no in its exports. In
inference mode and for TorchScript `must_inline` alone says yes. `nodes.is_body` asks of
a function whether it is what Dynamo traced.

Invariant: nothing here imports Dynamo, which takes seconds.
Rejected: `torch.compiler.disable` and the like, which import it.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch._C._dynamo import eval_frame
from torch.fx import _symbolic_trace


if TYPE_CHECKING:
    from types import FrameType

dynamo: Any = eval_frame
_F = TypeVar("_F", bound=Callable[..., Any])


_PROXY = torch._C._TorchDispatchModeKey.PROXY


# Deleted by: a public `torch.fx` way to ask whether a trace is being made.
def must_inline() -> bool:
    """Say whether a function is to be called as it is, though it is differentiated.

    That is so while Dynamo traces, which drops a Function's backward under torch.func;
    in a trace by make_fx, torch.fx or TorchScript; and in inference mode, where a
    torch.func level makes a graph but nothing below it can. `makes_graph` says where
    the graph is to hold a recompute nevertheless.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(_PROXY) is not None
        or torch.is_inference_mode_enabled()
        or torch._C._is_tracing()
        or _symbolic_trace.is_fx_symbolic_tracing()
    )


def has_proxies() -> bool:
    """Say whether what is dispatched here becomes a node of a graph."""
    return torch._C._get_dispatch_mode(_PROXY) is not None


def makes_graph() -> bool:
    """Say whether Dynamo, AOTAutograd or make_fx traces, and not for an export."""
    if torch.compiler.is_exporting():
        return False
    if torch.compiler.is_dynamo_compiling():
        return True
    return (
        has_proxies()
        and not torch.is_inference_mode_enabled()
        and not torch._C._is_tracing()
    )


def is_traced_symbolically() -> bool:
    """Say whether torch.fx traces, on stand-ins that are no tensors, unlike make_fx."""
    traces = _symbolic_trace.is_fx_symbolic_tracing()
    return traces and not has_proxies()


# Deleted by: a public way to say that TorchScript cannot compile a function.
def not_scriptable(fn: Callable[..., Any], why: str) -> None:
    """Have TorchScript refuse to compile a function, and say why."""
    vars(fn)["__script_unsupported"] = why


# Deleted by: `torch.compiler.disable` not importing Dynamo for those who do not use it.
def eager_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of `fn`, which the engine may call from compiled code."""
    skip = dynamo._FrameAction.SKIP
    strategy = dynamo._FrameExecStrategy(skip, skip)
    dynamo.set_code_exec_strategy(fn.__code__, strategy)
    return fn


# Deleted by: a public way to ask whether compiled code is running. A dispatch mode that
# ignores what is compiled sees what the result of a compilation dispatches, and not the
# kernels that it calls itself.
def is_in_compiled_code() -> bool:
    """Say whether AOTAutograd's or the Inductor's result calls what asks this."""
    if _RUNTIME not in sys.modules:  # nothing is compiled
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module not in _PASSED:
            if module.startswith(_COMPILED):
                return True
            if module.partition(".")[0] not in _PASSED:
                return False
            _PASSED.add(module)
        frame = frame.f_back
    return False


_COMPILED = "torch._functorch._aot_autograd", "torch._inductor"
_RUNTIME = "torch._functorch._aot_autograd.runtime_wrappers"
_PASSED = {"torch", "remat", ""}  # code of torch.fx is of no module


def is_symbolic(size: object) -> bool:
    """Say whether a size varies in the graph that is made."""
    return isinstance(size, torch.SymInt)


# Deleted by: a public way to ask which size a trace has seen.
def size_hint(size: Any) -> int | None:
    """Return the size that a trace has seen; None if it depends on values.

    Nothing is guarded: the graph is used for other sizes too.
    """
    return size.node.hint if isinstance(size, torch.SymInt) else size


# Deleted by: graphs whose recompute has the sizes of its forward.
def are_sizes_equal(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Compare two shapes; sizes that depend on values are equal when the graph runs.

    The graph checks that then.
    """
    if len(sizes) != len(others):
        return False
    for size, other in zip(sizes, others, strict=True):
        if size_hint(size) is None and size_hint(other) is None:
            torch._check(size == other)
        elif size != other:
            return False
    return True


# Deleted by: `torch.compiler.assume_constant_result` not importing Dynamo.
def constant_in_traces(fn: _F) -> _F:
    """Let Dynamo call `fn` where it traces a call, and take the result as constant."""
    vars(fn)["_dynamo_marked_constant"] = True
    return fn


# Deleted by: `torch.compiler.disable` not importing Dynamo.
def uncompiled(fn: _F, why: str) -> _F:
    """Have Dynamo break its graph at a call of `fn`, or refuse it with a reason."""
    vars(fn).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=why)
    return fn


# Deleted by: Dynamo sending to modes every function that they get when not traced.
def show_to_traced_modes(functions: Iterable[Any]) -> None:
    """Have Dynamo send these functions to TorchFunctionModes."""
    variables = sys.modules["torch._dynamo.variables.torch"]
    variables.get_overridable_functions().update(functions)


# Deleted by: a public way to ask whether a function or module is compiled.
def is_compiled(attributes: Mapping[str, Any]) -> bool:
    """Say by the attributes of an object whether Dynamo compiles its calls."""
    return (
        "_torchdynamo_orig_callable" in attributes
        and "_torchdynamo_disable" not in attributes
    )


# --- What torch compiles by itself ---


class _LeftModes(threading.local):
    """The modes of a thread that were left for what torch compiles by itself."""

    modes: Sequence[Any] = ()


LEFT = _LeftModes()


# Deleted by: higher-order operators that tell a mode what they read, uncompiled.
def telling_what_is_read(backend_chosen: Callable[[], Any]) -> Callable[[], Any]:
    """Return a context whose backend tells the modes that were left what graphs read.

    It takes the place of one that gives the backend for what torch compiles by itself.
    """

    @contextmanager
    def chosen() -> Iterator[Any]:
        with backend_chosen() as backend:
            yield _telling(backend) if LEFT.modes else backend

    return chosen


# Once for each: Dynamo compiles again for another backend.
@functools.lru_cache(maxsize=8)
def _telling(backend: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(graph: Any, examples: Any, **options: Any) -> Callable[..., Any]:
        run = backend(graph, examples, **options)
        held = [*graph.parameters(), *graph.buffers()]

        def call(*args: Any) -> Any:
            for mode in LEFT.modes:
                mode.note_unseen_reads([*args, *held])
            return run(*args)

        return call

    return compiled


_higher_order: Any = torch._higher_order_ops.utils
if hasattr(_higher_order, "setup_compilation_env"):  # else it is of another torch
    _higher_order.setup_compilation_env = telling_what_is_read(
        _higher_order.setup_compilation_env
    )
