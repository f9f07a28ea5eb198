"""Random streams: which there are, and how each is read and set.

The global streams of torch, of Python and of NumPy are Mersenne Twisters. They are read
before and after every forward, so reading must cost next to nothing. Their words are
copied out of memory, once objects of known state have shown where they are. That is
fifty times as fast as `random.getstate()`.

Invariant: two readings are equal exactly if nothing was drawn between them. A state is
set through the public interface of its stream.
Rejected: reading the streams of Python and NumPy on the first call of a function only.
What draws later, in training mode for instance, would be replayed wrongly.
"""

import contextlib
import ctypes
import functools
import importlib
import operator
import pickle
import random
import struct
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from remat._torch import (
    function_mode_count,
    no_torch_functions,
    twister_memory,
    twister_state,
)


class Stream(NamedTuple):
    """A random stream that a recompute sets back."""

    name: str
    read: Callable[[], Any]  # its state, to be compared by ==
    write: Callable[[Any], None]
    of: int = 0  # the identity of what draws; 0 of a global stream


_WORDS = 624  # of 32 bits, besides a position among them: a Mersenne Twister
_HEADER: int = object.__basicsize__


def _memory(address: int, size: int) -> Any:
    return (ctypes.c_char * size).from_address(address)


# --- torch's ---


def _torch_access(value: torch.Generator) -> tuple[Callable[[], Any], Any]:
    return functools.partial(_torch_state, value), functools.partial(_set_torch, value)


def _torch_state(generator: torch.Generator) -> bytes:
    state = generator.get_state()
    if function_mode_count():
        return _bytes_of(state)
    return ctypes.string_at(state.data_ptr(), state.numel())


def _bytes_of(state: torch.Tensor) -> bytes:
    # Unseen by modes and transforms.
    with no_torch_functions():
        return ctypes.string_at(state.data_ptr(), state.numel())


def _set_torch(generator: torch.Generator, state: bytes) -> None:
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def _torch_global(generator: torch.Generator) -> tuple[Stream, Any]:
    memory = twister_memory(generator)
    if memory is None:
        return Stream("cpu", *_torch_access(generator)), None

    def write(raw: bytes) -> None:
        with no_torch_functions():  # unseen by modes
            generator.set_state(twister_state(raw))

    return Stream("cpu", functools.partial(_raw, memory), write), memory


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


def _python_global(owner: Any) -> tuple[Stream, Any]:
    memory = _python_memory(random.Random(0))
    name = "Python's random"
    if memory is None or type(owner) is not random.Random:
        return Stream(name, random.getstate, random.setstate), None
    memory = _memory(id(owner) + _HEADER, len(memory))
    untyped: Any = owner

    def write(state: tuple[bytes, float | None]) -> None:
        untyped.setstate(_python_state(*state))

    return Stream(name, lambda: (memory.raw, untyped.gauss_next), write), memory


# --- NumPy's ---

_GAUSS = struct.Struct("id")  # whether there is a second normal number, and which


def _numpy_global(numpy_random: Any) -> tuple[Any, Any]:
    owner, bits = numpy_random.mtrand._rand, numpy_random.get_bit_generator()
    words, offset = _numpy_memory(bits), _gauss_offset(numpy_random)
    if words is None or offset is None:
        return _numpy_slowly(numpy_random, owner, bits), None
    gauss = _memory(id(owner) + offset, _GAUSS.size)

    def write(state: tuple[bytes, bytes]) -> None:
        _install(numpy_random, bits)
        owner.set_state(_numpy_state(bits, *state))

    stream = Stream("numpy.random", lambda: (words.raw, gauss.raw), write)
    return stream, (words, gauss)


def _install(numpy_random: Any, bits: Any) -> None:
    # Only if it is another: setting one forgets the second of two normal numbers.
    if numpy_random.get_bit_generator() is not bits:
        numpy_random.set_bit_generator(bits)


def _numpy_slowly(numpy_random: Any, owner: Any, bits: Any) -> Stream:
    def read() -> bytes:
        now = numpy_random.get_bit_generator()
        if now is bits:
            return pickle.dumps(owner.get_state(legacy=False))
        kept = owner.get_state(legacy=False)
        numpy_random.set_bit_generator(bits)
        state = pickle.dumps(owner.get_state(legacy=False))
        numpy_random.set_bit_generator(now)
        owner.set_state(kept)
        return state

    def write(state: bytes) -> None:
        _install(numpy_random, bits)
        owner.set_state(pickle.loads(state))

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


class GlobalStreams(NamedTuple):
    """The global streams of torch's CPU, of Python and, once it is imported, of NumPy.

    Attributes:
        read: returns the states of all, to be compared by `==`.
        streams: each of them; to each belongs one of the states.
        python, numpy, bits: the object behind Python's functions, NumPy's module and
            its generator. All three may be exchanged.
    """

    read: Callable[[], Sequence[Any]]
    streams: Sequence[Stream]
    python: Any
    numpy: Any
    bits: Any


