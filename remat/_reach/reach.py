"""What a call reaches, and how it is run again on the user's own objects.

A `Reach` notes what the call was given and what all that holds, and after the forward
what that changed. In `restored` everything holds what it held at the call.

Invariant: no tensor is held here, and no object of the user's that could hold one. If
nothing differs, a run writes nothing. Afterwards everything holds what it held just
before, also after an error, and no hook that the run set on a module stays.
Rejected: to rebuild functions and containers. Code that no walk reaches has the user's.
"""

import contextlib
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, compress
from operator import attrgetter, call
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from remat._base.code import IDENTITY, MARKS
from remat._base.tensors import describe
from remat._base.types import Fn
from remat._base.warned import warn
from remat._reach.arguments import CallArguments, structure_of
from remat._reach.attributes import put_aside, set_again
from remat._reach.before import At
from remat._reach.exchange import ForNames
from remat._reach.identities import RefuseMarks, end_leases, is_told, lease_of
from remat._reach.lifted import LiftedForward
from remat._reach.moment import Moment
from remat._reach.names import CallNames
from remat._reach.parts import Box
from remat._reach.roots import Root, number_all, roots_of
from remat._reach.running import Running, call_under, undone
from remat._reach.stream_search import NO_FACTS, CodeFacts
from remat._reach.walk import is_hook_of_library
from remat._reach.watched import Buffer, buffers_of, changed
from remat._torch.modes import function_mode_count, function_modes
from remat._torch.process import MODULE_HOOKS, parametrization_cache


_NO_ATTRIBUTES: dict[int, dict[str, Any]] = {}
_attributes = attrgetter("__dict__")


