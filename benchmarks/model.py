"""Bytes that a whole model holds under each policy: after the forward, and at most.

The model is several transformer blocks, every one checkpointed. Counted are the bytes
alive after its forward, besides its result, and the peak over forward and backward; the
parameters and their gradients exist before and do not count. Products computed again
show what the bytes are exchanged for. A plot goes to ``out/``. Reproduce with

    make model                              (or: python benchmarks/model.py --help)

What is offloaded to disk is in files: those are mapped and counted beside.
"""

import argparse
import functools
import operator
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from _block import HEADS, dots_run
from _files import timelines
from _model import Model, Sizes
from _systems import BASELINE, DEFAULT, PLAIN, SAVING, SELECTIVE, SYSTEMS, Wrapper
from _tables import console, table, verdict
from rich.console import Console
from rich.progress import track

from remat import policies, remat


NAMES, ALL, DISK = "remat, names", "remat, everything", "remat, dots to disk"
NAMED = policies.save_only_these_names("qkv", "hidden")
TO_DISK = policies.dots_saveable.but_offload(to="disk")
CHOSEN: dict[str, Wrapper] = {
    name: SYSTEMS[name] for name in (PLAIN, BASELINE, SELECTIVE, DEFAULT, SAVING)
} | {
    NAMES: functools.partial(remat, policy=NAMED),
    ALL: functools.partial(remat, policy=policies.everything_saveable),
    DISK: functools.partial(remat, policy=TO_DISK),
}
# Each holds no more than another does, and where that is strict less.
BOTH = "alive", "peak"
TARGETS = {
    DEFAULT: ("<=", BASELINE, BOTH),
    SAVING: ("<", SELECTIVE, BOTH),
    NAMES: ("<", SAVING, BOTH),
    # Its residuals are freed when the backward of a block ends, not one by one.
    ALL: ("<=", PLAIN, ("alive",)),
    DISK: ("<=", DEFAULT, BOTH),
}


# --- The measurement ---------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What a model holds, in bytes, and computes again."""

    alive: int
    peak: int
    files: int
    again: int


def measure(wrap: Wrapper, sizes: Sizes) -> Row:
    """Measure one system, once its first calls are over."""
    model = Model(wrap, sizes)
    model.step()
    model.step()
    memory, files = timelines(model.forward)
    return Row(
        alive=memory[-1] - model.x.nbytes,
        peak=max(timelines(model.step)[0]),
        files=files[-1],
        again=dots_run(model.step),
    )


# --- The comparison ------------------------------------------------------------------


def target(rows: dict[str, Row], name: str) -> str:
    """Say whether a system meets its target, and what that is."""
    if name not in TARGETS:
        return ""
    relation, other, fields = TARGETS[name]
    less = operator.lt if relation == "<" else operator.le
    pairs = [(getattr(rows[n], f) for n in (name, other)) for f in fields]
    return verdict(all(less(*pair) for pair in pairs), f"{relation} {other}")


def report(rows: dict[str, Row], screen: Console) -> bool:
    """Print the table; return whether every target is met."""
    headings = "after forward", "peak", "in files", "again", "target"
    cells = table("Bytes of a model, and matmuls recomputed", "system", *headings)
    all_met = True
    for name, row in rows.items():
        text = target(rows, name)
        again = row.again - rows[PLAIN].again
        sizes = [f"{size:,}" for size in (row.alive, row.peak, row.files)]
        cells.add_row(name, *sizes, str(again), text)
        all_met &= not text.startswith("MISSED")
    screen.print(cells)
    return all_met


def plot(rows: dict[str, Row], path: Path) -> None:
    """Draw both numbers of every system as bars."""
    import matplotlib as mpl

    mpl.use("Agg")  # no screen needed
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    names = [*rows][::-1]
    peaks = [rows[name].peak / 2**20 for name in names]
    alive = [rows[name].alive / 2**20 for name in names]
    axes.barh(names, peaks, alpha=0.3, label="peak of a step")
    bars = axes.barh(names, alive, height=0.5, label="alive after the forward")
    axes.bar_label(bars, fmt="%.0f", padding=3)
    axes.set_xlabel("MiB beyond parameters and gradients")
    axes.set_title("A model under each policy")
    figure.legend(loc="outside lower center", ncols=2)
    figure.savefig(path, dpi=150)


def parse_options() -> argparse.Namespace:
    """Read the command line, or exit with a message that says what to change."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sizes = {"layers": 6, "width": 256, "time": 256, "batch": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=Path("out"), help="for the plot")
    options = parser.parse_args()
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.width % HEADS:
        parser.error(f"--width {options.width} is not divisible by {HEADS} heads")
    return options


def main() -> None:
    """Measure, print the table, write the plot; exit with 1 if a target is missed."""
    options, screen = parse_options(), console()
    torch.set_num_threads(1)  # bytes are the same, and a busy machine no matter
    sizes = Sizes(options.layers, options.batch, options.time, options.width)
    rows = {
        name: measure(wrap, sizes)
        for name, wrap in track(CHOSEN.items(), transient=True, description="measuring")
    }
    all_met = report(rows, screen)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "model_memory.png"
    plot(rows, path)
    screen.print(f"Bytes under each policy: {path}")
    sys.exit(not all_met)


if __name__ == "__main__":
    main()
