"""Runs programs in a process of their own, which is started again when it dies.

Invariant: a program that crashes or hangs is one outcome, and no other is lost.
Rejected: a process for each program. To import torch takes longer than all programs.
"""

import gc
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from support.adversarial.outcomes import Outcome, is_clean, outcome_of
from support.adversarial.themes import load


TESTS = Path(__file__).parents[2]
COMMAND = [sys.executable, "-W", "ignore", "-m", "support.adversarial.serving"]
PATIENCE = 120  # seconds for a program that takes some milliseconds: it hangs


class Server:
    """A process that runs programs."""

    def __init__(self) -> None:
        self._process: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def outcome_of(self, name: str, configuration: str) -> Outcome:
        """Return what becomes of a program in a configuration."""
        if self._process is None:
            self._start()
        process = self._process
        process.stdin.write(json.dumps([name, configuration]) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        line = process.stdout.readline() if ready else ""
        if not line:
            return Outcome("crashed", f"exit status {self._end()}")
        *fields, clean = json.loads(line)
        if not clean:
            self._end()
        return Outcome(*fields)

    def _start(self) -> None:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        # As in conftest.py: sums do not depend on threads.
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )

    def _end(self) -> int | None:
        if self._process is None:
            return None
        process, self._process = self._process, None
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
        return process.returncode


def serve() -> None:
    """Run what is asked for, line by line."""
    load()
    gc.freeze()  # what is there is no garbage: it need not be looked at again
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for programs that print
    for line in sys.stdin:
        name, configuration = json.loads(line)
        outcome = outcome_of(name, configuration)
        answers.write(json.dumps([*outcome, is_clean()]) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve()
