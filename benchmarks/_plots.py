"""Plots of what the benchmarks wrote, drawn of tables alone.

Invariant: a plot shows numbers of a table, and computes none but a change of unit. So
all can be drawn again without measuring: `_page.py` does.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from _results import Table, Value


mpl.use("Agg")  # no screen needed

from matplotlib import pyplot as plt


Tables = Mapping[str, Table]


def bars(
    tables: Tables,
    key: str,
    columns: Sequence[str],
    title: str,
    label: str,
    *,
    without: Sequence[str] = (),
    unit: float = 1,
    form: str = "%.0f",
    log: bool = False,
) -> Any:
    """Draw a group of bars for each row, with one bar for each column.

    Args:
        tables: Those of a script.
        key: Which one is drawn.
        columns: Which of its columns; all if none.
        title: What the plot shows.
        label: What the numbers are.
        without: The rows that are left out.
        unit: What the numbers are divided by.
        form: How they are written beside the bars.
        log: Whether the axis is logarithmic.
    """
    table = tables[key]
    names, rows = [*table.columns], [row for row in table.rows if row not in without]
    columns = columns or names
    size = 8, 1.3 + (0.16 + 0.18 * len(columns)) * len(rows)
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    height = 0.8 / len(columns)
    for k, column in enumerate(columns):
        cells = [table.rows[row][names.index(column)] for row in rows]
        lengths = [c / unit if isinstance(c, int | float) else 0 for c in cells]
        places = [i + (k - (len(columns) - 1) / 2) * height for i in range(len(rows))]
        drawn = axes.barh(places, lengths, height * 0.9, label=column)
        texts = [_text(cell, unit, form) for cell in cells]
        axes.bar_label(drawn, texts, padding=3, fontsize=8)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    if log:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter("")
    axes.margins(x=0.12)
    axes.set_xlabel(label)
    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    if len(columns) > 1:
        figure.legend(loc="outside lower center", ncols=3)
    return figure


def _text(cell: Value, unit: float, form: str) -> str:
    """Return what stands beside a bar."""
    if isinstance(cell, int | float):
        return form % (cell / unit)
    return "n/a" if isinstance(cell, str) else ""


ACROSS = 3  # plots of models side by side
MARKS = {
    "remat.fit": "o-",
    "remat.fit, by blocks": ".",
    "remat, uniform": "s",
    "torch": "^",
    "torch.compile": "x",
}


def points(tables: Tables) -> Any:
    """Draw recomputed work against the peak, for each model that was fitted."""
    models = {
        key.removesuffix(", all"): tables[key]
        for key in tables
        if key.endswith(", all")
    }
    rows = -(-len(models) // ACROSS)
    figure, axes = plt.subplots(
        rows, ACROSS, figsize=(9, 0.6 + 2.7 * rows), layout="constrained"
    )
    for ax in axes.flat[len(models) :]:
        ax.set_visible(False)
    for ax, (model, table) in zip(axes.flat, models.items(), strict=False):
        for system, mark in MARKS.items():
            start = f"{system}: "
            cells = [table.rows[row] for row in table.rows if row.startswith(start)]
            peaks, works = [c[0] / 2**20 for c in cells], [c[-1] for c in cells]
            ax.plot(peaks, works, mark, label=system, alpha=0.8, markersize=5)
        ax.set_title(model, fontsize=11)
        ax.set_xlabel("peak, MiB")
        ax.spines[["top", "right"]].set_visible(False)
    figure.supylabel("recomputed work, ms", fontsize=10)
    lines = axes.flat[0].get_legend_handles_labels()
    figure.legend(*lines, loc="outside lower center", ncols=4)
    return figure


PLOTS: dict[str, Callable[[Tables], Any]] = {
    "chain": functools.partial(
        bars,
        key="steps",
        columns=["peak, carries", "backward"],
        title="A loop of 1,000 steps: what each system holds and runs",
        label="carries held at most, steps run in the backward",
        log=True,
    ),
    "compiled": functools.partial(
        bars,
        key=".backward()",
        columns=["peak, MiB"],
        title="Compiled blocks under .backward()",
        label="peak, MiB",
        form="%.1f",
    ),
    "fit": points,
    "memory": functools.partial(
        bars,
        key="derivatives",
        columns=[],
        title="Peaks of 8 blocks of 8 sines, by derivative",
        label="tensors",
    ),
    "model": functools.partial(
        bars,
        key="bytes",
        columns=["after the forward", "peak"],
        title="Bytes of a model",
        label="MiB beyond parameters and gradients",
        unit=2**20,
    ),
    "overhead": functools.partial(
        bars,
        key="block",
        columns=["function", "module"],
        title="Instructions of a small block beyond plain",
        label="thousands",
        without=["plain"],
        unit=1e3,
        form="%.0f",
    ),
}


def draw(name: str, tables: Tables, folder: Path) -> None:
    """Write the plot of a script beside its file, if it has one."""
    if name in PLOTS:
        figure = PLOTS[name](tables)
        figure.savefig(folder / f"{name}.png", dpi=90)
        plt.close(figure)
