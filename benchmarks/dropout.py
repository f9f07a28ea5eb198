"""What dropout keeps for the backward: masks, keys, a state of a generator or nothing.

The block is 8 layers, of one tensor of 1 MB each, with dropout after each: torch's from
the global stream, and ours from a key. The bytes that stay alive after its forward,
besides the result, are counted without dropout and with it; the difference is what it
costs. They are those of tensors and of Python objects of a kilobyte or more, for the
states that remat keeps are no tensors. Reproduce with

    python benchmarks/dropout.py

In plain, torch keeps masks, and ours keeps keys of 16 bytes. A checkpoint of torch's
keeps the state of the global stream, whether it is drawn from or not; remat does where
it is. With keys remat keeps nothing.
"""

import argparse
import functools
import gc
import sys
import tracemalloc
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from remat import random, remat
from remat.testing import live_bytes


LAYERS = 8
P = 0.1
KEY = random.key(0)
KEY_BYTES = 16

Block = Callable[[Tensor, float], Tensor]


def by_torch(x: Tensor, p: float) -> Tensor:
    """Draw the masks from the global stream."""
    for _ in range(LAYERS):
        x = functional.dropout(x.sin(), p)
    return x


def by_key(x: Tensor, p: float) -> Tensor:
    """Draw the masks from a key for each layer."""
    for i in range(LAYERS):
        x = random.dropout(random.fold_in(KEY, i), x.sin(), p)
    return x


torch_checkpoint = functools.partial(checkpoint, use_reentrant=False)

# Each with the most bytes that dropout may cost, where that is ours.
SYSTEMS: dict[str, tuple[Block, int | None]] = {
    "plain": (by_torch, None),
    "plain, key": (by_key, LAYERS * KEY_BYTES),
    "torch non-reentrant": (functools.partial(torch_checkpoint, by_torch), None),
    "remat": (remat(by_torch), 5100),  # the state as torch gives it, and its header
    "remat, key": (remat(by_key), 0),
}
LARGE = 1024  # of Python objects: what remat notes about a call is in smaller ones


def python_bytes(fn: Callable[[], object]) -> int:
    """Run ``fn`` and return the bytes of the large Python objects that stay alive."""
    gc.collect()
    tracemalloc.start()
    try:
        result = fn()
        traces = tracemalloc.take_snapshot().traces
        del result
    finally:
        tracemalloc.stop()
    return sum(trace.size for trace in traces if trace.size >= LARGE)


def kept(block: Block, x: Tensor, p: float) -> int:
    """Return the bytes that a forward leaves alive, besides its result."""
    run = functools.partial(block, x, p)
    run()  # what the first call leaves for good
    return live_bytes(run) - x.nbytes + python_bytes(run)


def verdict(cost: int, limit: int | None) -> str:
    """Say whether dropout costs no more than it may."""
    if limit is None:
        return ""
    return f"{'met' if cost <= limit else 'MISSED'} (<= {limit:,})"


def main() -> None:
    """Measure, print the table, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=float, default=1, help="size of the tensor")
    megabytes = parser.parse_args().mb
    if megabytes <= 0:
        parser.error(f"--mb must be positive, got {megabytes:g}")
    torch.set_num_threads(1)  # bytes are the same, and a busy machine no matter
    x = torch.linspace(0, 1, int(megabytes * 2**20 / 4), requires_grad=True)
    table = Table(title=f"Bytes kept by {LAYERS} layers of {megabytes:g} MB")
    table.add_column("system")
    for name in ("p = 0", f"p = {P}", "cost"):
        table.add_column(name, justify="right")
    table.add_column("target")
    all_met = True
    for name, row in track(SYSTEMS.items(), transient=True, description="measuring"):
        block, limit = row
        without, with_masks = (kept(block, x, p) for p in (0.0, P))
        target = verdict(with_masks - without, limit)
        counts = [without, with_masks, with_masks - without]
        table.add_row(name, *(f"{n:,}" for n in counts), target)
        all_met &= not target.startswith("MISSED")
    Console().print(table)
    sys.exit(not all_met)


if __name__ == "__main__":
    main()
