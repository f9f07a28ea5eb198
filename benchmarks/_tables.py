"""What the tables of the benchmarks have in common: width, cells, verdicts."""

from rich.console import Console
from rich.table import Table


def console() -> Console:
    """Return where tables are printed: in a file they are as wide as they need."""
    screen = Console()
    return screen if screen.is_terminal else Console(width=140)


def table(title: str, first: str, *headings: str) -> Table:
    """Return a table whose first column is text, and the others numbers."""
    made = Table(title=title)
    made.add_column(first)
    for heading in headings:
        made.add_column(heading, justify="right")
    return made


def verdict(met: bool, bound: str) -> str:
    """Say whether a number meets its target."""
    return f"{'met' if met else 'MISSED'} ({bound})"


def number(value: float | str, form: str = ",.0f") -> str:
    """Return the text of a cell; text says why there is no number."""
    return value if isinstance(value, str) else format(value, form)
