"""Draw the picture of the README: memory over one training step, and its time.

The model is that of ``benchmarks/model.py``: six transformer blocks of width 256 on
4 sequences of 256 tokens. On the left are the bytes that are alive beyond parameters
and gradients, after each allocation and free. They are the same on every machine. On
the right is the time of a step of such a block, as ``benchmarks/block.py`` measured it
last. The picture can be read on a light and on a dark page. Reproduce with

    python benchmarks/picture.py
"""

import argparse
import json
from pathlib import Path

import matplotlib as mpl
import torch
from _model import Model, Sizes
from _results import Table
from _systems import BASELINE, DEFAULT, PLAIN, SYSTEMS
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from remat.testing import memory_timeline


SIZES = Sizes(layers=6, batch=4, time=256, width=256)
PICTURE = Path(__file__).parents[1] / "docs/_static/memory.svg"
MEASURED = Path(__file__).parent / "results/block.json"
# Legible on white and on black.
GREY = "#808080"
COLOURS = {PLAIN: "#d1603d", DEFAULT: "#2a9d8f", BASELINE: GREY}
NAMES = {PLAIN: "plain", DEFAULT: "remat", BASELINE: "torch's\ncheckpoint"}
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "remat",
    "font.size": 11,
    "text.color": GREY,
    "axes.labelcolor": GREY,
    "axes.edgecolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def timeline(system: str) -> tuple[int, ...]:
    """Return the live bytes over a step, once another one is over."""
    model = Model(SYSTEMS[system], SIZES)
    model.step()
    return memory_timeline(model.step).bytes


def times() -> dict[str, float]:
    """Return the time of a block's step in each system, in times of plain's."""
    table = Table.of_json(json.loads(MEASURED.read_text())["tables"]["times"])
    column = [*table.columns].index(f"of {PLAIN}")
    return {system: table.rows[system][column].median for system in NAMES}


def draw_memory(timelines: dict[str, tuple[int, ...]], axes: Axes) -> None:
    """Draw one line for each system, and its peak."""
    for system, live in timelines.items():
        megabytes, colour = [n / 1e6 for n in live], COLOURS[system]
        # Both lines end together: one step, whatever number of allocations it takes.
        at = [i / len(live) for i in range(len(live))]
        axes.step(at, megabytes, where="post", color=colour)
        axes.fill_between(at, megabytes, step="post", alpha=0.15, color=colour)
        peak = max(megabytes)
        where = at[megabytes.index(peak)]
        text = f"{system}: {peak:.0f} MB"
        axes.annotate(text, (where, peak), (0, 4), textcoords="offset points",
                      ha="center", color=colour)  # fmt: skip
    axes.set(xlim=(0, 1), xticks=[], xlabel="forward, then backward")
    axes.set_ylim(0, 1.15e-6 * max(map(max, timelines.values())))
    axes.set_title("memory alive, MB", loc="left", fontsize=11)


def draw_times(of_plain: dict[str, float], axes: Axes) -> None:
    """Draw one bar for each system."""
    names = [NAMES[system] for system in of_plain]
    colours = [COLOURS[system] for system in of_plain]
    bars = axes.bar(names, [*of_plain.values()], 0.7, color=colours, alpha=0.6)
    axes.bar_label(bars, fmt="%.1f", padding=3)
    axes.set_ylim(0, 1.15 * max(of_plain.values()))
    axes.set_yticks([0, 1])
    axes.tick_params(axis="x", length=0)
    axes.set_title("time of a block, plain = 1", loc="left", fontsize=11)


def main() -> None:
    """Measure, print what is drawn, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE, help="an SVG file")
    out = parser.parse_args().out
    torch.set_num_threads(1)  # bytes are the same, and a busy machine no matter
    timelines, of_plain = {s: timeline(s) for s in (PLAIN, DEFAULT)}, times()
    for system, live in timelines.items():
        print(f"{system}: {max(live) / 1e6:.0f} MB")
    for system, ratio in of_plain.items():
        print(f"{system}: {ratio:.1f} times plain")
    with mpl.rc_context(STYLE):
        figure, (left, right) = plt.subplots(
            1, 2, figsize=(8, 3), width_ratios=[5, 3], layout="constrained"
        )
        draw_memory(timelines, left)
        draw_times(of_plain, right)
        figure.savefig(out, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
