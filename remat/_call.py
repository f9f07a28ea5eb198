"""What a user's call is made of, and how it is run around other tensors.

Invariant: the tensors of the call are taken out of it once, and every run is given its
own; but the first run of a module may be on the user's own parameters, for its graph is
dropped and nobody differentiates it.
Rejected: a program for each module of a model. What a function reaches is one set of
inputs, whatever holds it.
"""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from remat._capture import Search
from remat._code import code_of, is_constant, is_self_contained, is_static
from remat._compat import (
    dual_level_active,
    function_mode_count,
    function_modes,
    is_autocast_active,
    is_device_mode,
    is_parametrization_cached,
    swap_parametrization_cache,
    under_function_modes,
)
from remat._draws import without_draws
from remat._program import Program
from remat._rebuild import Node, build, is_same, pass_on
from remat._structure import Out, Path, apply, argument_name, flatten_arguments
from remat._trees import OutlinedNode
from remat._types import Fn


_TENSORS = frozenset({Tensor, nn.Parameter})
_NO_BUFFERS: Mapping[int, bool] = {}


_is_leaf = operator.attrgetter("is_leaf")
_backward_hooks = operator.attrgetter("_backward_hooks")


class Call(Program):
    """One call of a user's function, taken apart.

    Attributes:
        compiled: whether it reaches code that torch.compile or TorchScript made.
    """

    __slots__ = (
        "_always",
        "_buffers",
        "_code",
        "_contained",
        "_fn",
        "_is_on_own",
        "_label",
        "_leaves",
        "_modes",
        "_nodes",
        "_origins",
        "_out",
        "_own",
        "_positions",
        "_rng",
        "_streams",
        "_treedef",
        "_values",
        "compiled",
    )

    def __init__(
        self,
        fn: Fn,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng: str = "replay",
    ) -> None:
        self._out: Out | None = None
        self._fn, self._label, self._rng = fn, label, rng
        self._positions: list[tuple[int, int]] | None = None
        self._nodes: dict[int, Node] = {}
        self._own: int | None = None
        self._is_on_own = False
        self._modes = function_modes() if function_mode_count() else ()
        self._streams: Sequence[Any] = ()
        self._always = self.compiled = False
        self._code: Sequence[Any] = ()
        self._buffers: Mapping[int, bool] = _NO_BUFFERS
        self._origins: Sequence[Path]
        values, self._treedef = flatten_arguments(args, kwargs)
        contained = is_self_contained(fn)
        if self._modes:
            contained = contained and all(map(is_device_mode, self._modes))
        self._contained = contained
        if (
            contained
            and self._treedef is None
            and len({*map(id, values)}) == len(values)
        ):
            # The common case: the leaves are the arguments, each once.
            self._leaves, self._origins = values, range(len(values))
        else:
            roots = enumerate((fn, *self._modes))
            self._search(values, () if contained else [(~k, r) for k, r in roots])

    def _search(self, values: list[Any], roots: Sequence[tuple[int, Any]]) -> None:
        """Note where each tensor goes and how to rebuild what holds others.

        The function itself stands at -1, the TorchFunctionModes it is called in below.
        """
        if not roots and self._has_only_plain(values):
            return
        search = Search()
        positions: list[tuple[int, int]] = []
        self._positions = positions
        opaque: list[tuple[int, Any]] = []
        for k, value in enumerate(values):
            if isinstance(value, Tensor):
                positions.append((k, search.tensor(value, k)))
                values[k] = None
            else:
                opaque.append((k, value))
        # What an object passed can reach, its class say, is not the function's code.
        constant = all(is_constant(value) for _, value in opaque)
        self._contained = self._contained and constant
        for k, value in (*opaque, *roots):
            node = search.visit(value, k if k >= 0 else None)
            if node is not None:
                self._nodes[k] = node
        self._values = values
        found = search.found
        self._leaves, self._origins = found.tensors, found.origins
        self._streams, self._always = search.streams, search.always
        code = search.signature if roots else [code_of(self._fn), *search.signature]
        self._code, self.compiled = code, search.compiled
        self._buffers = found.buffers
        if self._nodes.keys() == {-1} and not (found.buffers or self._modes):
            node = self._nodes[-1]
            self._own = node.first if type(node) is OutlinedNode else None

    def _has_only_plain(self, values: list[Any]) -> bool:
        """Note where each tensor goes, if the rest are constants and each is once."""
        found = [(k, v) for k, v in enumerate(values) if type(v) in _TENSORS]
        tensors = [v for _, v in found]
        others = [v for v in values if type(v) not in _TENSORS]
        if not all(map(is_constant, others)) or len({*map(id, tensors)}) < len(found):
            return False
        where = [k for k, _ in found]
        self._origins, self._positions = where, [(k, i) for i, k in enumerate(where)]
        for k in where:
            values[k] = None
        self._values, self._leaves = values, tensors
        self._code = (code_of(self._fn),)
        return True

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        """What is the same in each call of the same code.

        That is the code of functions, types and modes of modules, types of what else
        is rebuilt, the structure of the arguments and those that are constants. It
        holds no tensor and no user's object.
        """
        if self._positions is None:
            return code_of(self._fn), len(self._origins)
        values = [_static(v) if is_static(v) else None for v in self._values]
        # By its hash: a treedef holds the keys of dictionaries, which may be anything.
        return hash(self._treedef), *values, *self._code

    @property
    @override
    def is_forward(self) -> bool:
        """Whether the next run is the first."""
        return self._out is None

    def own_from(self, leaves: Sequence[Tensor]) -> int:
        """Return from which leaf on the first run may be on the user's own tensors.

        They are then the parameters of a module that holds nothing else, and the module
        itself is called: a plain call, after which there is nothing to hand on. Those
        with gradient hooks are kept apart, for whoever differentiates inside runs them.
        """
        first = self._own
        # Autocast's cache may hold casts of the user's own, and has none of stand-ins.
        elsewhere = is_parametrization_cached() or is_autocast_active()
        if first is None or dual_level_active() or elsewhere:
            return len(leaves)
        own = leaves[first:]
        if False in map(_is_leaf, own) or any(map(_backward_hooks, own)):
            return len(leaves)
        if not {nn.Parameter}.issuperset(map(type, own)):  # fake ones have no address
            return len(leaves)
        self._is_on_own = True
        return first

    def take_leaves(self) -> list[Tensor]:
        """Return the tensors of the call, and forget them."""
        leaves = self._leaves
        self._leaves: list[Tensor] = []
        return leaves

    def join(self, outs: Sequence[Any], leaves: Sequence[Tensor]) -> Any:
        """Rebuild the value that the function returned."""
        assert self._out is not None
        return self._out.join(outs, leaves)

    def run_around(
        self,
        leaves: Sequence[Tensor],
        *,
        first: bool,
    ) -> Any:
        """Call the function around other tensors.

        The first time, what it assigns to captured names and attributes is handed on.
        """
        if self._positions is None:
            return self._apply(self._fn, None, leaves, self._modes)
        values = list(self._values)
        for k, i in self._positions:
            values[k] = leaves[i]
        if not self._nodes:
            return self._apply(self._fn, self._treedef, values, self._modes)
        if first and self._is_on_own:
            return self._apply(self._fn, self._treedef, values, self._modes)
        built, run = build(self._nodes, leaves, first=first)
        fn = built.pop(-1, self._fn)
        modes = [built.pop(~k, mode) for k, mode in enumerate(self._modes, 1)]
        for k, value in built.items():
            values[k] = value
        if is_parametrization_cached():
            fn = _with_own_cache(fn)
        result = self._apply(fn, self._treedef, values, modes)
        if first:
            pass_on(run)
        return result

    def _apply(
        self, fn: Fn, treedef: Any, values: Sequence[Any], modes: Sequence[Any]
    ) -> Any:
        """Call under the TorchFunctionModes of the call, and no others."""
        if self._rng == "error":
            fn = without_draws(fn, self._label)
        count = function_mode_count()
        if not (count or modes) or is_same(function_modes() if count else (), modes):
            return apply(fn, treedef, values)
        return under_function_modes(modes, apply, fn, treedef, values)

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        root, text = self._origins[index], ""
        while isinstance(root, tuple):
            root, part = root
            text = part + text
        if root is None:
            return text.lstrip(".")
        return argument_name(self._fn, self._treedef, root) + text


def _with_own_cache(fn: Fn) -> Fn:
    def run(*args: Any, **kwargs: Any) -> Any:
        before = swap_parametrization_cache({})
        try:
            return fn(*args, **kwargs)
        finally:
            swap_parametrization_cache(before)

    return run


def _static(value: Any) -> Any:
    """Return what stands for a constant in a signature: a number may be annealed."""
    return float if type(value) is float else (type(value), value)
