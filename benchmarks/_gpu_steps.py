"""Tables of a model on a device: memory, times, offloading, compiled code.

The model has transformer blocks, every one checkpointed by one system (`_model.py`).
"""

import functools
import statistics
import warnings
from collections.abc import Callable, Mapping

import torch
from _block import dots_run
from _device import Bytes, clock, mark, measured
from _model import Model, Sizes
from _systems import (
    BASELINE,
    DEFAULT,
    DOTS,
    DOTS_ON_CUDA,
    PLAIN,
    SAVING,
    SELECTIVE,
    SYSTEMS,
    Wrapper,
    brief,
    selective,
)
from _tables import table
from _times import Ratio, Times, interleaved
from rich.table import Table
from torch import Tensor

from remat import policies, remat


Step = Callable[[], object]

OFFLOADED = "remat, dots to host"
TO_HOST = policies.dots_saveable.but_offload()
MB = 1e6


def dtype_on(device: str) -> torch.dtype:
    """Return in which dtype a model is trained on a device."""
    return torch.float32 if device == "cpu" else torch.bfloat16


def model(wrap: Wrapper, sizes: Sizes, device: str) -> Model:
    """Return a model whose first steps are over."""
    made = Model(wrap, sizes, device, dtype_on(device))
    for _ in range(2):
        made.step()
    return made


def dots_on(device: str) -> tuple[object, ...]:
    """Return the products and attentions that a device runs."""
    return DOTS if device == "cpu" else DOTS_ON_CUDA


def milliseconds(times: list[float]) -> str:
    """Return the median of times."""
    return f"{statistics.median(times) * 1e3:.2f}"


def megabytes(size: int) -> str:
    """Return a size as the text of a cell."""
    return f"{size / MB:,.1f}"


# --- Memory and times ----------------------------------------------------------------


def steps(sizes: Sizes, device: str, rounds: int) -> Table:
    """Compare what each system holds, computes again, and how long a step takes."""
    wraps = {n: SYSTEMS[n] for n in (PLAIN, BASELINE, SELECTIVE, DEFAULT, SAVING)}
    wraps[SELECTIVE] = selective(dots_on(device))
    models = {name: model(wrap, sizes, device) for name, wrap in wraps.items()}
    runs = {name: made.step for name, made in models.items()}
    times = interleaved(runs, rounds, clock(device))
    products = {name: dots_run(run, dots_on(device)) for name, run in runs.items()}
    headings = (
        "held, MB",
        "peak, MB",
        "again",
        "ms",
        f"of {BASELINE}",
        f"of {SELECTIVE}",
    )
    cells = table(f"Steps of a model{mark()}", "system", *headings)
    for name, made in models.items():
        cells.add_row(
            name,
            *sizes_of(made, device),
            str(products[name] - products[PLAIN]),
            milliseconds(times[name]),
            *(str(Ratio.of(times[name], times[n])) for n in (BASELINE, SELECTIVE)),
        )
    return cells


def sizes_of(made: Model, device: str) -> tuple[str, str]:
    """Return the bytes after a forward, besides its result, and at most in a step."""
    held, step = (measured(fn, device) for fn in (made.forward, made.step))
    return megabytes(held.alive - made.x.nbytes), megabytes(step.peak)


# --- Offloading ----------------------------------------------------------------------


def offloading(sizes: Sizes, device: str, rounds: int) -> Table:
    """Compare saving values with sending them to the host, and with copies alone."""
    wraps = {
        SAVING: SYSTEMS[SAVING],
        OFFLOADED: functools.partial(remat, policy=TO_HOST),
    }
    models = {name: model(wrap, sizes, device) for name, wrap in wraps.items()}
    held = {n: measured(made.forward, device).alive for n, made in models.items()}
    sent = max(held[SAVING] - held[OFFLOADED], 0)
    runs: dict[str, Step] = {name: made.step for name, made in models.items()}
    runs["the copies alone"] = copies(sent, device)
    times = interleaved(runs, rounds, clock(device))
    cells = table(f"Offloading{mark()}", "", "held, MB", "peak, MB", "ms")
    for name, made in models.items():
        cells.add_row(name, *sizes_of(made, device), milliseconds(times[name]))
    alone = milliseconds(times["the copies alone"])
    cells.add_row(f"copies of {megabytes(sent)} MB alone", "", "", alone)
    cells.add_row("of these, beside computation", "", "", overlap(times, sent))
    return cells


