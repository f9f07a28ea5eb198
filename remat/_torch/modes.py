"""Modes: which are entered, how one is entered cheaply, and how to act outside of them.

Invariant: a stack of modes that is exchanged is put back, also after an exception.
Rejected: `TorchDispatchMode` as it is. It imports Dynamo, and to enter it costs more
than an operation.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, overrides
from torch._C._functorch import peek_interpreter_stack
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch
from typing_extensions import override

from remat._torch.tracing import LEFT, dynamo


# --- Modes for functions ---


# Deleted by: a public stack of TorchFunctionModes.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack


def function_modes() -> list[overrides.TorchFunctionMode]:
    """Return the user's TorchFunctionModes that are active, outermost first."""
    stack = overrides._get_current_function_mode_stack()
    return [mode for mode in stack if not _stays(mode)]


def _stays(mode: Any) -> bool:
    """Say whether a mode is remat's own, or that of a tracer, which holds a graph."""
    is_of_tracer = type(mode).__module__ == proxy_tensor.__name__
    return is_of_tracer or hasattr(mode, "is_remats_check")


def under_function_modes(
    modes: Sequence[overrides.TorchFunctionMode], fn: Callable[..., Any], *args: Any
) -> Any:
    """Call `fn` under just these TorchFunctionModes, and those that stay."""
    before = overrides._get_current_function_mode_stack()
    checks = [*filter(_stays, before)]
    _swap_function_modes([*modes, *checks])
    try:
        return fn(*args)
    finally:
        _swap_function_modes(before)


# Deleted by: a function mode that can be left before those inside of it.
def leave_function_mode(mode: overrides.TorchFunctionMode) -> None:
    """Leave a mode, also if others that were entered inside of it are still active."""
    stack = overrides._get_current_function_mode_stack()
    _swap_function_modes([other for other in stack if other is not mode])


def _swap_function_modes(modes: Sequence[overrides.TorchFunctionMode]) -> None:
    while function_mode_count():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


# Deleted by: `torch.autograd.grad` not switching torch functions off for a backward,
# where a tensor passed to it is of a class that has one.
torch_functions: Any = vars(torch._C)["_EnableTorchFunction"]

# Deleted by: a public way to keep TorchFunctionModes out.
no_torch_functions = torch._C.DisableTorchFunction


# --- Modes for operations ---


# Flags that a mode sets while it is entered. Dynamo reads them, since it compiles
# nothing under some modes.
_FLAGS = (
    *("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode"),
    "_is_in_any_mode_without_ignore_compile_internals",
)
_dispatch: Any = _python_dispatch
_tell_dynamo: Any = getattr(
    _dispatch, "set_is_in_mode_without_ignore_compile_internals", None
)
_has_flags = _tell_dynamo is not None and all(hasattr(_dispatch, n) for n in _FLAGS)
_read_flags = operator.attrgetter(*_FLAGS)


def _write_flags(values: Sequence[bool]) -> None:
    for name, value in zip(_FLAGS, values, strict=True):
        setattr(_dispatch, name, value)
    _tell_dynamo(values[-1])


# Deleted by: TorchDispatchMode not importing Dynamo to keep it out of its subclasses,
# and entering a mode costing no more than an operation.
class LeanDispatchMode(_python_dispatch.TorchDispatchMode):
    """A dispatch mode whose `__torch_dispatch__` must be `eager_only`.

    It is entered once at a time.
    """

    # Else torch refuses torch.cond and the like.
    supports_higher_order_operators = True

    is_of_call = True  # and not of a report, or of the user's step

    _before: tuple[bool, ...] = ()

    def __init__(self) -> None:
        if not _has_flags:  # torch's own `__init__` makes the flags
            super().__init__()

    @override
    def __enter__(self) -> Any:
        if not _has_flags:
            return super().__enter__()
        assert not self._before, "the flags from before would be lost"
        self._before = before = _read_flags(_dispatch)
        _write_flags((True, True, before[-1] or not self.ignore_compile_internals()))
        torch._C._push_on_torch_dispatch_stack(self)
        return self

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        if not _has_flags:
            return super().__exit__(exc_type, exc_val, exc_tb)
        _write_flags(self._before)
        self._before = ()
        torch._C._pop_torch_dispatch_stack(None)
        return None

    @classmethod
    @override
    def _should_skip_dynamo(cls) -> bool:
        return False

    def note_unseen(self) -> None:
        """Be told that the function runs operations that this mode does not see."""

    def note_unseen_reads(self, values: Sequence[Any]) -> None:
        """Be told what those operations read, before they run."""


