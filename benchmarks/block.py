"""What checkpointing one transformer block costs: instructions, time and bytes.

Three tables, each of the same work for every system:

- instructions beyond plain of a block so small that nothing is worth leaving out of its
  recomputation, as a function of its parameters and as a module; and those of a first
  call of a new shape, which remat records, beside those of the calls after it,
- the time of a step of a real block: all systems in turn, on one thread, many times,
- the bytes that the forward of that block leaves alive.

Reproduce with

    python benchmarks/block.py

Times are those of the process, which what else runs on the machine hardly changes, and
ratios are medians over the rounds.
"""

import argparse
import functools
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch
from _block import (
    BLOCK_SYSTEMS,
    DEFAULT,
    HEADS,
    PRUNED,
    SAVING,
    SELECTIVE,
    Step,
    block,
    block_params,
    block_step,
    dots_run,
    module_step,
    stream,
    verdict,
)
from _count import Case, Counts, Label, count
from _systems import BASELINE
from rich.console import Console
from rich.progress import track
from rich.table import Table

from remat.testing import live_bytes


SMALL = (2, 8, 32)  # batch, time, width
REAL = (8, 128, 256)
LOOPS = 12  # of the small block

# Of instructions beyond plain: the system that remat is compared to, and its share.
SHARES = {
    DEFAULT: (BASELINE, 0.50),
    PRUNED: (BASELINE, 0.85),
    SAVING: (SELECTIVE, 0.52),
}
FIRST_CALL = 3.0  # of a warm one
TIMES = {"plain": 1.33, BASELINE: 1.0}  # of default remat: its ratio to each


# --- Instructions --------------------------------------------------------------------


MODES: dict[str, Callable[..., Step]] = {"function": block_step, "module": module_step}
FIRST, AGAIN = "first call", "called again"
LENGTHS = range(9, 17)  # of sequences that are new to remat
OTHERS = range(32, 36)  # to warm up on


def step_of_lengths(system: str, lengths: list[int]) -> Step:
    """Return a step that takes the next length each time it is called."""
    wrapped = BLOCK_SYSTEMS[system](block)
    batch, _, width = SMALL
    steps = [block_step(lambda _: wrapped, batch, n, width) for n in lengths]
    turns = itertools.cycle(steps)
    return lambda: next(turns)()


def cases() -> dict[Label, Case]:
    """Return all that is counted, by column and row of the table."""
    found = {
        (mode, system): Case(functools.partial(make, wrap, *SMALL), LOOPS, LOOPS)
        for mode, make in MODES.items()
        for system, wrap in BLOCK_SYSTEMS.items()
    }
    warm, new = [*OTHERS], [*LENGTHS]
    for system in (PRUNED, SAVING):
        first = functools.partial(step_of_lengths, system, warm + new)
        again = functools.partial(step_of_lengths, system, new)
        found[FIRST, system] = Case(first, len(warm), len(new))
        found[AGAIN, system] = Case(again, 2 * len(new), len(new))
    return found


def beyond(counts: Counts, mode: str, system: str) -> float | str:
    """Return the instructions beyond plain, or why there are none."""
    total, plain = counts[mode, system], counts[mode, "plain"]
    return total if isinstance(total, str) else total - plain


def share(counts: Counts, mode: str, system: str) -> float | None:
    """Return what remat needs as a share of what it is compared to."""
    ours, theirs = (beyond(counts, mode, s) for s in (system, SHARES[system][0]))
    return None if isinstance(ours, str) or isinstance(theirs, str) else ours / theirs


def show(value: float | str) -> str:
    """Return the text of a cell."""
    return value if isinstance(value, str) else f"{value:,.0f}"


def instructions(console: Console) -> bool:
    """Print the table of instructions; return whether every target is met."""
    counts = count(__file__)
    title = "Instructions of a block of {} x {} x {}, forward + backward".format(*SMALL)
    table = Table(title=title)
    table.add_column("system, beyond plain")
    for mode in MODES:
        table.add_column(mode, justify="right")
        table.add_column("share", justify="right")
    table.add_column("target of the function")
    all_met = True
    for system in BLOCK_SYSTEMS:
        cells: list[str] = []
        for mode in MODES:
            part = share(counts, mode, system) if system in SHARES else None
            is_plain = system == "plain"
            own = counts[mode, system] if is_plain else beyond(counts, mode, system)
            cells += [show(own), "" if part is None else f"{part:.2f}"]
        met, target = share_target(counts, system)
        table.add_row(system, *cells, target)
        all_met &= met
    console.print(table)
    return first_calls(counts, console) and all_met


