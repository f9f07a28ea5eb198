"""Where tensors are, as the author of a function would write it: for errors, reports.

What a value holds is read as a call reads it (`holders`), and each part has a path,
which holds no value of the user's but the keys of dicts.

Invariant: each value is visited once, in the order in which a reader meets it, and is
held until the search is let go of: no other value gets its identity.
Rejected: paths in the walk of a call (`walk`), and paths as text. To write one costs as
much as to search what it leads to, and most are never read.
"""

import enum
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from remat._base.code import VIEWED, known_code
from remat._base.errors import CaptureError
from remat._base.pytree import REGISTERED, Registered
from remat._base.types import INERT
from remat._reach.holders import (
    FACTORIES,
    MISSING,
    OWNED,
    PART,
    PARTS,
    SLOTS,
    HolderKind,
    container_kind,
    contents_of,
    kinds_of,
    names_of,
)
from remat._reach.objects import (
    REGISTRIES,
    TEMPLATE,
    is_left_alone,
    is_rematerialized,
    is_spent_by_use,
    is_view,
)
from remat._reach.stream_search import is_stream
from remat._reach.watched import is_bare_buffer
from remat._torch.tracing import is_compiled


# The position of an argument; None for the function; `(path, text)` for what a value
# holds; `(path, key, None)` for an item, whose key is written only when asked for.
Path: TypeAlias = tuple[Any, ...] | int | None


def written(path: Path) -> tuple[int | None, str]:
    """Return the root of a path, and how it is written from there."""
    root, parts = texts_of(path)
    return root, "".join(parts)


def texts_of(path: Path) -> tuple[int | None, list[str]]:
    """Return the root of a path, and the texts after it."""
    parts: list[str] = []
    while isinstance(path, tuple):
        path, part, *is_item = path
        parts.append(f"[{part!r}]" if is_item else part)
    return path, parts[::-1]


def code_of_arguments(fn: Any) -> tuple[Any, int]:
    """Return the code that names the arguments of a function, and how many it skips.

    Those are bound: `self`, or arguments of a partial.
    """
    skip = 0
    while True:
        if isinstance(fn, types.FunctionType):
            if "__wrapped__" not in fn.__dict__:
                return fn.__code__, skip
            fn = fn.__dict__["__wrapped__"]
        elif isinstance(fn, types.MethodType):
            fn, skip = fn.__func__, skip + 1
        elif isinstance(fn, partial):
            fn, skip = fn.func, skip + len(fn.args)
        elif isinstance(fn, nn.Module):
            fn = fn.forward
        elif hasattr(type(fn), "__remat_options__"):
            fn = fn.__wrapped__
        elif isinstance(
            inspect.getattr_static(type(fn), "__call__", None), types.FunctionType
        ):
            fn, skip = type(fn).__call__, skip + 1
        else:
            return None, 0


def _parameter_at(code: Any, position: int) -> str:
    """Return the name of a parameter; "" if there is none."""
    if code is None:
        return ""
    if position < code.co_argcount:
        return code.co_varnames[position]
    if not code.co_flags & inspect.CO_VARARGS:
        return ""
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount]
    return f"{name}[{position - code.co_argcount}]"


class NamedSearch:
    """A search for tensors, and for one other value if that is wanted.

    Attributes:
        tensors: each once, in order.
        paths: where each was found first.
        seen: all that was visited, by identity.
    """

    def __init__(self, wanted: Any = None) -> None:
        self._wanted = wanted
        self.tensors: list[Any] = []
        self.paths: list[Path] = []
        self.seen: dict[int, Any] = {}

    def walk(self, value: Any, path: Path = None) -> None:
        """Visit a value and what it leads to, without recursion."""
        todo = [(value, path)]
        while todo:
            value, path = todo.pop()
            kind = type(value)
            if kind not in INERT and value is not MISSING:
                todo += [*self.visit(value, kind, path)][::-1]

    def visit(self, value: Any, kind: type, path: Path) -> Iterable[tuple[Any, Path]]:
        """Note a value; return what is visited next, which it holds."""
        if id(value) in self.seen:
            return ()
        self.seen[id(value)] = value
        if not (issubclass(kind, Tensor) or value is self._wanted):
            return parts_of(value, kind, path)
        self.tensors.append(value)
        self.paths.append(path)
        return ()


class CallNames(NamedSearch):
    """The tensors of a call, with their names."""

    def __init__(
        self,
        fn: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        wanted: Any = None,
    ) -> None:
        super().__init__(wanted)
        self._target, self._count = code_of_arguments(fn), len(args)
        self._names = [*kwargs]
        for k, value in enumerate((*args, *kwargs.values())):
            self.walk(value, k)
        self.walk(fn)

    def origin_of(self, index: int) -> tuple[str, bool]:
        """Return the name of a tensor, and whether it was passed.

        What a function refers to is written like what an object holds.
        """
        root, parts = texts_of(self.paths[index])
        text = "".join(p if p[:1] in ("", ".", "[") else f".{p}" for p in parts)
        if root is None:
            return text.lstrip("."), False
        if root >= self._count:  # keywords come after the others
            return self._names[root - self._count] + text, True
        code, skip = self._target
        return (_parameter_at(code, skip + root) or f"args[{root}]") + text, True

    def name_of(self, tensor: Any) -> str:
        """Return the name of what is among them."""
        return self.origin_of([t is tensor for t in self.tensors].index(True))[0]


