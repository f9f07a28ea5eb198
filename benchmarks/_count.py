"""Count the instructions of steps: under callgrind, or perf where there is none.

A script that uses this has a function ``cases`` and is imported again by a process of
its own, which runs under ``valgrind --tool=callgrind``. A helper that is compiled here
reads the counter around the loops. All cases take turns there, for some rounds, of
which the median counts. Without valgrind or a C compiler it is ``perf stat`` on two
lengths of the loop, in processes of their own, of which the difference is taken.

Invariant: the process starts alike each time, hashes included, so that instructions
repeat where times do not. Rejected: to count with the collector off. What a call leaves
to it costs instructions, too.
"""

import argparse
import ctypes
import gc
import importlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import torch
from _systems import brief
from rich.progress import Progress


HELPER = """
#include <valgrind/callgrind.h>
void start(void) { CALLGRIND_START_INSTRUMENTATION; }
void zero(void) { CALLGRIND_ZERO_STATS; }
void dump(const char *label) { CALLGRIND_DUMP_STATS_AT(label); }
"""

ROUNDS = 3
REPEATABLE = {**os.environ, "PYTHONHASHSEED": "0"}

LABEL = re.compile(r"^desc: Trigger: Client Request: (.*)$", re.MULTILINE)
TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)

Step = Callable[[], object]
Label = tuple[str, ...]  # where a table shows it
Counts = dict[Label, float | str]  # of one step; text: why there is none


@dataclass(frozen=True)
class Case:
    """What is counted: ``make`` returns a step, called so many times in each round."""

    make: Callable[[], Step]
    warmup: int = 20
    loops: int = 40


def count(script: str) -> Counts:
    """Count the cases of a script with whichever tool this machine has.

    Args:
        script: The path of a file beside this one. It is imported, and its function
            ``cases`` returns a dict from labels to cases.

    Returns:
        The instructions of one step of each case.
    """
    name = Path(script).stem
    if shutil.which("valgrind") and shutil.which("cc"):
        with tempfile.TemporaryDirectory() as folder:
            return _count_with_callgrind(name, Path(folder))
    if shutil.which("perf"):
        return _count_with_perf(name)
    raise SystemExit(
        "This benchmark counts instructions and found no tool that does. Install "
        "valgrind and a C compiler (apt install valgrind gcc), or perf (linux-perf)."
    )


def _cases(name: str) -> dict[Label, Case]:
    return importlib.import_module(name).cases()


def _failure(case: Case) -> tuple[Step | None, str]:
    """Make and warm up the step; say why it cannot run, if so."""
    try:
        step = case.make()
        for _ in range(case.warmup):
            step()
    except (RuntimeError, NotImplementedError) as error:
        return None, brief(error)
    return step, ""


# --- callgrind -----------------------------------------------------------------------


def _count_with_callgrind(name: str, folder: Path) -> Counts:
    """Run the cases under callgrind and read one dump for each."""
    source, library = folder / "helper.c", folder / "helper.so"
    source.write_text(HELPER)
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", library, source],
        check=True,
        capture_output=True,
    )
    out = f"--callgrind-out-file={folder / 'dump'}"
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", out]
    command = [*valgrind, sys.executable, __file__, name, "--helper", str(library)]
    with (folder / "messages").open("w+") as messages:
        return _run_child(command, name, messages) | _read_dumps(folder, name)


def _run_child(command: list[str], name: str, messages: TextIO) -> Counts:
    """Run the measured process with a progress bar; return the failures it names."""
    failures: Counts = {}
    with (
        Progress(transient=True) as progress,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=messages,
            text=True,
            env=REPEATABLE,
        ) as child,
    ):
        total = len(_cases(name)) * (ROUNDS + 1)
        task = progress.add_task("starting torch under valgrind", total=total)
        assert child.stdout is not None, "it is a pipe"
        for line in child.stdout:
            *label, error = line.rstrip("\n").split("\t")
            progress.update(task, advance=1, description=", ".join(label))
            if error:
                failures[tuple(label)] = error
    if child.returncode:
        messages.seek(0)
        raise SystemExit(f"the measured process failed:\n{messages.read()}")
    return failures


def _measured_process(name: str, library: str) -> None:
    """Be the child: run every case between two calls that read the counter."""
    helper = ctypes.CDLL(library)
    steps: dict[Label, tuple[Step, int]] = {}
    for label, case in _cases(name).items():
        step, error = _failure(case)
        print(*label, error, sep="\t", flush=True)
        if step is not None:
            steps[label] = step, case.loops
    gc.collect()
    gc.freeze()  # collections are of what the steps leave, not of all that is imported
    helper.start()  # once: to switch it off and on means to translate all code again
    for _ in range(ROUNDS):
        for label, (step, loops) in steps.items():
            gc.collect()
            helper.zero()
            for _ in range(loops):
                step()
            helper.dump("\t".join(label).encode())
            print(*label, "", sep="\t", flush=True)


def _read_dumps(folder: Path, name: str) -> Counts:
    """Read label and total of every dump that callgrind wrote."""
    totals: dict[Label, list[int]] = defaultdict(list)
    for dump in folder.glob("dump.*"):
        text = dump.read_text()
        label, total = LABEL.search(text), TOTAL.search(text)
        if label and total:
            totals[tuple(label[1].split("\t"))].append(int(total[1]))
    cases = _cases(name)
    return {
        label: statistics.median(found) / cases[label].loops
        for label, found in totals.items()
    }


# --- perf ----------------------------------------------------------------------------


def _count_with_perf(name: str) -> Counts:
    """Take the difference of two lengths of a loop, which cancels starting torch."""
    counts: Counts = {}
    _quiet()
    for label, case in _cases(name).items():
        _, error = _failure(case)
        if error:
            counts[label] = error
            continue
        loops = ROUNDS * case.loops
        many, none = (_perf_instructions(name, label, n) for n in (loops, 0))
        counts[label] = (many - none) / loops
    return counts


def _perf_instructions(name: str, label: Label, loops: int) -> int:
    """Count the user-mode instructions of a whole process with so many loops."""
    argv = [sys.executable, __file__, name, "--once", *label, str(loops)]
    perf = ["perf", "stat", "-x,", "-e", "instructions:u", *argv]
    done = subprocess.run(
        perf, capture_output=True, text=True, check=True, env=REPEATABLE
    )
    match = re.search(r"^(\d+),.*instructions", done.stderr, re.MULTILINE)
    if match is None:
        raise SystemExit(f"perf counts no instructions here:\n{done.stderr}")
    return int(match[1])


def _single_process(name: str, label: Label, loops: int) -> None:
    """Be the child of perf: warm up and loop."""
    step, error = _failure(_cases(name)[label])
    if step is None:
        raise SystemExit(error)
    for _ in range(loops):
        step()


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def _main() -> None:
    """Be one of the children."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="the script, without .py")
    parser.add_argument("--helper", help="the library that reads the counter")
    parser.add_argument("--once", nargs="+", metavar="LABEL ... LOOPS")
    options = parser.parse_args()
    _quiet()
    if options.helper:
        _measured_process(options.name, options.helper)
    else:
        *label, loops = options.once
        _single_process(options.name, tuple(label), int(loops))


if __name__ == "__main__":
    _main()
