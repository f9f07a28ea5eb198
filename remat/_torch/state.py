"""What surrounds a call: modes, traces, caches, classes of pytrees and operators.

Invariant: a mode stack that is exchanged is put back, also after an exception.
Rejected: asking Dynamo. Importing it takes seconds, for those who do not compile.
"""

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, overrides
from torch._C._dynamo import eval_frame
from torch._C._functorch import (
    is_functorch_wrapped_tensor,
    peek_interpreter_stack,
)

# Deleted by: public names for the classes of what `torch.ops` holds.
from torch._ops import (
    HigherOrderOperator as HigherOrderOperator,
    OpOverload as OpOverload,
    OpOverloadPacket as OpOverloadPacket,
)
from torch.fx import _symbolic_trace
from torch.library import CustomOpDef
from torch.nn.utils import parametrize
from torch.utils import _python_dispatch, _pytree, checkpoint
from typing_extensions import override


_dynamo: Any = eval_frame

try:
    from torch.func import _random  # nothing in torch imports it
except ImportError:
    _random = None

is_autocast_active = torch._C._is_any_autocast_enabled


# Deleted by: a public way to ask how many autocast contexts there are around. When the
# outermost ends, the cache of casts is emptied.
def autocast_depth() -> int:
    """Return how many contexts of autocast are open, on or off."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


# Deleted by: a public registry of torch's pytree classes.
TORCH_NODES: dict[type, Any] = _pytree.SUPPORTED_NODES


# Deleted by: a public torch.utils.pytree in which a class can be registered.
def register_torch_node(
    cls: type,
    name: str,
    children: Sequence[str],
    flatten: Callable[[Any], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], Any],
) -> None:
    """Register a class whose children are attributes with torch's own pytrees."""

    def flatten_with_keys(instance: Any) -> tuple[list[tuple[Any, Any]], Any]:
        leaves, context = flatten(instance)
        keys = map(_pytree.GetAttrKey, children)
        return list(zip(keys, leaves, strict=True)), context

    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=name,
        flatten_with_keys_fn=flatten_with_keys,
    )


# Deleted by: a public stack of TorchFunctionModes.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack


def function_modes() -> list[overrides.TorchFunctionMode]:
    """Return the active TorchFunctionModes, outermost first, without remat's own."""
    stack = overrides._get_current_function_mode_stack()
    return [mode for mode in stack if not hasattr(mode, "is_remats_check")]


def under_function_modes(
    modes: Sequence[overrides.TorchFunctionMode], fn: Callable[..., Any], *args: Any
) -> Any:
    """Call `fn` under just these TorchFunctionModes and remat's own."""
    before = overrides._get_current_function_mode_stack()
    checks = [mode for mode in before if hasattr(mode, "is_remats_check")]
    _swap_function_modes([*modes, *checks])
    try:
        return fn(*args)
    finally:
        _swap_function_modes(before)


def _swap_function_modes(modes: Sequence[overrides.TorchFunctionMode]) -> None:
    while function_mode_count():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


_PROXY = torch._C._TorchDispatchModeKey.PROXY


# Deleted by: a public `torch.fx` way to ask whether a trace is being made.
def must_inline() -> bool:
    """Say whether a function is to be called as it is, though it is differentiated.

    While Dynamo traces, which drops a Function's backward under torch.func; in a trace
    by make_fx, torch.fx or TorchScript, which has no memory to save; and in inference
    mode, where a torch.func level records but nothing below it can.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(_PROXY) is not None
        or torch.is_inference_mode_enabled()
        or torch._C._is_tracing()
        or _symbolic_trace.is_fx_symbolic_tracing()
    )


def is_traced_symbolically() -> bool:
    """Say whether torch.fx traces, on stand-ins that are no tensors, unlike make_fx."""
    traces = _symbolic_trace.is_fx_symbolic_tracing()
    return traces and torch._C._get_dispatch_mode(_PROXY) is None


# Deleted by: a public way to say that TorchScript cannot compile a function.
def not_scriptable(fn: Callable[..., Any], why: str) -> None:
    """Have TorchScript refuse to compile a function, and say why."""
    vars(fn)["__script_unsupported"] = why


# Deleted by: a cache of parametrizations that is not global.
def swap_parametrization_cache(
    state: tuple[dict[Any, Any], int],
) -> tuple[dict[Any, Any], int]:
    """Exchange what `parametrize.cached()` keeps, and how often it is entered."""
    before = parametrize._cache, parametrize._cache_enabled
    parametrize._cache, parametrize._cache_enabled = state
    return before


def parametrization_cache() -> dict[Any, Any] | None:
    """Return what `parametrize.cached()` keeps; None if it is not active."""
    return parametrize._cache if parametrize._cache_enabled > 0 else None


# Deleted by: `torch.compiler.disable` not importing Dynamo for those who do not use it.
def eager_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of `fn`, which the engine may call from compiled code."""
    skip = _dynamo._FrameAction.SKIP
    strategy = _dynamo._FrameExecStrategy(skip, skip)
    _dynamo.set_code_exec_strategy(fn.__code__, strategy)
    return fn


