"""Reads the state of torch's CPU generators from memory, a Mersenne Twister.

`get_state` makes a tensor of five kilobytes each time. A call reads the state before
and after its forward, and most calls draw nothing.

Invariant: two readings are equal exactly if nothing was drawn or set between them.
Nothing is read where the memory is laid out in another way than is known here.
Rejected: to compare a few words only. A state that moved has to be put back as it was.
"""

import ctypes
import functools
import struct
import threading
from typing import Any

import torch
from torch import Tensor


_WORDS = 624  # of 32 bits
_SEED = 0x5EED_0F_7E57
_HEAD = 256  # bytes of a generator, among which the seed is found
_BEFORE = 20  # the seed, how many words are left, whether it is seeded, the next word
_AFTER = 28  # padding, then a float and a double that are left of pairs of normals
_SIZE = _BEFORE + 4 * _WORDS + _AFTER


# Deleted by: a cheap way to ask whether a generator has drawn.
def twister_memory(generator: torch.Generator) -> Any:
    """Return the memory of a CPU generator's state, whose `raw` reads it, or None."""
    start = _start()
    if start is None:
        return None
    return (ctypes.c_char * _SIZE).from_address(_address(generator) + start)


def twister_state(raw: bytes) -> Tensor:
    """Return what `get_state` returns for a generator whose memory was read."""
    return _state_of(raw, _start())


def _state_of(raw: bytes, start: int | None) -> Tensor:
    assert start is not None
    generator = torch.Generator()
    ctypes.memmove(_address(generator) + start, raw, _SIZE)
    return generator.get_state()


def _address(generator: Any) -> int:
    return generator._cdata


@functools.cache
def _start() -> int | None:
    """Return where in a generator its state begins, if that is as expected.

    Found in a thread: no mode and no level of the caller's is to see the draws.
    """
    found: list[int | None] = []
    thread = threading.Thread(target=lambda: found.append(_find_start()))
    thread.start()
    thread.join()
    return found[0] if found else None


def _find_start() -> int | None:
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
