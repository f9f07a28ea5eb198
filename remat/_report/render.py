"""Shows reports as tables of strings: as text, and as HTML in a notebook.

Invariant: nothing is computed here, so that both forms of a report say the same.
Rejected: tables of rich. They break long lines, and nothing unfolds in their HTML.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import torch


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
    # The rows that a notebook shows only when asked, and what it shows in their place.
    folded: tuple[int, ...] = ()
    summary: str = ""

    @property
    def headers(self) -> list[tuple[str, bool]]:
        """The name of each column, and whether its cells are numbers."""
        return [(c.removeprefix("#"), c.startswith("#")) for c in self.columns]


def short_array(dtype: torch.dtype, shape: Iterable[int]) -> str:
    """Write a dtype and a shape as JAX does: "f32[2,3]"."""
    name = str(dtype).removeprefix("torch.")
    letters = re.sub(r"^(b?f|u|i|c)(?:loat|int|nt|omplex)(?=\d)", r"\1", name)
    return f"{letters}[{','.join(map(str, shape))}]"


def size(nbytes: int) -> str:
    """Write a number of bytes in the largest unit that fits: "4.0 KiB"."""
    units = [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]
    for unit, name in units:
        if nbytes >= unit:
            return f"{nbytes / unit:,.1f} {name}"
    return f"{nbytes} bytes"


def mebibytes(nbytes: int) -> str:
    """Write a number of bytes in MiB, rounded up, so that a budget is large enough."""
    thousandths = -(-nbytes * 1000 // 2**20)
    return f"{thousandths // 1000:,}.{thousandths % 1000:03} MiB"


# --- Text ---


def text(table: Table) -> str:
    """Write a table in columns for a terminal."""
    if not table.columns:
        return "\n".join([table.title, *table.notes])
    headers = table.headers
    rows = [[name for name, _ in headers], *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = [">" if number else "<" for _, number in headers]
    forms = [f"{{:{a}{w}}}" for a, w in zip(aligned, widths, strict=True)]
    lines = ["  ".join(forms).format(*row).rstrip() for row in rows]
    return "\n".join([table.title, *lines, *table.notes])


# --- HTML ---

_CELL = "padding: 0.1em 0.5em; vertical-align: top; text-align: "
_LONG = 24  # letters; a longer text is broken into lines, so that tables fit a page
_FATE = "padding: 0 0.4em; border-radius: 0.3em; "


def html(table: Table) -> str:
    """Write a table for a notebook. Fates are coloured, and folded rows unfold."""
    kinds = table.kinds or ("",) * len(table.rows)
    rows = [*zip(table.rows, kinds, strict=True)]
    folded = [row for i, row in enumerate(rows) if i in table.folded]
    others = [row for i, row in enumerate(rows) if i not in table.folded]
    parts = [f"<div><b>{escape(table.title)}</b></div>"]
    if folded:
        summary = f"<summary>{escape(table.summary)}</summary>"
        parts.append(f"<details>{summary}{_rows(table, folded)}</details>")
    parts += [_rows(table, others)] if table.columns else []
    parts += [f"<div>{escape(note)}</div>" for note in table.notes]
    return f'<div style="overflow-x: auto">{"".join(parts)}</div>'


def _rows(table: Table, rows: Sequence[tuple[tuple[str, ...], str]]) -> str:
    """Write some rows below the names of the columns."""
    sides = ["right" if number else "left" for _, number in table.headers]
    names = [name for name, _ in table.headers]
    head = "".join(
        f'<th style="{_cell(name, side)}">{escape(name)}</th>'
        for name, side in zip(names, sides, strict=True)
    )
    lines = [f"<tr>{head}</tr>"]
    for row, kind in rows:
        cells: list[str] = []
        for name, side, cell in zip(names, sides, row, strict=True):
            shown = _fate(cell, kind) if name == "fate" and kind else escape(cell)
            cells.append(f'<td style="{_cell(cell, side)}">{shown}</td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<table style="font-size: 85%">{"".join(lines)}</table>'


def _cell(cell: str, side: str) -> str:
    """Return the style of a cell."""
    return f"{_CELL}{side}" + ("" if len(cell) > _LONG else "; white-space: nowrap")


def _fate(cell: str, kind: str) -> str:
    """Write a fate on a background of its colour."""
    colour, ink = COLOURS[kind], "black" if kind in _BRIGHT else "white"
    style = f"{_FATE}background: {colour}; color: {ink}"
    return f'<span style="{style}">{escape(cell)}</span>'


_BRIGHT = {"recomputed", "dead"}


# --- Reports ---


class Shown(ABC):
    """A report that shows as a table: in a terminal and in a notebook."""

    @abstractmethod
    def _table(self) -> Table: ...

    def __str__(self) -> str:
        return text(self._table())

    def _repr_html_(self) -> str:
        return html(self._table())
