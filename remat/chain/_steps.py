"""What the steps of a chain are, how one runs, and what is held between two of them.

Invariant: a step runs with grad mode on, on tensors that require grad where they do in
plain code. When it has ended its graph is gone, so a chain holds one carry. No
collected row is held longer than its step: a view of a carry would keep it alive.
Rejected: steps without grad mode. Composite operations decompose differently there, and
which results require grad could not be told. Rejected: flat carries. The user's
function is given pytrees, and errors name their parts. Rejected: tensors that autograd
saves for the node of the chain. They would live until the node is done.
"""

import contextlib
import operator
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from remat._ambient.modes import ModesAround
from remat._base import pytree
from remat._base.errors import MutationError
from remat._base.program import InputIndex, leaves_for
from remat._base.pytree import Frame, tensors_and_frame
from remat._base.tensors import describe_meta, versions_of
from remat._offload.offload import Fetched, Origin, in_file, origin_of
from remat._reach.reach import Reach
from remat._torch.autograd import grad_mode, tells_of
from remat._torch.levels import (
    batched_here,
    current_layer,
    grad_level,
    is_legacy_batch,
    leaf_at,
    unbatched,
    unwrap_for_grad,
)
from remat._torch.tensors import is_fake


class Between(NamedTuple):
    """What all that the steps reach held between two of them."""

    reach: Reach  # notes it
    numbers: Sequence[int]  # of its tensors, among the inputs of the chain
    modes: ModesAround | None  # what the user's modes held; None where there are none


class Live(NamedTuple):
    """A carry between two steps, or what one step collects, without graphs."""

    tensors: Sequence[Tensor]
    frame: Frame  # the rest of it
    needs: Sequence[bool]  # which of the tensors require grad
    # The states of random streams, and what objects held, at this step; None if it is
    # as at the call.
    ambient: Any = None
    objects: Between | None = None

    @property
    def tree(self) -> Any:
        """The pytree, as a step is given it."""
        return self.frame.filled(self.tensors)


