"""Instructions that a checkpointed call costs beyond the plain one.

Counted are forward and backward of four ops on four floats, on one thread, so that it
is all bookkeeping; and of a small module, a normalized MLP of six parameters.
Reproduce with

    python benchmarks/overhead.py

``_count.py`` says how they are counted, and what with.
"""

import argparse
import functools
import sys
from collections.abc import Callable

import torch
from _count import Case, Counts, Label, count
from _systems import BASELINE, SYSTEMS, Wrapper
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.func import grad


MODES = (".backward()", "func.grad", "module")
TARGET_SHARE = 0.52  # of the baseline, both beyond plain, under .backward()
TARGET_MODULE = 0.78  # the same, of a module
TARGET_FUNC_GRAD = 500_000  # instructions beyond plain


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


def cases() -> dict[Label, Case]:
    """Return every step of the table, by its column and row."""
    return {
        (mode, system): Case(functools.partial(make_step, mode, wrap))
        for mode in MODES
        for system, wrap in SYSTEMS.items()
    }


# --- The table -------------------------------------------------------------------


def targets(beyond: Counts) -> list[tuple[bool, str]]:
    """Say of each mode whether remat meets its target."""
    results = [(False, "no number")] * 3
    for k, limit in (0, TARGET_SHARE), (2, TARGET_MODULE):
        ours, torchs = (beyond[MODES[k], name] for name in ("remat", BASELINE))
        if not isinstance(ours, str) and not isinstance(torchs, str):
            share = ours / torchs
            text = f"{share:.2f} of {BASELINE} (<= {limit})"
            results[k] = share <= limit, verdict(share <= limit, text)
    ours = beyond["func.grad", "remat"]
    if not isinstance(ours, str):
        met = ours <= TARGET_FUNC_GRAD
        results[1] = met, verdict(met, f"<= {TARGET_FUNC_GRAD:,}")
    return results


def verdict(met: bool, text: str) -> str:
    """Return the text of a target's cell."""
    return f"{'met' if met else 'MISSED'}: {text}"


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
    parser.parse_args()
    sys.exit(not report(count(__file__)))


if __name__ == "__main__":
    main()
