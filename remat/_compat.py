"""The only module that touches private torch API: an upgrade has one place to look.

Invariant: every name here says which upstream change would delete it.
Rejected: a HigherOrderOperator, or `Function.apply` under torch.func. They need less
private API, but cost 1.2 and 2.7 million instructions a call where this costs a third
of a million (torch 2.13).
"""

import functools
import operator
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, overrides
from torch._C._autograd import (
    _pop_saved_tensors_default_hooks as pop_hooks,
    _push_saved_tensors_default_hooks as push_hooks,
    _top_saved_tensors_default_hooks as top_hooks,
)
from torch._C._dynamo import eval_frame
from torch._C._functorch import (
    CGradInterpreterPtr,
    CInterpreter,
    CJvpInterpreterPtr,
    TransformType,
    _unwrap_for_grad,
    _wrap_for_grad,
    get_interpreter_stack,
    get_single_level_autograd_function_allowed,
    get_unwrapped,
    is_functorch_wrapped_tensor,
    maybe_get_level,
    peek_interpreter_stack,
    pop_dynamic_layer_stack,
    push_dynamic_layer_stack,
    set_single_level_autograd_function_allowed,
    unwrap_if_dead,
)
from torch._functorch import eager_transforms
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
from torch._functorch.vmap import restore_vmap, unwrap_batched, wrap_batched
from torch.autograd import Function, forward_ad, graph
from torch.nn.utils import parametrize
from torch.utils import _pytree
from torch.utils._device import DeviceContext


Outputs: TypeAlias = tuple[Tensor | None, ...]
Tensors: TypeAlias = tuple[Tensor, ...]


_dynamo: Any = eval_frame
is_autocast_active = torch._C._is_any_autocast_enabled
set_grad_enabled = torch._C._set_grad_enabled
# Deleted by: a public registry of torch's pytree classes.
TORCH_NODES: dict[type, Any] = _pytree.SUPPORTED_NODES
# Deleted by: a public way to ask which torch.func transform is innermost.
current_layer = peek_interpreter_stack
# Deleted by: Function.apply doing this without inspecting signatures on each call.
unwrap_dead = unwrap_if_dead
# Deleted by: a static (not per call) single-level Function in functorch.
unwrap_for_grad = _unwrap_for_grad
wrap_for_grad = _wrap_for_grad


# Deleted by: enums that compare as cheaply as integers.
_kinds: Any = TransformType
VMAP: int = _kinds.Vmap.value
GRAD: int = _kinds.Grad.value
JVP: int = _kinds.Jvp.value


def kind_of(layer: CInterpreter) -> int:
    """Return what transform a level of torch.func is of.

    Raises:
        NotImplementedError: it is none that remat knows.
    """
    key: Any = layer.key()
    kind: int = key.value
    if kind not in (VMAP, GRAD, JVP):
        raise NotImplementedError(f"remat: under {key.name} of torch.func")
    return kind


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


# Deleted by: a public `Tensor.unwrap()` for torch.func wrappers.
def base_tensor(tensor: Tensor) -> Tensor:
    """Return the tensor under all torch.func wrappers."""
    while is_functorch_wrapped_tensor(tensor):
        tensor = get_unwrapped(tensor)
    return tensor


def is_of_level_above(tensor: Tensor) -> bool:
    """Say whether a tensor belongs to a level above the innermost active one."""
    tensor = unwrap_if_dead(tensor)
    if not is_functorch_wrapped_tensor(tensor):
        return False
    layer = peek_interpreter_stack()
    return maybe_get_level(tensor) > (layer.level() if layer is not None else 0)


def requires_grad_at_any_level(tensor: Tensor) -> bool:
    """Say whether some level, torch.func's or the base, differentiates `tensor`."""
    while not tensor.requires_grad:
        if not is_functorch_wrapped_tensor(tensor):
            return False
        tensor = get_unwrapped(tensor)
    return True


