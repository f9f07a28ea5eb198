"""Instructions that a checkpointed call costs beyond the plain one.

Counted are forward and backward of four ops on four floats, on one thread, so that it
is all bookkeeping; and of a small module, a normalized MLP of six parameters.
Instructions are stable where times are not: they repeat to a few in a hundred.
Reproduce with

    python benchmarks/overhead.py

The script runs itself again under ``valgrind --tool=callgrind``, switching the counter
on around the loop through a helper that it compiles; without valgrind or a C compiler
it uses ``perf stat`` on two loop lengths and takes the difference.
"""

import argparse
import ctypes
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import torch
from _systems import BASELINE, SYSTEMS, Wrapper, brief
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.func import grad


WARMUP = 20
LOOPS = 200
MODES = (".backward()", "func.grad", "module")
TARGET_SHARE = 0.52  # of the baseline, both beyond plain, under .backward()
TARGET_FUNC_GRAD = 500_000  # instructions beyond plain
HELPER = """
#include <valgrind/callgrind.h>
void on(void) { CALLGRIND_START_INSTRUMENTATION; CALLGRIND_ZERO_STATS; }
void off(const char *label) {
    CALLGRIND_DUMP_STATS_AT(label);
    CALLGRIND_STOP_INSTRUMENTATION;
}
"""

LABEL = re.compile(r"^desc: Trigger: Client Request: (.*)\t(.*)$", re.MULTILINE)
TOTAL = re.compile(r"^(?:totals|summary): (\d+)", re.MULTILINE)

Counts = dict[tuple[str, str], float | str]  # by mode and system; text: why not


# --- The work --------------------------------------------------------------------


def body(x: Tensor) -> Tensor:
    """Run four ops, each of which saves something for its backward."""
    return torch.sin(torch.tanh(x * 2.0).exp())


class Block(nn.Module):
    """Hold six parameters in three modules."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize, and add what the MLP makes of it."""
        return x + self.down(torch.relu(self.up(self.norm(x))))


def make_step(mode: str, wrap: Wrapper) -> Callable[[], object]:
    """Return one forward and backward through what ``wrap`` makes of the work."""
    fn = wrap(Block() if mode == "module" else body)
    x = torch.linspace(-1, 1, 8 if mode == "module" else 4)
    if mode == "func.grad":
        gradient = grad(lambda x: fn(x).sum())
        return lambda: gradient(x)
    leaf = x.requires_grad_()

    def step() -> None:
        fn(leaf).sum().backward()
        leaf.grad = None

    return step


def failure(step: Callable[[], object]) -> str | None:
    """Warm up; say why the step cannot run, if so."""
    try:
        for _ in range(WARMUP):
            step()
    except (RuntimeError, NotImplementedError) as error:
        return brief(error)
    return None


# --- callgrind -------------------------------------------------------------------


def count_with_callgrind(folder: Path) -> Counts:
    """Run this script under callgrind and read one dump per mode and system."""
    source, library = folder / "helper.c", folder / "helper.so"
    source.write_text(HELPER)
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-o", library, source],
        check=True,
        capture_output=True,
    )
    out = f"--callgrind-out-file={folder / 'dump'}"
    valgrind = ["valgrind", "--tool=callgrind", "--instr-atstart=no", out]
    command = [*valgrind, sys.executable, __file__, "--helper", str(library)]
    with (folder / "messages").open("w+") as messages:
        return run_child(command, messages) | read_dumps(folder)


def run_child(command: list[str], messages: TextIO) -> Counts:
    """Run the measured process with a progress bar; return the failures it names."""
    failures: Counts = {}
    with (
        Progress(transient=True) as progress,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=messages, text=True
        ) as child,
    ):
        total = len(MODES) * len(SYSTEMS)
        task = progress.add_task("starting torch under valgrind", total=total)
        assert child.stdout is not None, "it is a pipe"
        for line in child.stdout:
            mode, system, error = line.rstrip("\n").split("\t")
            progress.update(task, advance=1, description=f"{mode}, {system}")
            if error:
                failures[mode, system] = error
    if child.returncode:
        messages.seek(0)
        raise SystemExit(f"the measured process failed:\n{messages.read()}")
    return failures


def measured_process(library: str) -> None:
    """Be the child: run every step between two calls that switch the counter."""
    helper = ctypes.CDLL(library)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for mode in MODES:
        for system, wrap in SYSTEMS.items():
            step = make_step(mode, wrap)
            error = failure(step)
            if error is None:
                helper.on()
                for _ in range(LOOPS):
                    step()
                helper.off(f"{mode}\t{system}".encode())
            print(mode, system, error or "", sep="\t", flush=True)


