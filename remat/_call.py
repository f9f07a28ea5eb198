"""What a user's call is made of, and how it is run around other tensors.

Invariant: the tensors of the call are taken out of it once, and every run is given its
own. But what provably does nothing to the user's own leaves runs on them, and so does
the first run of a module, whose graph is dropped and differentiated by nobody.
Rejected: a program for each module of a model. What a function reaches is one set of
inputs, whatever holds it.
"""

import operator
import warnings
from collections.abc import Mapping, Sequence
from itertools import compress
from typing import Any

from torch import Tensor
from typing_extensions import override

from remat._arguments import (
    Layout,
    apply,
    argument_name,
    flatten_arguments,
    take_apart,
)
from remat._capture import Search
from remat._checks import places_of
from remat._code import Contained, code_of, contained, is_constant, is_static
from remat._compat import (
    autocast_depth,
    current_layer,
    dual_level_active,
    function_mode_count,
    function_modes,
    is_autocast_active,
    is_device_mode,
    is_parametrization_cached,
    requires_grad_at_any_level,
    swap_parametrization_cache,
    under_function_modes,
    unwrap_dead,
)
from remat._draws import without_draws
from remat._foreign import holds_graph
from remat._program import Program
from remat._rebuild import Node, build, is_same, pass_on
from remat._structure import Out, Path
from remat._trees import OutlinedNode
from remat._types import Fn


_NO_BUFFERS: Mapping[int, bool] = {}


_requires_grad = operator.attrgetter("requires_grad")
_is_leaf = operator.attrgetter("is_leaf")
backward_hooks = operator.attrgetter("_backward_hooks")


class Known:
    """What one call of a function knows of it, for the next to compare.

    Attributes:
        code: what it and the functions it calls refer to, if that is no tensor.
        layout: of the arguments.
    """

    __slots__ = ("code", "layout")

    def __init__(self) -> None:
        self.code: Contained | None = None
        self.layout: Layout | None = None


