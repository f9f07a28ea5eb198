"""``checkpoint_sequential``, ours and torch's: time, peak bytes and recomputed ops.

A chain of blocks is cut into as many segments as there are blocks in each, as that
takes the least memory, and into segments of one block. Both are called as a user calls
them. All steps take turns, and of the times the ratio in each round counts. Reproduce
with

    python benchmarks/sequential.py
"""

import argparse
import functools
from collections.abc import Callable

import torch
from _results import Results, Table
from _systems import BASELINE, COMPAT, REENTRANT
from _times import Ratio, Step, interleaved
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from remat import compat
from remat.testing import count_ops, peak_bytes


BLOCKS = 16, 64, 256
SLACK = 1.0  # of torch's time, peak and ops
Chain = Callable[..., Tensor]
CHAINS: dict[str, Chain] = {
    REENTRANT: functools.partial(checkpoint_sequential, use_reentrant=True),
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


def measure(
    cells: Table, blocks: int, segments: int, options: argparse.Namespace
) -> None:
    """Measure one chain."""
    steps = {
        name: step_of(chain, blocks, segments, options)
        for name, chain in CHAINS.items()
    }
    plain = ops_of(step_of(None, blocks, segments, options))
    times = interleaved(steps, max(options.rounds // blocks, 5))
    ratios = {name: Ratio.of(times[name], times[BASELINE]) for name in CHAINS}
    peaks = {name: peak_bytes(step) for name, step in steps.items()}
    again = {name: ops_of(step) - plain for name, step in steps.items()}
    for name in CHAINS:
        row = f"{blocks} in {segments}, {name}"
        cells.add(row, ratios[name], peaks[name], again[name])
    row, own = f"{blocks} in {segments}, {COMPAT}", ratios[COMPAT]
    cells.aim(row, f"time <= {SLACK}", own, own.low <= SLACK)
    for what, found in ("peak", peaks), ("again", again):
        met = found[COMPAT] <= SLACK * found[BASELINE]
        cells.aim(row, f"{what} <= {found[BASELINE]:,}", found[COMPAT], met)


def main() -> None:
    """Measure and print the table."""
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
    results = Results(__file__)
    columns = {f"time, of {BASELINE}": ".3f", "peak": ",", "recomputed ops": ","}
    title = "checkpoint_sequential, of remat and of torch"
    cells = results.table("chains", title, "blocks in segments", columns)
    for blocks in BLOCKS:
        for segments in round(blocks**0.5), blocks:
            measure(cells, blocks, segments, options)
    results.show(cells)
    results.finish()


if __name__ == "__main__":
    main()
