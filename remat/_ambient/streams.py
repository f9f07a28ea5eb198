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

from remat._torch.modes import function_mode_count, no_torch_functions
from remat._torch.process import device_generators, twister_memory, twister_state


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


def _of_torch(generator: torch.Generator) -> Stream:
    def read() -> bytes:
        state = generator.get_state()
        with no_torch_functions() if function_mode_count() else _NOTHING:
            return ctypes.string_at(state.data_ptr(), state.numel())

    def write(state: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))

    return Stream("a torch.Generator", read, write, id(generator))


_NOTHING = contextlib.nullcontext()
_of_device = functools.lru_cache(maxsize=64)(_of_torch)


def device_streams() -> list[Stream]:
    """Return the global stream of every initialized device besides the CPU."""
    return [*map(_of_device, device_generators())]


def _global_of_torch() -> tuple[Stream, Any]:
    generator = torch.default_generator
    memory, stream = twister_memory(generator), _of_torch(generator)
    if memory is None:
        return stream._replace(name="cpu", of=0), None

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


def _global_of_python() -> tuple[Stream, Any]:
    memory, name = _python_memory(random.Random(0)), "Python's random"
    if memory is None or _PYTHON is None:
        return Stream(name, random.getstate, random.setstate), None
    memory = _memory(id(_PYTHON) + _HEADER, len(memory))

    def write(state: tuple[bytes, float | None]) -> None:
        _PYTHON.setstate(_python_state(*state))

    return Stream(name, lambda: (memory.raw, _PYTHON.gauss_next), write), memory


_PYTHON: Any = vars(random).get("_inst")  # the object behind the functions of `random`


# --- NumPy's ---

_GAUSS = struct.Struct("id")  # whether there is a second normal number, and which


def _global_of_numpy(numpy_random: Any) -> tuple[Any, Any]:
    owner, bits = numpy_random.mtrand._rand, numpy_random.get_bit_generator()
    memory, offset = _numpy_memory(bits), _gauss_offset(numpy_random)
    if memory is None or offset is None:
        return stream_of(owner)._replace(name="numpy.random", of=0), None
    gauss = _memory(id(owner) + offset, _GAUSS.size)

    def write(state: tuple[bytes, bytes]) -> None:
        if numpy_random.get_bit_generator() is not bits:
            return  # it was exchanged since: the other one is left alone
        *key, position = struct.unpack(f"{_WORDS}Ii", state[0])
        has_gauss, second = _GAUSS.unpack(state[1])
        words = {"state": {"key": key, "pos": position}, "has_gauss": has_gauss}
        owner.set_state({**bits.state, **words, "gauss": second})

    stream = Stream("numpy.random", lambda: (memory.raw, gauss.raw), write)
    return stream, (memory, gauss)


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


# --- Which there are ---


class GlobalStreams(NamedTuple):
    """The global streams of torch's CPU, of Python and, once it is imported, of NumPy.

    Attributes:
        read: returns the states of all, to be compared by `==`.
        streams: each of them; to each belongs one of the states.
        numpy, bits: NumPy's module, and its generator, which may be exchanged.
    """

    read: Callable[[], Sequence[Any]]
    streams: Sequence[Stream]
    numpy: Any
    bits: Any


def _find_global(numpy_random: Any) -> GlobalStreams:
    found, bits = [_global_of_torch(), _global_of_python()], None
    if isinstance(numpy_random, _MODULE):
        bits = numpy_random.get_bit_generator()
        found.append(_global_of_numpy(numpy_random))
    streams, memories = zip(*found, strict=True)
    read = _reader(memories) or (lambda: [s.read() for s in streams])
    return GlobalStreams(read, streams, numpy_random, bits)


def _reader(memories: Sequence[Any]) -> Callable[[], Sequence[Any]] | None:
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
        known, now = last, (_join(ends), _PYTHON.gauss_next)
        if now != known[0]:
            first, second, *others = map(_raw, all_)
            more = [(*others,)] if others else ()
            known = now, (first, (second, _PYTHON.gauss_next), *more)
            if now == (_join(ends), _PYTHON.gauss_next):  # no other thread drew
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
    global _global
    numpy_random: Any = sys.modules.get("numpy.random")
    known = _global
    if (
        known is None
        or known.numpy is not numpy_random
        or (known.bits and numpy_random.get_bit_generator() is not known.bits)
        or (numpy_random is None and type(sys.modules.get("numpy")) is _MODULE)
    ):
        if type(sys.modules.get("numpy")) is _MODULE:
            # NumPy imports it on its first use, which may be within a forward.
            numpy_random = importlib.import_module("numpy.random")
        known = _global = _find_global(numpy_random)
    return known


def stream_of(value: Any) -> Any:
    """Return how to read and write an object that draws; None if it is none."""
    if isinstance(value, torch.Generator):
        return _of_torch(value)
    if isinstance(value, random.Random):
        with contextlib.suppress(NotImplementedError):  # SystemRandom has no state
            value.getstate()
            return Stream("a random.Random", value.getstate, value.setstate, id(value))
    if str(type(value).__module__).startswith("numpy.random"):
        return _of_numpy(value)
    return None


def _of_numpy(value: Any) -> Stream | None:
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


def moved_since(states: Iterable[tuple[Stream, Any]]) -> list[tuple[Stream, Any]]:
    """Return those streams, with their states from before, that were drawn from."""
    return [(s, old) for s, old in states if s.read() != old]
