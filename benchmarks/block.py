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

import torch
from _block import block_work, dots_run
from _results import Results
from _styles import FUNCTION
from _systems import (
    BASELINE,
    DEFAULT,
    PLAIN,
    REENTRANT,
    SAVING,
    SELECTIVE,
    SYSTEMS,
    TORCH_REMAT,
)
from _times import Ratio, interleaved

from remat.testing import live_bytes


SHAPE = (8, 128, 256)  # batch, time, width
# By default as much is left out as with prune=True: it is worth it here.
CHOSEN = PLAIN, REENTRANT, BASELINE, SELECTIVE, TORCH_REMAT, DEFAULT, SAVING
TIMES = {PLAIN: 1.33, BASELINE: 1.0}  # of default remat: its ratio to each


def saved_bytes(results: Results) -> None:
    """Print what a forward keeps, and what its backward computes again."""
    title = "Bytes alive after the forward, and matmuls recomputed"
    columns = {"bytes": ",", "streams": ".2f", "again": ","}
    cells = results.table("bytes", title, "system", columns)
    kept, products = {}, {}
    for name in CHOSEN:
        work = block_work(FUNCTION, *SHAPE)
        forward = functools.partial(SYSTEMS[name](work.fn), *work.args)
        forward()  # what the first call leaves for good
        x = work.leaves[0]
        kept[name] = live_bytes(forward) - x.nbytes  # besides the result
        products[name] = dots_run(work.step(SYSTEMS[name]))
        again = products[name] - products[PLAIN]
        cells.add(name, kept[name], kept[name] / x.nbytes, again)
    none_again = products[SAVING] == products[SELECTIVE] == products[PLAIN]
    met = kept[SAVING] < kept[SELECTIVE] and none_again
    cells.aim(SAVING, f"< {SELECTIVE}, none again", kept[SAVING], met)
    results.show(cells)


def times(rounds: int, results: Results) -> None:
    """Print the times of a step."""
    steps = {name: block_work(FUNCTION, *SHAPE).step(SYSTEMS[name]) for name in CHOSEN}
    measured = interleaved(steps, rounds)
    title = "Step of a block of {} x {} x {}, one thread".format(*SHAPE)
    columns = ["ms", *(f"of {other}" for other in TIMES)]
    cells = results.table("times", title, "system", columns, ".1f")
    for name, own in measured.items():
        ratios = [Ratio.of(own, measured[other]) for other in TIMES]
        cells.add(name, statistics.median(own) * 1e3, *ratios)
    for other, limit in TIMES.items():
        ratio = Ratio.of(measured[DEFAULT], measured[other])
        cells.aim(DEFAULT, f"<= {limit} of {other}", ratio, ratio.low <= limit)
    results.show(cells)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=80, help="of the times")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    torch.set_num_threads(1)
    results = Results(__file__)
    saved_bytes(results)
    times(rounds, results)
    results.finish()


if __name__ == "__main__":
    main()
