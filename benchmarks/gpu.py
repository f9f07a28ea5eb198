"""Everything that needs a GPU: tables of memory and times, then the tests marked `gpu`.

- memory and time of a step, beside torch's checkpoint and SAC,
- offloading to pinned host memory: how much of the copies runs beside computation,
- compiled code, under ``.backward()`` and ``torch.func.grad``,
- draws from keys: their time beside torch's, and the same numbers as on the CPU,
- the tests that need a GPU: global streams and generators are replayed, among others.

Reproduce with

    make gpu                 (or, in an environment of your own: make gpu PY=python3)

Without a GPU it says so, and succeeds. Each table says if it was made with a torch that
pyproject.toml does not declare.

Invariant: what cannot be run is a line that says why, never a traceback.
Rejected: to run on a torch whose private API differs. `import remat` refuses it.
"""

import argparse
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from rich.table import Table


ROOT = Path(__file__).parents[1]
PARTS = "steps", "offloading", "compiled", "draws", "tests"
# What the tables need beside torch: remat itself, and the extra `viz`.
NEEDED = {"optree": "optree", "rich": "rich", "typing_extensions": "typing_extensions"}


def reason_to_skip() -> str:
    """Say why nothing can be run on a GPU here, or nothing."""
    if not torch.cuda.is_available():
        return f"skipped: torch {torch.__version__} finds no CUDA device here"
    return ""


def reason_to_fail() -> str:
    """Say why remat cannot be run here, or nothing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        return f"not run: install {', '.join(missing)} first"
    try:
        importlib.import_module("remat")
    except ImportError as error:
        return f"not run: {error}"
    return ""


def differences() -> list[str]:
    """Return what of torch's private API is not as remat expects it."""
    from remat._torch.selftest import failures

    return failures()


def tables(
    parts: list[str], device: str, rounds: int, small: bool
) -> Iterator["Table"]:
    """Measure each part, and yield its tables."""
    from _gpu_draws import equality, times
    from _gpu_steps import compiled, offloading, steps
    from _model import Sizes

    sizes = Sizes(2, 2, 16, 32) if small else Sizes(8, 8, 1024, 2048, heads=16)
    n, backend = (10**4, "aot_eager") if small else (10**8, "inductor")
    made: dict[str, Callable[[], list[Table]]] = {
        "steps": lambda: [steps(sizes, device, rounds)],
        "offloading": lambda: [offloading(sizes, device, rounds)],
        "compiled": lambda: compiled(sizes, device, rounds, backend),
        "draws": lambda: [times(n, device, rounds), equality(n, device)],
    }
    for part in parts:
        yield from made[part]() if part in made else ()


def tested() -> int:
    """Run the tests that are marked `gpu`; return pytest's exit code."""
    if importlib.util.find_spec("pytest") is None:
        print("tests not run: install the extra `test` first")
        return 0
    files = [p for p in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *map(str, files)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}"
    )
    parser.add_argument("--rounds", type=int, default=30, help="of the times")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="to try this script")
    options = parser.parse_args()
    options.parts = options.parts or [*PARTS]
    if unknown := set(options.parts) - set(PARTS):
        parser.error(
            f"no such part: {', '.join(unknown)}; parts are {', '.join(PARTS)}"
        )
    return options


def main() -> int:
    """Measure and print; return 1 if remat cannot be run, or a test fails."""
    options = parse_options()
    if options.device == "cuda" and (reason := reason_to_skip()):
        print(reason)
        return 0
    if reason := reason_to_fail():
        print(reason)
        return 1
    from _device import described, mark
    from _tables import console

    screen = console()
    screen.print(f"{described(options.device)}{mark()}", markup=False)
    if mark():
        for line in differences():
            screen.print(f"private API that differs: {line}", markup=False)
    for made in tables(options.parts, options.device, options.rounds, options.small):
        screen.print(made)
    return tested() if "tests" in options.parts else 0


if __name__ == "__main__":
    sys.exit(main())
