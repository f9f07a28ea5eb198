"""Bytes that a whole model holds under each policy: after the forward, and at most.

The model is several transformer blocks, every one checkpointed. Counted are the bytes
alive after its forward, besides its result, and the peak over forward and backward; the
parameters and their gradients exist before and do not count. Products computed again
show what the bytes are exchanged for. Reproduce with

    python benchmarks/model.py                  (a plot as well, in out/: make model)

What is offloaded to disk is in files: those are mapped and counted beside. The last row
is a plan of `remat.fit` for half of plain's peak.
"""

import argparse
import functools
import operator
from dataclasses import dataclass

import torch
from _block import HEADS, Block, dots_run
from _files import timelines
from _model import Model, Sizes
from _results import Results, Table
from _systems import (
    BASELINE,
    DEFAULT,
    PLAIN,
    REENTRANT,
    SAVING,
    SELECTIVE,
    SYSTEMS,
    TORCH_REMAT,
    Wrapper,
)
from rich.progress import track
from torch import Tensor, nn

from remat import fit, policies, remat
from remat.testing import peak_bytes


NAMES, ALL, DISK = "remat, names", "remat, everything", "remat, dots to disk"
FIT = "remat.fit, half of plain"
NAMED = policies.save_only_these_names("qkv", "hidden")
TO_DISK = policies.dots_saveable.but_offload(to="disk")
CHOSEN: dict[str, Wrapper] = {
    name: SYSTEMS[name]
    for name in (
        *(PLAIN, REENTRANT, BASELINE, SELECTIVE, TORCH_REMAT),
        *(DEFAULT, SAVING),
    )
} | {
    NAMES: functools.partial(remat, policy=NAMED),
    ALL: functools.partial(remat, policy=policies.everything_saveable),
    DISK: functools.partial(remat, policy=TO_DISK),
}
# Each holds no more than another does, and where that is strict less.
BOTH = "alive", "peak"
TARGETS = {
    DEFAULT: ("<=", BASELINE, BOTH),
    SAVING: ("<", SELECTIVE, BOTH),
    NAMES: ("<", SAVING, BOTH),
    # Its residuals are freed when the backward of a block ends, not one by one.
    ALL: ("<=", PLAIN, ("alive",)),
    DISK: ("<=", DEFAULT, BOTH),
}


class Fitted(Model):
    """The same blocks as modules, under a plan for half of the peak that they have."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(SYSTEMS[PLAIN], sizes)
        self.blocks = nn.Sequential(*(Block(sizes.width) for _ in range(sizes.layers)))
        self.step()  # gradients are there before a plan is made, as for the others
        there = sum(2 * t.nbytes for t in (self.x, *self.blocks.parameters()))
        self.budget = peak_bytes(self.step) // 2
        fit(self.blocks, self.x, budget=there + self.budget).apply(self.blocks)

    def forward(self) -> Tensor:
        """Apply the blocks to the stream of the model."""
        return self.blocks(self.x)


def model_of(name: str, sizes: Sizes) -> Model:
    """Return the model under a system."""
    return Fitted(sizes) if name == FIT else Model(CHOSEN[name], sizes)


# --- The measurement ---------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What a model holds, in bytes, and computes again."""

    alive: int
    peak: int
    files: int
    again: int


def measure(name: str, sizes: Sizes) -> Row:
    """Measure one system, once its first calls are over."""
    model = model_of(name, sizes)
    model.step()
    model.step()
    memory, files = timelines(model.forward)
    return Row(
        alive=memory[-1] - model.x.nbytes,
        peak=max(timelines(model.step)[0]),
        files=files[-1],
        again=dots_run(model.step),
    )


# --- The comparison ------------------------------------------------------------------


def aim(cells: Table, rows: dict[str, Row]) -> None:
    """Say whether each system that has a target meets it."""
    for name, (relation, other, fields) in TARGETS.items():
        less = operator.lt if relation == "<" else operator.le
        pairs = [(getattr(rows[n], f) for n in (name, other)) for f in fields]
        reached = ", ".join(f"{getattr(rows[name], f):,}" for f in fields)
        met = all(less(*pair) for pair in pairs)
        cells.aim(name, f"{' and '.join(fields)} {relation} {other}", reached, met)
    half, peak = rows[PLAIN].peak // 2, rows[FIT].peak
    cells.aim(FIT, f"peak <= {half:,}", peak, peak <= half)


def report(rows: dict[str, Row], results: Results) -> None:
    """Print the table."""
    title = "Bytes of a model, and matmuls recomputed"
    headings = *HEADINGS, "in files", "again"
    cells = results.table("bytes", title, "system", headings)
    for name, row in rows.items():
        again = row.again - rows[PLAIN].again
        cells.add(name, row.alive, row.peak, row.files, again)
    aim(cells, rows)
    results.show(cells)


HEADINGS = "after the forward", "peak"


def parse_options() -> argparse.Namespace:
    """Read the command line, or exit with a message that says what to change."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    sizes = {"layers": 6, "width": 256, "time": 256, "batch": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    for name in sizes:
        if getattr(options, name) < 1:
            parser.error(f"--{name} must be at least 1, got {getattr(options, name)}")
    if options.width % HEADS:
        parser.error(f"--width {options.width} is not divisible by {HEADS} heads")
    return options


def main() -> None:
    """Measure and print the table."""
    options, results = parse_options(), Results(__file__)
    torch.set_num_threads(1)  # bytes are the same, and a busy machine no matter
    sizes = Sizes(options.layers, options.batch, options.time, options.width)
    rows = {
        name: measure(name, sizes)
        for name in track([*CHOSEN, FIT], transient=True, description="measuring")
    }
    report(rows, results)
    results.finish()


if __name__ == "__main__":
    main()
