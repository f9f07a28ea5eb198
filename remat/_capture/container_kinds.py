"""How containers and the dicts of objects are read and written.

Invariant: as of `holders`. An instance of a subclass is read by its base class.
Rejected: sets in whatever order they get. A function that loops over one adds floats.
"""

import contextlib
import graphlib
import itertools
import operator
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from typing_extensions import override

from remat._base.errors import RecomputeError
from remat._capture.holders import (
    HolderKind,
    Holdings,
    MovedError,
    dict_of,
    flatten,
    without_contents,
)
from remat._capture.objects import by_class


class Dicts(HolderKind):
    """Dicts, and the dicts of objects and functions, which threads read meanwhile."""

    keyed = True

    def __init__(self, base: Any) -> None:
        self._base = base
        # An OrderedDict has an order of its own.
        self._values, self._keys = base.values, base.keys

    @override
    def read(self, holders: Sequence[Any], to: Holdings) -> None:
        values, keys, lengths = to.values, to.keys, [*map(dict.__len__, holders)]
        ends = len(values) + len(keys) + 2 * sum(lengths)
        to.lengths += lengths
        for table in itertools.compress(holders, lengths):  # most are empty
            values += self._values(table)
            keys += self._keys(table)
        if len(values) + len(keys) != ends:
            raise MovedError

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(self._values, holders))

    @override
    def keys(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(self._keys, holders))

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        base = self._base
        now = [*base.__iter__(holder)]
        if not _begin(now, keys):
            # It is emptied only if the order differs.
            wanted = {*map(id, keys)}
            gone = [key for key in now if id(key) not in wanted]
            if _begin([key for key in now if id(key) in wanted], keys):
                for key in gone:
                    base.__delitem__(holder, key)
            else:
                base.clear(holder)
        if base is dict:
            dict.update(holder, zip(keys, values, strict=True))
            return
        for key, value in zip(keys, values, strict=True):
            base.__setitem__(holder, key, value)

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        return self._base.__new__(kind)


def _begin(now: Sequence[Any], keys: Sequence[Any]) -> bool:
    """Say whether some keys are the first ones of others."""
    return len(now) <= len(keys) and all(map(operator.is_, now, keys))


class Owned(Dicts):
    """The dicts of values that have no weak references, as instances of a tuple's."""

    adds = True

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return super().values([*map(dict_of, holders)])

    @override
    def keys(self, holders: Sequence[Any]) -> Iterable[Any]:
        return super().keys([*map(dict_of, holders)])

    @override
    def read(self, holders: Sequence[Any], to: Holdings) -> None:
        super().read([*map(dict_of, holders)], to)

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        super().write(dict_of(holder), keys, values)

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        return without_contents(kind)


class Items(HolderKind):
    """Lists, deques and sets; tuples and frozensets, which are never written."""

    def __init__(self, base: Any) -> None:
        self._base, self.frozen = base, base in (tuple, frozenset)

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return flatten(map(self._base.__iter__, holders))

    @override
    def lengths(self, holders: Sequence[Any]) -> Iterable[int]:
        return map(self._base.__len__, holders)

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        if self._base is list:
            list.__setitem__(holder, slice(None), values)
        elif self._base is set:
            write_set(holder, values)
        else:
            deque.clear(holder)
            deque.extend(holder, values)

    @override
    def put_back(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        with contextlib.suppress(RecomputeError):  # no recompute reads it
            self.write(holder, keys, values)

    @override
    def new(self, kind: Any, values: Sequence[Any], limit: int | None) -> Any:
        if hasattr(kind, "n_sequence_fields"):
            return kind(values)
        if self._base is frozenset:
            return new_frozenset(kind, values)
        if self.frozen:
            return self._base.__new__(kind, values)
        new = self._base.__new__(kind)
        if limit is not None:
            deque.__init__(new, (), limit)
        return new


class Factories(HolderKind):
    """What makes the missing values of a defaultdict."""

    adds = True
    fixed = 1

    @override
    def values(self, holders: Sequence[Any]) -> Iterable[Any]:
        return map(_factory_of, holders)

    @override
    def write(self, holder: Any, keys: Sequence[Any], values: Sequence[Any]) -> None:
        (holder.default_factory,) = values


_factory_of = operator.attrgetter("default_factory")


ATTRIBUTES, OWNED, FACTORIES = Dicts(dict), Owned(dict), Factories()
# By the base class, the more special one first.
CONTAINERS: dict[type, HolderKind] = {
    OrderedDict: Dicts(OrderedDict),
    dict: Dicts(dict),
    **{base: Items(base) for base in (list, tuple, set, frozenset, deque)},
}


@by_class
def container_kind(kind: type) -> HolderKind | None:
    """Return how instances of a class are read; None if it is no container's."""
    return next(
        (how for base, how in CONTAINERS.items() if issubclass(kind, base)), None
    )


def refill(
    how: HolderKind, value: Any, keys: Sequence[Any], items: Sequence[Any]
) -> None:
    """Have a container that a run under torch.func was given hold these.

    Sets get them in any order: the search of `write_set` is slow, and tensors stand in
    for others there.
    """
    if isinstance(value, set):
        set.clear(value)
        set.update(value, items)
    else:
        how.write(value, keys, items)


# --- Sets in the order in which they were read ---

# The order of a set is that of the slots of its table. The hash of a value names slots,
# one after the other, and the value goes to the first one that is free. So the order
# depends on the order of insertion, the size of the table and what was discarded since.
# The order is compared after writing, so what is known of the table here is never
# trusted. To add values in one order after the other until one fits finds none for most
# sets of 70 names whose table had grown.
#
# `set.pop` begins where the last one ended. Where values are missing, that place is put
# back to the start, so a recompute pops in the order of the set. It is not right for a
# set that had values popped, and then others added, before the call, and for one that a
# function pops from and that has all its values again.
# Source: CPython 3.7 to 3.14, Objects/setobject.c (LINEAR_PROBES, PERTURB_SHIFT).

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
    """Return a frozenset that holds these, in this order."""
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


class _Filler:
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
    places = [value for value in added if type(value) is _Filler]
    # A dict gives a set room for twice its entries at once, so the table does not grow,
    # and nothing moves, while the values are added. Those that fill it up come last.
    first = added[: size // 2 - 1]
    places += [_Filler(k) for k in range(max(size // 4, 5) - len(first))]
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
    return [*map(_Filler, free), *(values[k] for k in order)]
