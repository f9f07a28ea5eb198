"""What holds for CPython alone: bytecode, flags of classes, where objects keep parts.

No other file reads these. What is relied on is checked at every import, in a few
milliseconds. `remat/__init__.py` imports this file first.

Invariant: what a check finds to differ is not read, or is one warning that names it.
Rejected: a list of versions that work. Builds of one version may differ, and a newer
one most often does not.
"""

import contextlib
import dis
import gc
import itertools
import struct
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from ctypes import c_char
from typing import Any, NamedTuple


# Every Python that tests ran with; pyproject.toml and docs/limits.md name them too.
RUN = ("3.11", "3.13")


def refuse_free_threads() -> None:
    """Raise an ImportError in a free-threaded build, even if its lock is on."""
    if "free-threading build" in sys.version:
        raise ImportError(_FREE_THREADED.format(version=_version()))


def _version() -> str:
    return sys.version.split(maxsplit=1)[0]


_FREE_THREADED = (
    "remat: this Python {version} is a free-threaded build. remat was never run with "
    "one: threads would change what it reads without a lock. Use a build with the "
    "global interpreter lock, such as python3.13 in place of python3.13t."
)


# --- Bytecode ---


class NamesUsed(NamedTuple):
    """Names in code, and in code nested in it: global ones, and methods it calls."""

    loaded: tuple[str, ...]
    stored: tuple[str, ...]  # or deleted
    called: frozenset[str]
    writes: bool  # whether it may change a value in place, as tensors are


def names_used(code: types.CodeType) -> NamesUsed:
    """Return which names code uses, and how."""
    loaded: dict[str, None] = {}
    stored: dict[str, None] = {}
    called: set[str] = set()
    writes = any(map(_names_what_writes, nested(code)))
    for step in itertools.chain.from_iterable(map(dis.get_instructions, nested(code))):
        action, _, where = step.opname.partition("_")
        if where in _GLOBAL:
            (loaded if action == "LOAD" else stored)[str(step.argval)] = None
        # What is called is loaded with something below it, which `argrepr` shows.
        has_more = step.opcode in dis.hasname and step.argrepr != step.argval
        if has_more or step.opname == "LOAD_METHOD":
            called.add(str(step.argval))
        adds = step.opname == "BINARY_OP" and step.argrepr.endswith("=")
        writes = writes or adds or step.opname == "STORE_SUBSCR"
    return NamesUsed((*loaded,), (*stored,), frozenset(called), writes)


def _names_what_writes(code: types.CodeType) -> bool:
    """Say whether code names a function or an argument that is written to."""
    named = [word for word in code.co_consts if type(word) is tuple]
    is_method = any(n[-1:] == "_" and n[:1] != "_" for n in code.co_names)
    return is_method or not _WRITING.isdisjoint(
        (*code.co_names, *itertools.chain(*named))
    )


# Of the operations of Python those that write: `operator.iadd` and `__iadd__`.
_ADDS = (
    *("add", "and", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow"),
    *("rshift", "sub", "truediv", "xor"),
)
_WRITING = frozenset(
    {
        *("batch_norm", "inplace", "instance_norm", "native_batch_norm", "out"),
        *("setitem", "__setitem__"),
        *(f"i{name}" for name in _ADDS),
        *(f"__i{name}__" for name in _ADDS),
    }
)


_GLOBAL = {"GLOBAL", "NAME", "FROM_DICT_OR_GLOBALS"}


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield code, and all code nested in it."""
    todo = [code]
    while todo:
        here = todo.pop()
        yield here
        todo += [c for c in here.co_consts if isinstance(c, types.CodeType)]


# --- Flags of classes ---


def is_made_by_statement(cls: type) -> bool:
    """Say whether a class was made by a class statement, rather than in C."""
    return bool(cls.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE


def may_refer_to_others(cls: type) -> bool:
    """Say whether instances of a class may refer to other objects."""
    return bool(cls.__flags__ & 1 << 14)  # Py_TPFLAGS_HAVE_GC


# --- Where objects keep parts ---


def _read_in_memory(values: Iterable[Any]) -> bytes:
    held = tuple(values)
    read = _READERS.get(len(held))
    if read is None:
        read = _READERS[len(held)] = (c_char * (len(held) * _POINTER)).from_address
    return read(id(held) + tuple.__basicsize__).raw


_POINTER = struct.calcsize("P")
_READERS: dict[int, Callable[[int], Any]] = {}  # of so many pointers


def _read_one_by_one(values: Iterable[Any]) -> bytes:
    held = (*map(id, values),)
    return struct.pack(f"{len(held)}P", *held)


def reader_of_identities() -> Callable[[Iterable[Any]], bytes]:
    """Return the fastest way to read which objects there are: in memory, mostly."""
    held = object(), None, refuse_free_threads
    is_there = _read_in_memory(held) == _read_one_by_one(held)
    return _read_in_memory if is_there else _read_one_by_one


# Which objects values are, as bytes: right for as long as all of them live. To read
# them in memory takes a tenth of the time of a loop.
identities = reader_of_identities()


def mapping_of(proxy: Any) -> Any:
    """Return what a read-only view is of: a mapping, or a class; `None` if unknown."""
    if "__module__" in proxy:
        own = proxy.get("__dict__", proxy.get("__weakref__"))
        return getattr(own, "__objclass__", None)
    return next(iter(gc.get_referents(proxy)), None)


# --- What is checked ---


_PROGRAM = """
def outer(x, n):
    global a, c
    a = a + f(x) + x.method(n) + x.other
    def inner():
        global c
        del c
        return b + n
    return inner
"""
_USED = NamesUsed(("a", "f", "b"), ("a", "c"), frozenset({"f", "method"}), False)


def _knows_classes() -> bool:
    made = type("Made", (), {})
    flags = [*map(is_made_by_statement, (made, int, list))]
    refer = [*map(may_refer_to_others, (list, made, int, str))]
    return flags == [True, False, False] and refer == [True, True, False, False]


def _finds_what_a_view_is_of() -> bool:
    mapping = {"a": 1}
    view = types.MappingProxyType(mapping)
    return mapping_of(view) is mapping and mapping_of(vars(NamesUsed)) is None


def _counts_references() -> bool:
    value = object()
    before = sys.getrefcount(value)
    held = [value, value]
    return sys.getrefcount(value) - before == len(held)


CHECKS: dict[str, Callable[[], bool]] = {
    "bytecode": lambda: names_used(compile(_PROGRAM, "", "exec").co_consts[0]) == _USED,
    "flags of classes": _knows_classes,
    "read-only views of mappings": _finds_what_a_view_is_of,
    "reference counts": _counts_references,
}


def differences() -> list[str]:
    """Return what differs from the Pythons that tests ran with."""
    found = [*CHECKS]
    for what, holds in CHECKS.items():
        with contextlib.suppress(Exception):  # whatever another Python raises
            if holds():
                found.remove(what)
    return found


def examine() -> None:
    """Refuse a Python without a lock; warn of one that differs."""
    refuse_free_threads()
    if found := differences():
        names = {"version": _version(), "run": " and ".join(RUN)}
        message = _DIFFERS.format(what=", ".join(found), **names)
        warnings.warn(message, RuntimeWarning, stacklevel=2)


_DIFFERS = (
    "remat: Python {version} differs from {run}, which remat was run with, in: {what}. "
    "Recomputes of functions that read or change Python objects may be wrong, without "
    "an error. Use one of these versions, or a newer remat."
)

examine()