# function, arguments of the chain, number of the step, carry, number of its slice
Apply: TypeAlias = Callable[[Any, Sequence[Any], int, Any, int], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Steps:
    """What the steps of a chain are."""

    apply: Apply  # runs a step; returns the next carry, and what is collected
    label: str  # what errors call the chain
    length: int | None  # None if only the chain itself can tell
    # Where the length is not known: whether there is another step after a carry.
    goes_on: Callable[[Any, Any], bool] | None = None
    scanned: int | None = None  # the argument that is cut into slices, one for a step
    is_repeated: bool = True  # each step calls one function, and carries are alike
    is_reversed: bool = False  # the last slice comes first
    on_disk: bool = False  # carries are stored in files

    def slices(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first of the slices that steps need, and the one after them."""
        if not self.is_reversed:
            return start, stop
        assert self.length is not None
        return self.length - stop, self.length - start

    def place(self, k: int) -> int:
        """Return which slice a step needs."""
        if not self.is_reversed:
            return k
        assert self.length is not None
        return self.length - 1 - k


def through(
    steps: Steps, fn: Any, args: Sequence[Any], carry: Any, numbers: range, offset: int
) -> tuple[Any, list[Any]]:
    """Run steps as plain code does; return the carry, and what is collected of each."""
    ys: list[Any] = []
    for k in numbers:
        carry, y = steps.apply(fn, args, k, carry, steps.place(k) - offset)
        ys.append(y)
    return carry, ys


# What errors call a part of a chain that is built alike in each step.
CARRY = {
    "name": "carry",
    "kind": "a carry",
    "first": "at the start",
    "advice": "A carry keeps its shape, dtype and device: convert the initial one or "
    "the result.",
}
COLLECTED = {
    "name": "y",
    "kind": "a `y`",
    "first": "in step 0",
    "advice": "What is collected is stacked: return the same shape, dtype and device "
    "each time.",
}


class Form(NamedTuple):
    """What a carry, or what a step collects, has in common with that of other steps."""

    treedef: Any
    kinds: Sequence[type]  # of its leaves
    metas: Sequence[tuple[Any, ...]]  # of its tensors

    def shown(self) -> Iterator[str]:
        """Describe each leaf."""
        metas = iter(self.metas)
        for kind in self.kinds:
            if kind is object:
                shape, dtype, device = next(metas)
                yield f"{describe_meta(dtype, shape)} on {device}"
            else:
                yield f"of type {kind.__name__}"


def form_of(live: Live) -> Form:
    """Return what a carry has in common with that of other steps."""
    treedef, leaves = live.frame
    metas = [(t.shape, t.dtype, t.device) for t in live.tensors]
    return Form(treedef, [*map(type, leaves)], metas)


def refuse_other_form(
    live: Live, first: Form, k: int, label: str, what: Mapping[str, str] = CARRY
) -> None:
    """Refuse a carry that is not built like the first one."""
    now = form_of(live)
    if now == first:
        return
    if now.treedef != first.treedef:
        shown = {"then": first.treedef, "now": now.treedef}
        raise TypeError(_TREEDEF.format(label=label, k=k, **shown, **what))
    paths = pytree.paths(first.treedef)
    for path, then, there in zip(paths, first.shown(), now.shown(), strict=True):
        if there != then:
            shown = {"path": path, "then": then, "now": there}
            raise TypeError(_FORM.format(label=label, k=k, **shown, **what))


_TREEDEF = (
    "remat: step {k} of {label} returned {kind} that is built otherwise than the one "
    "{first}.\n  first:    {then}\n  returned: {now}\nReturn the same structure in "
    "each step."
)
_FORM = (
    "remat: `{name}{path}` is {then} {first} of {label}, and {now} after step {k}. "
    "{advice}"
)


# --- Running a step ---


class Cut(NamedTuple):
    """How graphs end between two steps."""

    inputs: Sequence[Tensor]  # of the chain, as the graphs have them
    leaf: Callable[[Tensor, bool], Tensor]  # of the next graph; requires grad or not
    value: Callable[[Tensor], Tensor]  # of the level of the inputs, without its graph


@contextlib.contextmanager
def cutting(
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
    own: Container[InputIndex] = (),
    *,
    are_leaves: bool = False,
) -> Iterator[Cut]:
    """Make graphs that can be cut: below all levels, or in a level of their own.

    Below a vmap alone no tensor can be made to require grad. `are_leaves` says that the
    inputs of the chain are leaves already, which require grad by `needs`. Of the user's
    `own` no others are made.
    """
    if current_layer() is None:
        with grad_mode(True):
            # What requires grad only at a level of torch.func does not show down here.
            leaves = inputs if are_leaves else leaves_for(inputs, needs, own)
            yield Cut(leaves, _leaf, Tensor.detach)
        return
    # No level below records a graph: it is entered without grad mode. To detach the
    # inputs would do the same, and take their tangents.
    with grad_mode(False), grad_level() as level, grad_mode(True):

        def leaf(t: Tensor, need: bool) -> Tensor:
            return leaf_at(level, t, requires_grad=need)

        def value(t: Tensor) -> Tensor:
            return unwrap_for_grad(t, level)

        yield Cut([*map(leaf, inputs, needs)], leaf, value)


def _leaf(tensor: Tensor, need: bool) -> Tensor:
    new = tensor.detach()
    new.requires_grad = need
    return new


# A function of the results and the leaves of a step, called while its graph is there.
Look: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


def run_step(
    steps: Steps,
    call: tuple[Any, Sequence[Any]],
    cut: Cut,
    live: Live,
    k: int,
    offset: int = 0,
    look: Look | None = None,
) -> tuple[Live, Live, list[Tensor]]:
    """Run a step; return the next carry, what it collects, and its leaves."""
    leaves = [*map(cut.leaf, live.tensors, live.needs)]
    before = versions_of(leaves)
    try:
        given = live.frame.filled(leaves)
        carry, y = steps.apply(*call, k, given, steps.place(k) - offset)
    except RuntimeError as error:
        if not tells_of("a write to a leaf", error):
            raise
        raise MutationError(_CHANGED.format(k=k, label=steps.label)) from error
    if versions_of(leaves) != before:
        raise MutationError(_CHANGED.format(k=k, label=steps.label))
    tensors, frame = tensors_and_frame(carry)
    collected, form = tensors_and_frame(y)
    if look is not None:
        look([*tensors, *collected], leaves)
    new = Live([*map(cut.value, tensors)], frame, [t.requires_grad for t in tensors])
    needs = [t.requires_grad for t in collected]
    row = Live([*map(cut.value, collected)], form, needs)
    return new, row, leaves


_CHANGED = (
    "remat: step {k} of {label} changed its carry, or an input of the chain, in place. "
    "A recompute would start from the changed value: return a new tensor (`x = x + 1` "
    "instead of `x += 1`)."
)


# --- What is stored ---


class _OnDisk(NamedTuple):
    """A carry in files: what its tensors were, and how they were batched."""

    live: Live
    origins: Sequence[Origin]
    hows: Sequence[Any]


class Stored:
    """The stored carries of one chain; on disk all but the first, which is given."""

    __slots__ = ("_carries", "_on_disk", "_versions")

    def __init__(self, on_disk: bool) -> None:
        self._on_disk = on_disk
        self._carries: dict[int, Live | _OnDisk] = {}
        self._versions: dict[int, Sequence[int | None]] = {}

    def save(self, step: int, live: Live) -> None:
        """Store a carry."""
        if not (self._on_disk and step):
            self._carries[step] = live
            # It shares memory with what steps return, which may be changed later.
            self._versions[step] = versions_of(live.tensors)
            return
        below, hows = unbatched(live.tensors)
        away = live._replace(tensors=[in_file(t.detach()) for t in below])
        self._carries[step] = _OnDisk(away, [*map(origin_of, below)], hows)

    def load(self, step: int) -> Live:
        """Return a stored carry."""
        found = self._carries[step]
        if isinstance(found, Live):
            return found
        live, origins, hows = found
        fetched = Fetched(live.tensors, origins)
        # Copies: a mapped file is not to be written to, and goes with its tensor.
        tensors = [fetched.take(k).clone() for k in range(len(origins))]
        # The forward stores below all levels, whatever is around its backward.
        return live._replace(tensors=batched_here(tensors, hows) if hows else tensors)

    def changed(self, step: int) -> list[Tensor]:
        """Return the tensors of a carry that were changed since it was stored."""
        found = self._carries[step]
        if not isinstance(found, Live):
            return []
        now = versions_of(found.tensors)
        pairs = zip(found.tensors, now, self._versions[step], strict=True)
        return [t for t, version, then in pairs if version != then]

    def drop(self, step: int) -> None:
        """Let go of a carry."""
        del self._carries[step]
        self._versions.pop(step, None)

    def without_streams(self) -> None:
        """Forget the states of random streams, from which nothing was drawn."""
        for step, found in self._carries.items():
            if isinstance(found, Live):
                self._carries[step] = found._replace(ambient=None)
            else:
                live = found.live._replace(ambient=None)
                self._carries[step] = found._replace(live=live)


# --- What is collected of all steps ---


class Columns:
    """What is collected of all steps, each tensor of it stacked.

    A tensor is written to its place at once. A row that is a view of a carry would keep
    the carry alive.
    """

    def __init__(self, steps: Steps) -> None:
        self._steps, self._length = steps, steps.length or 0
        self._columns: list[Any] = []
        self._count = 0
        self._frame = tensors_and_frame(None)[1]
        self._form: Any = None  # of the first row
        self._needs: list[bool] = []

    def add(self, row: Live) -> None:
        """Add what was collected of the next step."""
        if not self._count:
            self._frame, self._needs = row.frame, [*row.needs]
            self._form = form_of(row)
            self._columns = [
                t.new_empty((self._length, *t.shape)) if can_be_written(t) else []
                for t in row.tensors
            ]
        else:
            label = self._steps.label
            refuse_other_form(row, self._form, self._count, label, COLLECTED)
        self._needs = [*map(operator.or_, self._needs, row.needs)]
        for column, t in zip(self._columns, row.tensors, strict=True):
            if isinstance(column, list):
                column.append(t)
            else:
                column[self._steps.place(self._count)] = t
        self._count += 1

    def stacked(self) -> Live:
        """Return what was collected, stacked, and forget it."""
        columns: list[Any] = self._columns
        self._columns = []
        turn = -1 if self._steps.is_reversed else 1
        stacked = [
            torch.stack(c[::turn]) if isinstance(c, list) else c for c in columns
        ]
        return Live(stacked, self._frame, self._needs)


def can_be_written(row: Tensor) -> bool:
    """Say whether a tensor of such rows can be written to; not below a vmap."""
    if current_layer() is not None or is_legacy_batch(row):
        return False
    return row.layout is torch.strided and (type(row) is Tensor or is_fake(row))
