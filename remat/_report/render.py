"""Shows reports: as text, as HTML in a notebook, and as plots.

A report is a table of strings, of which both texts are made. A function that plots
draws on the axes that it is given, or on new ones, and returns them; bytes are in MiB.

Invariant: nothing is computed here, so that all forms of a report say the same.
Rejected: tables of rich. They break long lines. A label beside each point: policies
that do the same are at one point, so names stand in a legend. Importing matplotlib at
the top: it is optional, and slow to import.
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
        table = self._table()
        heads = [name.removeprefix("#") for name in table.columns]
        rows = [heads, *table.rows] if heads else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        sides = [">" if name.startswith("#") else "<" for name in table.columns]
        form = "  ".join(f"{{:{a}{w}}}" for a, w in zip(sides, widths, strict=True))
        lines = [form.format(*row).rstrip() for row in rows]
        return "\n".join([table.title, *lines, *table.notes])

    def _repr_html_(self) -> str:
        table = self._table()
        looks = [
            f"text-align: {'right' if name.startswith('#') else 'left'}"
            for name in table.columns
        ]
        heads = [name.removeprefix("#") for name in table.columns]
        lines = [_row("th", heads, looks)] if heads else []
        kinds = table.kinds or [""] * len(table.rows)
        for row, kind in zip(table.rows, kinds, strict=True):
            colour = COLOURS.get(kind, "transparent")
            fate = f"{looks[0]}; border-left: 0.7em solid {colour}"
            own = [
                fate if name == "fate" else look
                for name, look in zip(table.columns, looks, strict=True)
            ]
            lines.append(_row("td", row, own))
        notes = "".join(f"<div>{escape(note)}</div>" for note in table.notes)
        rows = f"<table>{''.join(lines)}</table>" if lines else ""
        return f"<b>{escape(table.title)}</b>{rows}{notes}"


def _row(tag: str, cells: Sequence[str], looks: Sequence[str]) -> str:
    each = zip(cells, looks, strict=True)
    found = (f'<{tag} style="{look}">{escape(cell)}</{tag}>' for cell, look in each)
    return f"<tr>{''.join(found)}</tr>"


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


# --- Plots, with matplotlib ---


MIB = 2**20
_NO_AXES = (
    "remat: plot() takes the axes of matplotlib to draw on, and returns them; got a "
    "{kind}. For a file write report.plot().figure.savefig(path)."
)
_MARKERS = "osD^vP*X<"  # not ten, as there are ten colours
_GREY = "#9a9a9a"
_WIDE = 60  # letters in a line


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
    return _finished(ax, title, ("size of the result, MiB", ""))


def points(
    labels: Sequence[str],
    at: Sequence[tuple[int, int]],
    title: str,
    ax: Any = None,
    front: Sequence[tuple[int, int]] = (),
    budget: int | None = None,
) -> Any:
    """Draw a point for each pair of bytes and FLOPs; bytes of peaks, if in a budget."""
    ax = _axes(ax, (8, 3.5 + 0.2 * len(labels)))
    named: dict[tuple[int, int], list[str]] = {}
    for label, point in zip(labels, at, strict=True):
        named.setdefault(point, []).append(label)
    if front:
        bytes_of, work = zip(*front, strict=True)
        style = {"linestyle": "--", "marker": ".", "color": _GREY, "zorder": 0}
        reached = [nbytes / MIB for nbytes in bytes_of]
        ax.plot(reached, work, **style, label="policies.within(...)")
    for i, ((size, cost), names) in enumerate(named.items()):
        label = "\n".join(textwrap.fill(name, _WIDE) for name in names)
        look = {"marker": _MARKERS[i % len(_MARKERS)], "color": f"C{i}"}
        ax.scatter([size / MIB], [cost], 60, **look, label=label)
    if budget is not None:
        ax.axvline(budget / MIB, color=_GREY, linestyle=":", label="budget")
    ticker: Any = importlib.import_module("matplotlib.ticker")
    ax.yaxis.set_major_formatter(ticker.EngFormatter())
    if not any(cost for _, cost in at):  # matplotlib would show numbers around zero
        ax.set_ylim(0, 1)
    what = "saved memory, MiB" if budget is None else "peak of the step, MiB"
    return _finished(ax, title, (what, "recomputed work, FLOPs"))


def lines(
    at: Sequence[int],
    series: Mapping[str, Sequence[float]],
    axes: tuple[str, str],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw named sizes over time, with a dot at the largest of each."""
    ax = _axes(ax, (8, 3))
    for name, sizes in series.items():
        top = {"marker": "o", "markevery": [sizes.index(max(sizes))]}
        (line,) = ax.step(at, sizes, where="post", label=name, linewidth=1, **top)
        line.sticky_edges.y.append(0)
    # Room above the lines for the legend, of two columns. Below they stick to zero.
    rows = (len(ax.get_legend_handles_labels()[1]) + 1) // 2
    ax.margins(y=0.1 + 0.2 * rows)
    return _finished(ax, title, axes, loc="upper right", ncols=2)


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
