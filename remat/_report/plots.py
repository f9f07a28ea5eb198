"""Plots of reports, with matplotlib: bars, points, steps and lines.

Called by `reports`, `timeline` and `chain`. Bytes are drawn in MiB.

Invariant: labels stand in a legend or at an axis, so they collide with nothing. All
colours can be read on a light and on a dark background.
Rejected: a label beside each point. Policies that do the same are at one point.
Rejected: importing matplotlib at the top. It is optional, and slow to import.
"""

import importlib
import importlib.util
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from remat._base.optional import missing
from remat._report.render import COLOURS


MIB = 2**20
_MARKERS = "osD^vP*X<>"
_GREY = "#9a9a9a"
_WIDE = 60  # letters in a line


def bars(
    labels: Sequence[str],
    sizes: Sequence[int],
    kinds: Sequence[str],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw a horizontal bar of bytes for each label, coloured by kind; return the axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    ax = ax or _new_axes((8, 1.5 + 0.25 * len(labels)))
    for kind, (colour, _) in COLOURS.items():
        at = [i for i, k in enumerate(kinds) if k == kind]
        if at:
            ax.barh(at, [sizes[i] / MIB for i in at], color=colour, label=kind)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlabel("MiB")
    return _finished(ax, title)


def points(
    labels: Sequence[str],
    sizes: Sequence[int],
    costs: Sequence[int],
    title: str,
    ax: Any = None,
    front: Sequence[tuple[int, int]] = (),
) -> Any:
    """Draw a point for each pair of bytes and FLOPs; return the axes.

    Labels of equal pairs share a point. A line joins the points that no other beats,
    and a dashed one the pairs that budgets reach.

    Raises:
        ImportError: matplotlib is not installed.
    """
    ax = ax or _new_axes((8, 4 + 0.25 * len(labels)))
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
    ax.set_xlabel("saved MiB")
    ax.set_ylabel("recomputed FLOPs")
    return _finished(ax, title, (0, -0.15))


def _unbeaten(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs for which no other is as small in both; sorted.

    Example:
        >>> _unbeaten([(3, 0), (1, 5), (2, 5), (4, 0)])
        [(1, 5), (3, 0)]
    """
    found: list[tuple[int, int]] = []
    for pair in sorted(pairs):
        if not found or pair[1] < found[-1][1]:
            found.append(pair)
    return found


def steps(sizes: Sequence[int], peak: str, title: str, ax: Any = None) -> Any:
    """Draw bytes over time, with a label for their maximum; return the axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    ax = ax or _new_axes((8, 3))
    heights = [size / MIB for size in sizes]
    (line,) = ax.step(range(len(sizes)), heights, where="post")
    ax.fill_between(
        range(len(sizes)), heights, step="post", alpha=0.2, color=line.get_color()
    )
    if heights:
        at = heights.index(max(heights))
        ax.plot([at], [heights[at]], "o", color=line.get_color(), label=peak)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("allocations and frees")
    ax.set_ylabel("MiB alive")
    return _finished(ax, title)


def lines(
    at: Sequence[int],
    series: Mapping[str, Sequence[int]],
    axes: tuple[str, str],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw named counts over another one, as lines; return the axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    ax = ax or _new_axes((8, 3))
    for name, counts in series.items():
        ax.plot(at, counts, label=name, linewidth=1)
    ax.set_ylim(bottom=0)
    ax.set_xlabel(axes[0])
    ax.set_ylabel(axes[1])
    return _finished(ax, title)


def _finished(ax: Any, title: str, at: tuple[float, float] = (1, 1)) -> Any:
    """Add the title, and the legend beside the axes or below them."""
    ax.set_title(textwrap.fill(title, _WIDE), loc="left")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="upper left", bbox_to_anchor=at, frameon=False)
    return ax


def _new_axes(size: tuple[float, float]) -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(_NO_MATPLOTLIB)
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    return pyplot.subplots(figsize=size, layout="constrained")[1]


_NO_MATPLOTLIB = f"remat: plot() draws with matplotlib: {missing('matplotlib')}."
