"""Files of the repository: versions, the changelog, templates, what is built."""

import os
import re
import subprocess
from pathlib import Path

import check_dist
import pytest
import yaml

import remat


ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
TEMPLATES = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
PYPROJECT = (ROOT / "pyproject.toml").read_text()
FORMS = [path for path in TEMPLATES if path.stem != "config"]


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


def test_a_section_that_is_no_version_is_noticed():
    assert releases("\n## [1.0.0] - 2026-01-02\n") == [("1.0.0", "2026-01-02")]
    with pytest.raises(AssertionError, match="a heading is not"):
        releases("\n## [1.0.0] - 2026-01-02\n\n## 0.9\n")


def test_the_citation_names_the_version_and_its_date():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    released = dict(releases(CHANGELOG))[remat.__version__]
    assert citation["version"] == remat.__version__
    assert str(citation["date-released"]) == released


def test_the_version_is_written_in_one_file_of_the_package():
    files = (ROOT / "remat").rglob("*.py")
    found = [f for f in files if f'"{remat.__version__}"' in f.read_text()]
    assert found == [ROOT / "remat/__init__.py"]


# --- Templates ------------------------------------------------------------------------


def test_there_is_a_form_for_each_kind_of_issue():
    assert {path.stem for path in FORMS} == {
        *("bug_report", "feature", "wrong_gradient"),
    }
    config = yaml.safe_load((ROOT / ".github/ISSUE_TEMPLATE/config.yml").read_text())
    assert config["blank_issues_enabled"] is False


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_what_github_requires(path):
    form = yaml.safe_load(path.read_text())
    assert {"name", "description", "body"} <= form.keys()
    fields = [part for part in form["body"] if part["type"] != "markdown"]
    ids = [field["id"] for field in fields]
    assert len(ids) == len(set(ids))
    for field in fields:
        assert field["attributes"]["label"]
        assert field["type"] in {"textarea", "dropdown"}
        assert isinstance(field["validations"]["required"], bool)
        assert (field["type"] == "dropdown") == ("options" in field["attributes"])


@pytest.mark.parametrize("name", ["bug_report", "wrong_gradient"])
def test_a_report_needs_versions_a_script_and_both_results(name):
    form = yaml.safe_load((ROOT / f".github/ISSUE_TEMPLATE/{name}.yml").read_text())
    required = {
        field["id"]
        for field in form["body"]
        if field.get("validations", {}).get("required")
    }
    assert required == {"script", "expected", "actual", "versions"}


def test_a_pull_request_has_a_list_to_check():
    text = (ROOT / ".github/pull_request_template.md").read_text()
    assert text.count("- [ ] ") == 4
    for target in re.findall(r"`make (\w+)`", text):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


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
    assert len(files) > 100
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
    "names",
    [
        WHEEL - {"remat/py.typed"},
        WHEEL - {"remat/nn/_apply.py"},
        WHEEL | {"tests/conftest.py"},
        WHEEL - {"remat-0.2.0.dist-info/licenses/LICENSE"},
    ],
)
def test_a_wheel_that_has_too_few_or_too_many_files_fails(names):
    with pytest.raises(AssertionError):
        check_dist.check_wheel(names, METADATA, "0.2.0")


@pytest.mark.parametrize(
    "metadata",
    [METADATA.replace("0.2.0", "0.1.0"), METADATA + "Requires-Dist: numpy\n"],
)
def test_a_wheel_with_other_metadata_fails(metadata):
    with pytest.raises(AssertionError):
        check_dist.check_wheel(WHEEL, metadata, "0.2.0")


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


def _files_of(step):
    return step["with"]["cache-dependency-path"].split()


def test_a_release_is_tagged_with_its_version():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    release = text.partition("\n## Releases\n")[2].partition("\n## ")[0]
    version = re.search(r"git tag -a v([\d.]+) ", release)[1]
    assert f"## [{version}] - " in release
    for name in re.findall(r"`([\w./]+\.(?:md|py|cff))`", release):
        assert (ROOT / name).is_file()


def test_a_vulnerability_has_a_private_way_and_no_made_up_address():
    text = (ROOT / "SECURITY.md").read_text()
    assert "## How to report one" in text
    assert not re.search(r"@|https?:", text)


def test_ci_builds_what_is_released():
    assert re.search(r"^make .* dist", (ROOT / ".ci/run").read_text(), re.MULTILINE)
