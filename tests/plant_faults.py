"""Plants one fault at a time in a copy of remat, and shows that a test catches it.

    python tests/plant_faults.py              every fault
    python tests/plant_faults.py stop cast    those whose names contain a word

The faults are in `support/faults.py`. It fails if one is missed. `make faults` runs it.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support.faults import FAULTS, Fault


ROOT = Path(__file__).parents[1]
TIMEOUT = 1200  # seconds; a fault may make a test wait for ever, which catches it


def copy_of_the_repository(folder: Path) -> Path:
    """Copy what git tracks, as it is in the working tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, listed.split("\0")):
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, target)
    return folder


def first_failure(folder: Path, fault: Fault) -> str | None:
    """Run the tests of a fault in a copy; return the first that fails."""
    run = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        result = subprocess.run(
            [*run, *fault.tests],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "a test that does not end"
    lines = result.stdout.splitlines()
    failed = [ln for ln in lines if ln.startswith(("FAILED", "ERROR"))]
    return failed[0] if result.returncode and failed else None


def main(words: list[str]) -> int:
    """Plant the faults that the words choose; return how many were missed."""
    chosen = [f for f in FAULTS if not words or any(word in f.name for word in words)]
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = copy_of_the_repository(Path(temporary))
        for fault in chosen:
            file = folder / fault.file
            sound = file.read_text()
            file.write_text(fault.plant(sound))
            found = first_failure(folder, fault)
            file.write_text(sound)
            missed += found is None
            print(
                f"{'caught' if found else 'MISSED'}  {fault.name}: {found}", flush=True
            )
    print(f"{len(chosen) - missed} of {len(chosen)} faults were caught")
    return missed


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
