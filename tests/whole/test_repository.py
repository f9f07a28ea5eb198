"""Files of the repository: versions, the changelog, faults, what is built."""

import os
import re
import subprocess
from pathlib import Path

import check_dist
import pytest
import smoke
import yaml
from support.faults import FAULTS

import remat


ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
PYPROJECT = (ROOT / "pyproject.toml").read_text()


# --- Versions -------------------------------------------------------------------------


def releases(text):
    """The sections of a changelog as pairs of a version and a date, or None."""
    heading = r"^## \[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?$"
    headings = re.findall(heading, text, re.MULTILINE)
    assert len(headings) == text.count("\n## "), "a heading is not [version] - date"
    return [(version, date or None) for version, date in headings]


def as_numbers(version):
    return tuple(int(part) for part in version.split("."))


def test_the_changelog_begins_with_this_version():
    (first, no_date), (version, date), *_ = releases(CHANGELOG)
    assert (first, no_date) == ("Unreleased", None)
    assert version == remat.__version__
    assert date


def test_the_versions_of_the_changelog_go_down():
    versions = [as_numbers(version) for version, _ in releases(CHANGELOG)[1:]]
    dates = [date for _, date in releases(CHANGELOG)[1:]]
    assert versions == sorted(set(versions), reverse=True)
    assert dates == sorted(dates, reverse=True)


def test_the_citation_names_the_version_and_its_date():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = dict(releases(CHANGELOG))[remat.__version__]
    assert citation["version"] == remat.__version__
    assert str(citation["date-released"]) == released


def test_the_version_is_written_in_one_file_of_the_package():
    files = (ROOT / "remat").rglob("*.py")
    found = [f for f in files if f'"{remat.__version__}"' in f.read_text()]
    assert found == [ROOT / "remat/__init__.py"]


# --- What make and plants name --------------------------------------------------------


def quick():
    """Return what `make quick` leaves out and what it runs, as make itself says it."""
    ask = "ask:\n\t@echo $(words $(SLOW)) $(SLOW) $(QUICK)\n"
    command = ["make", "-s", "-f", "Makefile", "-f", "-", "ask"]
    # As from a shell, also where make runs the tests.
    env = {name: text for name, text in os.environ.items() if "MAKE" not in name}
    done = subprocess.run(
        command,
        input=ask,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    count, *names = done.stdout.split()
    return names[: int(count)], names[int(count) :]


def test_make_quick_runs_files_of_every_room():
    slow, files = quick()
    rooms = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {Path(file).parent.name for file in files} == rooms
    assert all((ROOT / file).is_file() for file in files)
    assert not {f"tests/{name}" for name in slow} & {*files}


def test_what_make_quick_leaves_out_exists():
    slow, _ = quick()
    found = {name: [*(ROOT / "tests").glob(name.replace("%", "*"))] for name in slow}
    assert [name for name, files in found.items() if not files] == []


# --- What `make dist` checks ----------------------------------------------------------


METADATA = """\
Metadata-Version: 2.4
Name: remat
Version: 0.2.0
Project-URL: Documentation, docs/index.md
Project-URL: Changelog, CHANGELOG.md
Project-URL: Source, remat
Requires-Dist: optree
Requires-Dist: torch>=2.13
Provides-Extra: viz
Requires-Dist: rich; extra == 'viz'
"""
WHEEL = check_dist.source_files() | {"remat-0.2.0.dist-info/licenses/LICENSE"}


def test_the_oldest_torch_is_what_is_installed():
    oldest = check_dist.declared_torch((ROOT / "pyproject.toml").read_text())
    pins = (ROOT / "constraints.txt").read_text()
    found = check_dist.with_torch(pins, oldest).splitlines()
    assert f"torch=={oldest}.*" in found
    assert len(found) == len(pins.splitlines())


def test_a_whole_wheel_passes():
    check_dist.check_wheel(WHEEL, METADATA, "0.2.0")


@pytest.mark.parametrize(
    ("names", "metadata"),
    [
        (WHEEL - {"remat/py.typed"}, METADATA),
        (WHEEL - {"remat/nn/_apply.py"}, METADATA),
        (WHEEL | {"tests/conftest.py"}, METADATA),
        (WHEEL - {"remat-0.2.0.dist-info/licenses/LICENSE"}, METADATA),
        (WHEEL, METADATA.replace("0.2.0", "0.1.0")),
        (WHEEL, METADATA.replace("docs/index.md", "docs/gone.md")),
        (WHEEL, METADATA + "Requires-Dist: numpy\n"),
    ],
)
def test_a_wheel_with_other_files_or_metadata_fails(names, metadata):
    with pytest.raises(AssertionError):
        check_dist.check_wheel(names, metadata, "0.2.0")


def test_an_sdist_without_tests_fails():
    names = {"remat/py.typed"} | check_dist.source_files()
    with pytest.raises(AssertionError, match="tests"):
        check_dist.check_sdist(names)


# --- What a hosted service and a release need -----------------------------------------


def test_hosted_ci_runs_what_every_machine_runs():
    text = (ROOT / ".github/workflows/ci.yml").read_text()
    workflow = yaml.safe_load(text)
    assert {"push", "pull_request"} <= workflow[True].keys()  # YAML reads `on` so
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    *_, python, last = job["steps"]
    assert last == {"run": ".ci/run"}
    assert os.access(ROOT / ".ci/run", os.X_OK)
    oldest = re.search(r'requires-python = ">=([\d.]+)"', PYPROJECT)[1]
    assert python["with"]["python-version"] == oldest
    assert all((ROOT / f).is_file() for f in _files_of(python))


def test_ci_runs_each_command_that_the_page_on_contributing_lists():
    page, script = ((ROOT / f).read_text() for f in ("CONTRIBUTING.md", ".ci/run"))
    listed = re.findall(r"^    make (\w+) ", page, re.MULTILINE)
    run = re.findall(r"^make (.*)", script, re.MULTILINE)
    assert {"clone", "test"} <= {*listed}
    # Its tests are among those of `make test`.
    assert {*listed} - {"quick"} <= {*" ".join(run).split()}


def _files_of(step):
    return step["with"]["cache-dependency-path"].split()


# --- Faults to plant ---


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault):
    text = (ROOT / fault.file).read_text()
    assert fault.plant(text) != text
    files = [test for test in fault.tests if test[0] != "-"]
    assert all((ROOT / test).exists() for test in files)


def test_a_fault_whose_text_is_gone_is_an_error():
    with pytest.raises(ValueError, match="0 of"):
        FAULTS[0].plant("another text")


# --- The smoke test ---


@pytest.mark.parametrize("check", smoke.CHECKS, ids=lambda check: check.__name__)
def test_the_smoke_test_passes(check):
    check()


@pytest.mark.parametrize("check", [smoke.backward, smoke.func_grad, smoke.policy])
def test_an_identity_in_place_of_remat_fails_it(check, monkeypatch):
    monkeypatch.setattr(smoke.remat, "remat", lambda fn, **options: fn)
    with pytest.raises(AssertionError, match="Counter"):
        check()