def share_target(counts: Counts, system: str) -> tuple[bool, str]:
    """Say whether the block as a function meets its target."""
    if system not in SHARES:
        return True, ""
    other, limit = SHARES[system]
    part = share(counts, "function", system)
    met = part is not None and part <= limit
    return met, verdict(met, f"<= {limit} of {other}")


def first_calls(counts: Counts, console: Console) -> bool:
    """Print what a first call of a shape costs; return whether the target is met."""
    table = Table(title="Instructions of a whole call of a new length, and once known")
    for heading in ("system", FIRST, AGAIN, "ratio", "target"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    all_met = True
    for system in (PRUNED, SAVING):
        first, again = counts[FIRST, system], counts[AGAIN, system]
        failed = isinstance(first, str) or isinstance(again, str)
        ratio = float("nan") if failed else first / again
        met = ratio <= FIRST_CALL
        target = verdict(met, f"<= {FIRST_CALL}")
        table.add_row(system, show(first), show(again), f"{ratio:.2f}", target)
        all_met &= met
    console.print(table)
    return all_met


# --- Time ----------------------------------------------------------------------------


def times(rounds: int, console: Console) -> bool:
    """Print the times of a step; return whether every target is met."""
    # By default as much is left out as with prune=True: it is worth it here.
    timed = {name: wrap for name, wrap in BLOCK_SYSTEMS.items() if name != PRUNED}
    steps = {name: block_step(wrap, *REAL) for name, wrap in timed.items()}
    measured = interleaved(steps, rounds)
    table = Table(title="Step of a block of {} x {} x {}, one thread".format(*REAL))
    for heading in ("system", "ms", "of plain", f"of {BASELINE}", "target"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    all_met = True
    for name, own in measured.items():
        ratios = {other: median_ratio(own, measured[other]) for other in TIMES}
        met = name != DEFAULT or all(ratios[o] <= limit for o, limit in TIMES.items())
        bounds = ", ".join(f"<= {limit} of {other}" for other, limit in TIMES.items())
        table.add_row(
            name,
            f"{statistics.median(own) * 1e3:.1f}",
            *(f"{ratio:.3f}" for ratio in ratios.values()),
            verdict(met, bounds) if name == DEFAULT else "",
        )
        all_met &= met
    console.print(table)
    return all_met


def interleaved(steps: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Time every step once a round, in random order.

    A step leaves caches and the heap to the next one, so none follows another always.
    """
    for step in [*steps.values()] * 3:
        step()
    measured: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in track(range(rounds), transient=True, description="timing"):
        for name in order.sample([*steps], len(steps)):
            start = time.process_time()
            steps[name]()
            measured[name].append(time.process_time() - start)
    return measured


def median_ratio(own: list[float], other: list[float]) -> float:
    """Return the median over rounds of how two times compare."""
    return statistics.median(a / b for a, b in zip(own, other, strict=True))


# --- Bytes ---------------------------------------------------------------------------


def saved_bytes(console: Console) -> bool:
    """Print what a forward keeps; return whether remat keeps less than SAC."""
    params, x = block_params(REAL[-1]), stream(*REAL)
    plain_dots = dots_run(block_step(BLOCK_SYSTEMS["plain"], *REAL))
    kept, again = {}, {}
    for name, wrap in BLOCK_SYSTEMS.items():
        forward = functools.partial(wrap(block), params, x, HEADS)
        forward()  # what the first call leaves for good
        kept[name] = live_bytes(forward) - x.nbytes  # besides the result
        again[name] = dots_run(block_step(wrap, *REAL)) - plain_dots
    met = kept[SAVING] < kept[SELECTIVE] and not again[SAVING] and not again[SELECTIVE]
    table = Table(title="Bytes alive after the forward, and products computed again")
    for heading in ("system", "bytes", "streams", "again", "target"):
        table.add_column(heading, justify="left" if heading == "system" else "right")
    for name, size in kept.items():
        target = verdict(met, f"< {SELECTIVE}, none again") if name == SAVING else ""
        cells = f"{size:,}", f"{size / x.nbytes:.2f}", str(again[name])
        table.add_row(name, *cells, target)
    console.print(table)
    return met


def main() -> None:
    """Measure, print the tables, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=80, help="of the times")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    torch.set_num_threads(1)
    console = Console()
    results = [saved_bytes(console), times(rounds, console), instructions(console)]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
