"""Completes the operations of a record with what was known only at the end.

Called by `recorder`. Names, hidden draws and updates of statistics all depend on what
came later in the forward.

Invariant: these are functions of data, which run nothing. Rejected: to change steps
while others are recorded. Each would have to be found again.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from remat._partial.effects import traits_of
from remat._partial.plan import Step


def completed(
    steps: Sequence[Step],
    names: Mapping[int, Iterable[str]],
    updates: Sequence[tuple[int, ...]],
    exposed: Iterable[int],
) -> tuple[Step, ...]:
    """Return the operations of a record.

    Args:
        steps: as they were recorded.
        names: that were given to storages.
        updates: of each step, the storages of running statistics that it updated.
        exposed: the storages whose memory Python read or wrote.
    """
    if names:
        steps = [_named(step, names) for step in steps]
    if any(step.draws for step in steps):
        steps = [*map(_with_hidden_draws, steps)]
    if any(updates):
        steps = _with_updates(steps, updates, exposed)
    return tuple(steps)


def _named(step: Step, names: Mapping[int, Iterable[str]]) -> Step:
    made = {*step.makes}.difference(step.reads)
    own = frozenset[str]().union(*(names.get(s, ()) for s in made))
    if not own:
        return step
    return step._replace(op=dataclasses.replace(step.op, names=own))


def _with_hidden_draws(step: Step) -> Step:
    """Have an operation of others draw: it may, from a stream that nobody knows of."""
    return step._replace(draws=True) if traits_of(step.op.func).is_of_others else step


def _with_updates(
    steps: Sequence[Step], updates: Sequence[tuple[int, ...]], exposed: Iterable[int]
) -> list[Step]:
    """Have a batch norm write to the statistics that something reads afterwards.

    To those that nothing reads it does not write: a recompute drops them, and what
    writes to memory that is not its own could not be saved.
    """
    read, found = {*exposed}, list[Step]()
    for step, updated in zip(steps[::-1], updates[::-1], strict=True):
        if read.isdisjoint(updated):
            read.update({*step.reads}.difference(updated))
            found.append(step)
        else:
            read.update(step.reads)
            found.append(step._replace(writes=step.writes + updated))
    return found[::-1]