# Deleted by: a public stack of dispatch modes.
dispatch_mode_count: Callable[[], int] = torch._C._len_torch_dispatch_stack


def dispatch_modes() -> list[Any]:
    """Return the dispatch modes that are entered, outermost first."""
    return _dispatch._get_current_dispatch_mode_stack()


def _from(mode: Any) -> list[Any]:
    """Return a mode and those inside of it, outermost first; none if it was left."""
    stack = dispatch_modes()
    at = next((k for k, each in enumerate(stack) if each is mode), len(stack))
    return stack[at:]


# Deleted by: modes that can be entered outside of others, left by those inside of them,
# and entered again without their `__enter__`.
@contextmanager
def _exchanged(
    count: int, modes: Sequence[Any] = (), flags: Sequence[bool] = ()
) -> Iterator[None]:
    """Run the body with other modes, outermost first, in place of the innermost."""
    # Dynamo traces nothing under some modes, and should trace nothing here either.
    before, known = dynamo.set_eval_frame(None), ()
    popped = [_dispatch._pop_mode() for _ in range(count)]
    for mode in modes:
        _dispatch._push_mode(mode)
    if flags and _has_flags:
        known = _read_flags(_dispatch)
        _write_flags(flags)
    try:
        yield
    finally:
        if known:
            _write_flags(known)
        for _ in modes:
            _dispatch._pop_mode()
        for mode in reversed(popped):
            _dispatch._push_mode(mode)
        dynamo.set_eval_frame(before)


_UP, _DOWN = (True,) * len(_FLAGS), (False,) * len(_FLAGS)


def modes_between(
    first: Any, outside: Any, inside: Any
) -> AbstractContextManager[None]:
    """Return a context with a mode just outside of `first`, and one innermost."""
    inner = _from(first)
    return _exchanged(len(inner), [outside, *inner, inside])


def under_dispatch_modes(modes: Sequence[Any]) -> AbstractContextManager[None]:
    """Return a context under modes, the last innermost, that are not entered anew."""
    return _exchanged(0, modes, _UP) if modes else nullcontext()


# Deleted by: an operator whose kernel runs as its caller would.
def as_one_operation(
    call: Callable[[Callable[..., Any]], Any], run: Callable[..., Any]
) -> Any:
    """Return `call(inside)`, under remat's modes alone; `inside` is under the others.

    There it runs as here, and not as a kernel does: under the modes of the user, and
    with autograd and transforms.
    """
    stack = dispatch_modes()
    ours = [mode for mode in stack if isinstance(mode, LeanDispatchMode)]
    with outside_all_dispatch_modes():
        keys = _included(), _excluded()

    def inside(*args: Any) -> Any:
        # A fake mode may be there, by which an operation on fake tensors runs.
        there = [*ours, *dispatch_modes()]
        others = [mode for mode in stack if mode not in there]
        with torch._C._ForceDispatchKeyGuard(*keys), under_dispatch_modes(others):
            return run(*args)

    with outside_all_dispatch_modes(), under_dispatch_modes(ours):
        return call(inside)


_included = torch._C._dispatch_tls_local_include_set
_excluded = torch._C._dispatch_tls_local_exclude_set


def without_dispatch_mode(mode: Any) -> AbstractContextManager[None]:
    """Return a context without a dispatch mode, if it is the innermost."""
    is_innermost = _dispatch._get_current_dispatch_mode() is mode
    return _exchanged(1) if is_innermost else nullcontext()


def outside_all_dispatch_modes() -> AbstractContextManager[None]:
    """Return a context as if no dispatch mode were entered, remat's own included."""
    return _exchanged(dispatch_mode_count(), (), _DOWN)


def outside_dispatch_mode(mode: Any) -> AbstractContextManager[None]:
    """Return a context without a mode, and without modes of ours inside of it."""
    inside = _from(mode)
    others = [m for m in inside if not isinstance(m, LeanDispatchMode)]
    return _exchanged(len(inside), others) if inside else nullcontext()


def leave_dispatch_mode(mode: LeanDispatchMode) -> None:
    """Leave a mode, also if others that were entered inside of it are still active."""
    inside = len(_from(mode)) - 1
    with _exchanged(inside):
        mode.__exit__(None, None, None)
    for name in _FLAGS if inside else ():
        setattr(_dispatch, name, True)


