"""Every Python example in the README and the docs runs, page by page, in order.

Where a page shows output after an example, the example prints it.
What docs/limits.md and docs/randomness.md say in words is tested in
`test_docs_limits.py`.
"""

import contextlib
import doctest
import importlib
import io
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.mistakes import outcome, rows


ROOT = Path(__file__).parents[2]

BLOCK = re.compile(
    r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL
)
# A reader runs an example in a file of another name. That moves columns, too.
SOURCE = re.compile(r"[\w./-]+\.(?:py|md):\d+")
# Its numbers depend on the kernels of the machine.
NOT_COMPARED = {"fit.md"}
LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# Lower these where you can.
MOST_PAGES, MOST_WORDS = 15, 22_000

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page):
    """The examples of a page: the line it starts at, the code, the output or None."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        yield text.count("\n", 0, match.start(1)), match[1], match[2]


def is_like(shown, printed):
    shown, printed = (SOURCE.sub("FILE:LINE", text) for text in (shown, printed))
    return doctest.OutputChecker().check_output(shown, printed, LIKE)


WITH_EXAMPLES = [page for page in PAGES if any(blocks(page))]

# They plan steps of models.
SLOW = "fit.md", "recipes.md"
EXAMPLES = [
    pytest.param(p, marks=pytest.mark.slow) if p.name in SLOW else p
    for p in WITH_EXAMPLES
]


@pytest.mark.parametrize("page", EXAMPLES, ids=lambda page: page.name)
def test_the_examples_of_the_page_run(page, monkeypatch):
    module = ModuleType("example")
    namespace = vars(module)
    monkeypatch.setitem(sys.modules, "example", module)  # where Dynamo looks
    for line, code, shown in blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # Blank lines in front make a traceback name the line in the page.
            exec(compile("\n" * line + code, str(page), "exec"), namespace)
        if shown and printed.getvalue() and page.name not in NOT_COMPARED:
            assert is_like(shown, printed.getvalue()), printed.getvalue()


def test_output_that_differs_is_noticed():
    assert is_like(
        "made at train.py:3,\n  in f: ...\n", "made at page.md:12, in f: 3\n"
    )
    assert not is_like("peak: 12 bytes\n", "peak: 13 bytes\n")


def test_the_docs_are_short():
    """What stands between spaces counts as a word."""
    pages = PAGES[1:]  # without the README, which has a test of its own
    assert len(pages) <= MOST_PAGES
    assert sum(len(page.read_text().split()) for page in pages) <= MOST_WORDS


LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
LINK_TO_PART = re.compile(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)")
FENCED = re.compile(r"^(`{3,}|:{3,}).*?^\1", re.MULTILINE | re.DOTALL)
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def without_examples(page):
    return FENCED.sub("", page.read_text())


def anchors(page):
    """Those of the headings, by the rule of GitHub. That of Sphinx gives the same."""
    headings = HEADING.findall(without_examples(page))
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


READ_AS_FILES = [*PAGES, *sorted((ROOT / "docs/api").glob("*.md"))]


@pytest.mark.parametrize("page", READ_AS_FILES, ids=lambda page: page.name)
def test_relative_links_point_at_files(page):
    """Without a build of the docs: docs/conf.py changes links for Sphinx."""
    for target in LINK.findall(without_examples(page)):
        path = page.parent / target
        assert path.exists(), f"{page.name} links to {target}"
        # docs/notebooks is made by `make docs`.
        assert path.resolve().parent != ROOT / "docs/notebooks", target


@pytest.mark.parametrize("page", READ_AS_FILES, ids=lambda page: page.name)
def test_links_to_a_part_of_a_page_point_at_a_heading(page):
    for target, anchor in LINK_TO_PART.findall(without_examples(page)):
        path = page.parent / target if target else page
        assert anchor in anchors(path), f"{page.name} links to {target}#{anchor}"


def test_an_anchor_is_that_of_github(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# A_b: `c-d`()\n\n```python\n# no heading\n```\n\n## 1. E\n")
    assert anchors(page) == {"a_b-c-d", "1-e"}


# --- Drawings ---


DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def drawings(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("drawings")


@pytest.mark.parametrize("name", ["architectures.svg", "policies.svg", "recompute.svg"])
def test_a_drawing_is_that_of_the_script(drawings, name):
    stored = (DOCS / "_static" / name).read_text()
    assert stored == drawings.PICTURES[name](), "run docs/drawings.py"


def test_the_readme_has_the_numbers_of_the_architectures(drawings):
    text = " ".join((ROOT / "README.md").read_text().split())
    said = re.search(
        r"Of (\d+) small .* bit for bit; with torch's checkpoint (\d+)", text
    )
    assert [*map(int, said.groups())] == [
        drawings.EQUAL["remat"],
        drawings.EQUAL["torch's checkpoint"],
    ]
    assert drawings.EQUAL["remat"] == drawings.SWEPT


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


# --- Mistakes, of which support/mistakes.txt has the programs ---


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=[row.title for row in ROWS])
def test_a_mistake_is_told_what_to_write(row):
    assert outcome(row.program) == row.told


def test_the_table_has_each_program_once():
    assert len({row.program for row in ROWS}) == len(ROWS)
    assert len({row.title for row in ROWS}) == len(ROWS)
