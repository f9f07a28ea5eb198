"""A snapshot: a call's function and arguments as they were, to be called again.

Made by `_transform` before the function runs. `Snapshot.call` calls the function again,
in a run (`runs`), which builds the values that the nodes describe.

Invariant: that of `nodes`. A snapshot holds no tensor: who asked for it holds them, and
frees them in time.
Rejected: a list of leaves and a treedef. It would lose what an object among the
arguments holds, and that it is that very object.
"""

import operator
import types
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from remat._base.code import static_of
from remat._base.errors import CaptureError
from remat._base.types import INERT, Fn
from remat._capture.nodes import Node, Rebuilding, TensorNode
from remat._capture.objects import is_spent_by_use
from remat._capture.paths import argument_name, code_of_arguments, texts_of
from remat._capture.search import CallSearch
from remat._torch import (
    function_mode_count,
    function_modes,
    parametrization_cache,
    swap_parametrization_cache,
    under_function_modes,
)


class Snapshot:
    """What a call refers to.

    Attributes:
        label: what errors call it.
        origins: the path of each tensor found.
        buffers: the tensors that the function may update in place, as it would without
            remat: index, and whether it is a module's registered buffer.
        streams: the random streams found.
        uses_stream_states: whether code reads or sets the state of a stream itself.
        compiled: whether it reaches code that torch.compile or TorchScript made.
        is_contained: whether all that it refers to, besides its arguments, are numbers,
            packages and functions like it.
    """

    __slots__ = (
        *("_cache", "_code", "_constants", "_count", "_fn", "_modes", "_names"),
        *("_nodes", "_target", "_values"),
        *("buffers", "compiled", "is_contained", "label", "origins", "streams"),
        "uses_stream_states",
    )

    def __init__(
        self,
        fn: Fn,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        search: CallSearch,
    ) -> None:
        self.label = label
        self._count, self._names = len(args), [*kwargs]
        self._values: list[Any] = [*args, *kwargs.values()]
        self._nodes: dict[int, Node] = {}
        found = search.found
        is_simple = type(fn) is types.FunctionType and not fn.__dict__
        self._target = (fn.__code__, 0) if is_simple else code_of_arguments(fn)
        for k, value in enumerate(self._values):
            if type(value) is Tensor:
                self._nodes[k] = TensorNode.of(found.index_of(value, k))
            elif type(value) not in INERT:
                if is_spent_by_use(type(value)):
                    raise only_once(value, self._argument(k))
                node = search.visit(value, k)
                if node is not None:
                    self._nodes[k] = node
        found.end_arguments()
        node = search.visit(fn, None)
        self._fn = fn if node is None else node
        self._modes: list[Any] = []
        if function_mode_count():
            modes = function_modes()
            self._modes = [search.visit(mode, None) or mode for mode in modes]
        cache = parametrization_cache()
        self._cache = None if cache is None else search.visit(cache, None)
        for k in self._nodes:
            self._values[k] = None
        self._code, self._constants = found.code, found.constants
        self.origins, self.buffers = found.origins, found.buffers
        self.is_contained, streams = found.is_contained, found.stream_search
        self.streams = [*streams.streams.values()]
        self.uses_stream_states = streams.uses_stream_states
        self.compiled = streams.compiled

    @property
    def code(self) -> Sequence[Any]:
        """The code and the classes that the call reaches, among other constants."""
        return self._code

    @property
    def signature(self) -> tuple[Any, ...]:
        """What is the same in each call of the same code.

        That is the code of functions, the types of objects, the types and modes of
        modules, the structure of the arguments and those that are constants. It holds
        no tensor and no user's object.
        """
        values = map(static_of, self._values)
        code = map(_code_of, self._code)
        return self._count, *self._names, *values, *self._constants, *code

    def call(self, run: Rebuilding) -> Any:
        """Call the function again, under the modes of the call and no others."""
        if self._modes or function_mode_count() or self._caches():
            return call_under(*self.built(run))
        args, kwargs = self._arguments(run)
        return _built(self._fn, run)(*args, **kwargs)

    def _caches(self) -> bool:
        """Say whether parametrizations are cached, at the call or now."""
        return not (self._cache is None and parametrization_cache() is None)

    def built(self, run: Rebuilding) -> tuple[Any, Any, Any]:
        """Return the function with its arguments, the modes, and a cache."""
        args, kwargs = self._arguments(run)
        fn = BoundFunction(_built(self._fn, run), args, kwargs)
        modes = [_built(mode, run) for mode in self._modes]
        return fn, modes, None if self._cache is None else self._cache.build(run)

    def _arguments(self, run: Rebuilding) -> tuple[list[Any], dict[str, Any]]:
        values = self._values
        if self._nodes:
            values = values.copy()
            for k, node in self._nodes.items():
                values[k] = node.build(run)
        if not self._names:
            return values, {}
        args, named = values[: self._count], values[self._count :]
        return args, dict(zip(self._names, named, strict=True))

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        return self.origin_of(index)[0]

    def origin_of(self, index: int) -> tuple[str, bool]:
        """Return the name of an input, and whether it was passed.

        What a function refers to is written like what an object holds.
        """
        root, parts = texts_of(self.origins[index])
        text = "".join(p if p[:1] in ("", ".", "[") else f".{p}" for p in parts)
        if root is None:
            return text.lstrip("."), False
        return self._argument(root) + text, True

    def _argument(self, k: int) -> str:
        return argument_name(self._target, self._names, k, self._count)


class BoundFunction(NamedTuple):
    """A function and its arguments.

    Not a partial, which joins its arguments to those of a partial that it is made of.
    """

    fn: Any
    args: list[Any]
    kwargs: dict[str, Any]

    def __call__(self) -> Any:
        return self.fn(*self.args, **self.kwargs)


def call_under(fn: Fn, modes: list[Any], cache: Any) -> Any:
    """Call what `Snapshot.built` returned, under these modes and no others."""
    if not (cache is None and parametrization_cache() is None):
        fn = _with_cache(fn, cache)
    if modes or function_mode_count():
        now = function_modes()
        if len(now) != len(modes) or not all(map(operator.is_, now, modes)):
            return under_function_modes(modes, fn)
    return fn()


def _built(found: Any, run: Rebuilding) -> Any:
    return found.build(run) if isinstance(found, Node) else found


def _with_cache(fn: Fn, cache: dict[Any, Any] | None) -> Fn:
    """Return what calls a function with a cache of parametrizations, or with none."""
    state = ({}, 0) if cache is None else (dict(cache), 1)

    def run() -> Any:
        before = swap_parametrization_cache(state)
        try:
            return fn()
        finally:
            swap_parametrization_cache(before)

    return run


def _code_of(found: Any) -> Any:
    """Return what stands for code in a signature.

    A weak reference has one hash, which reads all of a code, computed once.
    """
    is_code = isinstance(found, (type, types.CodeType))
    return weakref.ref(found) if is_code else found


def only_once(value: Any, name: str) -> CaptureError:
    """Return the error that an argument can be read only once."""
    return CaptureError(_SPENT.format(name=name, kind=type(value).__name__))


_SPENT = (
    "remat: the argument `{name}` is a {kind}, which can be read only once, and a "
    "recompute reads the arguments again. Pass a list or a tuple."
)
