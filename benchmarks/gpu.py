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
Rejected: to refuse a torch that is not declared. Numbers with a mark are better than
none, where the only GPU at hand has no other.
"""

import argparse
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


ROOT = Path(__file__).parents[1]
PARTS = "steps", "offloading", "compiled", "draws", "tests"
# What remat needs beside torch, and its extra `viz`.
NEEDED = "optree", "typing_extensions", "rich"


# --- Whether it can be run -----------------------------------------------------------


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
    except Exception as error:  # noqa: BLE001, an older torch may lack anything
        return f"not run: {described(error)}"
    return ""


def described(error: Exception) -> str:
    """Return an error as one line; remat's own says all that is needed."""
    text = str(error).partition("\n")[0]
    return text if text.startswith("remat:") else f"{type(error).__name__}: {text}"


# --- The parts -----------------------------------------------------------------------


def tables(part: str, device: str, rounds: int, small: bool) -> "list[Table]":
    """Measure one part, and return its tables."""
    import _gpu_draws
    import _gpu_steps
    from _model import Sizes

    sizes = Sizes(2, 2, 16, 32) if small else Sizes(8, 8, 1024, 2048, heads=16)
    if part == "steps":
        return [_gpu_steps.steps(sizes, device, rounds)]
    if part == "offloading":
        return [_gpu_steps.offloading(sizes, device, rounds)]
    if part == "compiled":
        backend = "aot_eager" if small else "inductor"
        return _gpu_steps.compiled(sizes, device, rounds, backend)
    times = _gpu_draws.times(10**4 if small else 10**8, device, rounds)
    return [times, _gpu_draws.equality(10**4 if small else 10**6, device)]


def shown(part: str, options: argparse.Namespace, screen: "Console") -> bool:
    """Print the tables of a part, or why there are none; return whether there are."""
    try:
        found = tables(part, options.device, options.rounds, options.small)
    except Exception as error:  # noqa: BLE001, the other parts are still worth running
        screen.print(f"{part}: not run: {described(error)}", markup=False)
        return False
    for made in found:
        screen.print(made)
    return True


def gpu_tests() -> list[Path]:
    """Return the files with tests that are marked `gpu`."""
    files = sorted(ROOT.glob("tests/**/test_*.py"))
    return [path for path in files if "mark.gpu" in path.read_text()]


def tested() -> bool:
    """Run the tests that are marked `gpu`; return whether they pass."""
    if importlib.util.find_spec("pytest") is None:
        print("tests: not run: install the extra `test` first")
        return False
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *gpu_tests()]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


# --- The script ----------------------------------------------------------------------


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
    """Measure and print; return 1 if a part cannot be run, or a test fails."""
    options = parse_options()
    if options.device == "cuda" and (reason := reason_to_skip()):
        print(reason)
        return 0
    if reason := reason_to_fail():
        print(reason)
        return 1
    from _device import machine, mark
    from _tables import console

    screen = console()
    screen.print(f"{machine(options.device)}{mark()}", markup=False)
    for line in differences() if mark() else ():
        screen.print(f"torch differs in: {line}", markup=False)
    parts = [part for part in options.parts if part != "tests"]
    results = [shown(part, options, screen) for part in parts]
    if "tests" in options.parts:
        results.append(tested())
    return 0 if all(results) else 1


def differences() -> list[str]:
    """Return what of torch is not as remat expects it."""
    from remat._torch import versions

    return versions.differences()


if __name__ == "__main__":
    sys.exit(main())
