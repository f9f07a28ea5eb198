"""The drawings of the docs are those that docs/drawings.py makes."""

import importlib
import re
from pathlib import Path

import pytest


DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def drawings(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("drawings")


@pytest.mark.parametrize("name", ["recompute.svg", "policies.svg"])
def test_a_drawing_is_that_of_the_script(drawings, name):
    stored = (DOCS / "_static" / name).read_text()
    assert stored == drawings.PICTURES[name](), "run docs/drawings.py"


def test_the_text_beside_the_drawing_has_its_numbers(drawings):
    page = " ".join((DOCS / "policies.md").read_text().split())
    said = re.search(
        r"Without a policy (\d+) KiB wait in memory and (\d+)% of the FLOPs run again. "
        r"With dots_saveable (\d+) KiB wait and none run again",
        page,
    )
    found = drawings.explained()
    none, dots = found["None"], found["dots_saveable"]
    numbers = [
        *(drawings.kept(none), 100 * none.recomputed_share, drawings.kept(dots)),
        dots.recomputed_share,
    ]
    assert numbers == [*map(int, said.groups()), 0]
