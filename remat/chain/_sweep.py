"""Runs steps one after the other, with the graph of one step at a time.

The forward of a chain and the advances of its backward are sweeps.

Invariant: a step runs with grad mode on, on tensors that require grad where they do in
plain code. When it has ended its graph is gone. So a sweep computes what plain code
does, and holds one carry.
Rejected: steps without grad mode. Composite operations decompose differently there, and
which results require grad could not be told.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from remat._base.errors import MutationError
from remat._base.program import fresh_leaves
from remat._base.tensors import versions_of
from remat._torch import current_layer, grad_level, grad_mode, leaf_at, unwrap_for_grad
from remat.chain._columns import Collected
from remat.chain._steps import Live, Steps, taken_apart


class Cut(NamedTuple):
    """How graphs end between two steps.

    Attributes:
        inputs: of the chain, as the graphs have them.
        leaf: returns a tensor as a leaf of the next graph, which requires grad or not.
        value: returns a result without its graph, as one of the level of the inputs.
    """

    inputs: Sequence[Tensor]
    leaf: Callable[[Tensor, bool], Tensor]
    value: Callable[[Tensor], Tensor]


@contextlib.contextmanager
def cutting(
    inputs: Sequence[Tensor], needs: Sequence[bool], *, are_leaves: bool = False
) -> Iterator[Cut]:
    """Make graphs that can be cut: below all levels, or in a level of their own.

    Below a vmap alone no tensor can be made to require grad.
    """
    if current_layer() is None:
        with grad_mode(True):
            # What requires grad only at a level of torch.func does not show down here.
            leaves = inputs if are_leaves else fresh_leaves(inputs, needs)
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


# Is shown the results and the leaves of a step before its graph is dropped.
Look: TypeAlias = Callable[[Sequence[Tensor], Sequence[Tensor]], None]


def run_step(
    steps: Steps,
    call: tuple[Any, Sequence[Any]],
    cut: Cut,
    live: Live,
    k: int,
    offset: int = 0,
    look: Look | None = None,
) -> tuple[Live, Collected, list[Tensor]]:
    """Run a step."""
    leaves = [*map(cut.leaf, live.tensors, live.needs)]
    before = versions_of(leaves)
    try:
        carry, y = steps.apply(*call, k, live.frame.filled(leaves), offset)
    except RuntimeError as error:
        if "a leaf Variable that requires grad" not in str(error):
            raise
        raise MutationError(_CHANGED.format(k=k, label=steps.label)) from error
    if versions_of(leaves) != before:
        raise MutationError(_CHANGED.format(k=k, label=steps.label))
    tensors, frame = taken_apart(carry)
    collected, form = taken_apart(y)
    if look is not None:
        look([*tensors, *collected], leaves)
    new = Live([*map(cut.value, tensors)], frame, [t.requires_grad for t in tensors])
    needs = [t.requires_grad for t in collected]
    return new, Collected([*map(cut.value, collected)], form, needs), leaves


_CHANGED = (
    "remat: step {k} of {label} changed its carry, or an input of the chain, in place. "
    "A recompute would start from the changed value: return a new tensor (`x = x + 1` "
    "instead of `x += 1`)."
)
