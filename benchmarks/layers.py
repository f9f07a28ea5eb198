"""What checkpointing real layers costs: the process's time, and instructions.

``_layers.py`` has the layers; remat may cost no more than torch's checkpoint in any.
Reproduce with

    python benchmarks/layers.py

``_times.py`` says how times are taken and compared, ``_count.py`` how instructions are
counted: on few numbers, since products are the same for all systems.
"""

import argparse
import functools
import sys
from statistics import median

import torch
from _count import Case, Counts, Label, count
from _layers import LAYERS
from _styles import Step
from _systems import BASELINE, DEFAULT, PLAIN, SYSTEMS
from _tables import console, table, verdict
from _times import Ratio, interleaved
from rich.console import Console


CHOSEN = PLAIN, BASELINE, DEFAULT


def counted_step(layer: str, system: str) -> Step:
    """Return a step of a layer on few numbers."""
    found = LAYERS[layer]
    return found.make(*found.counted).step(SYSTEMS[system])


def cases() -> dict[Label, Case]:
    """Return all whose instructions are counted."""
    return {
        (layer, system): Case(functools.partial(counted_step, layer, system), 8, 6)
        for layer in LAYERS
        for system in CHOSEN
    }


def times(rounds: int, screen: Console) -> bool:
    """Print the times; return whether every target is met."""
    title = f"Milliseconds of a step, one thread: median and least of {rounds}"
    ratios = f"of {BASELINE} (95%)", "least of least", "target"
    cells = table(title, "layer", *CHOSEN, *ratios)
    all_met = True
    for name, layer in LAYERS.items():
        steps = {
            system: layer.make(*layer.timed).step(SYSTEMS[system]) for system in CHOSEN
        }
        found = interleaved(steps, rounds)
        ratio = Ratio.of(found[DEFAULT], found[BASELINE])
        least = min(found[DEFAULT]) / min(found[BASELINE])
        cells.add_row(
            name,
            *(
                f"{median(own) * 1e3:.2f}, {min(own) * 1e3:.2f}"
                for own in found.values()
            ),
            str(ratio),
            f"{least:.3f}",
            verdict(ratio.low <= 1, "<= 1"),
        )
        all_met &= ratio.low <= 1
    screen.print(cells)
    return all_met


def instructions(counts: Counts, screen: Console) -> bool:
    """Print the instructions; return whether every target is met."""
    title = "Thousands of instructions of a step on few numbers: plain, and beyond it"
    cells = table(title, "layer", *CHOSEN, f"of {BASELINE}", "target")
    all_met = True
    for layer in LAYERS:
        totals = [counts[layer, system] for system in CHOSEN]
        if any(isinstance(total, str) for total in totals):
            cells.add_row(layer, *map(str, totals), "", verdict(False, "no number"))
            all_met = False
            continue
        plain, torchs, ours = map(float, totals)
        share = (ours - plain) / (torchs - plain)
        thousands = [f"{n / 1e3:,.0f}" for n in (plain, torchs - plain, ours - plain)]
        cells.add_row(layer, *thousands, f"{share:.3f}", verdict(share <= 1, "<= 1"))
        all_met &= share <= 1
    screen.print(cells)
    return all_met


def main() -> None:
    """Measure, print the tables, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="of the times")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    torch.set_num_threads(1)
    screen = console()
    results = [times(rounds, screen), instructions(count(__file__), screen)]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
