"""Time that draws from keys take, beside torch's own from a generator.

Draws of a million numbers and of ten are made in turns, so that both see the same
machine, and compared by the least of the times. Calls on a few numbers are all
overhead: the least of many rounds, in microseconds. Reproduce with

    python benchmarks/keys.py

It runs on one thread. With `--threads 2`, where another process has the same cores,
torch's threads wait for one another after each kernel, of which a draw has hundreds,
and spin meanwhile: times grow tenfold.

torch 2.14 and later have native kernels for the CPU, which remat then uses for keys and
uniform numbers. By our notes on torch 2.15, where this script was not run, they take
0.4 to 0.9 of the time of `torch.rand` on one thread, 14 microseconds for 4 uniform
numbers and 7 for a split; their normal numbers, which remat leaves, 2.0 to 2.8 of
`torch.randn`.
"""

import argparse
import time
import timeit
from collections.abc import Callable
from statistics import median

import torch
from _results import Results
from rich.progress import track

from remat import random


SIZES = (10**6, 10**7)
SECONDS = 10  # for each size; an idle machine makes 500 and 35 rounds of them
CALLS, CALL_ROUNDS = 20, 300
THREADS = 1

# At ten million float32, of what torch takes; and microseconds for a call.
SHARES = {"uniform": 2.0, "normal": 4.0}
LIMITS = {"split": 40, "fold_in": 40, "uniform(16)": 60, "normal(16)": 60}

Times = dict[str, list[float]]


def draws(n: int) -> dict[str, Callable[[], object]]:
    """Return the draws to compare: torch's and ours, of each distribution."""
    generator = torch.Generator().manual_seed(0)
    key = random.key(0)
    return {
        "torch.rand": lambda: torch.rand(n, generator=generator),
        "uniform": lambda: random.uniform(key, n),
        "torch.randn": lambda: torch.randn(n, generator=generator),
        "normal": lambda: random.normal(key, n),
    }


def calls() -> dict[str, Callable[[], object]]:
    """Return the calls that are all overhead."""
    key = random.key(0)
    return {
        "split": lambda: random.split(key),
        "fold_in": lambda: random.fold_in(key, 1),
        "uniform(16)": lambda: random.uniform(key, 16),
        "normal(16)": lambda: random.normal(key, 16),
    }


def in_turns(n: int) -> Times:
    """Return milliseconds of each draw, made one after the other in every round."""
    run = draws(n)
    times: Times = {name: [] for name in run}
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        for name, draw in run.items():
            times[name].append(timeit.timeit(draw, number=1) * 1e3)
    return times


def compare_draws(results: Results) -> None:
    """Print the table of large draws."""
    title = f"Milliseconds of float32 from a key, {torch.get_num_threads()} thread(s)"
    columns = dict.fromkeys(("least", "median", "torch's", "its median"), ".1f")
    cells = results.table("draws", title, "draw", columns | {"ratio": ".2f"})
    for n in track(SIZES, transient=True, description="measuring"):
        times = in_turns(n)
        for name, rival in (("uniform", "torch.rand"), ("normal", "torch.randn")):
            ours, theirs = times[name], times[rival]
            ratio = min(ours) / min(theirs)
            found = [f(each) for each in (ours, theirs) for f in (min, median)]
            row = f"{name}, {n // 10**6} million"
            cells.add(row, *found, ratio)
            if n == SIZES[-1]:
                met = ratio <= SHARES[name]
                cells.aim(row, f"<= {SHARES[name]:g}", f"{ratio:.2f}", met)
    results.show(cells)


def time_calls(results: Results) -> None:
    """Print the table of small calls, which take turns."""
    title = f"Microseconds of calls on a few numbers, least of {CALL_ROUNDS} rounds"
    cells = results.table("calls", title, "call", ["microseconds"], ".0f")
    run = calls()
    times: Times = {name: [] for name in run}
    for _ in range(CALL_ROUNDS):
        for name, call in run.items():
            times[name].append(timeit.timeit(call, number=CALLS))
    for name, found in times.items():
        micros = min(found) / CALLS * 1e6
        cells.add(name, micros)
        limit = LIMITS[name]
        cells.aim(name, f"<= {limit}", f"{micros:.0f}", micros <= limit)
    results.show(cells)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=THREADS, help="of torch")
    torch.set_num_threads(parser.parse_args().threads)
    results = Results(__file__)
    compare_draws(results)
    time_calls(results)
    results.finish()


if __name__ == "__main__":
    main()