def read_dumps(folder: Path) -> Counts:
    """Read label and total of every dump that callgrind wrote."""
    counts: Counts = {}
    for dump in folder.glob("dump.*"):
        text = dump.read_text()
        label, total = LABEL.search(text), TOTAL.search(text)
        if label and total:
            counts[label[1], label[2]] = int(total[1]) / LOOPS
    return counts


# --- perf ------------------------------------------------------------------------


def perf_instructions(mode: str, system: str, loops: int) -> int:
    """Count the user-mode instructions of a whole process with so many loops."""
    argv = [sys.executable, __file__, "--once", mode, system, str(loops)]
    perf = ["perf", "stat", "-x,", "-e", "instructions:u", *argv]
    done = subprocess.run(perf, capture_output=True, text=True, check=True)
    match = re.search(r"^(\d+),.*instructions", done.stderr, re.MULTILINE)
    if match is None:
        raise SystemExit(f"perf counts no instructions here:\n{done.stderr}")
    return int(match[1])


def count_with_perf() -> Counts:
    """Take the difference of two loop lengths, which cancels starting torch."""
    counts: Counts = {}
    torch.set_num_threads(1)
    for mode in MODES:
        for system, wrap in SYSTEMS.items():
            if error := failure(make_step(mode, wrap)):
                counts[mode, system] = error
                continue
            many, few = (perf_instructions(mode, system, n) for n in (2_000, 0))
            counts[mode, system] = (many - few) / 2_000
    return counts


def single_process(mode: str, system: str, loops: int) -> None:
    """Be the child of perf: warm up and loop."""
    torch.set_num_threads(1)
    step = make_step(mode, SYSTEMS[system])
    for _ in range(WARMUP + loops):
        step()


# --- The table -------------------------------------------------------------------


def count() -> Counts:
    """Count with whichever tool this machine has."""
    if shutil.which("valgrind") and shutil.which("cc"):
        with tempfile.TemporaryDirectory() as folder:
            return count_with_callgrind(Path(folder))
    if shutil.which("perf"):
        return count_with_perf()
    raise SystemExit(
        "This benchmark counts instructions and found no tool that does. Install "
        "valgrind and a C compiler (apt install valgrind gcc), or perf (linux-perf)."
    )


def targets(beyond: Counts) -> list[tuple[bool, str]]:
    """Say of each mode whether remat meets its target."""
    ours, torchs = (beyond[".backward()", name] for name in ("remat", BASELINE))
    results = [(False, "no number")] * 3
    if not isinstance(ours, str) and not isinstance(torchs, str):
        share = ours / torchs
        met = share <= TARGET_SHARE
        text = f"{share:.2f} of {BASELINE} (<= {TARGET_SHARE})"
        results[0] = met, f"{'met' if met else 'MISSED'}: {text}"
    ours = beyond["func.grad", "remat"]
    if not isinstance(ours, str):
        met = ours <= TARGET_FUNC_GRAD
        results[1] = met, f"{'met' if met else 'MISSED'} (<= {TARGET_FUNC_GRAD:,})"
    ours, torchs = (beyond["module", name] for name in ("remat", BASELINE))
    if not isinstance(ours, str) and not isinstance(torchs, str):
        results[2] = True, f"{ours / torchs:.2f} of {BASELINE}"  # no target yet
    return results


def show(value: float | str) -> str:
    """Return the text of a cell."""
    return value if isinstance(value, str) else f"{value:,.0f}"


def report(counts: Counts) -> bool:
    """Print the table; return whether every target is met."""
    table = Table(title="Instructions per call, forward + backward")
    table.add_column("system, beyond plain")
    for mode in MODES:
        table.add_column(mode, justify="right")
    beyond: Counts = {}
    for system in SYSTEMS:
        cells: list[str] = []
        for mode in MODES:
            total, plain = counts[mode, system], counts[mode, "plain"]
            known = not isinstance(total, str) and not isinstance(plain, str)
            beyond[mode, system] = total - plain if known else total
            cells.append(show(total if system == "plain" else beyond[mode, system]))
        table.add_row(system, *cells)
    results = targets(beyond)
    table.add_section()
    table.add_row("target", *(text for _, text in results))
    Console().print(table)
    return all(met for met, _ in results)


def main() -> None:
    """Count, print the table, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--helper", help=argparse.SUPPRESS)
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.helper:
        measured_process(options.helper)
    elif options.once:
        mode, system, loops = options.once
        single_process(mode, system, int(loops))
    else:
        sys.exit(not report(count()))


if __name__ == "__main__":
    main()
