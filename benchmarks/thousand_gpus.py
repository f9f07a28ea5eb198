"""The numbers of docs/distributed.md: what a decoder of 70B shape keeps on each GPU.

Nothing is measured: one block runs on meta tensors under each policy, `saved_residuals`
lists what it keeps, and `explain` what its backward computes again. The rest is
arithmetic. The page holds the tables as this prints them. Reproduce with

    python benchmarks/thousand_gpus.py
"""

import functools
from dataclasses import dataclass

import torch
from _decoder import COLLECTIVES, Shape, block
from _results import Results, Table

from remat import explain, policies, remat, saved_residuals
from remat.policies import Policy


SHAPE = Shape()
STAGES = 4  # of the pipeline
GPUS = 1024
SEQUENCES = 4  # in a micro-batch
ROOM = 60e9  # bytes of a GPU of 80 GB that are left for activations
# Weights and gradients in bfloat16, which a rank holds for its layers; and the weights
# and moments of Adam in float32, which all ranks share.
HELD, SHARED = 2 + 2, 4 + 4 + 4

names = policies.save_only_these_names
LEAN, RICH = "attention, scattered", "attention, scattered, qkv, hidden"
POLICIES: dict[str, Policy | None] = {
    "nothing": None,
    **{kept: names(*kept.split(", ")) for kept in ("attention", LEAN)},
    RICH: names(*RICH.split(", ")),
    "`dots_saveable`": policies.dots_saveable,
    "attention, scattered, gathered": names("attention", "scattered", "gathered"),
}
PLAIN = "plain, no remat"


@dataclass(frozen=True)
class Row:
    """What one block keeps of one sequence, and computes again."""

    kept: int
    held: int  # besides, while it is recomputed
    share: float
    collectives: int

    @property
    def per_token(self) -> float:
        """Return the bytes for each token of the sequence."""
        return self.kept / SHAPE.tokens


def measured(policy: Policy | None) -> Row:
    """Run the block on meta tensors under a policy."""
    args = SHAPE.params(), SHAPE.stream(), SHAPE.angles(), SHAPE
    found = explain(block, *args, policy=policy)
    again = (op.times for op in found.ops if op.name in COLLECTIVES)
    kept = activations(remat(block, policy=policy))
    return Row(kept, found.recomputed_bytes, found.recomputed_share, sum(again))


def activations(fn: object) -> int:
    """Return the bytes that a call keeps besides what all blocks or all steps share."""
    args = SHAPE.params(), SHAPE.stream(), SHAPE.angles(), SHAPE
    others = "from the argument params", "from the argument angles"
    kept = saved_residuals(fn, *args)
    return sum(r.nbytes for r in kept if not r.origin.startswith(others))


@functools.cache
def rows() -> dict[str, Row]:
    """Return what each policy makes of a block."""
    plain = Row(activations(block), 0, 0.0, 0)
    return {PLAIN: plain} | {name: measured(p) for name, p in POLICIES.items()}


# --- Arithmetic ----------------------------------------------------------------------


def parameters() -> int:
    """Return the number of parameters of the whole decoder."""
    # Norms are on every rank; all else is split.
    norms = 2 * SHAPE.width
    of_rank = sum(p.numel() for p in SHAPE.params().values()) - norms
    blocks = SHAPE.layers * (SHAPE.parallel * of_rank + norms)
    return blocks + 2 * SHAPE.vocabulary * SHAPE.width + SHAPE.width


def state() -> float:
    """Return the bytes of weights, gradients and optimizer on each GPU."""
    return parameters() * (HELD / (SHAPE.parallel * STAGES) + SHARED / GPUS)


def on_gpu(row: Row, blocks: int = SHAPE.layers) -> int:
    """Return the bytes of a micro-batch: what so many blocks keep, and one recomputes.

    A pipeline of `STAGES` keeps as many micro-batches on its first stage, so blocks of
    all layers, as FSDP without a pipeline does.
    """
    return SEQUENCES * (blocks * row.kept + row.held)


def rich_blocks(batches: int) -> int:
    """Return how many blocks of a stage may keep more, so that all fit in the room."""
    lean, rich = rows()[LEAN], rows()[RICH]
    layers = SHAPE.layers // STAGES
    free = ROOM - on_gpu(lean, batches * layers)
    return min(layers, int(free / (SEQUENCES * batches * (rich.kept - lean.kept))))


def share_of_stage(batches: int) -> float:
    """Return the share of the forward that such a stage computes again."""
    layers, rich = SHAPE.layers // STAGES, rich_blocks(batches)
    return (rich * rows()[RICH].share + (layers - rich) * rows()[LEAN].share) / layers


# --- Tables --------------------------------------------------------------------------


def blocks_table(results: Results) -> Table:
    """Return what one block keeps for each token, and repeats."""
    columns = {"bytes per token": ",.0f", "FLOPs again": ".0%", "collectives": ","}
    cells = results.table("One block", "One block", "kept, besides the input", columns)
    for name, row in rows().items():
        cells.add(name, row.per_token, row.share, row.collectives)
    return cells


def models_table(results: Results) -> Table:
    """Return what a GPU holds of the whole model."""
    columns = {"kept, GB": ".1f", "with one recompute, GB": ".1f", "fits in 60 GB": ""}
    cells = results.table("The model", "The model", "kept", columns)
    for name, row in rows().items():
        kept = SEQUENCES * SHAPE.layers * row.kept / 1e9
        fits = "yes" if on_gpu(row) <= ROOM else "no"
        cells.add(name, kept, on_gpu(row) / 1e9, fits)
    return cells


def stages_table(results: Results) -> Table:
    """Return how many blocks of each stage may keep more."""
    columns = {"micro-batches alive": ",", "blocks that keep more": ""}
    columns |= {"FLOPs again": ".0%"}
    cells = results.table("Stages", "Stages", "stage", columns)
    for stage, n in enumerate(range(STAGES, 0, -1)):
        blocks = f"{rich_blocks(n)} of {SHAPE.layers // STAGES}"
        cells.add(str(stage), n, blocks, share_of_stage(n))
    return cells


def measured_tables(results: Results) -> list[Table]:
    """Return all tables of the page."""
    makers = blocks_table, models_table, stages_table
    return [maker(results) for maker in makers]


def tables() -> dict[str, str]:
    """Return them as Markdown."""
    made = measured_tables(Results(__file__))
    return {table.title: table.markdown() for table in made}


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    results = Results(__file__)
    results.say(
        f"{parameters() / 1e9:.1f} billion parameters, {state() / 1e9:.1f} GB a GPU"
    )
    for table in measured_tables(results):
        results.say(f"\n{table.title}\n\n{table.markdown()}")
    results.finish()


if __name__ == "__main__":
    main()
