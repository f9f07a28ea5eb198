"""Draw the picture of the README: memory over one training step, plain and with remat.

The model is that of ``benchmarks/model.py``: six transformer blocks of width 256 on
4 sequences of 256 tokens. The picture shows the bytes that are alive beyond parameters
and gradients, after each allocation and free. It is the same on every machine, and it
can be read on a light and on a dark page. Reproduce with

    python benchmarks/picture.py
"""

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
from _model import Model, Sizes
from _systems import DEFAULT, PLAIN, SYSTEMS
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from remat.testing import memory_timeline


SIZES = Sizes(layers=6, batch=4, time=256, width=256)
PICTURE = Path(__file__).parents[1] / "docs/_static/memory.svg"
# Legible on white and on black.
COLOURS = {PLAIN: "#d1603d", DEFAULT: "#2a9d8f"}
GREY = "#808080"
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


def draw(timelines: dict[str, tuple[int, ...]], axes: Axes) -> None:
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
    axes.set(xlim=(0, 1), xticks=[], xlabel="one training step", ylabel="MB alive")
    axes.set_ylim(0, 1.15e-6 * max(map(max, timelines.values())))


def main() -> None:
    """Measure, print the peaks, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PICTURE, help="an SVG file")
    out = parser.parse_args().out
    torch.set_num_threads(1)  # bytes are the same, and a busy machine no matter
    timelines = {system: timeline(system) for system in COLOURS}
    for system, live in timelines.items():
        print(f"{system}: {max(live) / 1e6:.0f} MB")
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(7.5, 3), layout="constrained")
        draw(timelines, axes)
        figure.savefig(out, transparent=True, metadata={"Date": None})


if __name__ == "__main__":
    main()
