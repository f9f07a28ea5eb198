"""A loop of 1,000 steps: the carries it holds, the steps it runs, the time it takes.

A step is `x + w * sin(x)` on a carry of 64 KB. Each system runs the same loop and
its backward, for the gradients of the initial carry and of `w`. Printed are the most
bytes that are alive beyond the two inputs, in carries; the steps that a forward and a
backward run, and those that a schedule predicts; and the time, of plain's. All systems
take turns, and the ratio in each round counts. Reproduce with

    python benchmarks/chain.py

What is on disk is told apart, as in `_files`. `--json FILE` writes the numbers.
"""

import argparse
import functools
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from _files import timelines
from _tables import console, table, verdict
from _times import Ratio, interleaved
from rich.console import Console
from rich.progress import track
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from remat import chain, remat
from remat.chain.schedules import (
    Binomial,
    EveryStep,
    Multilevel,
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
ON_DISK = Multilevel(memory=5, write_cost=5, read_cost=5)
PLAIN, OURS = "plain", "chain"

Body = Callable[[Tensor], Tensor]
Loop = Callable[[Body, Tensor], Tensor]


# --- Systems -------------------------------------------------------------------------


def plain(body: Body, x: Tensor) -> Tensor:
    """Run the loop."""
    for _ in range(STEPS):
        x = body(x)
    return x


def each_remat(body: Body, x: Tensor) -> Tensor:
    """Rematerialize each step."""
    return plain(remat(body), x)


def each_checkpoint(body: Body, x: Tensor) -> Tensor:
    """Checkpoint each step, as torch does."""
    return plain(functools.partial(checkpoint, body, use_reentrant=False), x)


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


def by(schedule: Schedule) -> Loop:
    """Scan with a schedule."""

    def scan(body: Body, x: Tensor) -> Tensor:
        def step(x: Tensor, _: None) -> tuple[Tensor, None]:
            return body(x), None

        return chain.scan(step, x, length=STEPS, checkpoints=schedule)[0]

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
    "torch non-reentrant, each": System(each_checkpoint),
    f"torch non-reentrant, {CHUNK} steps": System(chunks),
    "remat, each": System(each_remat),
    'scan, "all"': _ours(EveryStep(), STEPS),
    "scan, None": _ours(Sqrt(), Sqrt().count(STEPS) * 3),
    "scan, Uniform(10)": _ours(Uniform(10)),
    "scan, 50": _ours(Binomial(50), 50),
    "scan, 10": _ours(Binomial(10), 10),
    "scan, 5": _ours(Binomial(5), 5),
    # What is read from disk is copied.
    "scan, Multilevel(memory=5)": _ours(ON_DISK, ON_DISK.memory + 1),
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

    @property
    def is_met(self) -> bool:
        """Whether the count is the predicted one, and the carries are few enough."""
        ran = self.forward + self.backward
        within = self.limit is None or self.carries <= self.limit + SCALARS
        return within and self.predicted in {None, ran}


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
        ends = self._x, self._w
        return [*torch.autograd.grad(self.forward().sum(), ends)]

    def counts(self) -> tuple[int, int]:
        """Return how many steps a forward and a backward run."""
        with count_ops() as first:
            out = self.forward()
        with count_ops() as again:
            torch.autograd.grad(out.sum(), (self._x, self._w))
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


def report(rows: dict[str, Row], screen: Console) -> bool:
    """Print the table; return whether all targets are met."""
    title = f"{STEPS:,} steps, a carry of {CARRY * 4:,} bytes"
    headings = "peak, carries", "in files", "forward", "backward", "predicted", "time"
    cells = table(title, "system", *headings, "target")
    for name, row in rows.items():
        cells.add_row(
            name,
            f"{row.carries:,.1f}",
            f"{row.in_files:,.1f}",
            f"{row.forward:,}",
            f"{row.backward:,}",
            "" if row.predicted is None else f"{row.predicted:,}",
            str(row.time),
            "" if row.limit is None else verdict(row.is_met, f"<= {row.limit}"),
        )
    screen.print(cells)
    return all(row.is_met for row in rows.values())


def main() -> None:
    """Measure, print the table, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=9, help="of timing")
    parser.add_argument("--json", type=Path, help="a file to write the numbers to")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(options.rounds)
    if options.json:
        found = {name: asdict(row) for name, row in rows.items()}
        options.json.write_text(json.dumps(found, indent=2))
    sys.exit(not report(rows, console()))


if __name__ == "__main__":
    main()
