"""The settings of torch that a call may be made under, and how to read them."""

import contextlib
import functools

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from remat._torch.process import read_settings


@contextlib.contextmanager
def changed(read, write, value):
    """Set a setting, and put it back."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def default_dtype(dtype):
    return changed(torch.get_default_dtype, torch.set_default_dtype, dtype)


def deterministic(on, *, warn_only=False):
    def write(values):
        torch._C._set_deterministic_algorithms(values[0], warn_only=values[1])

    return changed(lambda: (False, False), write, (on, warn_only))


def matmul_precision(precision):
    read, write = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    return changed(read, write, precision)


def filled(on):
    read = torch._C._get_deterministic_fill_uninitialized_memory
    return changed(read, torch._C._set_deterministic_fill_uninitialized_memory, on)


def mkldnn(on):
    return changed(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, on)


def autocast_dtype(dtype):
    read = functools.partial(torch.get_autocast_dtype, "cpu")
    return changed(read, functools.partial(torch.set_autocast_dtype, "cpu"), dtype)


def autocast(dtype=torch.bfloat16, **options):
    return torch.autocast("cpu", dtype, **options)


# How to enter a state that is not the ordinary one, and how to read which it is.
STATES = {
    "autocast": (autocast, lambda: torch.is_autocast_enabled("cpu")),
    "autocast to float16": (
        lambda: autocast(torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "dtype of autocast that is off": (
        lambda: autocast_dtype(torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "default device": (
        lambda: torch.device("meta"),
        lambda: torch.empty(()).device.type,
    ),
    "default dtype": (lambda: default_dtype(torch.float64), torch.get_default_dtype),
    "deterministic algorithms": (
        lambda: deterministic(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "only warnings": (
        lambda: deterministic(True, warn_only=True),
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "filled memory": (
        lambda: filled(False),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "matmul precision": (
        lambda: matmul_precision("high"),
        torch.get_float32_matmul_precision,
    ),
    "attention kernels": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "mkldnn": (lambda: mkldnn(False), lambda: torch.backends.mkldnn.enabled),
}


def state_of_now():
    return (
        torch.get_rng_state().tolist(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.empty(()).device.type,
        read_settings(),
    )
