"""``checkpoint_sequential``, ours and torch's: time, peak bytes and recomputed ops.

A chain of blocks is cut into as many segments as there are blocks in each, as that
takes the least memory, and into segments of one block. Both are called as a user calls
them. All steps take turns, and of the times the ratio in each round counts. Reproduce
with

    python benchmarks/sequential.py
"""

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _systems import BASELINE, COMPAT
from _tables import console, table, verdict
from _times import Ratio, Step, interleaved
from rich.console import Console
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from remat import compat
from remat.testing import count_ops, peak_bytes


BLOCKS = 16, 64, 256
SLACK = 1.0  # of torch's time, peak and ops
Chain = Callable[..., Tensor]
CHAINS: dict[str, Chain] = {
    BASELINE: functools.partial(checkpoint_sequential, use_reentrant=False),
    COMPAT: compat.checkpoint_sequential,
}
BOOKKEEPING = "detach", "alias", "view"


class Block(nn.Module):
    """A residual perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Apply it."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def step_of(
    chain: Chain | None, blocks: int, segments: int, options: argparse.Namespace
) -> Step:
    """Return a step of a chain, plain or checkpointed; it adds to the gradients."""
    model = nn.Sequential(*[Block(options.width) for _ in range(blocks)])
    x = torch.randn(options.rows, options.width, requires_grad=True)

    def step() -> None:
        out = model(x) if chain is None else chain(model, segments, x)
        out.sum().backward()

    step()  # the gradients exist from here on
    return step


def ops_of(step: Step) -> int:
    """Return how many operations a step runs, besides bookkeeping."""
    with count_ops() as ops:
        step()
    return sum(count for name, count in ops.items() if name not in BOOKKEEPING)


@dataclass(frozen=True)
class Row:
    """What ours and torch's cost on one chain."""

    blocks: int
    segments: int
    ratio: Ratio
    peaks: dict[str, int]
    again: dict[str, int]

    @property
    def is_met(self) -> bool:
        """Whether none of the three costs more than torch's."""
        pairs = [(found[COMPAT], found[BASELINE]) for found in (self.peaks, self.again)]
        less = all(own <= SLACK * other for own, other in pairs)
        return less and self.ratio.low <= SLACK


def measure(blocks: int, segments: int, options: argparse.Namespace) -> Row:
    """Measure one chain."""
    steps = {
        name: step_of(chain, blocks, segments, options)
        for name, chain in CHAINS.items()
    }
    plain = ops_of(step_of(None, blocks, segments, options))
    times = interleaved(steps, max(options.rounds // blocks, 5))
    return Row(
        blocks,
        segments,
        Ratio.of(times[COMPAT], times[BASELINE]),
        {name: peak_bytes(step) for name, step in steps.items()},
        {name: ops_of(step) - plain for name, step in steps.items()},
    )


def report(rows: list[Row], screen: Console) -> bool:
    """Print the table; return whether all targets are met."""
    title = f"checkpoint_sequential: {COMPAT}, and {BASELINE}"
    headings = "segments", "time", "peak", "torch's", "recomputed ops", "torch's"
    cells = table(title, "blocks", *headings, "target")
    for row in rows:
        cells.add_row(
            str(row.blocks),
            str(row.segments),
            str(row.ratio),
            *(f"{row.peaks[name]:,}" for name in (COMPAT, BASELINE)),
            *(f"{row.again[name]:,}" for name in (COMPAT, BASELINE)),
            verdict(row.is_met, "<= torch's"),
        )
    screen.print(cells)
    return all(row.is_met for row in rows)


def main() -> None:
    """Measure, print the table, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--width", type=int, default=128, help="of the blocks")
    parser.add_argument("--rows", type=int, default=512, help="of their input")
    parser.add_argument(
        "--rounds", type=int, default=640, help="of timing, divided by the blocks"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [
        measure(blocks, segments, options)
        for blocks in BLOCKS
        for segments in (round(blocks**0.5), blocks)
    ]
    sys.exit(not report(rows, console()))


if __name__ == "__main__":
    main()