def copies(nbytes: int, device: str) -> Step:
    """Return a copy of so many bytes to pinned memory and back, awaited."""
    pinned = device != "cpu"
    there = torch.empty(nbytes, dtype=torch.uint8, device=device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)

    def step() -> None:
        host.copy_(there, non_blocking=pinned)
        there.copy_(host, non_blocking=pinned)

    return step


def overlap(times: Times, sent: int) -> str:
    """Return which share of the copies took no time of its own."""
    if not sent:
        return "n/a (nothing is sent: values are on the host)"
    saved, offloaded, alone = map(statistics.median, times.values())
    return f"{1 - (offloaded - saved) / alone:.0%}"


# --- Compiled code -------------------------------------------------------------------


def by_backward(made: Model, compiler: Callable[..., object]) -> Step:
    """Return a step whose forward is compiled, and its backward with it."""
    loss: Callable[..., Tensor] = compiler(lambda ps, x: made.applied(ps, x).sum())

    def step() -> None:
        loss(made.layers, made.x).backward()

    return step


def by_grad(made: Model, compiler: Callable[..., object]) -> Step:
    """Return a compiled gradient function, applied."""
    gradient = torch.func.grad(lambda ps, x: made.applied(ps, x).sum())
    compiled: Callable[..., object] = compiler(gradient)
    # Not leaves: the backward of a kernel need not be differentiable.
    layers = [{k: p.detach() for k, p in layer.items()} for layer in made.layers]
    return functools.partial(compiled, layers, made.x.detach())


# With the systems that can: torch.func refuses torch's checkpoint, and a compilation
# that fails in it leaves hooks disabled.
DERIVATIVES = {
    ".backward()": (by_backward, (PLAIN, BASELINE, DEFAULT)),
    "torch.func.grad": (by_grad, (PLAIN, DEFAULT)),
}


def compiled(
    sizes: Sizes, device: str, rounds: int, backend: str = "inductor"
) -> list[Table]:
    """Compare compiled systems, for each kind of derivative, and eager remat."""
    return [
        compiled_table(kind, sizes, device, rounds, backend) for kind in DERIVATIVES
    ]


def compiled_table(
    kind: str, sizes: Sizes, device: str, rounds: int, backend: str
) -> Table:
    """Compare what each system holds at most, and how long a step takes."""
    compiler = functools.partial(torch.compile, backend=backend)
    derivative, systems = DERIVATIVES[kind]
    ways = {f"compiled {name}": (name, compiler) for name in systems}
    ways[f"eager {DEFAULT}"] = DEFAULT, lambda fn: fn
    runs: dict[str, Step] = {}
    failed: dict[str, str] = {}
    torch.compiler.reset()
    for name, (system, how) in ways.items():
        made = Model(SYSTEMS[system], sizes, device, dtype_on(device))
        try:
            runs[name] = warmed_up(derivative(made, how))
        except (RuntimeError, NotImplementedError) as error:
            failed[name] = brief(error)
    times = interleaved(runs, rounds, clock(device))
    peaks = {name: measured(run, device) for name, run in runs.items()}
    return compiled_cells(kind, [*ways], failed, peaks, times)


def warmed_up(step: Step) -> Step:
    """Compile; what torch warns of meanwhile is not the table's concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3):
            step()
    return step


def compiled_cells(
    kind: str,
    names: list[str],
    failed: Mapping[str, str],
    peaks: Mapping[str, Bytes],
    times: Times,
) -> Table:
    """Return the table; a system that raised has no numbers."""
    base = names[0]
    headings = "peak, MB", "peak, of plain", "ms", "time, of plain"
    cells = table(f"Compiled, {kind}{mark()}", "system", *headings)
    for name in names:
        if name in failed:
            cells.add_row(name, failed[name], "", "", "")
            continue
        share = ratio = "n/a"
        if base not in failed:
            share = f"{peaks[name].peak / peaks[base].peak:.2f}"
            ratio = str(Ratio.of(times[name], times[base]))
        peak = megabytes(peaks[name].peak)
        cells.add_row(name, peak, share, milliseconds(times[name]), ratio)
    return cells
