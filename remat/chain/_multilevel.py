"""Two levels of storage: carries on disk, and binomial checkpointing between them.

The forward writes some carries to disk. They cut the chain into blocks. Each block is
reversed from memory, with all memory checkpoints: the last one at once, each other one
after its first carry was read back and moved to memory.

Invariant: each carry on disk is written once, in the forward, and read once. Among all
schedules that do so, the number and the places of these carries are optimal: `t(l, c)`
is convex in `l`, so blocks are equal up to its slope; and the total is convex in the
number of blocks, so bisection finds it.
Rejected: reading a carry more than once, as the dynamic program of Aupy et al. may do.
It is quadratic in the length, and seldom better: by 9% if writes cost 100 times reads.

Source: Aupy, Herrmann, Hovland and Robert, "Optimal multistage algorithm for adjoint
computation", SIAM J. Sci. Comput. 38, 2016; Herrmann and Pallez, "H-Revolve", ACM TOMS
46, 2020, for the problem. The closed forms are derived here.
"""

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from remat.chain._actions import (
    Action,
    Advance,
    Drop,
    Evaluations,
    Load,
    Save,
    Schedule,
    Storage,
    check_count,
)
from remat.chain._binomial import (
    advances,
    beta,
    descent,
    reverse,
    save_on_the_way,
    units,
)


class DiskBlocks(NamedTuple):
    """How a chain is cut: `count` blocks on disk, of `size` units, and a last one.

    `again` is how many units are advanced over in the backward.
    """

    count: int
    size: int
    last: int
    again: int

    def start(self, block: int) -> int:
        """Return the first unit of a block. Block `count` is the last one."""
        return block * self.size // self.count if self.count else 0


def cut(length: int, count: int, slots: int) -> DiskBlocks:
    """Cut a chain where the fewest units run again.

    One unit more costs the same in each block: `r` advances, and one fewer in the last
    one, as the forward did its first run.
    """
    most = length + 1  # the forward goes over the last unit too: see `descent`
    r = _slope(most, count, slots)
    last = min(beta(slots, r + 1), most - count * max(1, beta(slots, r - 1)))
    size, again = most - last, advances(last, slots) - (last - 1)
    if count:
        less, longer = divmod(size, count)
        again += longer * advances(less + 1, slots)
        again += (count - longer) * advances(less, slots)
    return DiskBlocks(count, size, last - 1, again)


def _slope(most: int, count: int, slots: int) -> int:
    """Return the least `r` for which blocks of `r` repetitions are long enough."""

    def reach(r: int) -> int:
        return count * beta(slots, r) + beta(slots, r + 1)

    high = 1
    while reach(high) < most:
        high *= 2
    return bisect.bisect_left(range(high), most, key=reach)


@dataclass(frozen=True)
class Multilevel(Schedule):
    """Store some carries on disk, and reverse the steps between them from memory.

    It minimizes the evaluations and transfers of a backward,
    `steps + (write_cost + read_cost) * carries on disk`, among all schedules that
    write each carry on disk once and read it once.

    Args:
        memory: How many carries may be in memory at once. Carry 0 is counted where it
            is stored, on disk if the chain has more than one block.
        disk: How many carries may be on disk at once. None: as many as pay.
        write_cost: How many steps run in the time in which a carry is written.
        read_cost: How many steps run in the time in which a carry is read.
        unroll: How many steps are a unit, which is reversed as one.

    Source: Aupy, Herrmann, Hovland and Robert, SIAM J. Sci. Comput. 38, 2016.

    Example:
        >>> schedule = Multilevel(memory=5, write_cost=20, read_cost=20)
        >>> schedule.evaluations(10_000)
        Evaluations(forward=10000, backward=34964)
        >>> schedule.on_disk(10_000)
        177
    """

    memory: int
    disk: int | None = None
    write_cost: float = 1.0
    read_cost: float = 1.0
    unroll: int = 1

    def __post_init__(self) -> None:
        check_count("Multilevel", "memory", self.memory)
        check_count("Multilevel", "unroll", self.unroll)
        if self.disk is not None:
            check_count("Multilevel", "disk", self.disk, least=0)
        for name in ("write_cost", "read_cost"):
            if not getattr(self, name) >= 0:
                raise ValueError(
                    f"remat: Multilevel takes {name} >= 0, in steps; got "
                    f"{getattr(self, name)!r}"
                )

    def forward(self, length: int) -> Iterator[Action]:
        """Write the first carry of each block, then descend into the last block."""
        last = 0
        for start, last in itertools.pairwise(self._starts(length)):
            yield Save(start, Storage.DISK)
            yield Advance(start, last)
        yield from save_on_the_way(self._descent(last, length), length)

    def backward(self, length: int) -> Iterator[Action]:
        """Reverse the last block, then each block after its first carry was read."""
        stop = length
        for start in reversed(list(self._starts(length))):
            stored = [start]
            if stop == length:
                stored = self._descent(start, length)
            else:
                yield from (Load(start), Drop(start), Save(start))
            yield from reverse(stored, stop, self.memory, self.unroll)
            stop = start

    def evaluations(self, length: int) -> Evaluations:
        """Count by the closed form."""
        again = self._blocks(length).again if length else 0
        return Evaluations(length, self.unroll * again + length)

    def on_disk(self, length: int) -> int:
        """Return how many carries are written to disk, and read once each."""
        return self._blocks(length).count if length else 0

    def _blocks(self, length: int) -> DiskBlocks:
        """Add blocks while one more spares as many steps as its carry costs."""
        chain = units(0, length, self.unroll)
        price = self.write_cost + self.read_cost
        most = chain - 1 if self.disk is None else min(self.disk, chain - 1)

        def does_not_pay(count: int) -> bool:
            few, more = (cut(chain, n, self.memory).again for n in (count, count + 1))
            return (few - more) * self.unroll <= price

        count = bisect.bisect_left(range(most), True, key=does_not_pay)
        return cut(chain, count, self.memory)

    def _starts(self, length: int) -> Iterator[int]:
        if length:
            blocks = self._blocks(length)
            for block in range(blocks.count + 1):
                yield blocks.start(block) * self.unroll

    def _descent(self, start: int, length: int) -> Iterator[int]:
        return descent(start, length, self.memory, self.unroll)
