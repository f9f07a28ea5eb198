"""Run a script that counts what JAX does, in a Python that has jax."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def counted_by_jax(script: Path) -> dict[str, Any] | None:
    """Return what a script printed as JSON; None where there is no jax.

    It runs in the Python that ``JAX_PYTHON`` names, else in this one.
    """
    python = os.environ.get("JAX_PYTHON", sys.executable)
    done = subprocess.run([python, script], capture_output=True, text=True, check=False)
    if not done.returncode:
        return json.loads(done.stdout)
    if "No module named 'jax'" not in done.stderr:
        raise SystemExit(f"JAX could not count:\n{done.stderr}")
    return None
