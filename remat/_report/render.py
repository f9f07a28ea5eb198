"""Shows reports as tables of strings: as text, and as HTML in a notebook.

Invariant: nothing is computed here, so that both forms of a report say the same.
Rejected: tables of rich. They break long lines.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
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
