"""Runs programs in a process of their own, of which there is a new one when it dies.

A process imports all, and forks a child that runs programs until one crashes.

Invariant: a program that crashes or hangs is one outcome, and no other is lost.
Rejected: a process for each program. To import torch takes longer than a thousand
programs.
"""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Self, TextIO

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
            self._end()
            return Outcome("crashed", "it hangs")
        return Outcome(*json.loads(line))

    def _start(self) -> None:
        path = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        # As in conftest.py: sums do not depend on threads. The order of sets is fixed.
        fixed = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "PYTHONPATH": path}
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | fixed,
            start_new_session=True,
        )

    def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            os.killpg(process.pid, signal.SIGKILL)  # and its child
            with process:
                process.stdin.close()


# --- In the process ---

_AGAIN = 3  # exit status of a child that a program left in another state


def serve() -> None:
    """Run what is asked for in a child, and in a new one when that dies."""
    load()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for programs that print
    while True:
        child = os.fork()
        if not child:
            os._exit(_serve_lines(answers))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if status == 0:
            return
        if status != _AGAIN:
            _answer(answers, Outcome("crashed", f"exit status {status}"))


def _serve_lines(answers: TextIO) -> int:
    for line in sys.stdin:
        name, configuration = json.loads(line)
        _answer(answers, outcome_of(name, configuration))
        if not is_clean():
            return _AGAIN
    return 0


def _answer(answers: TextIO, outcome: Outcome) -> None:
    answers.write(json.dumps(outcome) + "\n")
    answers.flush()


if __name__ == "__main__":
    serve()
