"""Sets in the order in which they were read.

The order of a set is that of the slots of its table. The hash of a value names slots,
one after the other, and the value goes to the first one that is free. So the order
depends on the order of insertion, the size of the table and what was discarded since.

`set.pop` begins where the last one ended. Where values are missing, that place is put
back to the start, so a recompute pops in the order of the set. It is not right for a
set that had values popped, and then others added, before the call, and for one that a
function pops from and that has all its values again.

Invariant: the order is compared after writing, so what is known of the table here is
never trusted. `order` finds slots that rise in the order that is wanted, and the values
are added so that each finds all earlier slots of its own taken.
Rejected: to add them in one order after the other until one fits. That finds none for
most sets of 70 names whose table had grown.
Source: CPython 3.7 to 3.14, Objects/setobject.c (LINEAR_PROBES, PERTURB_SHIFT).
"""

import graphlib
import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from remat._base.errors import RecomputeError


_LINEAR, _SHIFT = 9, 5
_PROBES = 40  # slots that are tried for each value
_SIZES = [2**k for k in range(3, 17)]  # of tables
_GROWTH = 7  # a table that grew has less than seven slots for each value
_FAR = 1 << 40  # no other hash, but the same slot
_ORDER = (
    "remat: a set of {count} values, which the function reached at the call, changed "
    "since, and a recompute would read it in another order. Use a dict or a list, or "
    "keep the set as it is until the backward."
)


def write_set(holder: Any, values: Sequence[Any]) -> None:
    """Have a set hold these, in this order.

    What differs is written first, which mostly keeps the order of the rest.

    Raises:
        RecomputeError: no such order was found.
    """
    slots = _GROWTH * max(len(holder), len(values)) + _SIZES[0]
    if others := set.difference(holder, values):
        set.difference_update(holder, others)
    if others or len(holder) < len(values):  # perhaps some were popped
        _pop_from_the_start(holder, slots)
    set.update(holder, values)
    if in_order(holder, values):
        return
    for size in _SIZES:
        if 5 * len(values) >= 3 * (size - 1):
            continue
        _pop_from_the_start(holder, max(slots, 4 * size))
        if _write_in_table(holder, values, size):
            return
    raise RecomputeError(_ORDER.format(count=len(values)))


def new_frozenset(kind: Any, values: Sequence[Any]) -> Any:
    """Return a frozenset that holds these, in this order; errors as of `write_set`."""
    made = frozenset.__new__(kind, values)
    if not in_order(made, values):
        write_set(ordered := set(), values)
        made = frozenset.__new__(kind, ordered)
    if not in_order(made, values):
        raise RecomputeError(_ORDER.format(count=len(values)))
    return made


def in_order(holder: Any, values: Sequence[Any]) -> bool:
    """Return whether a set gives these values, in this order."""
    now = [*(set if isinstance(holder, set) else frozenset).__iter__(holder)]
    return len(now) == len(values) and all(map(operator.is_, now, values))


class _Place:
    """What takes a slot until the values are in."""

    def __init__(self, slot: int) -> None:
        self._hash = _FAR + slot

    def __hash__(self) -> int:
        return self._hash


def _pop_from_the_start(holder: Any, slots: int) -> None:
    """Have the next `pop` begin at the start of any table of up to this many slots.

    The set is written anew, in the order that it has.
    """
    values = [*set.__iter__(holder)]
    last = (1 << 30) - 1  # takes the last slot of any table
    set.clear(holder)
    # A dict gives a set room for twice its entries at once.
    set.update(holder, dict.fromkeys([last, *range(slots // 2)]))
    while set.pop(holder) != last:
        pass
    set.clear(holder)
    set.update(holder, values)


def _write_in_table(holder: Any, values: Sequence[Any], size: int) -> bool:
    """Fill a set anew, in a table of a size; return whether the order is right."""
    probes = [[*_probes(hash(value), size)] for value in values]
    slots = _rising(probes)
    added = None if slots is None else _insertions(values, probes, slots)
    if added is None:
        return False
    places = [value for value in added if type(value) is _Place]
    # A dict gives a set room for twice its entries at once, so the table does not grow,
    # and nothing moves, while the values are added. Those that fill it up come last.
    first = added[: size // 2 - 1]
    places += [_Place(k) for k in range(max(size // 4, 5) - len(first))]
    set.clear(holder)
    if size > _SIZES[0]:
        set.update(holder, dict.fromkeys([*first, *places]))
    set.update(holder, added)
    set.difference_update(holder, places)
    return in_order(holder, values)


def _probes(code: int, size: int) -> Iterator[int]:
    """Return the slots for a hash, each once, the first first."""
    mask, rest = size - 1, code & (1 << 64) - 1
    seen: set[int] = set()
    start = rest & mask
    for _ in range(_PROBES):
        run = range(start, start + 1 + (_LINEAR if start + _LINEAR <= mask else 0))
        yield from (slot for slot in run if slot not in seen)
        seen.update(run)
        if len(seen) >= _PROBES:
            return
        rest >>= _SHIFT
        start = (start * 5 + 1 + rest) & mask


class _Way(NamedTuple):
    """Slots for the first values, the last one first."""

    slot: int
    cost: int  # how many probes fail
    before: "_Way | None"


def _rising(probes: Sequence[Sequence[int]]) -> list[int] | None:
    """Return one slot of each value, each above the last, with the fewest probes."""
    ways = [_Way(-1, 0, None)]  # none is both higher and dearer than another
    for slots in probes:
        longer = [
            _Way(slot, before.cost + failed, before)
            for failed, slot in enumerate(slots)
            if (before := _cheapest_below(ways, slot)) is not None
        ]
        if not longer:
            return None
        longer.sort(key=lambda way: (way.slot, way.cost))
        least = itertools.accumulate((way.cost for way in longer), min)
        best = itertools.pairwise([longer[0].cost + 1, *least])
        ways = [w for w, (old, new) in zip(longer, best, strict=True) if new < old]
    found: list[int] = []
    way = ways[-1]
    while way.before is not None:
        found.append(way.slot)
        way = way.before
    return found[::-1]


def _cheapest_below(ways: Sequence[_Way], slot: int) -> _Way | None:
    below = itertools.takewhile(lambda way: way.slot < slot, ways)
    return min(below, key=lambda way: way.cost, default=None)


def _insertions(
    values: Sequence[Any], probes: Sequence[Sequence[int]], slots: Sequence[int]
) -> list[Any] | None:
    """Return places and values in an order of insertion; None if there is none.

    A place is for a slot that a value must find taken, and that stays free at the end.
    """
    owner = {slot: k for k, slot in enumerate(slots)}
    passed = [ways[: ways.index(s)] for ways, s in zip(probes, slots, strict=True)]
    before = {k: [owner[s] for s in p if s in owner] for k, p in enumerate(passed)}
    free = dict.fromkeys(s for p in passed for s in p if s not in owner)
    try:
        order = [*graphlib.TopologicalSorter(before).static_order()]
    except graphlib.CycleError:
        return None
    return [*map(_Place, free), *(values[k] for k in order)]
