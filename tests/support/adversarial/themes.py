"""Reads all themes, so that the table of programs is complete.

A theme is a file of `programs/`. In its text `## name` begins a program. What is below
is the body of a function of `wrap`: it returns what is to be compared, or a step.
`## name | case in TABLE` are programs for the entries of a dict, and `## name |
recomputes=False` has attributes of `Program`. What is below `##` alone, and before the
first, are definitions. All may name what `words.py` imports.

Invariant: a line of code has the number of its line in the file.
Rejected: functions. Half of their lines were imports, decorators and blank.
"""

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from support.adversarial import words
from support.adversarial.program import PROGRAMS, Program, add, add_rows, family


FOLDER = Path(__file__).with_name("programs")
WORDS = {name: value for name, value in vars(words).items() if name[:2] != "__"}


def load() -> dict[str, Program]:
    """Return all programs."""
    for path in sorted(FOLDER.glob("[a-z]*")) if not PROGRAMS else ():
        if path.suffix == ".py":
            importlib.import_module(f"support.adversarial.programs.{path.stem}")
        elif path.stem not in ("rows", "asked"):
            _read(path)
    return PROGRAMS


def _read(path: Path) -> None:
    module = ModuleType(f"support.adversarial.programs.{path.stem}")
    sys.modules[module.__name__], module.__file__ = module, str(path)
    scope = vars(module)
    scope.update(WORDS)
    for head, line, body in _cells(path.read_text()):
        name, _, options = head.partition(" | ")
        case = re.match(r"(\w+) in ", options)
        given = f"wrap, {case[1]}" if case else "wrap"
        known = name.replace(" ", "_")
        if head:
            body = [f"def {known}({given}):", *(f" {text}" for text in body)]
        above = "\n" * (line - bool(head))
        exec(compile(above + "\n".join(body), path, "exec"), scope)
        if case:
            family(**eval(options[case.end() :], scope))(scope[known])
        elif head:
            add(scope[known], name, **eval(f"dict({options})"))
    add_rows(path.stem, scope)


def _cells(text: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield the head of each part, how many lines are above its body, and that."""
    head, line, body = "", 0, []
    for number, found in enumerate(text.splitlines(), 1):
        if found.startswith("##     "):
            head, line = f"{head} {found[7:]}", number
        elif found.startswith("##"):
            yield head, line, body
            head, line, body = found[2:].strip(), number, []
        else:
            body.append(found)
    yield head, line, body