# Deleted by: Dynamo compiling the branches of `torch.cond`, and the bodies of loops,
# under a dispatch mode. Uncompiled they are not what these operators expect.
def compiled_outside_modes(compile_and_call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that leaves remat's modes for what torch compiles by itself."""

    @functools.wraps(compile_and_call)
    def call(*args: Any, **kwargs: Any) -> Any:
        stack = dispatch_modes()
        is_ours = [isinstance(mode, LeanDispatchMode) for mode in stack]
        if not (stack and all(is_ours) and _has_flags):
            return compile_and_call(*args, **kwargs)
        for mode in stack:
            mode.note_unseen()
        before, LEFT.modes = LEFT.modes, stack
        try:
            with _exchanged(len(stack), (), stack[0]._before):
                return compile_and_call(*args, **kwargs)
        finally:
            LEFT.modes = before

    return call


_higher_order: Any = torch._higher_order_ops.utils
if hasattr(_higher_order, "_hop_compile_and_call"):  # else it is of another torch
    _higher_order._hop_compile_and_call = compiled_outside_modes(
        _higher_order._hop_compile_and_call
    )


# Deleted by: kernels that resolve lazy conjugates and negatives below a dispatch mode.
# torch switches that off there, and kernels that are made of others (`pinv`) are wrong.
def call_kernel(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a kernel from a dispatch mode as it is called without one."""
    conjugate, negative = _is_excluded(_CONJUGATE), _is_excluded(_NEGATIVE)
    if not (conjugate or negative):
        return kernel(*args, **kwargs)
    _set_excluded(_CONJUGATE, False)
    _set_excluded(_NEGATIVE, False)
    try:
        return kernel(*args, **kwargs)
    finally:
        _set_excluded(_CONJUGATE, conjugate)
        _set_excluded(_NEGATIVE, negative)


_CONJUGATE, _NEGATIVE = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded


# Deleted by: `detach` sharing the count of changes below a dispatch mode, too.
def detached(tensor: Tensor) -> Tensor:
    """Detach a tensor, so that its changes are counted, also from a dispatch mode."""
    before = _is_excluded(_COUNTS)
    _set_excluded(_COUNTS, False)
    try:
        return tensor.detach()
    finally:
        _set_excluded(_COUNTS, before)


_COUNTS = torch._C.DispatchKey.ADInplaceOrView


# --- Outside of all of them ---


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


# Deleted by: views of another dtype whatever the shape, which modes do not see.
def flat_view(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the whole storage of a tensor as a row of elements of a dtype."""
    if hasattr(tensor, "fake_mode"):  # its storage is on another device
        count = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor.as_strided((count,), (1,), 0).view(dtype)
    with unseen():
        row = torch.empty(0, dtype=dtype, device=tensor.device)
        return row.set_(tensor.untyped_storage())


# Deleted by: views that modes do not get to see.
def alias(tensor: Tensor) -> Tensor:
    """Return a view of all of a tensor, past all dispatch modes."""
    if type(tensor) is not Tensor:
        return torch.ops.aten.alias.default(tensor)
    with unseen():
        return torch.ops.aten.alias.default(tensor)


# Deleted by: a public context below modes, transforms and autograd.
@contextmanager
def undisturbed() -> Iterator[None]:
    """Run the body as if there were no mode, no transform and no autograd."""
    with torch._C.DisableTorchFunction(), torch._C._ExcludeDispatchKeyGuard(_ALL):
        yield


def _key_set(names: Iterable[str]) -> Any:
    keys = torch._C.DispatchKey
    found = [getattr(keys, name) for name in names if hasattr(keys, name)]
    return functools.reduce(operator.or_, map(torch._C.DispatchKeySet, found))


_ALL = _key_set(
    (
        *("Python", "PythonTLSSnapshot", "PythonDispatcher", "PreDispatch"),
        *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode"),
        *("AutogradFunctionality", "ADInplaceOrView", "Functionalize"),
    )
)


# Deleted by: a public context in which operations run as a dispatch mode sees them.
def below_autograd() -> Any:
    """Return a context below autograd and autocast, but above dispatch modes."""
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE_MODES)


_DEVICES = "CPU", "CUDA", "XPU", "MPS", "HPU", "XLA", "IPU", "MTIA", "PrivateUse1"
_ABOVE_MODES = _key_set(
    ("AutogradFunctionality", "ADInplaceOrView", *(f"Autocast{d}" for d in _DEVICES))
)


# Deleted by: calls of `torch.ops` costing as little as those of a function.
def is_unwatched(tensor: Tensor) -> bool:
    """Say whether an operation on `tensor` may be computed without being dispatched.

    That is: it is on the CPU, and no transform, mode, trace or subclass would see it.
    """
    return (
        not torch.compiler.is_compiling()
        and type(tensor) is Tensor
        and not torch._C._len_torch_function_stack()
        and not dispatch_mode_count()
        and torch._C._get_tracing_state() is None
        and peek_interpreter_stack() is None
        and tensor.is_cpu
    )
