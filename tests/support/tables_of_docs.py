"""The tables of docs/migrating.md: their calls, and ours."""

import re
from pathlib import Path


PAGE = Path(__file__).parents[2] / "docs/migrating.md"
# A bar in code is escaped in a table.
CELL = re.compile(r"(?<!\\)\|")
CODE = re.compile(r"`([^`]+)`")


def rows(section):
    """Return the code in the rows of a section, in pairs: theirs and ours."""
    text = PAGE.read_text().split(f"## {section}\n")[1].split("\n## ")[0]
    tables = re.findall(
        r"^\| [^\n]* \| remat \|\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE
    )
    lines = "".join(tables).splitlines()
    cells = [CELL.split(line)[1:-1] for line in lines]
    return [
        tuple(CODE.findall(cell.replace(r"\|", "|")) for cell in row) for row in cells
    ]


def run(code, names):
    """Run a call, a `with` or a decorator, and return the value of a call."""
    if code.startswith("with "):
        return exec(f"{code} pass", names)
    if code.startswith("@"):
        return exec(f"{code}\ndef decorated(x): return x", names)
    return eval(code, names)
