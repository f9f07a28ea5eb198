"""Shows reports: as text, as HTML in a notebook, and as plots.

A report is a table of strings, of which both texts are made. A function that plots
draws on the axes that it is given, or on new ones, and returns them; bytes are in MiB.

Invariant: nothing is computed here, so that all forms of a report say the same. Labels
of plots stand in a legend, where room is left for it, or at an axis.
Rejected: tables of rich. They break long lines. A label beside each point: policies
that do the same are at one point. Importing matplotlib at the top: it is optional, and
slow to import.
"""

import importlib
import importlib.util
import re
import textwrap
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch

from remat._base.errors import missing


# Of each fate: colours of matplotlib's `tab10`, which the colour-blind can tell apart.
COLOURS = {
    "saved": "#1f77b4",
    "offloaded": "#9467bd",
    "recomputed": "#ff7f0e",
    "dead": "#c7c7c7",
}
_BRIGHT = {"recomputed", "dead"}
_LONG = 24  # letters; a longer text is broken into lines, so that tables fit a page


@dataclass(frozen=True, slots=True)
class Table:
    """A table to be shown; without columns, only its title and notes."""

    title: str
    columns: tuple[str, ...] = ()  # a name starts with "#" if the cells are numbers
    rows: tuple[tuple[str, ...], ...] = ()
    kinds: tuple[str, ...] = ()  # of each row, one of `COLOURS` or ""; () for none
    notes: tuple[str, ...] = ()


class Shown(ABC):
    """A report that shows as a table: in a terminal and in a notebook."""

    @abstractmethod
    def _table(self) -> Table: ...

    def __str__(self) -> str:
        return text(self._table())

    def _repr_html_(self) -> str:
        return html(self._table())


