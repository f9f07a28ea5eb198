"""Reads all themes, so that the table of programs is complete.

A theme is a file of `programs/`. In its text `## name` begins a program. What is below
is the body of a function of `wrap`: it returns what is to be compared, or a step.
`## name | case in TABLE` are programs for the entries of a dict, which may follow, each
in a line of `##     name: case`; `## name | recomputes=False` has attributes of
`Program`. What is below `##` alone, and before the first, are definitions, and what is
below `## = NAME` rows: `NAME` is a dict of their parts. All may name what `words.py`
imports. Of cases that `CLOSE` names the last bits may differ.

Invariant: a line of code has the number of its line in the file.
Rejected: functions. Half of their lines were imports, decorators and blank.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from support.adversarial import words
from support.adversarial.program import PROGRAMS, ROWS, Program, add, add_rows
from support.tables import rows_of


FOLDER = Path(__file__).with_name("programs")
WORDS = {name: value for name, value in vars(words).items() if name[:2] != "__"}


def load() -> dict[str, Program]:
    """Return all programs."""
    for path in sorted(FOLDER.glob("*.txt")) if not PROGRAMS else ():
        if path.name != ROWS:
            _read(path)
    return PROGRAMS


def _read(path: Path) -> None:
    module = ModuleType(f"support.adversarial.programs.{path.stem}")
    sys.modules[module.__name__], module.__file__ = module, str(path)
    scope = vars(module)
    scope.update(WORDS)
    for head, entries, line, body in _cells(path.read_text()):
        if head.startswith("= "):
            scope[head[2:]] = {name: parts for name, *parts in rows_of(body)}
        elif head:
            _add(path, scope, head, entries, line, body)
        else:
            _run(path, scope, line, body)
    add_rows(path.stem, scope)


def _add(path, scope, head, entries, line, body) -> None:
    """Add a program, or one for each case."""
    name, _, options = head.partition(" | ")
    case, is_family, table = options.partition(" in")
    known = name.replace(" ", "_")
    given = f"wrap, {case}" if is_family else "wrap"
    indented = [f"def {known}({given}):", *(f" {text}" for text in body)]
    _run(path, scope, line - 1, indented)
    if not is_family:
        add(scope[known], name, **eval(f"dict({options})"))
        return
    cases = {key: eval(text, scope) for key, text in entries}
    for key, value in (cases or eval(table.strip(), scope)).items():
        is_close = key in scope.get("CLOSE", ())
        add(scope[known], f"{name}: {key}", value, is_close=is_close)


def _run(path: Path, scope: dict[str, Any], line: int, body: list[str]) -> None:
    """Run code that has so many lines above it."""
    exec(compile("\n" * line + "\n".join(body), path, "exec"), scope)


def _cells(text: str) -> Iterator[tuple[str, list[list[str]], int, list[str]]]:
    """Yield of each part: the head, entries, how many lines are above, the body."""
    head, entries, line, body = "", [], 0, []
    for number, found in enumerate(text.splitlines(), 1):
        if found.startswith("##     "):
            entries.append(found[7:].split(": ", 1))
            line = number
        elif found.startswith("##"):
            yield head, entries, line, body
            head, entries, line, body = found[2:].strip(), [], number, []
        else:
            body.append(found)
    yield head, entries, line, body
