"""The settings of the process, and the global generators of its devices.

Invariant: two readings are equal exactly if the settings are.
Rejected: reading all of `torch.backends`. Only settings that change what a function
computes are here, since they are read on every call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch


# Deleted by: one public call that returns the settings of the process, and one that
# sets them.
_dtype = torch.get_default_dtype
_autocast_dtype = torch.get_autocast_dtype
_deterministic = torch._C._get_deterministic_algorithms
_warn_only = torch._C._get_deterministic_algorithms_warn_only
_precision = torch._C._get_float32_matmul_precision
_filled = torch._C._get_deterministic_fill_uninitialized_memory
_math_attention = torch._C._get_math_sdp_enabled
_flash_attention = torch._C._get_flash_sdp_enabled
_mkldnn = torch._C._get_mkldnn_enabled
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
# Those that this torch has.
_MORE: list[tuple[Callable[[], Any], Callable[..., None]]] = [
    (getattr(torch._C, f"_get_{getter}"), getattr(torch._C, f"_set_{setter}"))
    for getter, setter in _FLAGS_OF_CUDA
    if torch.backends.cuda.is_built() and hasattr(torch._C, f"_set_{setter}")
]


def read_settings() -> tuple[Any, ...]:
    """Return the settings that choose dtypes and kernels."""
    try:
        precision: Any = _precision()
    except RuntimeError:  # it was set for each backend, and torch refuses to sum it up
        precision = [torch._C._get_fp32_precision_getter(*p) for p in _PRECISIONS]
    # One tuple, not two put together: this is read on every call.
    basic = (
        _dtype(),
        _autocast_dtype("cpu"),
        _deterministic(),
        _warn_only(),
        precision,
        _filled(),
        _math_attention(),
        _flash_attention(),
        _mkldnn(),
    )
    return (*basic, *[get() for get, _ in _MORE]) if _MORE else basic


def _set_autocast_dtype(dtype: torch.dtype) -> None:
    torch.set_autocast_dtype("cpu", dtype)


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


_SETTERS: tuple[Callable[..., None], ...] = (
    *(torch.set_default_dtype, _set_autocast_dtype, _set_deterministic, _set_warn_only),
    *(_set_precision, torch._C._set_deterministic_fill_uninitialized_memory),
    *(torch._C._set_sdp_use_math, torch._C._set_sdp_use_flash),
    *(torch._C._set_mkldnn_enabled, *[put for _, put in _MORE]),
)


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


def default_generators() -> list[torch.Generator]:
    """Return the global generator of every device that is initialized."""
    return [torch.default_generator, *device_generators()]
