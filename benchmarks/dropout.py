"""What dropout keeps for the backward: masks, keys, a state of a generator or nothing.

The block is 8 layers, of one tensor of 1 MB each, with dropout after each: torch's from
the global stream, and ours from a key. The bytes that stay alive after its forward,
besides the result, are counted without dropout and with it; the difference is what it
costs. They are those of tensors and of Python objects of a kilobyte or more, for the
states that remat keeps are no tensors. Reproduce with

    python benchmarks/dropout.py

In plain, torch keeps masks, and ours keeps keys of 16 bytes. A checkpoint of torch's
keeps the state of the global stream, whether it is drawn from or not; remat does where
it is. With keys remat keeps nothing. torch_remat restores no stream by itself.
"""

import argparse
import functools
import gc
import tracemalloc
from collections.abc import Callable

import torch
from _results import Results
from _systems import BASELINE, DEFAULT, PLAIN, REENTRANT, SYSTEMS, TORCH_REMAT
from rich.progress import track
from torch import Tensor
from torch.nn import functional

from remat import random
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


# Each with the most bytes that dropout may cost, where that is ours.
CHOSEN: dict[str, tuple[Block, int | None]] = {
    PLAIN: (by_torch, None),
    f"{PLAIN}, key": (by_key, LAYERS * KEY_BYTES),
    **{
        name: (SYSTEMS[name](by_torch), None)
        for name in (REENTRANT, BASELINE, TORCH_REMAT)
    },
    # The state as torch gives it, and its header.
    DEFAULT: (SYSTEMS[DEFAULT](by_torch), 5100),
    f"{DEFAULT}, key": (SYSTEMS[DEFAULT](by_key), 0),
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


def is_right(block: Block, x: Tensor) -> bool:
    """Say whether a backward uses the masks of its forward.

    Where a mask is zero, so is the gradient, and the result.
    """
    x = x.detach().clone().add_(0.1).requires_grad_()
    out = block(x, P)
    out.sum().backward()
    assert x.grad is not None
    return bool(((out == 0) <= (x.grad == 0)).all())


def kept(block: Block, x: Tensor, p: float) -> int:
    """Return the bytes that a forward leaves alive, besides its result."""
    run = functools.partial(block, x, p)
    run()  # what the first call leaves for good
    return live_bytes(run) - x.nbytes + python_bytes(run)


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mb", type=float, default=1, help="size of the tensor")
    megabytes = parser.parse_args().mb
    if megabytes <= 0:
        parser.error(f"--mb must be positive, got {megabytes:g}")
    torch.set_num_threads(1)  # bytes are the same, and a busy machine no matter
    x = torch.linspace(0, 1, int(megabytes * 2**20 / 4), requires_grad=True)
    title = f"Bytes kept by {LAYERS} layers of {megabytes:g} MB"
    results = Results(__file__)
    cells = results.table("bytes", title, "system", ["p = 0", f"p = {P}", "cost"])
    for name, row in track(CHOSEN.items(), transient=True, description="measuring"):
        block, limit = row
        if not is_right(block, x):
            cells.add(name, *["n/a (a wrong gradient)"] * 3)
            continue
        without, with_masks = (kept(block, x, p) for p in (0.0, P))
        cost = with_masks - without
        cells.add(name, without, with_masks, cost)
        if limit is not None:
            cells.aim(name, f"<= {limit:,}", cost, cost <= limit)
    results.show(cells)
    results.finish()


if __name__ == "__main__":
    main()
