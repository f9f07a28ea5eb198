"""Bytes and times on a device, and which torch they are of.

On a CPU, bytes are those of `remat.testing`. On a GPU they are those of torch's
allocator, which rounds sizes up, and also counts what kernels ask for.

Invariant: each function takes the device, so that tests run it on a CPU.
Rejected: the profiler on a GPU. It sees what the allocator returns, not what it rounds.
"""

import gc
import platform
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from _times import Clock

from remat.testing import memory_timeline


DECLARED = re.compile(r'^dependencies = \["(torch>=[\d.]+)"', re.MULTILINE)
PROJECT = Path(__file__).parents[1] / "pyproject.toml"


@dataclass(frozen=True)
class Bytes:
    """What is alive after a function returned, with its result, and was at most."""

    alive: int
    peak: int


def measured(fn: Callable[[], object], device: str) -> Bytes:
    """Run a function once, and count the bytes beyond those that exist already."""
    if device == "cpu":
        found = memory_timeline(fn)
        return Bytes(found.bytes[-1] if found.bytes else 0, found.peak)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = fn()
    torch.cuda.synchronize()
    alive = torch.cuda.memory_allocated() - before
    del result
    return Bytes(alive, torch.cuda.max_memory_allocated() - before)


def clock(device: str) -> Clock:
    """Return what tells the time once the device has done its work, in seconds."""
    if device == "cpu":
        return time.process_time

    def now() -> float:
        torch.cuda.synchronize()
        return time.perf_counter()

    return now


# --- Versions ------------------------------------------------------------------------


def declared() -> str:
    """Return which versions of torch pyproject.toml declares."""
    found = DECLARED.search(PROJECT.read_text())
    if found is None:
        raise SystemExit(f"{PROJECT} names no version of torch.")
    return found[1]


def numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, as in 2.14.1+cu130."""
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def mark(version: str = torch.__version__) -> str:
    """Return what marks results of a torch that is not declared; else nothing."""
    if numbers(version) >= numbers(declared()):
        return ""
    return f" (torch {version}: NOT DECLARED, {declared()} is)"


def machine(device: str) -> str:
    """Return what was measured on: torch, its CUDA, the device, Python."""
    name = platform.machine() if device == "cpu" else torch.cuda.get_device_name()
    cuda = f", CUDA {torch.version.cuda}" if device != "cpu" else ""
    python = platform.python_version()
    return f"torch {torch.__version__}{cuda}, {name}, Python {python}"
