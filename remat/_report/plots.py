"""Plots of reports, with matplotlib: bars, points, steps and lines.

Bytes are drawn in MiB.

Invariant: labels stand in a legend or at an axis, so they collide with nothing. The
legend is inside of the axes, where room is left for it.
Rejected: a label beside each point. Policies that do the same are at one point.
Rejected: importing matplotlib at the top. It is optional, and slow to import.
"""

import importlib
import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from remat._base.errors import missing
from remat._report.render import COLOURS


MIB = 2**20
_MARKERS = "osD^vP*X<>"
_GREY = "#9a9a9a"
_WIDE = 60  # letters in a line
_ACROSS, _MARK = 90, 8  # letters in a row of a legend, and the width of its marks


def bars(
    labels: Sequence[str],
    sizes: Sequence[int],
    kinds: Sequence[str],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw a bar of bytes for each label, coloured by kind; return the axes."""
    ax = ax or _new_axes((8, 1.5 + 0.25 * len(labels)))
    for kind, colour in COLOURS.items():
        at = [i for i, k in enumerate(kinds) if k == kind]
        if at:
            ax.barh(at, [sizes[i] / MIB for i in at], color=colour, label=kind)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.margins(x=0.3)  # beside the longest bar, for the legend
    ax.set_xlabel("size of the result, MiB")
    return _finished(ax, title, loc="best")


def points(
    labels: Sequence[str],
    sizes: Sequence[int],
    costs: Sequence[int],
    title: str,
    ax: Any = None,
    front: Sequence[tuple[int, int]] = (),
) -> Any:
    """Draw a point for each pair of bytes and FLOPs; return the axes.

    A line joins the points that no other beats, a dashed one what budgets reach.
    """
    ax = ax or _new_axes((8, 3.5 + 0.2 * len(labels)))
    named: dict[tuple[int, int], list[str]] = {}
    for label, size, cost in zip(labels, sizes, costs, strict=True):
        named.setdefault((size, cost), []).append(label)
    best = [(size / MIB, cost) for size, cost in _unbeaten([*named])]
    ax.plot(*zip(*best, strict=True), color=_GREY, linewidth=1, zorder=0)
    if front:
        reached = [(size / MIB, cost) for size, cost in _unbeaten(front)]
        style = {"linestyle": "--", "marker": ".", "color": _GREY, "zorder": 0}
        ax.plot(*zip(*reached, strict=True), **style, label="policies.within(...)")
    for i, ((size, cost), names) in enumerate(named.items()):
        around, at = divmod(i, len(_MARKERS))
        look = {"marker": _MARKERS[at], "color": f"C{at + around}"}
        label = "\n".join(textwrap.fill(name, _WIDE) for name in names)
        ax.scatter([size / MIB], [cost], 60, **look, label=label)
    ticker: Any = importlib.import_module("matplotlib.ticker")
    ax.yaxis.set_major_formatter(ticker.EngFormatter())
    ax.set_xlabel("saved memory, MiB")
    ax.set_ylabel("recomputed work, FLOPs")
    if not any(costs):  # matplotlib would show numbers around zero
        ax.set_ylim(0, 1)
    return _finished(ax, title, loc="best")


def points_in(
    budget: int,
    labels: Sequence[str],
    peaks: Sequence[int],
    costs: Sequence[int],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw points of peaks and FLOPs, and a line at the budget; return the axes."""
    ax = points(labels, peaks, costs, title, ax)
    ax.axvline(budget / MIB, color=_GREY, linestyle=":", label="budget")
    ax.set_xlabel("peak of the step, MiB")
    return _finished(ax, title, loc="best")


def _unbeaten(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs for which no other is as small in both; sorted."""
    found: list[tuple[int, int]] = []
    for pair in sorted(pairs):
        if not found or pair[1] < found[-1][1]:
            found.append(pair)
    return found


def steps(sizes: Sequence[int], peak: str, title: str, ax: Any = None) -> Any:
    """Draw bytes over time, with a label for their maximum; return the axes."""
    ax = ax or _new_axes((8, 3))
    at, heights = range(len(sizes)), [size / MIB for size in sizes]
    (line,) = ax.step(at, heights, where="post")
    colour = line.get_color()
    area = ax.fill_between(at, heights, step="post", alpha=0.2, color=colour)
    area.sticky_edges.y.append(0)
    if heights:
        top = heights.index(max(heights))
        ax.plot([top], [heights[top]], "o", color=colour, label=peak)
    ax.set_xlabel("allocations and frees so far")
    ax.set_ylabel("memory alive, MiB")
    return _below_its_legend(ax, title)


def lines(
    at: Sequence[int],
    series: Mapping[str, Sequence[int]],
    axes: tuple[str, str],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw named counts over another one, as lines; return the axes."""
    ax = ax or _new_axes((8, 3))
    for name, counts in series.items():
        (line,) = ax.plot(at, counts, label=name, linewidth=1)
        line.sticky_edges.y.append(0)
    ax.set_xlabel(axes[0])
    ax.set_ylabel(axes[1])
    return _below_its_legend(ax, title)


def _below_its_legend(ax: Any, title: str) -> Any:
    """Leave room above the lines for the legend, which is as flat as it can be."""
    labels = ax.get_legend_handles_labels()[1]
    across = max(1, _ACROSS // (max(map(len, labels), default=0) + _MARK))
    # Lines keep their lowest end at zero: they are sticky there.
    ax.margins(y=0.1 + 0.2 * -(-len(labels) // across))
    return _finished(ax, title, loc="upper right", ncols=across)


def _finished(ax: Any, title: str, **legend: Any) -> Any:
    """Add the title, and the legend if anything has a label."""
    ax.set_title(textwrap.fill(title, _WIDE), loc="left")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(**legend)
    return ax


def _new_axes(size: tuple[float, float]) -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(_NO_MATPLOTLIB)
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    return pyplot.subplots(figsize=size, layout="constrained")[1]


_NO_MATPLOTLIB = f"remat: plot() draws with matplotlib: {missing('matplotlib')}."