# --- What a value holds ---


def parts_of(value: Any, kind: Any, path: Path) -> Iterator[tuple[Any, Path]]:
    """Yield what a value holds, each with a path."""
    if kind is types.FunctionType:
        yield from _parts_of_function(value, path)
    elif issubclass(kind, nn.Module):
        yield from _parts_of_module(value, kind, path)
    elif is_rematerialized(kind):
        yield value.__wrapped__, path
    elif kind is types.CellType:
        yield contents_of([value])[0], path
    else:
        for how in kinds_seen(value, kind):
            yield from held_with_paths(how, kind, *how.held(value), path)


def _parts_of_function(
    fn: types.FunctionType, path: Path
) -> Iterator[tuple[Any, Path]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        yield cell, (path, name)
    if not is_compiled(fn.__dict__):
        for name in known_code(fn).open:
            yield fn.__globals__.get(name, MISSING), (path, name)
    held = {"__defaults__": fn.__defaults__, "__kwdefaults__": fn.__kwdefaults__}
    for name, value in (held | fn.__dict__).items():
        yield value, (path, f"{fn.__name__}.{name}")


def _parts_of_module(module: Any, kind: type, path: Path) -> Iterator[tuple[Any, Path]]:
    if issubclass(kind, torch.jit.ScriptModule):
        for name, value in module.named_parameters():
            yield value, (path, f".{name}")
        return
    if is_view(kind):
        yield getattr(module, VIEWED), path
    else:
        held = vars(module)
        for name in [name for name in held if name not in TEMPLATE]:
            yield held[name], (path, f".{name}")
        for registry in REGISTRIES:
            for name, value in held[registry].items():
                yield value, (path, f".{name}")
    yield from held_with_paths(SLOTS, kind, (), SLOTS.held(module)[1], path)


def kinds_seen(value: Any, kind: type) -> Sequence[HolderKind]:
    """Return how what a value holds is read; nothing if it is used as it is."""
    if kind in REGISTERED:
        return [RegisteredKind(REGISTERED[kind])]
    if issubclass(kind, _AS_THEY_ARE) or is_stream(kind) or is_bare_buffer(kind):
        return []
    is_open = issubclass(kind, PARTS) or container_kind(kind) is not None
    if not is_open and (is_spent_by_use(kind) or is_left_alone(kind)):
        return []
    return kinds_of(value, kind)


def held_with_paths(
    how: HolderKind, kind: type, keys: Sequence[Any], items: Sequence[Any], path: Path
) -> Iterator[tuple[Any, Path]]:
    """Yield the keys and items that a value holds, each with a path."""
    if not INERT.issuperset(map(type, keys)):
        yield from ((key, path) for key in keys)
    if not INERT.issuperset(map(type, items)):
        yield from zip(items, _paths_in(how, kind, keys, items, path), strict=True)


def _paths_in(
    how: HolderKind, kind: type, keys: Sequence[Any], items: Sequence[Any], path: Path
) -> Sequence[Path]:
    """Return the path of each item that a value holds."""
    if how is OWNED:
        return [(path, f".{name}") for name in keys]
    if how is SLOTS:
        return [(path, f".{name}") for name in names_of(kind)]
    if how is FACTORIES:
        return [(path, ".default_factory")]
    if how is PART:
        owner = (path, "self") if issubclass(kind, _METHODS) else path
        return [path, owner, *[path] * (len(items) - 2)][: len(items)]
    if type(how) is RegisteredKind:
        children = [(path, f"<child {i}>") for i in range(len(items) - 1)]
        return [*children, (path, "<rest>")]
    places = map(_held_key, keys) if how.keyed else range(len(items))
    return [(path, place, None) for place in places]


def _held_key(key: Any) -> Any:
    """Return a key, as a path may hold it: None if it may lead to a tensor."""
    is_plain = type(key) in (tuple, frozenset) and INERT.issuperset(map(type, key))
    is_plain = is_plain or type(key) in INERT or isinstance(key, (enum.Enum, type))
    return key if is_plain else None


_METHODS = types.MethodType, types.BuiltinFunctionType
_AS_THEY_ARE = types.ModuleType, type, enum.Enum, weakref.ref, *weakref.ProxyTypes


class RegisteredKind(HolderKind):
    """Instances of a class that says itself what they hold.

    What one is rebuilt from besides its children is the last value: it may hold
    tensors, too.
    """

    def __init__(self, how: Registered) -> None:
        def rebuilt(_: Any, values: Sequence[Any], limit: int | None) -> Any:
            *children, context = values
            return how.unflatten(context, children)

        super().__init__(partial(_flattened, how), new=rebuilt)


def _flattened(how: Registered, value: Any) -> list[Any]:
    found: Any = how.flatten(value)
    try:
        children, context = found[:2]
        return [*children, context]
    except (KeyError, TypeError, ValueError) as error:
        name, kind = type(value).__qualname__, type(found).__name__
        raise CaptureError(_NO_PAIR.format(name=name, kind=kind)) from error


_NO_PAIR = (
    "remat: the function that {name} is registered with returned a {kind}. It must "
    "return a pair: a list of what holds tensors, and what else is needed to rebuild."
)