class Reach(CodeFacts):
    """What a call reaches, and what the code there does.

    Attributes:
        label: what messages call it.
        buffers: what it may update in place: index, and whether a module holds it.
        next_hook: the number that the next hook set anywhere was to get.
        tensors: what was found. The call takes it: it is not to stay here.
        first_parameter: from which of these on all are parameters, found in roots.
        is_bare: whether it is a function of tensors and constants alone.
        attributes: what was set on the tensors, by their numbers.
        marks: whether a run has attributes on its tensors, or sets some.
    """

    __slots__ = (
        *("_are_there", "_boxes", "_buffers", "_cache", "_count", "_modes"),
        *("_names", "_refs", "_roots", "_running", "_values", "_watched"),
        *("around", "attributes", "buffers", "first_parameter", "is_bare", "label"),
        *("left", "marks", "next_hook", "tensors"),
    )

    def __init__(self, fn: Any, label: str, args: Any, kwargs: dict[str, Any]) -> None:
        self.label, self._count, self._names = label, len(args), [*kwargs]
        self.next_hook = RemovableHandle.next_id
        passed = CallArguments(fn, args, kwargs, self)
        self._values = [*map(passed.put_aside, (*args, *kwargs.values(), fn))]
        self._modes: Sequence[Any] = ()
        if function_mode_count():
            self._modes = [*map(passed.put_aside, function_modes())]
        cache = parametrization_cache()
        self._cache = None if cache is None else passed.put_aside(cache)
        self._running: Running | LiftedForward | None = None
        self.around: Any = None  # makes of the function what a recompute calls
        self.left: Sequence[Any] = ()  # where the forward left tensors, `LeftAt`
        self.buffers: dict[int, bool] = {}
        self._roots: list[Root] = []
        parameters: list[Tensor] = []
        attributes = _NO_ATTRIBUTES
        if passed.roots or any(map(_attributes, passed.tensors)):
            parameters, attributes = self._walk(passed)
        self._watched: Sequence[Any] = ()
        self._boxes: Mapping[int, tuple[Any, Any]] = passed.boxes
        # After all are numbered: those that are in `passed` come first.
        self._refs = [*map(weakref.ref, passed.tensors)]
        self.first_parameter = len(passed.tensors)
        self.tensors = passed.tensors + parameters
        self.attributes: dict[int, dict[str, Any]] = {}
        if attributes:
            held: list[Any] = [*map(attributes.get, map(id, self.tensors))]
            self.attributes = dict(compress(enumerate(held), held))
        self.marks = bool(attributes)
        for root in self._roots:
            if root.layout.facts is not NO_FACTS:
                self.add(root.layout.facts)
        if not IDENTITY.isdisjoint(self.asks):
            self._lease(passed)
        self._are_there = passed.are_found
        if passed.are_found:
            self._watched = passed.watched()
        buffers = passed.buffers
        for root in self._roots:
            buffers += root.buffers
        self._buffers = buffers_of(buffers) if buffers else ()
        beside = passed.boxes or buffers or self._modes or self.has_iterators
        self.is_bare = not (self._roots or beside or attributes)

    def _walk(
        self, passed: CallArguments
    ) -> tuple[list[Tensor], dict[int, dict[str, Any]]]:
        """Return the parameters found, and what is set on tensors, by identity."""
        if any(MODULE_HOOKS.dicts) and passed.roots:
            hooks = chain.from_iterable(held.values() for held in MODULE_HOOKS.dicts)
            # Those of counters are to see what runs again.
            if not all(map(is_hook_of_library, hooks)):
                passed.roots[id(MODULE_HOOKS.module)] = MODULE_HOOKS.module
        self._roots = roots_of(passed.roots.values())
        each, attributes = [root.tensors() for root in self._roots], _NO_ATTRIBUTES
        for some in (passed.tensors, *each):
            if any(map(_attributes, some)):
                attributes = put_aside(passed, self._roots, each)
                break
        if not any(each):
            return [], attributes
        return number_all(passed, self._roots, each, self.buffers), attributes

    def _lease(self, passed: CallArguments) -> None:
        """Refer to containers that code may tell from others like them."""
        passed.are_found = True
        end_leases()
        for root in self._roots:
            root.lease(self.asks)
        self.lease_passed(self.asks)

    def lease_passed(self, asks: Container[str] = ("id",)) -> None:
        """Refer to the containers that were passed, which code tells from others."""
        self._are_there = True
        for box, value in self._boxes.values():
            if is_told(value, asks):
                box.ref = box.ref or lease_of(value)

    @property
    def signature(self) -> tuple[Any, ...]:
        """What is the same in each call of the same code.

        Code, classes, modes of modules, the structure of arguments, and constants: no
        tensor, and no object of the user's.
        """
        values = structure_of(self._values)
        roots = [root.signature for root in self._roots]
        return self._count, *self._names, *values, *roots

    @property
    def passed(self) -> set[int]:
        """The numbers of tensors that are arguments, and in no container."""
        return {value.number for value in self._values if type(value) is At}

    def may_write(self, index: int, tensor: Tensor) -> bool:
        """Say so of buffers of modules, and of others if code writes in place."""
        is_vector = index < self.first_parameter and tensor.dim() < 2
        if self.buffers.get(index) or not (is_vector or index in self.buffers):
            return self.buffers.get(index, False)
        return self.writes

    @property
    def is_contained(self) -> bool:
        """Whether it refers to functions, numbers and packages, and tensors passed."""
        if self.is_bare:
            return True
        passed = (*self._values, *self._modes, self._cache)
        if self.attributes or Box in map(type, passed):
            return False
        return all(
            r.layout.is_contained and not r.before.has_tensors for r in self._roots
        )

    def take_tensors(self) -> list[Tensor]:
        """Return what was found, which does not stay here."""
        tensors = self.tensors
        del self.tensors
        return tensors

    def lifted(self, users: Sequence[Tensor], tensors: Sequence[Any]) -> LiftedForward:
        """Return a context in which other tensors stand in for the user's."""
        return LiftedForward(self._roots, self._boxes, users, tensors, self.asks)

    @property
    def code(self) -> list[Any]:
        """The code of functions, and the classes of objects."""
        held = [ref for root in self._roots for ref in root.layout.signature]
        found = [ref() for ref in held if isinstance(ref, weakref.ref)]
        found.append(getattr(self._values[-1], "__code__", None))
        return [c for c in found if getattr(c, "co_name", "") != "__init__"]

    def forward_done(self) -> None:
        """Note what the forward changed."""
        self._boxes = {}
        for each in (*self._roots, *self._watched):
            each.forward_done()
        self._watched = ()

    # --- Between the steps of a chain ---

    def moment(self, tensors: Sequence[Tensor]) -> Moment:
        """Note what all holds now, while the forward runs on some tensors."""
        return Moment(self._roots, self._boxes, self._buffers, tensors)

    def not_as_a_whole(self) -> None:
        """Let go of what only a forward needs. What runs again may be parts of it.

        So each run may change something else, and all is put back after it.
        """
        self._boxes = {}
        self._watched = ()
        for root in self._roots:
            root.live = root.effects = None

    # --- A recompute ---

    def undone(self) -> Any:
        """Return a context after which all holds what it held just before."""
        return undone(self._roots)

    def restored(
        self, tensors: Sequence[Any], users: Callable[[], Sequence[Any]] | None = None
    ) -> Running:
        """Return a context in which everything holds what it held at the call.

        The tensors to run on stand for those of the user's that `users` returns.
        """
        users = users or self.alive
        buffers = self._buffers, self._changed
        args = self._roots, buffers, self.next_hook, tensors, users, self._are_there
        return Running(*args)

    def _changed(self, buffer: Buffer) -> Exception:
        with contextlib.suppress(Exception):  # what held it is gone
            buffer.name = self._names_now(buffer.value)[0].name_of(buffer.value)
        return changed(buffer, self.label)

    def run(
        self,
        tensors: Sequence[Any],
        body: Callable[..., Any] | None = None,
        runs: list[Any] | None = None,
        users: Callable[[], Sequence[Any]] | None = None,
        take: Callable[..., Any] | None = None,
    ) -> Any:
        """Call the function again, in `restored`.

        Args:
            tensors: to run on.
            body: what is called with the function and its arguments, if not that.
            runs: where the run is noted whose graph is going to be differentiated.
            users: as for `restored`.
            take: takes the result apart, with what is left where the forward left it.
        """
        if self.is_bare and not self.marks:
            found = self.call(None, tensors, body)
            return take(found) if take else found
        running = self.restored(tensors, users)
        if self.marks:
            running.note_stand_ins()
        running.__enter__()
        try:
            found = self.call(running, tensors, body)
            if take is not None:
                found = take(found, left=running.left(self.left) if self.left else ())
        except BaseException:
            running.__exit__()
            raise
        if runs is None:
            running.__exit__()
        elif running.end_run():  # until then the tensors stay where they are
            runs.append(running)
        return found

    def call(
        self, running: Running | None, tensors: Sequence[Any], body: Fn | None = None
    ) -> Any:
        """Call the function again, under the modes of the call and no others."""
        cache, modes = None, self._modes
        if self.is_bare:
            *args, fn = self._bare_values(tensors)
        else:
            assert running is not None
            if self._cache is not None:
                (cache,) = running.values((self._cache,))
            *args, fn = running.values(self._values)
            modes = modes and running.values(modes)
            if self.attributes:
                set_again(self.attributes, tensors, running)
        fn = fn if self.around is None else self.around(fn)
        kwargs: dict[str, Any] = {}
        if self._names:
            kwargs = dict(zip(self._names, args[self._count :], strict=True))
            del args[self._count :]
        if body is not None:
            fn, args = body, [fn, args]
            kwargs.clear()
        self._running = running  # for names in errors
        try:
            is_plain = cache is None and parametrization_cache() is None
            if is_plain and not (modes or function_mode_count()):
                return fn(*args, **kwargs)
            return call_under(fn, args, kwargs, modes, cache)
        finally:
            self._running = None

    def call_bare(self, tensors: Sequence[Any], instead: Any = None) -> Any:
        """Call a function of tensors and constants alone for the first time."""
        *args, fn = self._bare_values(tensors)
        if instead is not None:
            return instead(fn, args[: self._count])
        if not self._names:
            return fn(*args)
        count = self._count
        return fn(*args[:count], **dict(zip(self._names, args[count:], strict=True)))

    def _bare_values(self, tensors: Sequence[Any]) -> list[Any]:
        """Return the arguments and the function, where these are all that there is."""
        return [tensors[v.number] if type(v) is At else v for v in self._values]

    def call_lifted(self, lifted: LiftedForward, fn: Any) -> Any:
        """Call the function for the first time, where errors find their names."""
        if not MARKS.isdisjoint(self.asks):
            fn = partial(RefuseMarks(lifted.users, self.name_of_tensor).around, fn)
        self._running = lifted
        try:
            return fn()
        finally:
            self._running = None

    def beside_arrays(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Return inputs of which arrays of the user's may share the memory."""
        if not self._buffers:
            return {}
        there = self.alive()
        return {i: t for i in indices if (t := there[i]) is not None}

    # --- Names ---

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        with contextlib.suppress(Exception):  # what held it is gone
            names, tensors = self._names_now()
            return names.name_of(tensors[index])
        tensor = self.alive()[index]
        return "an input" if tensor is None else describe(tensor)

    def name_of_tensor(self, tensor: Tensor) -> str | None:
        """Write where a tensor comes from; None if it is no input."""
        same = [t is tensor for t in self.alive()]
        return self.name_of(same.index(True)) if True in same else None

    def alive(self) -> list[Tensor | None]:
        """Return the tensors of the call that are still there."""
        roots = [root for root in self._roots if root.first is not None]
        return [*map(call, chain(self._refs, *(root.before.refs for root in roots)))]

    def _names_now(self, wanted: Any = None) -> tuple[CallNames, Sequence[Any]]:
        """Search for all tensors, and what is wanted; only an error needs names."""
        running = self._running
        there = self.alive() if running is None else running.tensors
        # In place of one that is gone is an empty one, so that a path is known.
        tensors = [torch.empty(0) if t is None else t for t in there]
        *values, fn = ForNames(tensors, running).values(self._values)
        kwargs = dict(zip(self._names, values[self._count :], strict=True))
        return CallNames(fn, values[: self._count], kwargs, wanted), tensors


def reach_of(fn: Any, label: str, args: Any, kwargs: dict[str, Any]) -> Reach | None:
    """Return what a call reaches; None, with a warning, where no walk can tell."""
    try:
        return Reach(fn, label, args, kwargs)
    except TypeError as error:
        if not str(error).startswith("unhashable type"):
            raise
        message = _UNHASHABLE.format(label=label, error=error)
    warn(message)
    return None


_UNHASHABLE = (
    "remat: {label} reaches an object of an {error}, whose metaclass has no "
    "`__hash__`. The function is called as it is, and no memory is saved. Give the "
    "metaclass `__hash__ = type.__hash__`."
)
