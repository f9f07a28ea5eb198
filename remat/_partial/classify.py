"""Says what a recompute may do with an operation: the `Step` that a record holds.

Called by `recorder`, after the operation has run.

Invariant: an operation is left out or saved only if everything that it did is known.
Rejected: a table of operations. Its schema, its tags and its tensors tell, for the
operations of every library.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from remat._base.op import Op
from remat._base.source import user_line
from remat._partial.effects import Traits, metadata_only_outputs
from remat._partial.plan import Step
from remat._partial.values import Arguments, Results, value_of
from remat._torch import is_lazy


class Seen(NamedTuple):
    """One operation that ran.

    Attributes:
        func: the overload.
        traits: what its schema and tags say of it.
        arguments: its arguments.
        results: what it returned.
        written: the tensors that it wrote to, by its schema.
        draws: whether it moved a random stream.
    """

    func: Any
    traits: Traits
    arguments: Arguments
    results: Results
    written: Sequence[Tensor]
    draws: bool


def step_of(
    seen: Seen,
    reads: tuple[int, ...],
    makes: tuple[int, ...],
    writes: tuple[int, ...],
    *,
    writes_known: bool,
) -> Step:
    """Return what a record holds of an operation.

    Args:
        seen: the operation.
        reads: the numbers of the storages of its tensor arguments.
        makes: those of its outputs.
        writes: those that it wrote to.
        writes_known: whether the call has met all that it wrote to before.
    """
    values = tuple(seen.results.values)
    op = Op(seen.func, *seen.arguments.described, values, source=user_line())
    hides = seen.arguments.hides_aliases or seen.results.hides_aliases
    return Step(
        op,
        reads,
        makes,
        writes,
        draws=seen.draws,
        may_draw=seen.traits.may_draw,
        metadata_only=metadata_only_outputs(seen.func, len(values)),
        always_runs=_always_runs(seen, hides=hides, writes_known=writes_known),
        hides_aliases=hides,
        on_subclass=seen.arguments.on_subclass,
        result=seen.results.form,
    )


def _always_runs(seen: Seen, *, hides: bool, writes_known: bool) -> bool:
    """Say whether an operation has to run again whether or not a result is needed."""
    arguments, results = seen.arguments, seen.results
    # For tensors of a subclass `on_subclass` says what may be left out.
    known = hides or (arguments.all_strided and results.all_strided)
    return (
        seen.traits.is_read_by_python
        or not known
        or not (results.tensors or seen.written)
        or any(map(is_lazy, results.tensors))
        or not writes_known
        or (bool(seen.written) and _resizes(seen.written, arguments))
    )


def _resizes(written: Iterable[Tensor], arguments: Arguments) -> bool:
    """Say whether an operation changed the metadata of what it wrote to."""
    before = dict(zip(map(id, arguments.tensors), arguments.values, strict=True))
    return any(value_of(t) != before[id(t)] for t in written)


def may_be_saved(step: Step, outputs: Iterable[Tensor]) -> bool:
    """Say whether a policy may be asked to save what an operation returned."""
    if not step.reads or step.always_runs or step.writes:
        return False
    return not any(t.is_inference() for t in outputs)
