"""Random streams other than torch's: Python's `random` and NumPy's.

The global ones are read before and after every forward, so reading must cost next to
nothing: their words are copied out of memory, once a look at an object of known state
has shown where they are. `random.getstate()` costs fifty times as much, NumPy's a
hundred times.

Invariant: two readings are equal exactly if nothing was drawn between them, and writing
one goes through the public interface of the stream.
Rejected: reading on the first call of a function only. What draws later, in training
mode say, would be replayed wrongly.
"""

import contextlib
import ctypes
import functools
import pickle
import random
import struct
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch


class Stream(NamedTuple):
    """A random stream that a recomputation sets back.

    Attributes:
        name: for messages.
        read: returns its state, to be compared by `==`.
        write: sets a state that `read` returned.
    """

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], None]


# Mersenne Twister: 624 words of 32 bits and a position among them.
_WORDS = 624
_HEADER: int = object.__basicsize__


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


# --- Python's ---


def _python_memory(stream: random.Random) -> Any:
    """Return the memory in which CPython keeps position and words, if it is there."""
    size = 4 * (1 + _WORDS)
    if type(stream).__basicsize__ < _HEADER + size:
        return None
    memory = _memory(id(stream) + _HEADER, size)
    return memory if _python_state(memory.raw, None) == stream.getstate() else None


def _python_state(raw: bytes, gauss: float | None) -> tuple[Any, ...]:
    position, *words = struct.unpack(f"i{_WORDS}I", raw)
    return (3, (*words, position), gauss)


def _python_global() -> Stream:
    owner: Any = random.random
    owner = owner.__self__
    memory = _python_memory(random.Random(0))
    if memory is None:
        return Stream("Python's random", random.getstate, random.setstate)
    memory = _memory(id(owner) + _HEADER, len(memory))

    def read() -> tuple[bytes, float | None]:
        return memory.raw, owner.gauss_next

    def write(state: tuple[bytes, float | None]) -> None:
        random.setstate(_python_state(*state))

    return Stream("Python's random", read, write)


# --- NumPy's ---

_GAUSS = struct.Struct("id")  # whether there is a second normal number, and which


def _numpy_global(numpy_random: Any) -> Stream:
    owner = numpy_random.random_sample.__self__

    def read_slowly() -> bytes:
        return pickle.dumps(numpy_random.get_state(legacy=False))

    def write_slowly(state: bytes) -> None:
        numpy_random.set_state(pickle.loads(state))

    bits = numpy_random.get_bit_generator()
    gauss = _gauss_offset(numpy_random)
    words = _numpy_memory(bits)
    if words is None or gauss is None:
        return Stream("numpy.random", read_slowly, write_slowly)
    second = _memory(id(owner) + gauss, _GAUSS.size)

    def read() -> tuple[bytes, bytes]:
        return words.raw, second.raw

    def write(state: tuple[bytes, bytes]) -> None:
        numpy_random.set_state(_numpy_state(bits, *state))

    return Stream("numpy.random", read, write)


def _numpy_memory(bits: Any) -> Any:
    """Return the memory of a bit generator's words and position, if it is there."""
    if type(bits).__name__ != "MT19937":
        return None
    memory = _memory(bits.ctypes.state_address, 4 * (_WORDS + 1))
    state = bits.state["state"]
    known = struct.pack(f"{_WORDS}Ii", *state["key"], state["pos"])
    return memory if memory.raw == known else None


def _gauss_offset(numpy_random: Any) -> int | None:
    """Return where in a RandomState the second of two normal numbers is kept."""
    probe = numpy_random.RandomState(0)
    probe.standard_normal()
    state = probe.get_state(legacy=False)
    body = _memory(id(probe) + _HEADER, type(probe).__basicsize__ - _HEADER).raw
    at = body.find(_GAUSS.pack(state["has_gauss"], state["gauss"]))
    return None if at < 0 else _HEADER + at


def _numpy_state(bits: Any, raw: bytes, gauss: bytes) -> dict[str, Any]:
    *words, position = struct.unpack(f"{_WORDS}Ii", raw)
    has_gauss, second = _GAUSS.unpack(gauss)
    state = bits.state
    state["state"]["key"][:] = words
    state["state"]["pos"] = position
    return {**state, "has_gauss": has_gauss, "gauss": second}


# --- Which there are ---

_PYTHON = _python_global()
_numpy: tuple[Any, Stream] | None = None


def host_streams() -> list[Stream]:
    """Return the global streams of Python and, once it is imported, NumPy."""
    global _numpy
    numpy_random: Any = sys.modules.get("numpy.random")
    if numpy_random is None:
        return [_PYTHON]
    bits = numpy_random.get_bit_generator()
    if _numpy is None or _numpy[0] is not bits:
        _numpy = (bits, _numpy_global(numpy_random))
    return [_PYTHON, _numpy[1]]


def stream_of(value: Any) -> Stream | None:
    """Return how to read and write an object that draws; None if it is none."""
    if isinstance(value, torch.Generator):
        return Stream("a torch.Generator", *_torch_access(value))
    if isinstance(value, random.Random):
        return _python_stream(value)
    if str(type(value).__module__).startswith("numpy.random"):
        return _numpy_stream(value)
    return None


def _torch_access(value: torch.Generator) -> tuple[Callable[[], Any], Any]:
    def read() -> bytes:
        state = value.get_state()
        return ctypes.string_at(state.data_ptr(), len(state))

    def write(state: bytes) -> None:
        value.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return read, write


def _python_stream(value: random.Random) -> Stream | None:
    with contextlib.suppress(NotImplementedError):  # SystemRandom has no state
        value.getstate()
        return Stream("a random.Random", value.getstate, value.setstate)
    return None


def _numpy_stream(value: Any) -> Stream | None:
    owner = getattr(value, "bit_generator", value)
    if hasattr(owner, "set_state"):
        get, put = functools.partial(owner.get_state, legacy=False), owner.set_state
    elif hasattr(owner, "state"):
        get = functools.partial(getattr, owner, "state")
        put = functools.partial(setattr, owner, "state")
    else:
        return None
    name = f"a numpy.random.{type(value).__name__}"
    # States hold arrays, which do not compare.
    return Stream(name, lambda: pickle.dumps(get()), lambda s: put(pickle.loads(s)))
