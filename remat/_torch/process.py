"""The settings of the process, the generators of its devices, and what a call is in.

The state of a CPU generator, a Mersenne Twister, is read from memory. `get_state` makes
a tensor of five kilobytes each time; a call reads the state before and after its
forward, and most calls draw nothing.

Invariant: two readings are equal exactly if the settings are, or if nothing was drawn
between them. Nothing is read where memory is laid out in another way than is known.
Rejected: reading all of `torch.backends`, on every call. To compare a few words of a
state: one that moved has to be put back as it was.
"""

import ctypes
import functools
import inspect
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from operator import call
from types import CodeType, FrameType, ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils.module_tracker import ModuleTracker


# Deleted by: one public call that returns the settings of the process, and one that
# sets them.
_deterministic = torch._C._get_deterministic_algorithms
_warn_only = torch._C._get_deterministic_algorithms_warn_only
_precision = torch._C._get_float32_matmul_precision
_DENORMAL = 5e-324
_UMATH, _ERRORS = "numpy._core.umath", "_extobj_contextvar"  # of NumPy 2
# torch imports NumPy if it is installed.
_errors_of_numpy: ContextVar[Any] = getattr(
    sys.modules.get(_UMATH), _ERRORS, ContextVar("none", default=None)
)
_PRECISIONS = ("cuda", "matmul"), ("mkldnn", "matmul")
_FLAGS_OF_CUDA = (
    ("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    ("cudnn_sdp_enabled", "sdp_use_cudnn"),
    ("sdp_priority_order", "sdp_priority_order"),
    ("cudnn_enabled", "cudnn_enabled"),
    ("cudnn_deterministic", "cudnn_deterministic"),
    ("cudnn_benchmark", "cudnn_benchmark"),
    ("cublas_allow_fp16_reduced_precision_reduction",) * 2,
    ("cublas_allow_bf16_reduced_precision_reduction",) * 2,
)


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


# How each is read and set, but for the precision and denormal numbers.
_SETTINGS: list[tuple[Callable[[], Any], Callable[..., object]]] = [
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        functools.partial(torch.get_autocast_dtype, "cpu"),
        functools.partial(torch.set_autocast_dtype, "cpu"),
    ),
    (_deterministic, _set_deterministic),
    (_warn_only, _set_warn_only),
    (
        torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory,
    ),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    # What NumPy does upon errors, as `np.errstate` sets it.
    (_errors_of_numpy.get, _errors_of_numpy.set),
    *[  # those that this torch has
        (getattr(torch._C, f"_get_{getter}"), getattr(torch._C, f"_set_{setter}"))
        for getter, setter in _FLAGS_OF_CUDA
        if torch.backends.cuda.is_built() and hasattr(torch._C, f"_set_{setter}")
    ],
]
_GETTERS = [get for get, _ in _SETTINGS]
_SETTERS = _set_precision, torch.set_flush_denormal, *(put for _, put in _SETTINGS)


def read_settings() -> tuple[Any, ...]:
    """Return the settings that choose dtypes and kernels."""
    try:
        precision: Any = _precision()
    except RuntimeError:  # it was set for each backend, and torch refuses to sum it up
        precision = [torch._C._get_fp32_precision_getter(*p) for p in _PRECISIONS]
    # The second says whether the processor flushes such numbers to zero.
    return precision, _DENORMAL * 1.0 == 0.0, *map(call, _GETTERS)


def write_settings(then: tuple[Any, ...]) -> None:
    """Set what `read_settings` returned, where it is not so already."""
    for put, now, value in zip(_SETTERS, read_settings(), then, strict=True):
        if now != value:
            put(*value) if isinstance(value, tuple) else put(value)


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
    return [g for generators in _STREAMS for g in generators()] if _STREAMS else []


# --- The state of a CPU generator, from memory ---

_WORDS = 624  # of 32 bits
_SEED = 0x5EED_0F_7E57
_HEAD = 256  # bytes of a generator, among which the seed is found
_BEFORE = 20  # the seed, how many words are left, whether it is seeded, the next word
_AFTER = 28  # padding, then a float and a double that are left of pairs of normals
_SIZE = _BEFORE + 4 * _WORDS + _AFTER


# Deleted by: a cheap way to ask whether a generator has drawn.
def twister_memory(generator: torch.Generator) -> Any:
    """Return the memory of a CPU generator's state, whose `raw` reads it, or None."""
    start = _start_of_state()
    if start is None:
        return None
    return (ctypes.c_char * _SIZE).from_address(_address(generator) + start)


