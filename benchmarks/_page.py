"""Make docs/benchmarks.md, and its plots, from page.md and what the benchmarks wrote.

page.md has the text, and names tables and plots in double braces:

- ``{{table SCRIPT | TABLE}}``: a table; ``title`` in place of it: its title,
- ``{{rows SCRIPT | TABLE | PATTERN | COLUMN | ...}}``: a table of the rows with such
  names, and of the columns that fit such patterns, or all,
- ``{{number SCRIPT | TABLE | ROW | COLUMN | FORM}}``: one number, rounded,
- ``{{plot SCRIPT | WHAT IT SHOWS}}``: a picture,
- ``{{machines}}``: what was measured on, and when,
- ``{{missed}}``: how many targets are met, and those that are not.

Invariant: page.md has no number that a script measured. Run this as

    python benchmarks/_page.py
"""

import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from _results import Table, reached
from _times import Ratio


HERE = Path(__file__).parent
RESULTS, TEMPLATE = HERE / "results", HERE / "page.md"
PAGE = HERE.parent / "docs/benchmarks.md"
# They have commands of their own, or show a table and keep nothing.
NOT_IN_BENCH = {"architectures", "demo", "gpu", "picture"}

FIELD = re.compile(r"\{\{(\w+)([^}]*)\}\}")
FIRST = "<!-- Made by benchmarks/_page.py from benchmarks/page.md: change that. -->\n\n"

Found = Mapping[str, Mapping[str, Any]]  # of each script, what its file holds


def scripts() -> list[str]:
    """Return the names of the scripts that `make bench` runs."""
    names = (path.stem for path in HERE.glob("*.py"))
    return sorted(n for n in names if not n.startswith("_") and n not in NOT_IN_BENCH)


def found() -> Found:
    """Return what all files hold."""
    files = sorted(RESULTS.glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in files}


# --- What a field stands for ---------------------------------------------------------


def _table(results: Found, script: str, key: str) -> Table:
    tables = results[script]["tables"]
    if key not in tables:
        raise KeyError(f"{script} has no table {key!r}, but {', '.join(tables)}")
    return Table.of_json(tables[key])


def a_table(results: Found, script: str, key: str) -> str:
    """Return a table."""
    return _table(results, script, key).markdown()


def rows(results: Found, script: str, key: str, pattern: str, *columns: str) -> str:
    """Return a table of rows and columns whose names fit patterns, as in a shell."""
    table = _table(results, script, key)
    names = [
        name
        for name in table.columns
        if any(fnmatchcase(name, each) for each in columns or "*")
    ]
    places = [[*table.columns].index(name) for name in names]
    fitting = {
        row: [cells[place] for place in places]
        for row, cells in table.rows.items()
        if fnmatchcase(row, pattern)
    }
    if not (fitting and names):
        raise KeyError(f"{script}, {key}: no row fits {pattern!r}")
    shown = {name: table.columns[name] for name in names}
    return replace(table, columns=shown, rows=fitting).markdown()


FORMS = {"MB": (1e6, ".0f"), "tenths": (1, ".1f"), "count": (1, ",.0f")}


def number(results: Found, script: str, key: str, *place: str) -> str:
    """Return one number of a table, of a ratio its median, in a form of `FORMS`."""
    row, column, form = place
    table = _table(results, script, key)
    cell = table.rows[row][[*table.columns].index(column)]
    unit, written = FORMS[form]
    return format((cell.median if isinstance(cell, Ratio) else cell) / unit, written)


def title(results: Found, script: str, key: str) -> str:
    """Return the title of a table."""
    return _table(results, script, key).title


def plot(results: Found, script: str, text: str) -> str:
    """Return the picture that a script drew."""
    del results
    return f"![{text}](../benchmarks/results/{script}.png)"


def machines(results: Found) -> str:
    """Say what was measured on, and when: first the machine of most scripts."""
    of_machine: dict[str, list[str]] = defaultdict(list)
    for script, result in results.items():
        of_machine[described(result["machine"])].append(script)
    most, *others = sorted(of_machine, key=lambda name: -len(of_machine[name]))
    rest = (f" {', '.join(of_machine[name])}: on {name}." for name in others)
    return f"Measured on {most}, {dates(results)}." + "".join(rest)


def described(machine: Mapping[str, Any]) -> str:
    """Return a machine in words."""
    threads = machine["threads"]
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, "
        f"Python {machine['python']}, torch {machine['torch']}, "
        + ("one thread" if threads == 1 else f"{threads} threads")
    )


def dates(results: Found) -> str:
    """Return the first day and the last."""
    days = sorted({result["date"] for result in results.values()})
    return f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"


def in_short(value: Any) -> str:
    """Return the text of what a row reached: of a ratio its median."""
    return reached(value.median if isinstance(value, Ratio) else value)


def missed(results: Found) -> str:
    """Say how many targets are met, and list the others with what was reached."""
    away: dict[str, list[str]] = defaultdict(list)
    count = 0
    for script, result in results.items():
        for key in result["tables"]:
            for target in _table(results, script, key).targets:
                count += 1
                if not target.met:
                    text = f"{target.row}: {in_short(target.reached)}"
                    away[f"| {script}, {key} | {target.target} |"].append(text)
    met = count - sum(map(len, away.values()))
    said = f"{met} of {count} targets are met."
    if not away:
        return said
    lines = [f"{place} {'; '.join(texts)} |" for place, texts in away.items()]
    head = "| script | target | reached |", "|---|---|---|"
    return f"{said} These are not:\n\n" + "\n".join((*head, *lines))


FIELDS: dict[str, Callable[..., str]] = {
    "table": a_table,
    "rows": rows,
    "number": number,
    "title": title,
    "plot": plot,
    "machines": machines,
    "missed": missed,
}


# --- The page ------------------------------------------------------------------------


def page(results: Found) -> str:
    """Return the page."""

    def replaced(match: re.Match[str]) -> str:
        arguments = [part.strip() for part in match[2].split("|") if part.strip()]
        return FIELDS[match[1]](results, *arguments)

    return FIRST + FIELD.sub(replaced, TEMPLATE.read_text())


def main() -> None:
    """Write the plots and the page; fail where a script has no file."""
    results = found()
    if without := sorted({*scripts()} - {*results}):
        sys.exit(f"no results of {', '.join(without)}: run make bench")
    from _plots import draw

    for script, result in results.items():
        tables = {key: Table.of_json(of) for key, of in result["tables"].items()}
        draw(script, tables, RESULTS)
    PAGE.write_text(page(results))
    print(f"Written: {PAGE}")


if __name__ == "__main__":
    main()