# Deleted by: `torch.set_grad_enabled` without its decorator machinery, ten times this.
class grad_mode:  # noqa: N801
    """A context in which grad mode is on or off."""

    __slots__ = ("_before", "_mode")

    def __init__(self, mode: bool) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        set_grad_enabled(self._mode)

    def __exit__(self, *_: object) -> None:
        set_grad_enabled(self._before)


# Deleted by: `Function.apply` not inspecting signatures on each call, nor sending
# torch.func's levels elsewhere.
def plain_apply(function: type[Function]) -> Callable[..., Any]:
    """Return what records a call of `function` at the level it is on."""
    parent: Any = super(Function, function)
    return parent.apply


# Deleted by: a static single-level Function in functorch.
def apply_at_level(apply: Callable[..., Any], *args: Any) -> Any:
    """Record a call at one torch.func level, which torch allows only if told so."""
    before = get_single_level_autograd_function_allowed()
    set_single_level_autograd_function_allowed(True)
    try:
        return apply(*args)
    finally:
        set_single_level_autograd_function_allowed(before)


def lifted(layer: CInterpreter, kind: int, leaves: Sequence[Tensor]) -> list[Tensor]:
    """Return the leaves as tensors of a grad or jvp level.

    Else that level would see the tangents that a constant of its has one level down.
    """
    level = (CGradInterpreterPtr if kind == GRAD else CJvpInterpreterPtr)(layer)
    return [*map(level.lift, leaves)]


def call_below(
    layer: CInterpreter, kind: int, fn: Callable[..., Any], *args: Any
) -> Any:
    """Call `fn` below a grad or jvp level, in the modes it was entered in.

    To be called in a Function's forward, which restores the modes itself.
    """
    is_grad = kind == GRAD
    set_grad_enabled(not is_grad or CGradInterpreterPtr(layer).prevGradMode())
    set_forward_ad(is_grad or CJvpInterpreterPtr(layer).prevFwdGradMode())
    popped = pop_dynamic_layer_stack()
    try:
        return fn(*args)
    finally:
        push_dynamic_layer_stack(popped)


# Deleted by: `torch.autograd.grad(is_grads_batched=True)` saying that it is at work.
def is_batch_of_cotangents(primals: Sequence[Tensor]) -> bool:
    """Say whether a vmap over the base is the only level, and batches no primal."""
    layers = get_interpreter_stack()
    return (
        layers is not None
        and len(layers) == 1
        and layers[0].key().value == VMAP
        and not any(map(is_functorch_wrapped_tensor, primals))
    )