def twister_state(raw: bytes) -> Tensor:
    """Return what `get_state` returns for a generator whose memory was read."""
    return _state_of(raw, _start_of_state())


def _state_of(raw: bytes, start: int | None) -> Tensor:
    assert start is not None
    generator = torch.Generator()
    ctypes.memmove(_address(generator) + start, raw, _SIZE)
    return generator.get_state()


def _address(generator: Any) -> int:
    return generator._cdata


@functools.cache
def _start_of_state() -> int | None:
    """Return where in a generator its state begins, if that is as expected.

    Found in a thread: no mode and no level of the caller's is to see the draws.
    """
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(_find_start_of_state()))
    thread.start()
    thread.join()
    return found[0] if found else None


def _find_start_of_state() -> int | None:
    probe = torch.Generator().manual_seed(_SEED)
    start = ctypes.string_at(_address(probe), _HEAD).find(struct.pack("Q", _SEED))
    if start < 0:
        return None
    words = struct.unpack_from(f"{_WORDS}Q", bytes(probe.get_state().tolist()), 24)
    known = struct.pack(f"{_WORDS}I", *words)
    if ctypes.string_at(_address(probe) + start + _BEFORE, len(known)) != known:
        return None
    return start if _is_all(probe, start) else None


def _is_all(probe: torch.Generator, start: int) -> bool:
    """Say whether the memory from there on is the whole state, through some draws."""
    memory = (ctypes.c_char * _SIZE).from_address(_address(probe) + start)
    for dtype in (torch.float64, torch.float32, torch.float64, torch.float32):
        before = memory.raw
        torch.empty(1, dtype=dtype).normal_(generator=probe)
        if before == memory.raw:
            return False
        state = probe.get_state()
        if not torch.equal(_state_of(memory.raw, start), state):
            return False
        probe.set_state(state)
    return True


# --- Autocast, cached parametrizations, torch's checkpoint, hooks on modules ---


# Deleted by: a public way to ask whether any device type autocasts.
is_autocast_active = torch._C._is_any_autocast_enabled


# Deleted by: a public way to ask how many autocast contexts there are around. When the
# outermost ends, the cache of casts is emptied.
def autocast_depth() -> int:
    """Return how many contexts of autocast are open, on or off."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


# Deleted by: a number of the cache of casts, another one once it is emptied.
def new_cast() -> Callable[[], Tensor | None]:
    """Return a weak reference to a cast, which is alive until the cache is emptied."""
    unseen = torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch()
    with unseen[0], unseen[1], torch.inference_mode(False), torch.enable_grad():
        leaf = torch.zeros(0, 0, dtype=torch.float32, device="cpu", requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            product: Any = torch.mm(leaf, leaf).grad_fn
    return weakref.ref(product._saved_self)


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


# Deleted by: a public way to ask whether torch's checkpoint is running a function.
# Torch 2.14 has a second entry beside the first: `checkpoint(use_reentrant=False)(fn)`.
_checkpoint: Any = getattr(checkpoint, "_checkpoint_impl", checkpoint.checkpoint)
_CHECKPOINT: CodeType = inspect.unwrap(_checkpoint).__code__


# Deleted by: a public way to read what torch.utils.checkpoint's `set_` functions set.
def checkpoint_settings() -> tuple[bool | None, bool | None]:
    """Return whether checkpoints stop early and debug; None where nothing is set."""
    early_stop = checkpoint._enable_checkpoint_early_stop
    return early_stop, checkpoint._checkpoint_debug_enabled


# Deleted by: contexts of selective checkpointing that tell their policy.
def selective_policy(context: object) -> Any:
    """Return the policy of a context of selective checkpointing, or its operators.

    None if it is another context, or of a subclass.
    """
    if type(context) is not checkpoint._CachingTorchDispatchMode:
        return None
    policy = context.policy_fn
    if getattr(policy, "__code__", None) is not _CODE_OF_LIST:
        return policy
    return inspect.getclosurevars(policy).nonlocals[_LIST]


_LIST = "policy_fn_or_list"
_CODE_OF_LIST = next(
    (
        code
        for code in checkpoint.create_selective_checkpoint_contexts.__code__.co_consts
        if isinstance(code, CodeType) and _LIST in code.co_freevars
    ),
    None,
)


def is_of_checkpoint(hook: Any) -> bool:
    """Say whether a hook for saved tensors is that of torch's checkpoint."""
    return getattr(hook, "__module__", None) == checkpoint.__name__


