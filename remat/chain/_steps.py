"""What the steps of a chain are, and what is between two of them.

Invariant: all here is data, but for the function of a step.
Rejected: flat carries. The user's function is given pytrees, and errors name their
parts.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from remat._base import pytree
from remat._base.tensors import describe
from remat._base.types import INERT
from remat._capture.between import NOTHING, Between


class Frame(NamedTuple):
    """A pytree without its tensors.

    Attributes:
        treedef: its structure.
        leaves: its leaves, with `TENSOR` in place of tensors.
    """

    treedef: pytree.Treedef
    leaves: Sequence[Any]

    def filled(self, tensors: Iterable[Tensor]) -> Any:
        """Return the pytree around tensors."""
        each = iter(tensors)
        leaves = [next(each) if leaf is TENSOR else leaf for leaf in self.leaves]
        return pytree.unflatten(self.treedef, leaves)


TENSOR = object()


def taken_apart(tree: Any) -> tuple[list[Tensor], Frame]:
    """Return the tensors of a pytree, and the rest."""
    leaves, treedef = pytree.flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    rest = [TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return tensors, Frame(treedef, rest)


class Live(NamedTuple):
    """A carry between two steps.

    Attributes:
        tensors: of the carry.
        frame: the rest of it.
        needs: which of the tensors require grad.
        ambient: the state of random streams at this step; None if it is that of the
            call.
        objects: what objects held at this step that differ from the call.
    """

    tensors: Sequence[Tensor]
    frame: Frame
    needs: Sequence[bool]
    ambient: Any = None
    objects: Between = NOTHING

    @property
    def carry(self) -> Any:
        """The carry, as a step is given it."""
        return self.frame.filled(self.tensors)


def refuse_opaque(frame: Frame, label: str) -> None:
    """Refuse a carry with a value that may hold a tensor, and cannot be looked into."""
    paths = pytree.paths(frame.treedef)
    for path, leaf in zip(paths, frame.leaves, strict=True):
        if leaf is not TENSOR and type(leaf) not in INERT:
            kind = type(leaf).__qualname__
            raise TypeError(_OPAQUE.format(label=label, path=path, kind=kind))


# function, arguments of the chain, number of the step, carry, offset of what is scanned
Apply: TypeAlias = Callable[[Any, Sequence[Any], int, Any, int], tuple[Any, Any]]


@dataclass(frozen=True, slots=True)
class Steps:
    """What the steps of a chain are.

    Attributes:
        apply: runs a step. It is given the function and the arguments of the chain, the
            number of the step, its carry, and where what is scanned begins. It returns
            the next carry, and what is collected.
        label: what errors call the chain.
        length: how many steps there are; None if only the chain itself can tell.
        goes_on: given the function and a carry, says whether there is another step;
            None if the length is known.
        scanned: the argument that is cut into slices, one for each step; None if none.
        is_repeated: whether each step calls the same function. Then each carry is built
            like the first one.
        is_reversed: whether the last slice comes first.
    """

    apply: Apply
    label: str
    length: int | None
    goes_on: Callable[[Any, Any], bool] | None = None
    scanned: int | None = None
    is_repeated: bool = True
    is_reversed: bool = False

    def slices(self, start: int, stop: int) -> tuple[int, int]:
        """Return the first of the slices that steps need, and the one after them."""
        if not self.is_reversed:
            return start, stop
        assert self.length is not None
        return self.length - stop, self.length - start


class Functions:
    """Several functions, as one that a search can walk."""

    def __init__(self, fns: Sequence[Any]) -> None:
        self.fns = fns

    def __call__(self) -> Any:
        """Not called: its parts are."""
        raise NotImplementedError


def through(
    steps: Steps, fn: Any, args: Sequence[Any], carry: Any, numbers: range, offset: int
) -> tuple[Any, list[Any]]:
    """Run steps as plain code does; return the carry, and what is collected of each."""
    ys: list[Any] = []
    for k in numbers:
        carry, y = steps.apply(fn, args, k, carry, offset)
        ys.append(y)
    return carry, ys


class Named(NamedTuple):
    """What errors call a part of a chain that is built alike in each step.

    Attributes:
        name: of the variable.
        kind: what it is.
        first: which one the others are to be like.
        advice: how.
    """

    name: str
    kind: str
    first: str
    advice: str


CARRY = Named(
    *("carry", "a carry", "at the start"),
    "A carry keeps its shape, dtype and device: convert the initial one or the result.",
)
COLLECTED = Named(
    *("y", "a `y`", "in step 0"),
    "What is collected is stacked: return the same shape, dtype and device each time.",
)


def refuse_other_form(
    live: Live, first: Live, k: int, label: str, what: Named = CARRY
) -> None:
    """Refuse a carry that is not built like the first one."""
    if live.frame.treedef != first.frame.treedef:
        then, now = first.frame.treedef, live.frame.treedef
        shown = {"then": then, "now": now, "kind": what.kind, "first": what.first}
        raise TypeError(_TREEDEF.format(label=label, k=k, **shown))
    if _form(live) == _form(first):
        return
    paths = pytree.paths(first.frame.treedef)
    for path, then, now in zip(paths, _shown(first), _shown(live), strict=True):
        if now != then:
            shown = {"then": then, "now": now, **what._asdict()}
            raise TypeError(_FORM.format(label=label, path=path, k=k, **shown))


def _form(live: Live) -> tuple[Any, ...]:
    metas = [(t.shape, t.dtype, t.device) for t in live.tensors]
    return metas, [*map(type, live.frame.leaves)]


def _shown(live: Live) -> Iterator[str]:
    """Describe each leaf of a carry: what must be the same in each step."""
    tensors = iter(live.tensors)
    for leaf in live.frame.leaves:
        if leaf is TENSOR:
            yield describe(next(tensors))
        else:
            yield f"of type {type(leaf).__name__}"


_OPAQUE = (
    "remat: `carry{path}` of {label} is a {kind}. A carry is made of tensors, numbers "
    "and containers: make the class a dataclass, or register it with remat.register."
)
_TREEDEF = (
    "remat: step {k} of {label} returned {kind} that is built otherwise than the one "
    "{first}.\n  first:    {then}\n  returned: {now}\nReturn the same structure in "
    "each step."
)
_FORM = (
    "remat: `{name}{path}` is {then} {first} of {label}, and {now} after step {k}. "
    "{advice}"
)