def call_below_vmap(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` below a vmap level, if there is one."""
    if peek_interpreter_stack() is None:
        return fn(*args)
    popped = pop_dynamic_layer_stack()
    try:
        return fn(*args)
    finally:
        push_dynamic_layer_stack(popped)


Flat: TypeAlias = tuple[Any, ...]


# Deleted by: `torch.func.vmap` returning the out_dims that a function has.
def batched(
    leaves: Sequence[Tensor],
    lower: Callable[[Flat, Flat, int, str], tuple[Flat, Flat]],
) -> Flat:
    """Send a call below the innermost vmap level.

    `lower(physical, in_dims, batch_size, randomness)` is called there; it gives
    `(outputs, out_dims)`.
    """
    interpreter: Any = retrieve_current_functorch_interpreter()
    level = interpreter.level()
    physical, in_dims = unwrap_batched(tuple(leaves), level)
    size, randomness = interpreter.batch_size(), interpreter.randomness()
    with interpreter.lower():
        outs, dims = lower(physical, in_dims, size, randomness)
    return wrap_batched(outs, dims, level) if outs else ()


batch = restore_vmap


# Deleted by: a public `forward_ad.is_active()`.
def dual_level_active() -> bool:
    """Say whether a `forward_ad.dual_level` is open."""
    return forward_ad._current_level >= 0


def base_dual_level_active() -> bool:
    """Say whether the open dual level is the user's, in which torch.func.jvp raises."""
    return dual_level_active() and eager_transforms.JVP_NESTING == 0


set_forward_ad = torch._C._set_fwd_grad_enabled
forward_ad_enabled = forward_ad._set_fwd_grad_enabled


# Deleted by: a public stack of TorchFunctionModes.
function_mode_count: Callable[[], int] = torch._C._len_torch_function_stack


def function_modes() -> list[overrides.TorchFunctionMode]:
    """Return the active TorchFunctionModes, outermost first, without remat's own."""
    stack = overrides._get_current_function_mode_stack()
    return [mode for mode in stack if not hasattr(mode, "is_remats_check")]


def is_device_mode(mode: overrides.TorchFunctionMode) -> bool:
    """Say whether a mode only chooses a device, as `with torch.device(...)` does."""
    return type(mode) is DeviceContext


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


# Deleted by: torch.func levels that are lowered keeping inference mode switched off.
def with_autograd(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` where autograd can record, below a level in inference mode too."""
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(_AUTOGRAD):
        return fn(*args)
    with torch.inference_mode(False):
        return fn(*args)


_AUTOGRAD = torch._C.DispatchKey.AutogradFunctionality


# Deleted by: a public `torch.fx` way to ask whether a trace is being made.
def must_inline() -> bool:
    """Say whether a function is to be called as it is, though it is differentiated.

    While Dynamo traces, which drops a Function's backward under torch.func; in a trace
    by make_fx, which has no memory to save; and in inference mode, where a torch.func
    level records but nothing below it can.
    """
    return (
        torch.compiler.is_compiling()
        or torch._C._get_dispatch_mode(_PROXY) is not None
        or torch.is_inference_mode_enabled()
    )


_PROXY = torch._C._TorchDispatchModeKey.PROXY


# Deleted by: a cache of parametrizations that is not global.
def swap_parametrization_cache(cache: dict[Any, Any]) -> dict[Any, Any]:
    """Exchange what `parametrize.cached()` keeps: a run has its own."""
    before, parametrize._cache = parametrize._cache, cache
    return before


def is_parametrization_cached() -> bool:
    """Say whether `parametrize.cached()` is active."""
    return parametrize._cache_enabled > 0


# Deleted by: a public way to open a grad level without `torch.func.vjp`'s graph.
grad_level = eager_transforms.grad_increment_nesting


def leaf_at(level: int, tensor: Tensor, *, requires_grad: bool) -> Tensor:
    """Return `tensor` as an argument of the grad level just opened."""
    wrapped = _wrap_for_grad(tensor, level)
    if requires_grad:
        with eager_transforms.enable_inplace_requires_grad(True):
            wrapped.requires_grad_()
    return wrapped


# Deleted by: `torch.compiler.disable` not importing Dynamo for those who do not use it.
def eager_only(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Keep Dynamo out of `fn`, which the engine may call from compiled code."""
    skip = _dynamo._FrameAction.SKIP
    strategy = _dynamo._FrameExecStrategy(skip, skip)
    _dynamo.set_code_exec_strategy(fn.__code__, strategy)
    return fn


# Deleted by: `torch.autograd.grad` not checking again what the engine checks, which is
# a third of its cost on small graphs.
def pull_back(
    outs: Tensors, cotangents: Tensors, inputs: Tensors, *, create_graph: bool
) -> Outputs:
    """Run the engine from `outs` to `inputs`; free the graph or make another of it."""
    engine: Any = torch.autograd.Variable._execution_engine
    retain, unused = create_graph, True
    return engine.run_backward(
        outs, cotangents, retain, create_graph, inputs, unused, accumulate_grad=False
    )


# Deleted by: `Tensor.detach` keeping tangents.
def detach_dual(tensor: Tensor) -> Tensor:
    """Detach from reverse mode only."""
    primal, tangent = forward_ad.unpack_dual(tensor)
    if tangent is None or not torch._C._is_fwd_grad_enabled():
        return primal.detach()
    return forward_ad.make_dual(primal.detach().requires_grad_(), tangent.detach())


# Deleted by: a public way to suspend saved-tensor hooks.
def without_hooks(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn`, whose graph is dropped at once, without the user's saved-tensor hooks.

    They would offload or copy every intermediate value, for nothing.
    """
    if top_hooks(True) is None:
        return fn(*args)
    suspended = []
    while (hooks := top_hooks(True)) is not None:
        suspended.append(hooks)
        pop_hooks()
    try:
        return fn(*args)
    finally:
        for hooks in reversed(suspended):
            push_hooks(*hooks)


# Deleted by: saved tensors that tell which of them changed.
def saved_tensors(ctx: Any) -> tuple[Tensor, ...]:
    """Return what was saved, changed in place since or not: the reader checks that.

    Raises:
        RuntimeError: torch's own, where something changed and this torch says no more.
    """
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raw = ctx._raw_saved_tensors
        if not all(hasattr(s, "data") for s in raw):
            raise
        return tuple(s.data for s in raw)


# Deleted by: `forward_ad.unpack_dual` working where forward AD is disabled.
def without_tangent(tensor: Tensor) -> Tensor:
    """Return the primal of a tensor that may be dual in the user's dual level."""
    if base_dual_level_active():
        return forward_ad.unpack_dual(tensor).primal
    return tensor


# Deleted by: a public copy-on-write clone.
def snapshot(tensor: Tensor) -> Tensor | None:
    """Return a copy that shares memory until either is written, or None if none can."""
    if type(tensor) is not Tensor:
        return None
    try:
        return torch._lazy_clone(tensor)
    except (RuntimeError, NotImplementedError):
        return None


_is_cow: Callable[[Tensor], bool] = vars(torch._C)["_is_cow_tensor"]


def is_shared(copy: Tensor) -> bool:
    """Say whether a `snapshot` was never written."""
    return _is_cow(copy)


# Deleted by: `Tensor.register_hook` costing as little as this.
def on_backward(tensor: Tensor, hook: Callable[[Tensor | None], None]) -> None:
    """Call `hook` when a gradient reaches `tensor`, a leaf without other hooks."""
    hooks: OrderedDict[int, Any] = OrderedDict()
    tensor._backward_hooks = hooks
    hooks[0] = hook


# Deleted by: nodes that tell when they were made: AccumulateGrad has no sequence
# number.
@functools.cache
def _references_to_unheld() -> int:
    with torch.enable_grad():
        root = torch.zeros((), requires_grad=True) * 2.0
    node: Any = graph.get_gradient_edge(root).node
    return sys.getrefcount(node.next_functions[0][0].variable)


def is_held(leaf_node: Any) -> bool:
    """Say whether anything but the graph refers to the leaf of `leaf_node`."""
    return sys.getrefcount(leaf_node.variable) > _references_to_unheld()


_use_count: Callable[[Tensor], int] = operator.methodcaller("_use_count")


# Deleted by: backward formulas that do not ask whether grad mode is on. These do, and
# with it on use other kernels, whose results differ in the last bits.
MODAL_NODES = frozenset(
    {
        *("LogitBackward0", "MishBackward0", "NativeDropoutBackward0"),
        *("NativeGroupNormBackward0", "SiluBackward0"),
    }
)


def pull_in_grad_mode(outs: Iterable[Tensor]) -> None:
    """Make the modal nodes of a graph act as with grad mode on, recording nothing."""
    todo = [o.grad_fn for o in outs if o.requires_grad]
    seen = set(todo)
    while todo:
        node: Any = todo.pop()
        if type(node).__name__ in MODAL_NODES:
            node.register_prehook(_enter_grad_mode)
            node.register_hook(_leave_grad_mode)
        for parent, _ in node.next_functions:
            if parent is not None and parent not in seen:
                seen.add(parent)
                todo.append(parent)


def _enter_grad_mode(_cotangents: Tensors) -> None:
    set_grad_enabled(True)


def _leave_grad_mode(grads: Outputs, _cotangents: Tensors) -> Outputs:
    set_grad_enabled(False)
    return tuple(None if g is None else g.detach() for g in grads)


# Deleted by: a public count of a tensor's references.
def is_graph_held(leaves: Sequence[Tensor]) -> bool:
    """Say whether some graph still refers to one of the autograd `leaves`."""
    return any(_use_count(t) > 1 for t in leaves if t.requires_grad)


# Deleted by: a public name for the node that accumulates into a leaf.
with torch.enable_grad():
    _leaf = torch.zeros((), requires_grad=True)
    AccumulateGrad: type = type(graph.get_gradient_edge(_leaf).node)


# Deleted by: one public call that returns the settings of the process, and one that
# sets them.
_dtype = torch.get_default_dtype
_deterministic = torch._C._get_deterministic_algorithms
_warn_only = torch._C._get_deterministic_algorithms_warn_only
_precision = torch._C._get_float32_matmul_precision
_filled = torch._C._get_deterministic_fill_uninitialized_memory
_math_attention = torch._C._get_math_sdp_enabled
_flash_attention = torch._C._get_flash_sdp_enabled
_mkldnn = torch._C._get_mkldnn_enabled
_PRECISIONS = ("cuda", "matmul"), ("mkldnn", "matmul")
_CUDA = (
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
)
_MORE = _CUDA if torch.backends.cuda.is_built() else ()


def read_settings() -> tuple[Any, ...]:
    """Return the settings that choose dtypes and kernels."""
    try:
        precision: Any = _precision()
    except RuntimeError:  # it was set for each backend, and torch refuses to sum it up
        precision = [torch._C._get_fp32_precision_getter(*p) for p in _PRECISIONS]
    basic = (
        *(_dtype(), _deterministic(), _warn_only(), precision, _filled()),
        *(_math_attention(), _flash_attention(), _mkldnn()),
    )
    return (*basic, *[get() for get, _ in _MORE]) if _MORE else basic


def _set_precision(value: Any) -> None:
    if isinstance(value, str):
        torch._C._set_float32_matmul_precision(value)
        return
    for precision, one in zip(_PRECISIONS, value, strict=True):
        torch._C._set_fp32_precision_setter(*precision, one)


def _set_deterministic(on: bool) -> None:
    torch._C._set_deterministic_algorithms(on, warn_only=_warn_only())


def _set_warn_only(on: bool) -> None:
    torch._C._set_deterministic_algorithms(_deterministic(), warn_only=on)


_SETTERS: tuple[Callable[[Any], None], ...] = (
    *(torch.set_default_dtype, _set_deterministic, _set_warn_only, _set_precision),
    torch._C._set_deterministic_fill_uninitialized_memory,
    *(torch._C._set_sdp_use_math, torch._C._set_sdp_use_flash),
    *(torch._C._set_mkldnn_enabled, *[put for _, put in _MORE]),
)


def write_settings(then: tuple[Any, ...]) -> None:
    """Set what `read_settings` returned, where it is not so already."""
    for put, now, value in zip(_SETTERS, read_settings(), then, strict=True):
        if now != value:
            put(value)


# Deleted by: a registry of devices that tells their default generators.
_STREAMS: list[Callable[[], Sequence[torch.Generator]]] = []
if torch.backends.cuda.is_built():
    _STREAMS.append(
        lambda: torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    )
if torch.xpu._is_compiled():
    _STREAMS.append(
        lambda: torch.xpu.default_generators if torch.xpu.is_initialized() else ()
    )
if torch.backends.mps.is_available():
    _STREAMS.append(lambda: (torch.mps._get_default_mps_generator(),))


def device_generators() -> list[torch.Generator]:
    """Return the global generator of every initialized device besides the CPU."""
    return [g for generators in _STREAMS for g in generators()]


def default_generators() -> list[torch.Generator]:
    """Return the global generator of every device that is initialized."""
    return [torch.default_generator, *device_generators()]


# --- Keys ---


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
    module = getattr(torch.func, "_random", None)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    ops = "aten::_philox_key_split", "aten::_philox_uniform_", "aten::_philox_normal_"
    try:
        key = torch._C._dispatch_key_for_device(device)
        return module if all(has_kernel(op, key) for op in ops) else None
    except RuntimeError:  # an older torch has no such operation
        return None
