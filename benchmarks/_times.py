"""Time steps in turns, and say how two of them compare.

Times are those of the process, which what else runs on the machine hardly changes. Of
two systems the ratio in each round counts. Its median is known as well as the rounds
agree, and a target is missed where all of that interval lies above it.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rich.progress import track


Step = Callable[[], object]
Clock = Callable[[], float]
Times = dict[str, list[float]]  # of each system, in seconds, by round


@dataclass(frozen=True)
class Ratio:
    """The median over rounds of how two times compare, and its 95% interval."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, own: Sequence[float], other: Sequence[float]) -> "Ratio":
        """Compare two lists of times, round by round."""
        ratios = sorted(a / b for a, b in zip(own, other, strict=True))
        n = len(ratios)
        off = round(0.98 * n**0.5)  # ranks of a median: a binomial's
        low, high = max(n // 2 - off, 0), min(n // 2 + off, n - 1)
        return cls(statistics.median(ratios), ratios[low], ratios[high])

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def interleaved(
    steps: Mapping[str, Step], rounds: int, clock: Clock = time.process_time
) -> Times:
    """Time every step once a round, in random order.

    A step leaves caches and the heap to the next one, so none follows another always.
    The clock of a device is another one: what runs there takes no time of the process.
    """
    for step in [*steps.values()] * 3:
        step()
    gc.collect()
    measured: Times = {name: [] for name in steps}
    order = random.Random(0)
    for _ in track(range(rounds), transient=True, description="timing"):
        for name in order.sample([*steps], len(steps)):
            start = clock()
            steps[name]()
            measured[name].append(clock() - start)
    return measured
