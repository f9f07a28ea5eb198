"""A loop of 1,000 steps: the carries it holds, the steps it runs, the time it takes.

A step is `x + w * sin(x)` on a carry of 64 KB. Each system runs the same loop and
its backward, for the gradients of the initial carry and of `w`. Printed are the most
bytes that are alive beyond the two inputs, in carries; the steps that a forward and a
backward run, and those that a schedule predicts; and the time, of plain's. All systems
take turns, and the ratio in each round counts. Reproduce with

    python benchmarks/chain.py

What is on disk is told apart, as in `_files`.
"""

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _files import timelines
from _results import Results
from _systems import BASELINE, DEFAULT, PLAIN, REENTRANT, SYSTEMS as WRAPS, TORCH_REMAT
from _times import Ratio, interleaved
from rich.progress import track
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from remat import chain
from remat.chain.schedules import (
    Binomial,
    EveryStep,
    Online,
    Schedule,
    Sqrt,
    Uniform,
)
from remat.testing import count_ops


STEPS, CHUNK = 1000, 32
CARRY = 2**14  # elements
SLACK = 5  # carries beyond the checkpoints: the live one, and a step that is reversed
SCALARS = 0.01  # of a carry

Body = Callable[[Tensor], Tensor]
Loop = Callable[[Body, Tensor], Tensor]


# --- Systems -------------------------------------------------------------------------


def plain(body: Body, x: Tensor) -> Tensor:
    """Run the loop."""
    for _ in range(STEPS):
        x = body(x)
    return x


def each(system: str) -> Loop:
    """Checkpoint each step, as one of the systems does."""
    return lambda body, x: plain(WRAPS[system](body), x)


def chunks(body: Body, x: Tensor) -> Tensor:
    """Checkpoint a few steps at a time."""

    def some(x: Tensor, count: int) -> Tensor:
        for _ in range(count):
            x = body(x)
        return x

    for start in range(0, STEPS, CHUNK):
        count = min(CHUNK, STEPS - start)
        x = checkpoint(some, x, count, use_reentrant=False)
    return x


def by(schedule: Schedule, *, disk: bool = False) -> Loop:
    """Scan with a schedule."""

    def scan(body: Body, x: Tensor) -> Tensor:
        def step(x: Tensor, _: None) -> tuple[Tensor, None]:
            return body(x), None

        return chain.scan(step, x, length=STEPS, checkpoints=schedule, disk=disk)[0]

    return scan


def within(carries: int) -> Loop:
    """Scan within the bytes of so many carries."""

    def scan(body: Body, x: Tensor) -> Tensor:
        def step(x: Tensor, _: None) -> tuple[Tensor, None]:
            return body(x), None

        budget = carries * x.nbytes
        return chain.scan(step, x, length=STEPS, budget=budget)[0]

    return scan


def online(count: int) -> Loop:
    """Run until a counter says so."""

    def loop(body: Body, x: Tensor) -> Tensor:
        def go_on(carry: tuple[int, Tensor]) -> bool:
            return carry[0] < STEPS

        def step(carry: tuple[int, Tensor]) -> tuple[int, Tensor]:
            return carry[0] + 1, body(carry[1])

        return chain.while_loop(go_on, step, (0, x), checkpoints=count)[1]

    return loop


@dataclass(frozen=True)
class System:
    """A way to run the loop, and its schedule, if it has one.

    Args:
        loop: Runs the steps.
        schedule: What predicts how many are run.
        limit: The most carries that may be alive.
    """

    loop: Loop
    schedule: Schedule | None = None
    limit: int | None = None


def _ours(schedule: Schedule, stored: int | None = None) -> System:
    limit = None if stored is None else stored + SLACK
    return System(by(schedule), schedule, limit)


SYSTEMS: dict[str, System] = {
    PLAIN: System(plain),
    **{
        f"{name}, each": System(each(name))
        for name in (REENTRANT, BASELINE, TORCH_REMAT, DEFAULT)
    },
    f"{BASELINE}, {CHUNK} steps": System(chunks),
    'scan, "all"': _ours(EveryStep(), STEPS),
    "scan, None": _ours(Sqrt(), Sqrt().count(STEPS) * 3),
    "scan, Uniform(10)": _ours(Uniform(10)),
    "scan, 50": _ours(Binomial(50), 50),
    "scan, 10": _ours(Binomial(10), 10),
    "scan, 5": _ours(Binomial(5), 5),
    # What is read from disk is copied.
    'scan, "all", disk': System(by(EveryStep(), disk=True), EveryStep(), 2 + SLACK),
    # Result, cotangent and gradient come on top.
    "scan, budget of 15 carries": System(within(15), None, 15 + 3),
    "scan, budget of 100 carries": System(within(100), None, 100 + 3),
    "while_loop, 10": System(online(10), Online(10), 10 + SLACK),
}


