"""Builds a wheel and an sdist, and tries each one in a fresh environment.

    python tests/check_dist.py

The environment has the oldest torch that `pyproject.toml` declares, and no extras.
`tests/smoke.py` then runs outside of the repository. `make dist` runs it. `out/dist/`
has the wheel and the sdist in the end.

Invariant: the installed package is the built one; nothing is read from the repository.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path


ROOT = Path(__file__).parents[1]
DIST = ROOT / "out/dist"
# What extras bring. `import remat` must do without.
EXTRAS = ("numpy", "scipy", "matplotlib", "rich")
# torch says so when it finds no NumPy.
QUIET = ("-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning")

IMPORTED = f"""
import importlib.metadata, sys
import torch
before = set(sys.modules)
import remat, remat.testing
late = set(sys.modules) - before
assert not late & set({EXTRAS!r}), late
assert importlib.metadata.version("remat") == remat.__version__
print(remat.__version__, torch.__version__, remat.__file__)
"""


# --- What is in the files -------------------------------------------------------------


def declared_torch(pyproject: str) -> str:
    """Return the oldest torch that a project declares, `2.13` say."""
    dependencies = tomllib.loads(pyproject)["project"]["dependencies"]
    found = [re.fullmatch(r"torch>=([\d.]+)", text) for text in dependencies]
    (bound,) = filter(None, found)
    return bound[1]


def with_torch(constraints: str, oldest: str) -> str:
    """Return constraints whose torch is a release of that version."""
    pin = f"torch=={oldest}.*"
    text, count = re.subn(r"^torch==.*$", pin, constraints, flags=re.MULTILINE)
    assert count == 1, "constraints.txt does not pin torch"
    return text


def source_files() -> set[str]:
    """Return the files of the package, as they are in a wheel."""
    files = (ROOT / "remat").rglob("*")
    kept = (f for f in files if f.suffix == ".py" or f.name == "py.typed")
    return {str(f.relative_to(ROOT)) for f in kept}


def check_wheel(names: set[str], metadata: str, version: str) -> None:
    """Raise unless a wheel has the package, its metadata, and nothing else."""
    inside = {name for name in names if ".dist-info/" not in name}
    assert inside == source_files(), inside ^ source_files()
    assert "remat/py.typed" in inside
    assert any(name.endswith("/licenses/LICENSE") for name in names)
    fields = HeaderParser().parsestr(metadata)
    assert (fields["Name"], fields["Version"]) == ("remat", version)
    needed = [n for n in fields.get_all("Requires-Dist") if "extra ==" not in n]
    assert sorted(re.match(r"[\w-]+", n)[0] for n in needed) == ["optree", "torch"]
    links = dict(each.split(", ") for each in fields.get_all("Project-URL"))
    assert links.keys() == {"Documentation", "Changelog", "Source"}
    assert all((ROOT / page).exists() for page in links.values()), links


def check_sdist(names: set[str]) -> None:
    """Raise unless an sdist has what is needed to change, test and document remat."""
    missing = source_files() - names
    assert not missing, missing
    wanted = ("tests", "docs", "notebooks", "benchmarks", ".ci", ".github")
    for folder in wanted:
        assert any(name.startswith(f"{folder}/") for name in names), folder
    files = {"pyproject.toml", "Makefile", "constraints.txt", "README.md", "LICENSE"}
    files |= {"CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "tests/smoke.py"}
    assert files <= names, files - names
    unwanted = [n for n in names if n.startswith(("out/", "docs/_build", ".venv"))]
    assert not unwanted, unwanted


def read_wheel(path: Path) -> tuple[set[str], str]:
    """Return the names of the files in a wheel, and its metadata."""
    with zipfile.ZipFile(path) as file:
        names = set(file.namelist())
        (metadata,) = (n for n in names if n.endswith(".dist-info/METADATA"))
        return names, file.read(metadata).decode()


def read_sdist(path: Path) -> set[str]:
    """Return the names of the files in an sdist, below its folder."""
    with tarfile.open(path) as file:
        return {name.partition("/")[2] for name in file.getnames()}


# --- Build, install, run --------------------------------------------------------------


def environment(folder: Path) -> Path:
    """Make an environment without pip; return its Python."""
    venv.create(folder, symlinks=True)
    return folder / "bin/python"


def run(*command: object, cwd: Path = ROOT) -> str:
    """Run a command; return what it printed."""
    # A make that it starts is a user's: it knows nothing of the make that runs this.
    left_out = {"PYTHONPATH", "VENV", "TORCH", "PY", "ARGS"}
    surroundings = {
        name: text
        for name, text in os.environ.items()
        if name not in left_out and "MAKE" not in name
    }
    # What pip builds in isolation takes its pins from the environment.
    surroundings["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    texts = [str(word) for word in command]
    result = subprocess.run(
        texts, cwd=cwd, env=surroundings, text=True, capture_output=True, check=False
    )
    if result.returncode:
        raise SystemExit(f"{' '.join(texts)}\n{result.stdout}{result.stderr}")
    return result.stdout


def install(python: Path, constraints: Path, *what: object) -> None:
    """Install a package into an environment, with pins."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    # Compiling all of torch takes longer than what is imported of it.
    flags = ("-q", "--no-compile", "-c", constraints)
    run(*pip, "--python", python, "install", *flags, *what)


def build(folder: Path) -> tuple[Path, Path]:
    """Build with the pinned hatchling; return the wheel and the sdist."""
    python = environment(folder / "build")
    install(python, ROOT / "constraints.txt", "hatchling")
    shutil.rmtree(DIST, ignore_errors=True)
    run(python, "-m", "hatchling", "build", "-d", DIST)
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    return wheel, sdist


def try_out(package: Path, python: Path, folder: Path) -> str:
    """Use an installed package; return the torch that it says it has."""
    said = run(python, "-I", *QUIET, "-c", IMPORTED, cwd=folder)
    version, torch, file = said.split()
    assert Path(file).is_relative_to(folder), f"{file} is not the installed package"
    print(run(python, "-I", *QUIET, ROOT / "tests/smoke.py", cwd=folder), end="")
    assert package.name.startswith(f"remat-{version}")
    return torch


def main() -> None:
    """Build, look inside, install and run."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="remat-dist-") as temporary:
        folder = Path(temporary)
        wheel, sdist = build(folder)
        version = wheel.name.split("-")[1]
        check_wheel(*read_wheel(wheel), version)
        check_sdist(read_sdist(sdist))
        oldest = declared_torch((ROOT / "pyproject.toml").read_text())
        constraints = folder / "constraints.txt"
        pins = (ROOT / "constraints.txt").read_text()
        constraints.write_text(with_torch(pins, oldest))
        python = environment(folder / "environment")
        # The second takes the place of the first, beside the same torch.
        for package, flags in (
            (wheel, ()),
            (sdist, ("--no-deps", "--force-reinstall")),
        ):
            print(f"{package.name} ({package.stat().st_size / 1024:.0f} kB)")
            install(python, constraints, *flags, package)
            torch = try_out(package, python, folder)
            assert torch.startswith(f"{oldest}."), torch
    print(f"wheel and sdist install and pass, in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
