"""What checkpointing real layers costs: the process's time, and instructions.

``_layers.py`` has the layers; remat may cost no more than torch's checkpoint in any.
Reproduce with

    python benchmarks/layers.py

``_times.py`` says how times are taken and compared, ``_count.py`` how instructions are
counted: on few numbers, since products are the same for all systems.
"""

import argparse
import functools
from statistics import median

import torch
from _count import Case, Counts, Label, count
from _layers import LAYERS
from _results import THOUSANDS, Results
from _styles import Step
from _systems import BASELINE, DEFAULT, PLAIN, REENTRANT, SYSTEMS, TORCH_REMAT
from _times import Ratio, interleaved


CHOSEN = PLAIN, REENTRANT, BASELINE, TORCH_REMAT, DEFAULT


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


def times(rounds: int, results: Results) -> None:
    """Print the times."""
    title = f"Milliseconds of a step, one thread: median of {rounds} rounds"
    columns = dict.fromkeys(CHOSEN, ".2f") | {f"remat, of {BASELINE}": ".3f"}
    cells = results.table("times", title, "layer", columns)
    for name, layer in LAYERS.items():
        steps = {
            system: layer.make(*layer.timed).step(SYSTEMS[system]) for system in CHOSEN
        }
        found = interleaved(steps, rounds)
        ratio = Ratio.of(found[DEFAULT], found[BASELINE])
        cells.add(name, *(median(own) * 1e3 for own in found.values()), ratio)
        cells.aim(name, "<= 1", ratio, ratio.low <= 1)
    results.show(cells)


def instructions(counts: Counts, results: Results) -> None:
    """Print the instructions."""
    title = "Thousands of instructions of a step on few numbers: plain, and beyond it"
    columns = dict.fromkeys(CHOSEN, THOUSANDS) | {f"remat, of {BASELINE}": ".3f"}
    cells = results.table("instructions", title, "layer", columns)
    for layer in LAYERS:
        totals = {system: counts[layer, system] for system in CHOSEN}
        plain = totals.pop(PLAIN)
        beyond = {
            system: total if isinstance(total, str) else total - float(plain)
            for system, total in totals.items()
        }
        share = float(beyond[DEFAULT]) / float(beyond[BASELINE])
        cells.add(layer, plain, *beyond.values(), share)
        cells.aim(layer, "<= 1", f"{share:.3f}", share <= 1)
    results.show(cells)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="of the times")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error(f"--rounds must be at least 1, got {rounds}")
    torch.set_num_threads(1)
    results = Results(__file__)
    times(rounds, results)
    instructions(count(__file__), results)
    results.finish()


if __name__ == "__main__":
    main()