# Deleted by: calls of `torch.ops` costing as little as those of a function.
def is_unwatched(tensor: Tensor) -> bool:
    """Say whether an operation on `tensor` may be computed without being dispatched.

    That is: it is on the CPU, and no transform, mode, trace or subclass would see it.
    """
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()
        and torch._C._get_tracing_state() is None
        and peek_interpreter_stack() is None
        and tensor.is_cpu
    )


# Deleted by: a public `torch.func.random`.
def native_random(device: str) -> Any:
    """Return torch's own module of keyed draws, if it has kernels for the device."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    ops = "aten::_philox_key_split", "aten::_philox_uniform_", "aten::_philox_normal_"
    try:
        key = torch._C._dispatch_key_for_device(device)
        return _random if all(has_kernel(op, key) for op in ops) else None
    except RuntimeError:  # of no dispatch key
        return None


def is_operator(obj: object) -> TypeGuard[Any]:
    """Say whether `obj` is what `torch.ops` holds, or `torch.library.custom_op` made.

    Example:
        >>> is_operator(torch.ops.aten.mm), is_operator(torch.mm)
        (True, False)
    """
    kinds = OpOverload, OpOverloadPacket, HigherOrderOperator, CustomOpDef
    return isinstance(obj, kinds)


# Deleted by: a public way from a custom_op's function to its overload.
def overload_of(operator: Any) -> Any:
    """Return the operator behind a function that `torch.library.custom_op` made."""
    return operator._opoverload if isinstance(operator, CustomOpDef) else operator


# Deleted by: a public fake tensor that needs no mode.
tensor_without_data: Callable[..., Any] = Tensor._make_wrapper_subclass

# Deleted by: subclasses without data whose address cannot be taken.
refuse_data_ptr: Callable[[Tensor], None] = vars(torch._C)[
    "_set_throw_on_mutable_data_ptr"
]


# Deleted by: a public `Tensor.is_zerotensor`.
def is_lazy(tensor: Tensor) -> bool:
    """Say whether what operations do with a tensor depends on more than metadata."""
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


# Deleted by: calls of an overload that cost as little as what they call.
def kernel_of(func: Any) -> Callable[..., Any]:
    """Return what an overload calls, or an operator of higher order itself."""
    # From torch 2.14 on `_op` may be a short cut of a custom operator, which is not to
    # be taken everywhere.
    return getattr(func, "_cpp_dispatch_handle", None) or getattr(func, "_op", func)


# Deleted by: dispatch modes below which kernels still resolve what they conjugate or
# negate lazily: torch switches that off there, and a kernel made of others (`pinv`) is
# wrong.
def call_kernel(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a kernel from a dispatch mode as it is called without one."""
    before = [*map(_is_excluded, _LAZY)]
    for key in _LAZY:
        _set_excluded(key, False)
    try:
        return kernel(*args, **kwargs)
    finally:
        for key, was in zip(_LAZY, before, strict=True):
            _set_excluded(key, was)


_LAZY = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


# Deleted by: a public `OpOverload.is_view`.
def is_view_op(func: Any) -> bool:
    """Say whether an operation only looks at a storage in another way."""
    return getattr(func, "is_view", False)


# Deleted by: a public way for a subclass to have no `__torch_function__`.
no_torch_function: Any = torch._C._disabled_torch_function_impl

# Deleted by: `torch.autograd.grad` not switching torch functions off for a backward,
# where a tensor passed to it is of a class that has one.
torch_functions: Any = vars(torch._C)["_EnableTorchFunction"]

# Deleted by: a public way to keep TorchFunctionModes out.
no_torch_functions = torch._C.DisableTorchFunction


# Deleted by: a dispatch mode that can be left by those inside of it.
@contextmanager
def without_dispatch_mode(mode: Any) -> Iterator[None]:
    """Run the body without a dispatch mode, if it is the innermost."""
    if _python_dispatch._get_current_dispatch_mode() is not mode:
        yield
        return
    # Which traces nothing under such a mode, and is to go on with that.
    dynamo = _dynamo.set_eval_frame(None)
    _python_dispatch._pop_mode()
    try:
        yield
    finally:
        _python_dispatch._push_mode(mode)
        _dynamo.set_eval_frame(dynamo)


# Deleted by: the same.
@contextmanager
def outside_dispatch_mode(mode: Any) -> Iterator[None]:
    """Run the body as if a mode, and those of ours inside of it, were not entered."""
    popped = list[Any]()
    dynamo = _dynamo.set_eval_frame(None)
    stack = _python_dispatch._get_current_dispatch_mode_stack()
    inside = [*map(id, stack)].index(id(mode))
    for _ in stack[inside:]:
        popped.append(_python_dispatch._pop_mode())
    others = [m for m in reversed(popped) if not isinstance(m, LeanDispatchMode)]
    for other in others:
        _python_dispatch._push_mode(other)
    try:
        yield
    finally:
        for _ in others:
            _python_dispatch._pop_mode()
        for each in reversed(popped):
            _python_dispatch._push_mode(each)
        _dynamo.set_eval_frame(dynamo)


