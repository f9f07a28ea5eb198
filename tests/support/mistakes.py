"""Programs with a mistake, and what each is told: `tests/whole/mistakes.txt`.

A row is a title, a program, and what the program prints, warns and raises. To write the
rows anew, after a message was changed: `python -m support.mistakes` in `tests/`. Then
read the difference.
"""

import contextlib
import io
import linecache
import re
import sys
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from remat._partial import decide, names
from remat._partial.decide import CACHES


FILE = Path(__file__).parents[1] / "whole" / "mistakes.txt"
NAME = "mistake.py"
BEFORE = """\
import torch
from torch import nn
x = torch.linspace(0.1, 0.9, 4, requires_grad=True)
"""


class Mistake(NamedTuple):
    """A row of the table."""

    title: str
    program: str
    told: str


def rows() -> list[Mistake]:
    """Return the rows of the table."""
    head, *rest = FILE.read_text().split("\n# ")
    assert not head.strip().startswith("# "), "a title begins after an empty line"
    return [_row(text) for text in rest]


def _row(text: str) -> Mistake:
    title, _, body = text.partition("\n")
    program, _, told = body.partition("\n---\n")
    return Mistake(title, program, told.strip("\n"))


def outcome(program: str) -> str:
    """Run a program; return what it prints, warns and raises."""
    torch.manual_seed(0)
    CACHES.clear()
    decide._WARNED.clear()
    names._FOUND.clear()
    source = f"{BEFORE}{program}\n"
    linecache.cache[NAME] = len(source), None, source.splitlines(keepends=True), NAME
    space = {"__name__": "mistake"}
    said = io.StringIO()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with contextlib.redirect_stdout(said):
            error = _raised(source, space)
    lines = [said.getvalue().rstrip("\n")]
    ours = (w for w in warned if str(w.message).startswith("remat"))
    lines += [f"{w.category.__name__}: {w.message}" for w in ours]
    lines += [error]
    return re.sub(r"0x[0-9a-f]+", "0x...", "\n".join(filter(None, lines)))


def _raised(source: str, space: dict[str, object]) -> str:
    try:
        exec(compile(source, NAME, "exec"), space)
    except Exception as error:  # noqa: BLE001
        notes = getattr(error, "__notes__", [])
        return "\n".join([f"{type(error).__name__}: {error}", *notes])
    return ""


def written(rows: list[Mistake]) -> str:
    """Return the text of the table."""
    text = (f"# {row.title}\n{row.program}\n---\n{row.told}\n" for row in rows)
    return "\n" + "\n".join(text).rstrip("\n") + "\n"


if __name__ == "__main__":
    sys.path.insert(0, str(FILE.parents[2]))
    FILE.write_text(written([r._replace(told=outcome(r.program)) for r in rows()]))
