"""Train a small transformer with FSDP2, and compare what each way of training keeps.

Start it on CPUs, with two processes or more:

    torchrun --nproc-per-node 2 docs/examples/train_fsdp.py
    torchrun --nproc-per-node 2 docs/examples/train_fsdp.py --compile

The same model is trained plain, with torch's checkpoint and with remat; with
`--compile` also with each block compiled. The table has the bytes that each rank holds
between forward and backward, the peak of a step, and the loss, which is the same.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import remat
from remat.testing import memory_timeline


VOCABULARY, WIDTH, HEADS, LAYERS = 64, 128, 4, 4
BATCH, TIME = 4, 128


# --- The model -----------------------------------------------------------------------


class Block(nn.Module):
    """Attention to earlier positions, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Add both to the residual stream of (batch, time, width)."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        h = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """Predicts the next token at each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of a batch of (batch, time + 1) tokens."""
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = block(x)
        scores, targets = self.head(x), tokens[:, 1:]
        return functional.cross_entropy(scores.flatten(0, 1), targets.flatten())


# --- Ways of training ----------------------------------------------------------------


def plain(model: Model) -> None:
    """Keep all intermediate values."""
    del model


def with_checkpoint(model: Model) -> None:
    """Recompute each block by torch's checkpoint."""
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)


def with_remat(model: Model) -> None:
    """Recompute each block by remat."""
    remat.nn.apply(model, Block)


WAYS: dict[str, Callable[[Model], None]] = {
    "plain": plain,
    "torch's checkpoint": with_checkpoint,
    "remat": with_remat,
}


def prepared(way: Callable[[Model], None], backend: str | None) -> Model:
    """Return the model: recomputed, then compiled, then sharded over the ranks."""
    torch.manual_seed(0)
    torch.compiler.reset()  # code compiled for one way is not tried on another
    model = Model()
    way(model)
    for block in model.blocks:
        if backend:
            block.compile(backend=backend)
        fully_shard(block)
    return fully_shard(model)


# --- Training ------------------------------------------------------------------------


def batch(step: int) -> Tensor:
    """Return tokens that count up, from another start on each rank and step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    start = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    return (start + torch.arange(TIME + 1)) % VOCABULARY


@dataclass(frozen=True)
class Row:
    """What a training did on one rank: bytes, and the loss of its last step."""

    held: int
    peak: int
    loss: float


def train(model: Model, steps: int) -> Row:
    """Take steps, and measure one more, without an update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(steps):
        model(batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    tokens = batch(steps)

    def one_more() -> Tensor:
        loss = model(tokens)
        loss.backward()
        return loss.detach()

    loss = float(one_more())  # gradients are there from now on
    peak = memory_timeline(one_more).peak
    return Row(memory_timeline(model, tokens).bytes[-1], peak, loss)


# --- The table -----------------------------------------------------------------------


def line(name: str, ranks: list[Row]) -> str:
    """Return a line of the table; the loss is the mean over the ranks."""
    cells = [f"{row.held / 1e6:.2f} / {row.peak / 1e6:.2f}" for row in ranks]
    loss = sum(row.loss for row in ranks) / len(ranks)
    return f"| {' | '.join([name, *cells])} | {loss:.6f} |"


def main() -> None:
    """Train in each way; rank 0 prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--compile", action="store_true", help="each block, as well")
    parser.add_argument("--backend", default="inductor", help="of the compiler")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    first = dist.get_rank() == 0
    if first:
        cells = [f"rank {rank}: held / peak, MB" for rank in range(ranks)]
        print(f"| | {' | '.join(cells)} | loss |", flush=True)
    for backend in [None, options.backend] if options.compile else [None]:
        for name, way in WAYS.items():
            found: list[Row] = [Row(0, 0, 0.0)] * ranks
            row = train(prepared(way, backend), options.steps)
            dist.all_gather_object(found, row)
            if first:
                print(line(f"{name}, compiled" if backend else name, found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
