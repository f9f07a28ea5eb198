"""The recipes of CONTRIBUTING.md, each applied to a copy, where its tests pass."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from textwrap import indent

import pytest


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = PAGE.split("## Recipes")[1].split("### Other parts")[0]
REFERENCE = "tests/whole/test_api_reference.py::test_nothing_is_missing"
# What pytest runs in a copy.
TESTS = {
    "policy": [
        "tests/policies/test_policies.py",
        "remat/policies/_dtypes.py",
        f"{REFERENCE}[remat.policies]",
    ],
    "sampler": [
        *("tests/random/test_random_distributions.py", "-k", "logistic or reference"),
        *("tests/random/test_random_samplers.py", "remat/random/_continuous.py"),
        f"{REFERENCE}[remat.random]",
    ],
    "lowering": ["tests/transform/test_off.py"],
    "holder": ["tests/reach/test_state.py", "-k", "text and memory"],
    "report": [
        *("tests/report/test_by_line.py", "remat/_report/by_line.py"),
        *("tests/transform/test_import.py", f"{REFERENCE}[remat]"),
    ],
}
each = pytest.mark.parametrize("name", TESTS)


def diff(name):
    return (ROOT / f"tests/recipes/{name}.diff").read_text()


def section(name):
    return next(s for s in RECIPES.split("### ") if s.startswith(f"A {name}\n"))


@pytest.fixture
def copy(tmp_path):
    skipped = shutil.ignore_patterns("__pycache__", "notebooks", "_build")
    for folder in ("remat", "tests", "docs"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=skipped)
    for file in ("pyproject.toml", "CONTRIBUTING.md", "CHANGELOG.md", "README.md"):
        shutil.copy(ROOT / file, tmp_path)
    return tmp_path


def run(folder, *command):
    paths = os.pathsep.join([str(folder), str(folder / "tests")])
    return subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": paths},
        text=True,
        capture_output=True,
        check=False,
    )


def apply(folder, name):
    path = ROOT / f"tests/recipes/{name}.diff"
    result = run(folder, "git", "apply", "-C1", str(path))
    assert result.returncode == 0, result.stderr


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="git applies diffs")


@needs_git
@each
def test_the_recipe_is_of_the_code_as_it_is_and_uses_names_that_are_there(name, copy):
    apply(copy, name)
    ruff = run(copy, str(Path(sys.executable).with_name("ruff")), "check", "remat")
    assert ruff.returncode == 0, ruff.stdout


@needs_git
@pytest.mark.parametrize(
    "name", ["policy", *(pytest.param(n, marks=pytest.mark.slow) for n in [*TESTS][1:])]
)
def test_the_recipe_passes_its_tests(name, copy):
    apply(copy, name)
    options = ("-q", "-p", "no:cacheprovider", "-p", "no:randomly", "-n", "0")
    result = run(copy, sys.executable, "-m", "pytest", *options, *TESTS[name])
    assert result.returncode == 0, result.stdout
    assert re.search(r"\d+ passed", result.stdout)


@each
def test_the_page_names_every_file_of_the_recipe(name):
    files = re.findall(r"^\+\+\+ b/(.*)$", diff(name), re.MULTILINE)
    assert len(files) > 1
    for file in files:
        is_new = f"--- /dev/null\n+++ b/{file}" in diff(name)
        assert is_new or f"`{file}`" in section(name), file


@each
def test_the_code_of_the_page_is_that_of_the_recipe(name):
    lines = [ln[1:] for ln in diff(name).splitlines() if ln.startswith("+")]
    added = "\n".join(lines)
    (code,) = re.findall(r"(?ms)^```python\n(.*?)^```", section(name))
    code = code.rstrip()
    assert code in added or indent(code, "    ") in added


def test_every_file_that_the_page_names_exists():
    files = re.findall(r"`((?:remat|tests|docs)/[\w./]+\.\w+)`", PAGE)
    assert len(files) > 20
    assert [file for file in files if not (ROOT / file).exists()] == []