class Call(Program):
    """One call of a user's function, taken apart.

    Attributes:
        compiled: whether it reaches code that torch.compile or TorchScript made.
        own: the leaves that it runs on themselves, not on stand-ins.
        above: the leaves as they were passed, until the forward has run, if they may be
            used in a way that there is not below the levels that they are of.
    """

    __slots__ = (
        "_always",
        "_buffers",
        "_code",
        "_constants",
        "_contained",
        "_differentiates",
        "_first",
        "_fn",
        "_label",
        "_layout",
        "_leaves",
        "_modes",
        "_nodes",
        "_only_computes",
        "_origins",
        "_out",
        "_places",
        "_positions",
        "_rng",
        "_streams",
        "_treedef",
        "_values",
        "above",
        "compiled",
        "own",
    )
    _origins: Sequence[Path]
    _out: Out | None
    _places: list[int] | None

    def __init__(
        self,
        fn: Fn,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng: str = "replay",
        known: Known | None = None,
    ) -> None:
        self._out = None
        self._fn, self._label, self._rng = fn, label, rng
        self._constants: Sequence[tuple[int, Any]] = ()
        self._positions: list[tuple[int, int]] | None = None
        self._nodes: dict[int, Node] = {}
        self.own: Sequence[int] = ()
        self.above: Sequence[Tensor] = ()
        self._places = None
        self._first: int | None = None
        self._modes = function_modes() if function_mode_count() else ()
        self._streams: Sequence[Any] = ()
        self._always = self.compiled = False
        self._code: Sequence[Any] = ()
        self._buffers: Mapping[int, bool] = _NO_BUFFERS
        self._layout: Layout | None = None
        known = known or Known()
        code = known.code
        if code is None or not code.is_still(fn):
            code = known.code = contained(fn)
        if self._modes and not all(map(is_device_mode, self._modes)):
            code = None
        self._contained = code is not None
        self._only_computes = code is not None and code.only_computes
        self._differentiates = code is None or code.differentiates
        if self._contained:
            values, self._treedef, layout = take_apart(args, kwargs, known.layout)
            self._layout = layout
            if layout is not known.layout:
                known.layout = layout if layout and layout.is_kept else None
            if self._take_plain(values):
                return
        else:
            values, self._treedef = flatten_arguments(args, kwargs)
        roots = enumerate((fn, *self._modes))
        self._search(values, [] if self._contained else [(~k, r) for k, r in roots])

    def _take_plain(self, values: list[Any]) -> bool:
        """Note where each tensor goes, if the rest are constants and each is once."""
        layout, tensors = self._layout, values
        if layout is not None:
            tensors = [*compress(values, layout.are_tensors)]
        elif self._treedef is not None:
            return False
        if len({*map(id, tensors)}) < len(tensors):
            return False
        self._leaves, self._origins = tensors, range(len(values))
        if layout is not None:
            self._origins = layout.where
            self._constants = [(k, values[k]) for k in layout.constants]
        return True

    def _search(self, values: list[Any], roots: Sequence[tuple[int, Any]]) -> None:
        """Note where each tensor goes and how to rebuild what holds others.

        The function itself stands at -1, the TorchFunctionModes it is called in below.
        """
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
            self._first = node.first if type(node) is OutlinedNode else None

    @property
    @override
    def signature(self) -> tuple[Any, ...]:
        """What is the same in each call of the same code.

        That is the code of functions, types and modes of modules, types of what else
        is rebuilt, the structure of the arguments and those that are constants. It
        holds no tensor and no user's object.
        """
        if self._positions is None:
            key = None if self._layout is None else self._layout.key
            constants = [(k, _static(value)) for k, value in self._constants]
            return code_of(self._fn), len(self._origins), key, *constants
        values = [_static(v) if is_static(v) else None for v in self._values]
        # By its hash: a treedef holds the keys of dictionaries, which may be anything.
        return hash(self._treedef), *values, *self._code

    @property
    @override
    def is_forward(self) -> bool:
        """Whether the next run is the first."""
        return self._out is None

    def own_among(
        self, leaves: Sequence[Tensor], needs: Sequence[bool]
    ) -> Sequence[int]:
        """Return which leaves it may run on themselves, and not on stand-ins.

        Those of autograd, if what is called provably only computes with them. And, in
        the forward, the parameters of a module that holds nothing else, if it is what
        is called: that is a plain call, after which there is nothing to hand on. But
        none with gradient hooks, for whoever differentiates inside would run them.
        """
        first = self._first
        if self._places is None or not (self._only_computes or first is not None):
            return ()
        # Autocast's cache may hold casts of the user's own, and has none of stand-ins.
        if is_autocast_active() or autocast_depth() or dual_level_active():
            return ()
        if is_parametrization_cached():
            return ()
        own = leaves[first:]
        fit = not (False in map(_is_leaf, own) or any(map(backward_hooks, own)))
        if first is not None:
            return range(first, len(leaves)) if fit else ()
        if fit and False not in needs:
            return range(len(leaves))
        return [
            i
            for i, (t, need) in enumerate(zip(leaves, needs, strict=True))
            if need and t.is_leaf and not t._backward_hooks
        ]

    def take_leaves(self) -> tuple[list[Tensor], list[bool]]:
        """Return the tensors of the call, and which require grad, at any level.

        And forget them.
        """
        leaves = self._leaves
        self._leaves: list[Tensor] = []
        layer = current_layer()
        if layer is None:
            needs = [*map(_requires_grad, leaves)]
            self._places = places_of(leaves, needs)
            # What has a place in memory wraps nothing: others may.
            if self._places is not None and False not in needs:
                return leaves, needs
        above, leaves = leaves, [*map(unwrap_dead, leaves)]
        if layer is not None and (self._differentiates or not self._contained):
            self.above = above
        if True in map(operator.is_not, leaves, above) and holds_graph(above, leaves):
            warnings.warn(_PULLBACK.format(label=self._label), stacklevel=3)
            return leaves, [False] * len(leaves)
        return leaves, [*map(requires_grad_at_any_level, leaves)]

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
            values = leaves
            if self._constants:
                values = [*leaves]
                for k, value in self._constants:
                    values.insert(k, value)
            return self._apply(self._fn, self._treedef, values, self._modes)
        values = list(self._values)
        for k, i in self._positions:
            values[k] = leaves[i]
        if not self._nodes:
            return self._apply(self._fn, self._treedef, values, self._modes)
        if first and self.own:
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


_PULLBACK = (
    "remat: {label} holds a pullback of torch.func.vjp. Its graph, recorded outside, "
    "can't be computed again: the function is called as it is, and no memory is saved. "
    "Call torch.func.vjp inside it."
)


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
