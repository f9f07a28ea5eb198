"""What a benchmark measured: printed as tables, and written as JSON if asked.

A script makes one `Results` and gives it a `Table` for each comparison. With the
variable ``RESULTS=folder``, `Results.finish` writes ``<script>.json`` and its plot
there. `_page.py` makes docs/benchmarks.md from those files.

Invariant: cells are numbers, or text that says why there is none. A column says how its
numbers are written, so the screen, the page and the plots show the same.
Rejected: an exit status for targets that are missed. A script fails if it cannot
measure; the tables, the files and the page say which targets are met.
"""

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from _tables import console, table as rich_table, verdict
from _times import Ratio
from rich.table import Table as RichTable

import remat


Value = float | str | Ratio | None
THOUSANDS = "thousands"  # the form of a large count
CPU_INFO = Path("/proc/cpuinfo")


def written(value: Value, form: str) -> str:
    """Return the text of a cell."""
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, Ratio):
        return str(value)
    return f"{value / 1e3:,.0f}" if form == THOUSANDS else format(value, form)


def reached(value: Value) -> str:
    """Return the text of what a row reached, for which no column has a form."""
    return written(value, "," if isinstance(value, int) else ",.4g")


@dataclass(frozen=True)
class Target:
    """What a row has to reach, and what it did."""

    row: str
    target: str
    reached: Value
    met: bool


@dataclass
class Table:
    """Numbers by row and column.

    Attributes:
        title: what is compared.
        first: the heading of the names of the rows.
        columns: how the numbers of each column are written, by its name.
        rows: the cells of each row, in the order of the columns.
        targets: what the rows have to reach.
    """

    title: str
    first: str
    columns: Mapping[str, str]
    rows: dict[str, list[Value]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def add(self, row: str, *values: Value) -> None:
        """Add a row."""
        self.rows[row] = [*values]

    def aim(self, row: str, target: str, reached: Value, met: bool) -> None:
        """Say what a row has to reach, and what it reached."""
        self.targets.append(Target(row, target, reached, bool(met)))

    def cells(self, row: str) -> list[str]:
        """Return the texts of a row."""
        forms = self.columns.values()
        return [
            written(value, form)
            for value, form in zip(self.rows[row], forms, strict=True)
        ]

    def on_screen(self) -> RichTable:
        """Return the table as it is printed, with a column of targets if it has any."""
        headings = [*self.columns, *(["target"] if self.targets else [])]
        made = rich_table(self.title, self.first, *headings)
        for row in self.rows:
            own = [verdict(t.met, t.target) for t in self.targets if t.row == row]
            verdicts = ["\n".join(own)] if self.targets else []
            made.add_row(row, *self.cells(row), *verdicts)
        return made

    def markdown(self) -> str:
        """Return the table in Markdown, without its title and targets.

        A cell of a system that raised is only `n/a`, which keeps tables narrow.
        """
        head = [self.first, *self.columns]
        rule = f"|---|{'---:|' * len(self.columns)}"
        lines = [[row, *map(_short, self.cells(row))] for row in self.rows]
        first, *others = (f"| {' | '.join(cells)} |" for cells in (head, *lines))
        return "\n".join((first, rule, *others))

    def as_json(self) -> dict[str, Any]:
        """Return what a file holds of it."""
        return {
            "table": self.title,
            "first": self.first,
            "columns": [*self.columns],
            "forms": [*self.columns.values()],
            "rows": {
                row: dict(zip(self.columns, map(_plain, values), strict=True))
                for row, values in self.rows.items()
            },
            "targets": [
                vars(target) | {"reached": _plain(target.reached)}
                for target in self.targets
            ],
        }

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> "Table":
        """Return the table that a file holds."""
        columns = dict(zip(found["columns"], found["forms"], strict=True))
        made = cls(found["table"], found["first"], columns)
        for row, values in found["rows"].items():
            made.add(row, *map(_value, values.values()))
        made.targets = [
            Target(**target | {"reached": _value(target["reached"])})
            for target in found["targets"]
        ]
        return made


def _short(text: str) -> str:
    return "n/a" if text.startswith("n/a") else text


def _plain(value: Value) -> Any:
    return vars(value) if isinstance(value, Ratio) else value


def _value(found: Any) -> Value:
    return Ratio(**found) if isinstance(found, dict) else found


# --- The machine ---------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return what the numbers are of."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def _cpu() -> str:
    """Return the name of the processor, or its kind where it has none."""
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


# --- A script ------------------------------------------------------------------------


class Results:
    """The tables of a script."""

    def __init__(self, script: str) -> None:
        """Begin with no table.

        Args:
            script: Its ``__file__``.
        """
        self.name = Path(script).stem
        self.tables: dict[str, Table] = {}
        self._screen = console()

    def table(
        self,
        key: str,
        title: str,
        first: str,
        columns: Mapping[str, str] | Sequence[str],
        form: str = ",",
    ) -> Table:
        """Return a new table, which `show` prints once it has its rows.

        Args:
            key: What names it in the file.
            title: What is compared.
            first: The heading of the names of the rows.
            columns: The names of the others, with the form of each.
            form: That of all columns, where they are only named.
        """
        if not isinstance(columns, Mapping):
            columns = dict.fromkeys(columns, form)
        self.tables[key] = Table(title, first, columns)
        return self.tables[key]

    def show(self, *tables: Table) -> None:
        """Print tables."""
        for table in tables:
            self._screen.print(table.on_screen())

    def say(self, text: str) -> None:
        """Print a line."""
        self._screen.print(text, markup=False)

    def finish(self) -> None:
        """Say which targets are missed; write the files, if a folder is given."""
        for key, table in self.tables.items():
            for each in table.targets:
                if not each.met:
                    found = reached(each.reached)
                    self.say(f"MISSED {key}, {each.row}: {each.target}; {found}")
        folder = os.environ.get("RESULTS")
        if not folder:
            return
        from _plots import draw  # it is slow to import, and imports this

        path = Path(folder) / f"{self.name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        draw(self.name, self.tables, path.parent)
        self.say(f"Written: {path}")

    def as_json(self) -> dict[str, Any]:
        """Return what the file holds."""
        return {
            "script": self.name,
            "remat": remat.__version__,
            "command": f"python benchmarks/{self.name}.py",
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "machine": machine(),
            "tables": {key: table.as_json() for key, table in self.tables.items()},
        }
