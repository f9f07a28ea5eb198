"""Imports all themes, so that the table of programs is complete."""

import importlib
from pathlib import Path

from support.adversarial.program import PROGRAMS, Program


def load() -> dict[str, Program]:
    """Return all programs."""
    for path in sorted((Path(__file__).parent / "programs").glob("[a-z]*.py")):
        importlib.import_module(f"support.adversarial.programs.{path.stem}")
    return PROGRAMS
