"""Reads what fails today, and why, from `known.txt`.

Invariant: a line is one program, below the configurations that it fails in.
Rejected: patterns. One would go on to excuse a program that does not fail any more.
"""

from pathlib import Path

from support.adversarial.configurations import OURS
from support.adversarial.contexts import CONTEXTS


def read() -> dict[tuple[str, str], str]:
    """Return the reason for each program and configuration."""
    found: dict[tuple[str, str], str] = {}
    reason, configurations = "", [""]
    for line in Path(__file__).with_suffix(".txt").read_text().splitlines():
        if line.startswith("["):
            head, _, reason = line[1:].partition("] ")
            configurations = head.split()
            assert {*OURS, *CONTEXTS} >= {*configurations}, line
        elif line and not line.startswith("#"):
            found.update(((line, name), reason) for name in configurations)
    return found
