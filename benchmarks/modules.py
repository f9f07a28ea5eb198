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
from collections.abc import Callable
from statistics import median

import torch
from _count import Case, Counts, Label, count
from _results import THOUSANDS, Results
from _styles import Step
from _systems import BASELINE, COMPAT, PLAIN, REENTRANT, SYSTEMS, TORCH_REMAT
from _times import Ratio, interleaved
from sequential import Block
from torch import nn

from remat import nn as remat_nn, remat


APPLIED, RETURNED = "remat.nn.apply", "remat(module)"
OURS = COMPAT, RETURNED, APPLIED
CHOSEN = PLAIN, REENTRANT, BASELINE, TORCH_REMAT, *OURS
COUNTED, TIMED = (4, 16), (256, 128)  # rows and width
SHARE = 0.80  # of torch's instructions beyond plain
WAYS: dict[str, Callable[[nn.Module], Callable[..., torch.Tensor]]] = {
    PLAIN: lambda module: module,
    REENTRANT: SYSTEMS[REENTRANT],
    BASELINE: SYSTEMS[BASELINE],
    TORCH_REMAT: SYSTEMS[TORCH_REMAT],
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


def instructions(counts: Counts, results: Results) -> None:
    """Print the instructions."""
    title = "Thousands of instructions of a module: plain, and beyond it"
    columns = {"instructions": THOUSANDS, f"of {BASELINE}": ".3f"}
    cells = results.table("instructions", title, "system", columns)
    plain, theirs = float(counts[PLAIN,]), float(counts[BASELINE,])
    cells.add(PLAIN, plain, None)
    for system in CHOSEN[1:]:
        own = float(counts[system,]) - plain
        share = own / (theirs - plain)
        cells.add(system, own, share)
        if system in OURS:
            cells.aim(system, f"<= {SHARE}", f"{share:.3f}", share <= SHARE)
    results.show(cells)


def times(rounds: int, results: Results) -> None:
    """Print the times."""
    found = interleaved({s: step_of(s, TIMED) for s in CHOSEN}, rounds)
    title = f"Milliseconds of a step, one thread: median of {rounds} rounds"
    columns = {"ms": ".2f", f"of {BASELINE}": ".3f"}
    cells = results.table("times", title, "system", columns)
    for system, own in found.items():
        ratio = Ratio.of(own, found[BASELINE])
        cells.add(system, median(own) * 1e3, ratio)
        if system in OURS:
            cells.aim(system, "<= 1", ratio, ratio.low <= 1)
    results.show(cells)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=300, help="of the times")
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    results = Results(__file__)
    times(rounds, results)
    instructions(count(__file__), results)
    results.finish()


if __name__ == "__main__":
    main()