def short_array(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """Write a dtype and a shape as JAX does: "f32[2,3]"."""
    name = str(dtype).removeprefix("torch.")
    letters = re.sub(r"^(b?f|u|i|c)(?:loat|int|nt|omplex)(?=\d)", r"\1", name)
    return f"{letters}[{','.join(map(str, shape))}]"


def size(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that fits: "4.0 KiB"."""
    for unit, name in (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"):
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes} bytes"


def text(table: Table) -> str:
    """Write a table in columns for a terminal."""
    if not table.columns:
        return "\n".join([table.title, *table.notes])
    rows = [[name.removeprefix("#") for name in table.columns], *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = [">" if name.startswith("#") else "<" for name in table.columns]
    form = "  ".join(f"{{:{a}{w}}}" for a, w in zip(sides, widths, strict=True))
    lines = [form.format(*row).rstrip() for row in rows]
    return "\n".join([table.title, *lines, *table.notes])


def html(table: Table) -> str:
    """Write a table for a notebook, with fates in colours."""
    head = "".join(_cell("th", name, name.removeprefix("#")) for name in table.columns)
    lines = [f"<tr>{head}</tr>"] if head else []
    for row, kind in zip(
        table.rows, table.kinds or [""] * len(table.rows), strict=True
    ):
        pairs = zip(table.columns, row, strict=True)
        cells = (_cell("td", name, cell, kind) for name, cell in pairs)
        lines.append(f"<tr>{''.join(cells)}</tr>")
    rows = f'<table style="font-size: 85%">{"".join(lines)}</table>' if lines else ""
    notes = "".join(f"<div>{escape(note)}</div>" for note in table.notes)
    title = f"<div><b>{escape(table.title)}</b></div>"
    return f'<div style="overflow-x: auto">{title}{rows}{notes}</div>'


def _cell(tag: str, column: str, cell: str, kind: str = "") -> str:
    style = (
        f"padding: 0.1em 0.5em; text-align: {'right' if column[0] == '#' else 'left'}"
    )
    style += "" if len(cell) > _LONG else "; white-space: nowrap"
    shown = escape(cell)
    if column == "fate" and kind:
        look = f"background: {COLOURS[kind]}; color: "
        look += "black" if kind in _BRIGHT else "white"
        shown = f'<span style="padding: 0 0.4em; {look}">{shown}</span>'
    return f'<{tag} style="{style}">{shown}</{tag}>'


# --- Plots, with matplotlib ---


MIB = 2**20
_NO_AXES = (
    "remat: plot() takes the axes of matplotlib to draw on, and returns them; got a "
    "{kind}. For a file write report.plot().figure.savefig(path)."
)
_MARKERS = "osD^vP*X<>"
_GREY = "#9a9a9a"
_WIDE = 60  # letters in a line
_ACROSS, _MARK = 90, 8  # letters in a row of a legend, and the width of its marks


def bars(
    labels: Sequence[str], sizes: Any, kinds: Sequence[str], title: str, ax: Any = None
) -> Any:
    """Draw a bar of bytes for each label, coloured by kind."""
    ax = _axes(ax, (8, 1.5 + 0.25 * len(labels)))
    for kind, colour in COLOURS.items():
        at = [i for i, k in enumerate(kinds) if k == kind]
        if at:
            ax.barh(at, [sizes[i] / MIB for i in at], color=colour, label=kind)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.margins(x=0.3)  # beside the longest bar, for the legend
    return _finished(ax, title, ("size of the result, MiB", ""), loc="best")


def points(
    labels: Sequence[str],
    sizes: Sequence[int],
    costs: Sequence[int],
    title: str,
    ax: Any = None,
    front: Sequence[tuple[int, int]] = (),
) -> Any:
    """Draw a point for each pair of bytes and FLOPs.

    A line joins the points that no other beats, a dashed one what budgets reach.
    """
    ax = _axes(ax, (8, 3.5 + 0.2 * len(labels)))
    named: dict[tuple[int, int], list[str]] = {}
    for label, size, cost in zip(labels, sizes, costs, strict=True):
        named.setdefault((size, cost), []).append(label)
    ax.plot(*_unbeaten([*named]), color=_GREY, linewidth=1, zorder=0)
    if front:
        style = {"linestyle": "--", "marker": ".", "color": _GREY, "zorder": 0}
        ax.plot(*_unbeaten(front), **style, label="policies.within(...)")
    for i, ((size, cost), names) in enumerate(named.items()):
        around, at = divmod(i, len(_MARKERS))
        look = {"marker": _MARKERS[at], "color": f"C{at + around}"}
        label = "\n".join(textwrap.fill(name, _WIDE) for name in names)
        ax.scatter([size / MIB], [cost], 60, **look, label=label)
    ticker: Any = importlib.import_module("matplotlib.ticker")
    ax.yaxis.set_major_formatter(ticker.EngFormatter())
    if not any(costs):  # matplotlib would show numbers around zero
        ax.set_ylim(0, 1)
    axes = "saved memory, MiB", "recomputed work, FLOPs"
    return _finished(ax, title, axes, loc="best")


def points_in(
    budget: int,
    labels: Sequence[str],
    peaks: Sequence[int],
    costs: Sequence[int],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw points of peaks and FLOPs, and a line at the budget."""
    ax = points(labels, peaks, costs, title, ax)
    ax.axvline(budget / MIB, color=_GREY, linestyle=":", label="budget")
    axes = "peak of the step, MiB", ax.get_ylabel()
    return _finished(ax, title, axes, loc="best")


def _unbeaten(pairs: Sequence[tuple[int, int]]) -> Any:
    """Return the points for which no other is as small in both: all x, all y."""
    found: list[tuple[int, int]] = []
    for pair in sorted(pairs):
        if not found or pair[1] < found[-1][1]:
            found.append(pair)
    return zip(*((size / MIB, cost) for size, cost in found), strict=True)


def steps(sizes: Sequence[int], peak: str, title: str, ax: Any = None) -> Any:
    """Draw bytes over time, with a label for their maximum."""
    ax = _axes(ax, (8, 3))
    at, heights = range(len(sizes)), [size / MIB for size in sizes]
    (line,) = ax.step(at, heights, where="post")
    colour = line.get_color()
    area = ax.fill_between(at, heights, step="post", alpha=0.2, color=colour)
    area.sticky_edges.y.append(0)
    if heights:
        top = heights.index(max(heights))
        ax.plot([top], [heights[top]], "o", color=colour, label=peak)
    axes = "allocations and frees so far", "memory alive, MiB"
    return _below_its_legend(ax, title, axes)


def lines(
    at: Sequence[int],
    series: Mapping[str, Sequence[int]],
    axes: tuple[str, str],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw named counts over another one, as lines."""
    ax = _axes(ax, (8, 3))
    for name, counts in series.items():
        (line,) = ax.plot(at, counts, label=name, linewidth=1)
        line.sticky_edges.y.append(0)
    return _below_its_legend(ax, title, axes)


def _below_its_legend(ax: Any, title: str, axes: tuple[str, str]) -> Any:
    """Leave room above the lines for the legend, which is as flat as it can be."""
    labels = ax.get_legend_handles_labels()[1]
    across = max(1, _ACROSS // (max(map(len, labels), default=0) + _MARK))
    # Lines keep their lowest end at zero: they are sticky there.
    ax.margins(y=0.1 + 0.2 * -(-len(labels) // across))
    return _finished(ax, title, axes, loc="upper right", ncols=across)


def _finished(ax: Any, title: str, axes: tuple[str, str], **legend: Any) -> Any:
    """Name the axes, add the title, and the legend if anything has a label."""
    ax.set_xlabel(axes[0])
    ax.set_ylabel(axes[1])
    ax.set_title(textwrap.fill(title, _WIDE), loc="left")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(**legend)
    return ax


def _axes(ax: Any, size: tuple[float, float]) -> Any:
    """Return the axes that were passed, or new ones of a size."""
    if ax is not None:
        if not hasattr(ax, "set_xlabel"):
            raise TypeError(_NO_AXES.format(kind=type(ax).__name__))
        return ax
    if importlib.util.find_spec("matplotlib") is None:
        why = missing("matplotlib")
        raise ImportError(f"remat: plot() draws with matplotlib: {why}.")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    return pyplot.subplots(figsize=size, layout="constrained")[1]