# Deleted by: a public way to ask whether torch's checkpoint is running a function.
# Torch 2.14 has a second entry beside the first: `checkpoint(use_reentrant=False)(fn)`.
_checkpoint: Any = getattr(checkpoint, "_checkpoint_impl", checkpoint.checkpoint)
_CHECKPOINT: CodeType = inspect.unwrap(_checkpoint).__code__


def checkpoint_depth() -> int:
    """Return how many calls of torch.utils.checkpoint this is within, by the stack."""
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is _CHECKPOINT
        frame = frame.f_back
    return depth


# Deleted by: a public context below modes, transforms and autograd.
@contextmanager
def undisturbed() -> Iterator[None]:
    """Run the body as if there were no mode, no transform and no autograd."""
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_ABOVE):
        yield


_ABOVE = functools.reduce(
    operator.or_,
    [
        torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
        for key in (
            *("Python", "PythonTLSSnapshot", "PythonDispatcher", "PreDispatch"),
            *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"),
            *("AutogradFunctionality", "ADInplaceOrView", "Functionalize"),
        )
    ],
)


# Deleted by: a FakeTensorMode that takes tensors made outside of it.
def as_fake(tensor: Tensor) -> Tensor:
    """Return a tensor that has no wrapper as one of the FakeTensorMode there is."""
    mode: Any = torch._C._get_dispatch_mode(_FAKE)
    if (
        mode is None
        or type(tensor) is not Tensor
        or is_functorch_wrapped_tensor(tensor)
    ):
        return tensor
    return mode.from_tensor(tensor)


_FAKE = torch._C._TorchDispatchModeKey.FAKE
_F = TypeVar("_F", bound=Callable[..., Any])


# Deleted by: `torch.compiler.assume_constant_result` not importing Dynamo.
def constant_in_traces(fn: _F) -> _F:
    """Let Dynamo call `fn` where it traces a call, and take the result as constant."""
    vars(fn)["_dynamo_marked_constant"] = True
    return fn


# Deleted by: Dynamo sending to modes every function that they get when not traced.
def show_to_traced_modes(functions: Iterable[Any]) -> None:
    """Have Dynamo send these functions to TorchFunctionModes."""
    variables = sys.modules["torch._dynamo.variables.torch"]
    variables.get_overridable_functions().update(functions)


# What a mode sets while it is entered: for Dynamo, which compiles nothing in some.
_FLAGS = (
    *("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode"),
    "_is_in_any_mode_without_ignore_compile_internals",
)
_dispatch: Any = _python_dispatch
_tell_dynamo = getattr(
    _dispatch, "set_is_in_mode_without_ignore_compile_internals", None
)
_has_flags = _tell_dynamo is not None and all(hasattr(_dispatch, n) for n in _FLAGS)
_read_flags = operator.attrgetter(*_FLAGS)


# Deleted by: TorchDispatchMode not importing Dynamo to keep it out of its subclasses,
# and entering a mode costing no more than an operation.
class LeanDispatchMode(_python_dispatch.TorchDispatchMode):
    """A dispatch mode whose `__torch_dispatch__` is to be `eager_only`.

    It is entered once at a time.
    """

    # torch.cond and the like: else torch refuses them.
    supports_higher_order_operators = True

    _before: tuple[bool, ...] = ()

    def __init__(self) -> None:
        if not _has_flags:  # torch's own makes places for the flags
            super().__init__()

    @override
    def __enter__(self) -> Any:
        if not _has_flags:
            return super().__enter__()
        assert not self._before, "the flags from before would be lost"
        self._before = _read_flags(_dispatch)
        for name in _FLAGS:
            setattr(_dispatch, name, True)
        _tell_dynamo(True)
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if not _has_flags:
            return super().__exit__(exc_type, exc_val, exc_tb)
        for name, value in zip(_FLAGS, self._before, strict=True):
            setattr(_dispatch, name, value)
        _tell_dynamo(self._before[-1])
        self._before = ()
        torch._C._pop_torch_dispatch_stack(None)
        return None

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False


# Deleted by: a public context that no dispatch mode sees.
unseen: Any = torch._C._DisableTorchDispatch


# Deleted by: views that modes do not get to see.
def viewed(
    tensor: Tensor, shape: Sequence[int], stride: Sequence[int], offset: int
) -> Tensor:
    """Return another view of the storage of a tensor, past all dispatch modes."""
    if type(tensor) is not Tensor:
        return tensor.as_strided(shape, stride, offset)
    with unseen():
        return tensor.as_strided(shape, stride, offset)
