"""Shows reports: tables of strings as text or HTML, and numbers as plots.

Called by `reports`. rich draws tables, and matplotlib plots, where they are installed.

Invariant: nothing is computed here, so that every form of a report says the same.
Rejected: importing rich and matplotlib at the top. They are optional, and slow to
import for a user who prints nothing.
"""

import importlib
import importlib.util
import io
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import torch


# Of each fate. Colours of matplotlib's `tab10`, which the colour-blind can tell apart,
# and the nearest colours of a terminal.
COLOURS = {
    "saved": ("#1f77b4", "blue"),
    "offloaded": ("#9467bd", "magenta"),
    "recomputed": ("#ff7f0e", "yellow"),
    "dead": ("#c7c7c7", "bright_black"),
}


@dataclass(frozen=True, slots=True)
class Table:
    """A table to be shown.

    Attributes:
        title: the line above the table.
        columns: names of the columns. A name starts with "#" if the cells are numbers.
        rows: the cells of each row.
        kinds: of each row, one of `COLOURS` or "".
        notes: the lines below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    kinds: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def headers(self) -> list[tuple[str, bool]]:
        """The name of each column, and whether its cells are numbers."""
        return [(c.removeprefix("#"), c.startswith("#")) for c in self.columns]


def short(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """Write a dtype and a shape as JAX does.

    Example:
        >>> short(torch.float32, (2, 3)), short(torch.int64, ())
        ('f32[2,3]', 'i64[]')
    """
    name = str(dtype).removeprefix("torch.")
    letters = re.sub(r"^(b?f|u|i|c)(?:loat|int|nt|omplex)(?=\d)", r"\1", name)
    return f"{letters}[{','.join(map(str, shape))}]"


# --- Text ---


def text(table: Table) -> str:
    """Write a table for a terminal: by rich where it is installed, plainly if not."""
    return plain(table) if importlib.util.find_spec("rich") is None else _rich(table)


def plain(table: Table) -> str:
    """Write a table in columns, without lines around the cells.

    Example:
        >>> columns, row = ("op", "#bytes"), ("sin", "12")
        >>> print(plain(Table("ops", columns, (row,), ("",), ("1 op",))))
        ops
        op   bytes
        sin     12
        1 op
    """
    headers = table.headers
    rows = [[name for name, _ in headers], *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [">" if number else "<" for _, number in headers]
    forms = [f"{{:{a}{w}}}" for a, w in zip(aligned, widths, strict=True)]
    lines = ["  ".join(forms).format(*row).rstrip() for row in rows]
    return "\n".join([table.title, *lines, *table.notes])


def _rich(table: Table) -> str:
    width = max(100, shutil.get_terminal_size((120, 24)).columns)
    lines = _console(table, width).export_text().splitlines()
    return "\n".join(line.rstrip() for line in lines)


def _console(table: Table, width: int) -> Any:
    """Return a console of rich that has recorded the table, and shown it nowhere."""
    rich: Any = importlib.import_module("rich.console")
    # In a notebook rich would show the table there at once.
    console = rich.Console(
        file=io.StringIO(), width=width, record=True, force_jupyter=False
    )
    console.print(rich_table(table))
    return console


def rich_table(table: Table) -> Any:
    """Return a table of rich, with a colour for each kind of row."""
    rich: Any = importlib.import_module("rich.table")
    shown = rich.Table(
        title=_unmarked(table.title),
        caption=_unmarked("\n".join(table.notes)),
        title_justify="left",
        caption_justify="left",
    )
    for name, number in table.headers:
        side = "right" if number else "left"
        shown.add_column(name, justify=side, overflow="fold")
    for row, kind in zip(table.rows, table.kinds, strict=True):
        style = COLOURS[kind][1] if kind else None
        shown.add_row(*map(_unmarked, row), style=style)
    return shown


def _unmarked(string: str) -> Any:
    """Return text that rich shows as it is: [2,3] could be markup."""
    return importlib.import_module("rich.text").Text(string)


# --- HTML ---


_WIDE = 400  # columns: in a notebook a wide table scrolls


def html(table: Table) -> str:
    """Write a table for a notebook: by rich where it is installed, plainly if not."""
    if importlib.util.find_spec("rich") is None:
        return f"<pre>{escape(plain(table))}</pre>"
    form = '<pre style="overflow-x: auto; line-height: normal">{code}</pre>'
    console = _console(table, _WIDE)
    return console.export_html(inline_styles=True, code_format=form)


# --- Plots ---


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
            ax.barh(at, [sizes[i] for i in at], color=colour, label=kind)
    ax.set_yticks(range(len(labels)), labels)
    ax.invert_yaxis()
    ax.set_xlabel("bytes")
    ax.set_title(title, loc="left")
    if labels:
        ax.legend()
    return ax


def tradeoff(
    labels: Sequence[str],
    sizes: Sequence[int],
    costs: Sequence[int],
    title: str,
    ax: Any = None,
) -> Any:
    """Draw a labelled point for each pair of bytes and FLOPs, joined by bytes.

    Returns:
        The axes.

    Raises:
        ImportError: matplotlib is not installed.
    """
    ax = ax or _new_axes((8, 5))
    ordered = sorted(zip(sizes, costs, strict=True))
    ax.plot(*zip(*ordered, strict=True), color="#c7c7c7", zorder=0)
    points = [*zip(sizes, costs, strict=True)]
    for i, (label, (size, cost)) in enumerate(zip(labels, points, strict=True)):
        ax.scatter([size], [cost], label=label)
        left = 2 * size <= max(sizes) + min(sizes)
        line = sum(_is_near(points[i], other, points) for other in points[:i])
        ax.annotate(
            label,
            (size, cost),
            xytext=(4 if left else -4, 4 + 12 * line),
            textcoords="offset points",
            ha="left" if left else "right",
        )
    ax.set_xlabel("saved bytes")
    ax.set_ylabel("recomputed FLOPs")
    ax.set_title(title, loc="left")
    return ax


def _is_near(
    one: Sequence[int], other: Sequence[int], points: Sequence[Sequence[int]]
) -> bool:
    """Say whether the labels of two points would overlap."""
    axes = zip(zip(*points, strict=True), one, other, strict=True)
    return all(8 * abs(a - b) <= max(all_) - min(all_) for all_, a, b in axes)


def _new_axes(size: tuple[float, float]) -> Any:
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(_NO_MATPLOTLIB)
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    return pyplot.subplots(figsize=size, layout="constrained")[1]


_NO_MATPLOTLIB = (
    "remat: plot() draws with matplotlib, which is not installed. "
    "Run: pip install 'remat[viz]'"
)
