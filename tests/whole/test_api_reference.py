"""Every public name has an entry in the reference, types, and an example that runs."""

import doctest
import re
import sys
from pathlib import Path
from textwrap import dedent

import pytest
from support.public import MODULES, missing, public_names, text_of


ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs/api"
PAGES = {path.name: path.read_text() for path in sorted(FOLDER.glob("*.md"))}
NAMES = public_names(MODULES)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


# --- The reference of remat -----------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_nothing_is_missing(module):
    assert missing([module], "\n".join(PAGES.values()), PAGES["errors.md"]) == []


def test_what_a_function_returns_does_not_read_as_a_type():
    # Sphinx takes what stands before a colon there for one.
    texts = [text_of(name) for name in NAMES if not name.is_foreign]
    found = [re.search(r"(?m)^Returns:\n    (.*)", text) for text in texts]
    lines = [match[1] for match in found if match]
    assert len(lines) > 50
    assert [line for line in lines if re.search(r"\S:(\s|$)", line)] == []


def test_all_public_modules_are_looked_at():
    files = [p for p in (ROOT / "remat").rglob("*") if p.suffix in {"", ".py"}]
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in files}
    hidden = {name for name in names if any(part[0] == "_" for part in name.split("."))}
    assert names - hidden | {"remat"} == set(MODULES)


def test_the_names_are_those_of_the_modules():
    for module in MODULES:
        names = {name.name for name in NAMES if name.module == module}
        values = vars(sys.modules[module])
        modules = {key for key in values if f"{module}.{key}" in sys.modules}
        assert names == {key for key in values if not key.startswith("_")} - modules
    assert len(NAMES) > 130


VALUES = [name for name in NAMES if name.is_value and not name.is_foreign]


@pytest.mark.parametrize("name", VALUES, ids=lambda name: name.full)
def test_the_example_of_a_value_runs(name):
    # pytest finds docstrings, and not the text below an assignment.
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=OPTIONS)
    example = parser.get_doctest(text_of(name), {}, name.full, None, None)
    assert example.examples
    assert runner.run(example).failed == 0


def test_the_errors_are_raised(monkeypatch, tmp_path):
    monkeypatch.setenv("REMAT_OFFLOAD_DIR", str(tmp_path))  # the page sets it
    path = str(FOLDER / "errors.md")
    ran = doctest.testfile(path, module_relative=False, optionflags=OPTIONS)
    assert ran.failed == 0
    assert ran.attempted > 25


# --- A made-up package that has each of the faults ------------------------------------


PACKAGE = {
    "__init__": """
        from functools import reduce as reduce

        from made_up._things import (
            BrokenError as BrokenError,
            Point as Point,
            bare as bare,
            double as double,
            origin as origin,
            start as start,
        )
        """,
    "_things": '''
        """Things."""


        class BrokenError(Exception):
            """It broke."""


        class Point:
            """A point.

            Example:
                >>> Point(1).x
                1
            """

            def __init__(self, x: int) -> None:
                self.x = x

            def moved(self, by) -> "Point":
                """Move it."""
                return Point(self.x + by)


        def double(x: int) -> int:
            """Double.

            Example:
                >>> double(2)
                4
            """
            return 2 * x


        def bare(x, *more: int):
            """No example."""
            return x


        origin = Point(0)
        """Where all begins.

        Example:
            >>> origin.x
            0
        """
        start = origin
        ''',
}
PAGE = """
.. autofunction:: made_up.double
.. autofunction:: made_up.bare
.. autoclass:: made_up.Point
.. autodata:: made_up.origin
.. py:data:: made_up.start
.. autoexception:: made_up.BrokenError

`reduce` is Python's.
"""
ERRORS = """
>>> raise made_up.BrokenError("at once")
Traceback (most recent call last):
    ...
made_up.BrokenError: at once
"""
FAULTS = [
    "made_up.Point.moved: no type for by",
    "made_up.bare: no example",
    "made_up.bare: no type for the result",
    "made_up.bare: no type for x",
]


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    (tmp_path / "made_up").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "made_up" / f"{name}.py").write_text(dedent(text).lstrip())
    monkeypatch.syspath_prepend(tmp_path)
    yield lambda page, errors=ERRORS: missing(["made_up"], page, errors, "made_up")
    for name in ("made_up", "made_up._things"):
        sys.modules.pop(name, None)


def test_what_has_no_types_or_no_example_is_found(made_up):
    assert sorted(made_up(PAGE)) == FAULTS


@pytest.mark.parametrize("name", ["double", "Point", "origin", "start", "BrokenError"])
def test_a_name_that_is_removed_from_the_page_is_missing(made_up, name):
    lines = [line for line in PAGE.splitlines() if not line.endswith(f".{name}")]
    assert sorted(made_up("\n".join(lines))) == sorted(
        [*FAULTS, f"made_up.{name}: no entry"]
    )


def test_a_name_of_another_package_and_an_error_are_missing(made_up):
    page = PAGE.replace("`reduce`", "It")
    errors = ERRORS.replace("made_up.BrokenError: at once", "")
    found = [
        "made_up.reduce: not named on a page",
        "made_up.BrokenError: no example on the page of errors",
    ]
    assert sorted(made_up(page, errors)) == sorted([*FAULTS, *found])