def checkpoint_depth() -> int:
    """Return how many calls of torch.utils.checkpoint this is within, by the stack."""
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is _CHECKPOINT
        frame = frame.f_back
    return depth


class ModuleHooks(NamedTuple):
    """Hooks on all modules: the dicts, the Python module they are in, their names."""

    module: ModuleType
    names: tuple[str, ...]
    dicts: tuple[dict[int, Any], ...]


# Deleted by: a public way to ask for the hooks on all modules.
_modules: Any = torch.nn.modules.module
_NAMES = tuple(
    name
    for name in vars(_modules)
    if name.startswith(("_global_forward_", "_global_backward_")) and "hook" in name
)
MODULE_HOOKS = ModuleHooks(_modules, _NAMES, (*map(vars(_modules).get, _NAMES),))


def has_hooks_on_all_modules() -> bool:
    """Say whether the forward of every module calls hooks, beside those below."""
    hooks = _modules._global_forward_pre_hooks, _modules._global_forward_hooks
    return any(len(each) > (_KEY in each) for each in hooks)


# Deleted by: public hooks on all modules whose key is constant. Compiled code is made
# again where another key is there.
def hook_all_modules(enter: Callable[..., None], leave: Callable[..., None]) -> None:
    """Have functions called before and after the forward of every module."""
    _modules._global_forward_pre_hooks[_KEY] = enter
    _modules._global_forward_hooks[_KEY] = leave
    _modules._global_forward_hooks_always_called[_KEY] = True


def unhook_all_modules() -> None:
    _modules._global_forward_pre_hooks.pop(_KEY, None)
    _modules._global_forward_hooks.pop(_KEY, None)
    _modules._global_forward_hooks_always_called.pop(_KEY, None)


_KEY = -1  # no hook that torch registers has it


_ANSWER = "_remat_answer"


# Deleted by: public hooks that may answer in place of a module, or of a Function.
def answer_calls(
    of_module: Callable[..., Any], of_function: Callable[..., Any]
) -> None:
    """Have functions answer all calls of modules and of custom Functions from now on.

    Each is given how to call it, what is called, the arguments and the keywords. Who
    answers already goes on to. A trace replaces the call of modules while it lasts, and
    then puts back what it found: what began in it has to begin again.
    """
    module, function = torch.nn.Module, torch.autograd.Function
    plain, found = module.__call__, vars(function)["apply"]  # of Python's, or in C

    def plain_apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return found.__get__(None, cls)(*args, **kwargs)

    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return plain(self, *args, **kwargs)
        return of_module(plain, self, args, kwargs)

    @functools.wraps(function.apply)
    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        # Modules look for the node of the hooks on their graph by its name.
        if torch.compiler.is_compiling() or cls is BackwardHookFunction:
            return plain_apply(cls, *args, **kwargs)
        return of_function(plain_apply, cls, args, kwargs)

    # What wraps such a call, as traces do, has its attributes.
    if getattr(plain, _ANSWER, None) is not of_module:
        vars(call)[_ANSWER] = of_module
        setattr(module, "__call__", call)  # noqa: B010 - no method of this file
    if getattr(function.apply, _ANSWER, None) is not of_function:
        vars(apply)[_ANSWER] = of_function
        setattr(function, "apply", classmethod(apply))  # noqa: B010


Tracked: TypeAlias = Sequence[tuple[list[Any], int]]


# Deleted by: a ModuleTracker that holds no graph by the hooks that it sets on it. A
# FLOP counter has such a tracker.
def hooks_of_trackers() -> Tracked:
    """Return the hooks on graphs of each ModuleTracker, and how many there are now."""
    hooks = _modules._global_forward_pre_hooks
    if not hooks:
        return ()
    owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
    found = [owner._hooks for owner in owners if isinstance(owner, ModuleTracker)]
    return [(hooks, len(hooks)) for hooks in found]


def remove_hooks_since(then: Tracked) -> None:
    """Remove the hooks that were set on graphs since `hooks_of_trackers`."""
    for hooks, count in then:
        for hook in hooks[count:]:
            hook.remove()
        del hooks[count:]
