"""Tables of random draws on a device: times beside torch's own, and equal numbers."""

import functools
import statistics
from collections.abc import Callable

import torch
from _device import clock, mark
from _tables import table
from _times import Ratio, interleaved
from rich.table import Table
from torch import Tensor
from torch.autograd.profiler import profile

from remat import random


Draw = Callable[[], Tensor]

KINDS = {
    "uniform": (random.uniform, torch.rand, "_philox_uniform_"),
    "normal": (random.normal, torch.randn, "_philox_normal_"),
}
SEED = 7


def draws(n: int, device: str) -> dict[str, Draw]:
    """Return the draws to compare: ours from a key, and torch's from a generator."""
    key = random.key(SEED).to(device)
    generator = torch.Generator(device).manual_seed(SEED)
    options = {"generator": generator, "device": device}
    found: dict[str, Draw] = {}
    for name, (ours, theirs, _) in KINDS.items():
        found[name] = functools.partial(ours, key, n)
        found[f"torch, {name}"] = functools.partial(theirs, n, **options)
    return found


def times(n: int, device: str, rounds: int) -> Table:
    """Compare how long draws take, and say which have a kernel of torch's."""
    runs = draws(n, device)
    measured = interleaved(runs, rounds, clock(device))
    headings = "ms", "torch's ms", "of torch's", "native kernel"
    cells = table(f"{n / 1e6:g} million float32{mark()}", "draw", *headings)
    for name, (_, _, kernel) in KINDS.items():
        own, other = measured[name], measured[f"torch, {name}"]
        both = (f"{statistics.median(each) * 1e3:.3f}" for each in (own, other))
        ratio = str(Ratio.of(own, other))
        native = "yes" if runs_kernel(runs[name], kernel) else "no"
        cells.add_row(name, *both, ratio, native)
    return cells


def runs_kernel(draw: Draw, kernel: str) -> bool:
    """Say whether a draw runs an operator of torch's, inside of remat's."""
    # A dispatch mode sees only remat's.
    with profile() as profiler:
        draw()
    return any(kernel in event.name for event in profiler.function_events or ())


def differences(n: int, device: str) -> dict[str, float]:
    """Return by how much the same key's numbers differ from those of the CPU."""
    found = {}
    for name, (ours, _, _) in KINDS.items():
        for dtype in torch.float32, torch.bfloat16:
            here, there = (
                ours(random.key(SEED).to(where), n, dtype=dtype).cpu().double()
                for where in ("cpu", device)
            )
            kind = f"{name}, {str(dtype).removeprefix('torch.')}"
            found[kind] = float((here - there).abs().max())
    return found


def equality(n: int, device: str) -> Table:
    """Show what differs from the CPU: nothing if uniform, the last bits if normal."""
    title = f"A key's numbers on {device}{mark()}"
    cells = table(title, "draw", "differ from the CPU's")
    for name, difference in differences(n, device).items():
        cells.add_row(name, f"by {difference:.1e}" if difference else "not at all")
    return cells