def _find_global(python: Any, numpy_random: Any) -> GlobalStreams:
    found = [_torch_global(torch.default_generator), _python_global(python)]
    bits = None
    if isinstance(numpy_random, _MODULE):
        bits = numpy_random.get_bit_generator()
        found.append(_numpy_global(numpy_random))
    streams = [stream for stream, _ in found]
    read = _reader(python, [memory for _, memory in found])
    read = read or (lambda: [s.read() for s in streams])
    return GlobalStreams(read, streams, python, numpy_random, bits)


def _reader(python: Any, memories: Sequence[Any]) -> Callable[[], Sequence[Any]] | None:
    """Return the quickest way to read all of them, if all of them are in memory.

    All words of a stream are replaced at once. So what is around them and the first few
    tell whether all are as they were read last, and need not be copied again.
    """
    if None in memories:
        return None
    torch_, words, *rest = memories
    all_ = [torch_, words, *(rest[0] if rest else ())]
    ends = [end for memory in all_ for end in _ends_of(memory)]
    last: tuple[Any, Sequence[Any]] = None, ()

    def read() -> Sequence[Any]:
        nonlocal last
        known, now = last, (_join(ends), python.gauss_next)
        if now != known[0]:
            first, second, *others = map(_raw, all_)
            more = [(*others,)] if others else ()
            known = now, (first, (second, python.gauss_next), *more)
            if now == (_join(ends), python.gauss_next):  # no other thread drew
                last = known
        return known[1]

    return read


def _ends_of(memory: Any) -> list[Any]:
    """Return the memory of the first bytes and of the last ones."""
    start, size = ctypes.addressof(memory), len(memory)
    if size <= _END:
        return [memory]
    return [_memory(start, _END), _memory(start + size - _END, _END)]


_raw, _join = operator.attrgetter("raw"), b"".join
_END = 48  # bytes: what is around the words, and some of them


_MODULE = types.ModuleType
_global: GlobalStreams | None = None


def global_streams() -> GlobalStreams:
    """Return the global streams of the host."""
    global _global
    # The object behind the functions of `random`, which a test may replace.
    python: Any = getattr(random, "_inst", None)
    numpy_random: Any = sys.modules.get("numpy.random")
    known = _global
    if (
        known is None
        or known.python is not python
        or known.numpy is not numpy_random
        or (known.bits and numpy_random.get_bit_generator() is not known.bits)
        or (numpy_random is None and type(sys.modules.get("numpy")) is _MODULE)
    ):
        known = _global = _find_global(python, _numpy_module())
    return known


def _numpy_module() -> Any:
    if type(sys.modules.get("numpy")) is _MODULE:
        # NumPy imports it on its first use, which may be within a forward.
        return importlib.import_module("numpy.random")
    return sys.modules.get("numpy.random")


def stream_of(value: Any) -> Stream | None:
    """Return how to read and write an object that draws; None if it is none."""
    if isinstance(value, torch.Generator):
        return Stream("a torch.Generator", *_torch_access(value), id(value))
    if isinstance(value, random.Random):
        return _python_stream(value)
    if str(type(value).__module__).startswith("numpy.random"):
        return _numpy_stream(value)
    return None


def _python_stream(value: random.Random) -> Stream | None:
    with contextlib.suppress(NotImplementedError):  # SystemRandom has no state
        value.getstate()
        return Stream("a random.Random", value.getstate, value.setstate, id(value))
    return None


def _numpy_stream(value: Any) -> Stream | None:
    """Access a RandomState, a Generator or a bit generator."""
    name = f"a numpy.random.{type(value).__name__}"
    owner = getattr(value, "bit_generator", value)
    legacy = hasattr(owner, "set_state")
    if not (legacy or hasattr(owner, "lock")):
        return None  # a SeedSequence

    # As bytes: the states hold arrays, which do not compare.
    def read() -> bytes:
        return pickle.dumps(owner.get_state(legacy=False) if legacy else owner.state)

    def write(state: bytes) -> None:
        if legacy:
            owner.set_state(pickle.loads(state))
        else:
            owner.state = pickle.loads(state)

    return Stream(name, read, write, id(owner))


# --- Whether one moved ---


def state_of(stream: Any) -> Any:
    """Return the state of a stream, or of a torch.Generator."""
    return stream.read() if isinstance(stream, Stream) else stream.get_state()


def set_state(stream: Any, state: Any) -> None:
    """Set a state that `state_of` returned."""
    (stream.write if isinstance(stream, Stream) else stream.set_state)(state)


def moved_since(states: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return those streams, with their states from before, that were drawn from."""
    return [(s, old) for s, old in states if _differ(old, state_of(s))]


def _differ(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return _bytes_of(a) != _bytes_of(b)
    return a != b
