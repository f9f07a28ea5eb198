"""What checkpointing a real transformer block costs: time and bytes, by system.

Two tables, each of the same work for every system:

- the bytes that the forward leaves alive, and the matmuls recomputed,
- the time of a step: all systems in turn, on one thread, many times.

Reproduce with

    python benchmarks/block.py

The instructions of a small block are in ``overhead.py``, other layers in ``layers.py``.
"""

import argparse
import functools
import statistics
import sys

import torch
from _block import block_work, dots_run
from _styles import FUNCTION
from _systems import BASELINE, DEFAULT, PLAIN, SAVING, SELECTIVE, SYSTEMS
from _tables import console, table, verdict
from _times import Ratio, interleaved
from rich.console import Console

from remat.testing import live_bytes


SHAPE = (8, 128, 256)  # batch, time, width
# By default as much is left out as with prune=True: it is worth it here.
CHOSEN = PLAIN, BASELINE, SELECTIVE, DEFAULT, SAVING
TIMES = {PLAIN: 1.33, BASELINE: 1.0}  # of default remat: its ratio to each


def saved_bytes(screen: Console) -> bool:
    """Print what a forward keeps; return whether remat keeps less than SAC."""
    kept, products = {}, {}
    for name in CHOSEN:
        work = block_work(FUNCTION, *SHAPE)
        forward = functools.partial(SYSTEMS[name](work.fn), *work.args)
        forward()  # what the first call leaves for good
        x = work.leaves[0]
        kept[name] = live_bytes(forward) - x.nbytes  # besides the result
        products[name] = dots_run(work.step(SYSTEMS[name]))
    again = {name: count - products[PLAIN] for name, count in products.items()}
    met = kept[SAVING] < kept[SELECTIVE] and not again[SAVING] and not again[SELECTIVE]
    title = "Bytes alive after the forward, and matmuls recomputed"
    cells = table(title, "system", "bytes", "streams", "again", "target")
    for name, size in kept.items():
        target = verdict(met, f"< {SELECTIVE}, none again") if name == SAVING else ""
        streams = f"{size / x.nbytes:.2f}"
        cells.add_row(name, f"{size:,}", streams, str(again[name]), target)
    screen.print(cells)
    return met


def times(rounds: int, screen: Console) -> bool:
    """Print the times of a step; return whether every target is met."""
    steps = {name: block_work(FUNCTION, *SHAPE).step(SYSTEMS[name]) for name in CHOSEN}
    measured = interleaved(steps, rounds)
    title = "Step of a block of {} x {} x {}, one thread".format(*SHAPE)
    others = [f"of {other}" for other in TIMES]
    cells = table(title, "system", "ms", *others, "target")
    for name, own in measured.items():
        ratios = {other: Ratio.of(own, measured[other]) for other in TIMES}
        met = all(ratios[other].low <= limit for other, limit in TIMES.items())
        bounds = ", ".join(f"<= {limit} of {other}" for other, limit in TIMES.items())
        target = verdict(met, bounds) if name == DEFAULT else ""
        milliseconds = f"{statistics.median(own) * 1e3:.1f}"
        cells.add_row(name, milliseconds, *map(str, ratios.values()), target)
    screen.print(cells)
    ours = {other: Ratio.of(measured[DEFAULT], measured[other]) for other in TIMES}
    return all(ours[other].low <= limit for other, limit in TIMES.items())


def main() -> None:
    """Measure, print the tables, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=80, help="of the times")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    torch.set_num_threads(1)
    screen = console()
    results = [saved_bytes(screen), times(rounds, screen)]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
