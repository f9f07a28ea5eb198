"""Does in a fresh clone what the README says first, and imports every benchmark.

    python tests/check_clone.py

`make demo` makes its environment and has to succeed: bit-identical parameters, a lower
peak. The extras that the README names for `benchmarks/` are added to that environment,
and each file of it is imported there. `make clone` runs this.

Invariant: nothing is used that the environment for development has. What is not
committed is not in a clone.
"""

import tempfile
import time
from pathlib import Path

from check_dist import ROOT, install, run


# `JAX_PYTHON`, another Python, runs these.
OF_JAX = {"_jax_counts", "_jax_orders"}
IMPORTS = """
import importlib, sys
sys.path.insert(0, "benchmarks")
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def demo(clone: Path) -> None:
    """Run the README's first command; its end is the table that it prints."""
    print(run("make", "demo", "ARGS=--steps 20", cwd=clone), end="")
    assert (clone / "out/demo_memory.png").stat().st_size > 0


def benchmarks(clone: Path) -> int:
    """Install what the README says, and import all; return how many there are."""
    python = clone / ".venv/bin/python"
    install(python, clone / "constraints.txt", f"{clone}[bench,budget]")
    names = {path.stem for path in (clone / "benchmarks").glob("*.py")} - OF_JAX
    run(python, "-c", IMPORTS, *sorted(names), cwd=clone)
    return len(names)


def main() -> None:
    """Clone, and do what a user does."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="remat-clone-") as temporary:
        clone = Path(temporary) / "remat"
        run("git", "clone", "-q", ROOT, clone)
        demo(clone)
        count = benchmarks(clone)
    seconds = time.monotonic() - start
    print(f"make demo succeeds, {count} benchmarks are imported, in {seconds:.0f} s")


if __name__ == "__main__":
    main()