# --- Measures ------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What a system costs.

    Args:
        carries: The most that is alive, in carries.
        in_files: The most that is on disk, in carries.
        forward: How many steps the forward runs.
        backward: How many steps the backward runs.
        predicted: How many both run, by the schedule.
        time: How long a forward and a backward take, of plain's.
        limit: The most carries that may be alive.
    """

    carries: float
    in_files: float
    forward: int
    backward: int
    predicted: int | None
    time: Ratio
    limit: int | None


def body(w: Tensor, x: Tensor) -> Tensor:
    """Run a step. It has one sine, and its backward none: so sines count steps."""
    return x + w * torch.sin(x)


class Work:
    """A loop and its inputs."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._x = torch.linspace(-2, 2, CARRY, requires_grad=True)
        self._w = torch.tensor(0.01, requires_grad=True)

    def forward(self) -> Tensor:
        """Run all steps."""
        return self._loop(functools.partial(body, self._w), self._x)

    def step(self) -> list[Tensor]:
        """Run a forward and a backward; return the gradients."""
        # torch's reentrant checkpoint has no other way.
        self.forward().sum().backward()
        return self._taken()

    def _taken(self) -> list[Tensor]:
        """Return the gradients, and forget them."""
        found = []
        for leaf in self._x, self._w:
            assert leaf.grad is not None
            found.append(leaf.grad)
            leaf.grad = None
        return found

    def counts(self) -> tuple[int, int]:
        """Return how many steps a forward and a backward run."""
        with count_ops() as first:
            out = self.forward()
        with count_ops() as again:
            out.sum().backward()
        self._taken()
        return first["sin"], again["sin"]

    def carries(self) -> tuple[float, float]:
        """Return the most that is alive, in memory and in files, in carries."""
        memory, files = timelines(self.step)
        return max(memory) / self._x.nbytes, max(files) / self._x.nbytes


def measure(rounds: int) -> dict[str, Row]:
    """Measure all systems.

    Raises:
        AssertionError: gradients differ from plain's.
    """
    works = {name: Work(system.loop) for name, system in SYSTEMS.items()}
    expected = works[PLAIN].step()
    for name, work in works.items():
        torch.testing.assert_close(work.step(), expected, msg=lambda m, n=name: n + m)
    times = interleaved({name: work.step for name, work in works.items()}, rounds)
    rows = {}
    for name, work in track(works.items(), transient=True, description="counting"):
        system = SYSTEMS[name]
        carries, in_files = work.carries()
        time = Ratio.of(times[name], times[PLAIN])
        schedule = system.schedule
        predicted = None if schedule is None else sum(schedule.evaluations(STEPS))
        counts = work.counts()
        rows[name] = Row(carries, in_files, *counts, predicted, time, system.limit)
    return rows


def report(rows: dict[str, Row], results: Results) -> None:
    """Print the table."""
    title = f"{STEPS:,} steps, a carry of {CARRY * 4:,} bytes"
    columns = {PEAK: ",.1f", "in files": ",.1f", "forward": ",", "backward": ","}
    columns |= {"predicted": ",", TIME: ".3f"}
    cells = results.table("steps", title, "system", columns)
    for name, row in rows.items():
        counts = row.forward, row.backward, row.predicted
        cells.add(name, row.carries, row.in_files, *counts, row.time)
        ran = row.forward + row.backward
        if row.limit is not None:
            met = row.carries <= row.limit + SCALARS
            cells.aim(name, f"peak <= {row.limit:,}", f"{row.carries:,.1f}", met)
        if row.predicted is not None:
            met = ran == row.predicted
            cells.aim(name, f"{row.predicted:,} steps", f"{ran:,}", met)
    results.show(cells)


PEAK, TIME = "peak, carries", "time, of plain"


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9, help="of timing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(__file__)
    report(measure(options.rounds), results)
    results.finish()


if __name__ == "__main__":
    main()
