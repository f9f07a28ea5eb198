"""What a call reaches, and how it is run again on the user's own objects.

A `Reach` is made before the forward. It notes what the call was given, and what all
that holds. After the forward it notes what the forward changed there. `restored` is a
context in which everything holds what it held at the call.

Invariant: no tensor is held here, and no object of the user's that could hold one.
Rejected: to rebuild functions and containers, as under torch.func. Code that the walk
does not reach, such as a hook, holds the originals.
"""

import contextlib
import operator
import types
import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from remat._base.code import is_library
from remat._base.tensors import describe
from remat._base.types import TENSORS
from remat._capture.kinds import is_spent_by_use
from remat._capture.paths import argument_name, code_of_arguments
from remat._capture.search import CallSearch
from remat._capture.snapshot import BoundFunction, Snapshot, call_under, spent
from remat._capture.stream_search import has_user_code
from remat._live.given import Building, Given, structure_of
from remat._live.layout import hooks_so_far
from remat._live.roots import roots_of
from remat._live.running import Running, bytes_of
from remat._torch import function_mode_count, function_modes, parametrization_cache


_PARAMETERS = frozenset({nn.Parameter})


class Reach:
    """What a call reaches.

    Args:
        fn: the function.
        label: what messages call it.
        args: its arguments.
        kwargs: its keyword arguments.

    Attributes:
        label: see above.
        buffers: the tensors that the function may update in place, as it would without
            remat: index, and whether a module holds it.
        hooks: how many hooks had been set anywhere.
        streams: the random streams found.
        handles_states: whether some code reads or sets the state of a stream itself.
        compiled: whether it reaches code that torch.compile or TorchScript made.
        is_lazy: whether some module has no parameters yet.
        tensors: what was found. The call takes it: it is not to stay here.
        first_parameter: from which of these on all are parameters, found in roots.

    Raises:
        CaptureError: an argument can be read only once.
    """

    __slots__ = (
        *("_buffers", "_cache", "_count", "_fn", "_modes", "_names", "_refs"),
        *("_roots", "_running", "_values", "buffers", "compiled"),
        *(
            "first_parameter",
            "handles_states",
            "hooks",
            "is_lazy",
            "label",
            "streams",
            "tensors",
        ),
    )

    def __init__(self, fn: Any, label: str, args: Any, kwargs: dict[str, Any]) -> None:
        self.label, self._count, self._names = label, len(args), [*kwargs]
        self.hooks, given = hooks_so_far(), Given()
        self._values: list[Any] = []
        for k, value in enumerate((*args, *kwargs.values())):
            if type(value) not in TENSORS and is_spent_by_use(type(value)):
                target = code_of_arguments(fn)
                raise spent(value, argument_name(target, self._names, k, self._count))
            self._values.append(given.put_aside(value))
        self._fn = given.put_aside(fn)
        self._modes: Sequence[Any] = ()
        if function_mode_count():
            self._modes = [*map(given.put_aside, function_modes())]
        cache = parametrization_cache()
        self._cache = None if cache is None else given.put_aside(cache)
        self._roots = roots_of(given.roots.values()) if given.roots else []
        if given.has_containers:
            self._find_in_hooks(given)
        self.buffers: dict[int, bool] = {}
        self._find_tensors(given)
        self._note_streams(given)
        buffers = given.buffers
        for root in self._roots:
            buffers += root.buffers
        self._buffers = [(buffer, bytes_of(buffer)) for buffer in buffers]
        self._running: Running | None = None

    def _find_in_hooks(self, given: Given) -> None:
        """Reach what hooks of modules hold: it may be a container that was passed.

        Without such a container a hook finds what it holds by itself.
        """
        known = len(given.roots)
        for root in self._roots:
            for hook in root.layout.hooks():
                if not _is_of_library(hook):
                    given.put_aside(hook)
        if len(given.roots) > known:
            self._roots = roots_of(given.roots.values())

    def _find_tensors(self, given: Given) -> None:
        """Number the tensors that the roots reach.

        Parameters come last, and nothing is noted of each by itself. If one is found
        twice, none of them is apart: each has one number.
        """
        parameters: list[Tensor] = []
        each = [root.tensors() for root in self._roots]
        if any(each):
            parameters = self._parameters(given, each)
            self._number(given, each, apart=bool(parameters))
        self._refs = [*map(weakref.ref, given.tensors)]
        self.first_parameter = len(given.tensors)
        self.tensors = given.tensors + parameters

    def _parameters(self, given: Given, each: Sequence[list[Tensor]]) -> list[Tensor]:
        """Return the parameters that the roots reach, or none if one is found twice."""
        found = [root.contents.parameters for root in self._roots]
        if len(found) == 1:
            are_apart = given.index.keys().isdisjoint(found[0])
        else:
            known = {*given.index}.union(*found)
            are_apart = len(known) == len(given.index) + sum(map(len, found))
        parameters: list[Tensor] = []
        if are_apart:
            for root, tensors in zip(self._roots, each, strict=True):
                parameters += root.contents.parameters_in(tensors)
        # Another tensor may have the identity of one that is gone.
        return parameters if _PARAMETERS.issuperset(map(type, parameters)) else []

    def _number(
        self, given: Given, each: Sequence[list[Tensor]], *, apart: bool
    ) -> None:
        """Number the tensors of all roots, of which the parameters may come last."""
        passed = len(given.tensors)
        for root, tensors in zip(self._roots, each, strict=True):
            contents = root.contents
            if apart and len(contents.others) < len(tensors):
                tensors = [*map(tensors.__getitem__, contents.others)]
            root.entries, is_module = given.numbers_of(tensors), root.layout.is_module
            for i, t in zip(root.entries, tensors, strict=True):
                if not t.requires_grad and (is_module or i >= passed):
                    self.buffers[i] = self.buffers.get(i, False) or is_module
        if apart:
            first = len(given.tensors)
            for root in self._roots:
                root.first, first = first, first + len(root.contents.refs)

    def _note_streams(self, given: Given) -> None:
        found: dict[int, Any] = {}
        self.handles_states = self.compiled = self.is_lazy = False
        search = given.search
        if search is not None:
            found, self.compiled = search.streams, search.compiled
            self.handles_states = search.handles_states
        for root in self._roots:
            layout = root.layout
            if layout.streams:
                alive = (stream() for stream in layout.streams)
                found |= {id(s): s for s in alive if s is not None}
            self.handles_states = self.handles_states or layout.handles_states
            self.compiled = self.compiled or layout.compiled
            self.is_lazy = self.is_lazy or layout.is_lazy
        self.streams = [*found.values()]

    @property
    def signature(self) -> tuple[Any, ...]:
        """What is the same in each call of the same code.

        That is the code of functions, the classes of objects, the modes of modules, the
        structure of the arguments and those that are constants. It holds no tensor and
        no user's object.
        """
        values = structure_of([self._fn, *self._values])
        roots = [root.signature for root in self._roots]
        return self._count, *self._names, *values, *roots

    def take_tensors(self) -> list[Tensor]:
        """Return what was found, which does not stay here."""
        tensors = self.tensors
        del self.tensors
        return tensors

    def forward_done(self) -> None:
        """Note what the forward changed."""
        for root in self._roots:
            root.forward_done()

    # --- A recompute ---

    def restored(self, tensors: Sequence[Any], *, exchanges: bool) -> Running:
        """Return a context in which everything holds what it held at the call.

        Args:
            tensors: to run on.
            exchanges: whether others stand for some of the parameters.
        """
        if not exchanges:
            originals = [ref() for ref in self._refs]
            exchanges = not all(map(operator.is_, originals, tensors))
        return Running(
            self._roots, self._buffers, self.hooks, tensors, exchanges=exchanges
        )

    def call(self, running: Running, tensors: Sequence[Any]) -> Any:
        """Call the function again, under the modes of the call and no others."""
        building = Building(tensors, running.found, running.container)
        cache = None if self._cache is None else building.value(self._cache)
        fn, modes = self._bound(building), building.values(self._modes)
        self._running = running  # for names in errors
        try:
            return call_under(fn, modes, cache)
        finally:
            self._running = None

    def _bound(self, building: Building) -> BoundFunction:
        values, fn = building.values(self._values), building.value(self._fn)
        if not self._names:
            return BoundFunction(fn, values, {})
        kwargs = dict(zip(self._names, values[self._count :], strict=True))
        return BoundFunction(fn, values[: self._count], kwargs)

    # --- Names ---

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        with contextlib.suppress(Exception):  # what held it is gone
            return self._name_of(index)
        tensor = self._alive()[index]
        return "an input" if tensor is None else describe(tensor)

    def name_of_tensor(self, tensor: Tensor) -> str | None:
        """Write where a tensor comes from; None if it is no input."""
        same = [t is tensor for t in self._alive()]
        return self.name_of(same.index(True)) if True in same else None

    def _alive(self) -> list[Tensor | None]:
        """Return the tensors of the call that are still there."""
        roots = [root for root in self._roots if root.first is not None]
        refs = (*self._refs, *(ref for root in roots for ref in root.contents.refs))
        return [ref() for ref in refs]

    def _name_of(self, index: int) -> str:
        """Search for a tensor; only an error needs its name."""
        running = self._running
        if running is None:
            tensors = self._alive()
            fn = self._bound(Building(tensors, _itself, _itself))
        else:
            tensors = running.tensors
            fn = self._bound(Building(tensors, running.found, running.container))
        search = CallSearch()
        snapshot = Snapshot(fn.fn, self.label, (*fn.args,), fn.kwargs, search)
        same = [t is tensors[index] for t in search.found.tensors]
        return snapshot.name_of(same.index(True))


# What knows the inputs of a call by name: at the base, or under torch.func.
Origin = Reach | Snapshot


def _is_of_library(hook: Any) -> bool:
    """Say whether a hook is code of an installed package."""
    fn = getattr(hook, "__func__", hook)
    if type(fn) is types.FunctionType:
        return is_library(fn.__globals__)
    return not has_user_code(type(fn))


def _itself(kept: Any) -> Any:
    """Return a value that is still there, or None."""
    return None if kept.ref is None else kept.ref()
