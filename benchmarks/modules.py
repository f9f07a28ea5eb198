"""What it costs to recompute a module, by each way of asking for it.

The module has six parameters: a norm and two linear layers. It is called by torch's
checkpoint, by ``compat.checkpoint``, as what ``remat(module)`` returns, and after
``remat.nn.apply``. Reproduce with

    python benchmarks/modules.py

``_times.py`` says how times are taken and compared, ``_count.py`` how instructions are
counted.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from statistics import median

import torch
from _count import Case, Counts, Label, count
from _styles import Step
from _systems import BASELINE, COMPAT, PLAIN, SYSTEMS
from _tables import console, table, verdict
from _times import Ratio, interleaved
from rich.console import Console
from sequential import Block
from torch import nn

from remat import nn as remat_nn, remat


APPLIED, RETURNED = "remat.nn.apply", "remat(module)"
CHOSEN = PLAIN, BASELINE, COMPAT, RETURNED, APPLIED
COUNTED, TIMED = (4, 16), (256, 128)  # rows and width
SHARE = 0.80  # of torch's instructions beyond plain
WAYS: dict[str, Callable[[nn.Module], Callable[..., torch.Tensor]]] = {
    PLAIN: lambda module: module,
    BASELINE: SYSTEMS[BASELINE],
    COMPAT: SYSTEMS[COMPAT],
    RETURNED: remat,
    APPLIED: lambda module: remat_nn.apply(module, Block),
}


def step_of(system: str, shape: tuple[int, int]) -> Step:
    """Return forward and backward of the module, called in one of the ways."""
    module = Block(shape[-1])
    x = torch.linspace(-1, 1, shape[0] * shape[1]).view(shape).requires_grad_()
    call, leaves = WAYS[system](module), [x, *module.parameters()]

    def step() -> None:
        call(x).sum().backward()
        for leaf in leaves:
            leaf.grad = None

    return step


def cases() -> dict[Label, Case]:
    """Return all whose instructions are counted."""
    return {
        (system,): Case(functools.partial(step_of, system, COUNTED), loops=10)
        for system in CHOSEN
    }


def instructions(counts: Counts, screen: Console) -> bool:
    """Print the instructions; return whether every target is met."""
    title = "Thousands of instructions of a module: plain, and beyond it"
    cells = table(title, "system", "instructions", f"of {BASELINE}", "target")
    plain, theirs = float(counts[PLAIN,]), float(counts[BASELINE,])
    cells.add_row(PLAIN, f"{plain / 1e3:,.0f}", "", "")
    all_met = True
    for system in CHOSEN[1:]:
        own = float(counts[system,]) - plain
        share = own / (theirs - plain)
        met = share <= SHARE
        is_ours = system != BASELINE
        told = verdict(met, f"<= {SHARE}") if is_ours else ""
        cells.add_row(system, f"{own / 1e3:,.0f}", f"{share:.3f}", told)
        all_met &= met or not is_ours
    screen.print(cells)
    return all_met


def times(rounds: int, screen: Console) -> bool:
    """Print the times; return whether every target is met."""
    found = interleaved({s: step_of(s, TIMED) for s in CHOSEN}, rounds)
    title = f"Milliseconds of a step, one thread: median of {rounds}"
    cells = table(title, "system", "time", f"of {BASELINE} (95%)", "target")
    all_met = True
    for system, own in found.items():
        ratio = Ratio.of(own, found[BASELINE])
        is_ours = system not in (PLAIN, BASELINE)
        told = verdict(ratio.low <= 1, "<= 1") if is_ours else ""
        cells.add_row(system, f"{median(own) * 1e3:.2f}", str(ratio), told)
        all_met &= ratio.low <= 1 or not is_ours
    screen.print(cells)
    return all_met


def main() -> None:
    """Measure, print the tables, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300, help="of the times")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    screen = console()
    results = [times(rounds, screen), instructions(count(__file__), screen)]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
