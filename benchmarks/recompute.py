"""Work that a checkpointed block does again: FLOPs of a step beyond those of plain.

Counted by torch's flop counter over forward and backward: products, convolutions and
attention. torch's recompute stops early, at the last tensor that the backward
reads; remat leaves out what the backward does not read, wherever it is. The last block
has both: a head whose result is not in the loss, and a product that nobody uses.
Reproduce with

    python benchmarks/recompute.py
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _block import HEADS, block, block_params
from _results import Results
from _systems import (
    BASELINE,
    DEFAULT,
    PLAIN,
    PRUNED,
    REENTRANT,
    SYSTEMS,
    TORCH_REMAT,
    Wrapper,
)
from rich.progress import track
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)


WIDTH = 256
CHOSEN = PLAIN, REENTRANT, BASELINE, TORCH_REMAT, DEFAULT, PRUNED

_aten = torch.ops.aten


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query, key, value)


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any
) -> int:
    return sdpa_backward_flop_count(grad, query, key, value)


# The counter knows the kernels of attention on a GPU, not that on a CPU.
KERNELS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


# --- The blocks ----------------------------------------------------------------------


Params = dict[str, Tensor]


def mlp(params: Params, x: Tensor) -> Tensor:
    """Apply a two-layer perceptron."""
    return functional.gelu(x @ params["up"]) @ params["down"]


def conv_norm(params: Params, x: Tensor) -> Tensor:
    """Convolve, normalize over the batch, and keep what is positive."""
    x = functional.conv2d(x, params["kernel"], padding=1)
    scale, shift = params["scale"], params["shift"]
    return functional.batch_norm(x, None, None, scale, shift, training=True).relu()


def residual(params: Params, x: Tensor) -> Tensor:
    """Add two convolutions."""
    h = functional.conv2d(x, params["first"], padding=1).relu()
    return x + functional.conv2d(h, params["second"], padding=1)


def written_out(params: Params, x: Tensor) -> Tensor:
    """Attend to all positions, op by op."""
    q, k, v = x @ params["query"], x @ params["key"], x @ params["value"]
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (scores.softmax(-1) @ v).tanh()


def transformer(params: Params, x: Tensor) -> Tensor:
    """Apply the transformer block of the other benchmarks."""
    return block(params, x, HEADS)


def experts(params: Params, x: Tensor) -> Tensor:
    """Send each row to one of the MLPs, with the weight that a router gives it."""
    weights, choice = (x @ params["router"]).softmax(-1).max(-1)
    out = x
    for number, (up, down) in enumerate(zip(params["up"], params["down"], strict=True)):
        rows = (choice == number).nonzero().squeeze(-1)
        made = mlp({"up": up, "down": down}, x[rows])
        out = out.index_add(0, rows, made * weights[rows, None])
    return out


def lstm(params: Params, x: Tensor) -> Tensor:
    """Run a gated cell over time, and return its last state."""
    hidden = cell = torch.zeros_like(x[0])
    for now in x:
        gates = torch.cat([now, hidden], -1) @ params["gates"]
        i, f, g, o = gates.chunk(4, -1)
        cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
        hidden = o.sigmoid() * cell.tanh()
    return hidden


def two_heads(params: Params, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return two results, of which the loss takes the last, and waste a product."""
    x = mlp(params, x)
    auxiliary = (x @ params["hidden"]).relu() @ params["auxiliary"]
    (x @ params["wasted"]).exp()
    return auxiliary, (x @ params["main"]).relu()


@dataclass(frozen=True)
class Work:
    """A block: the shapes of its parameters and of its input."""

    fn: Callable[[Params, Tensor], Any]
    params: dict[str, tuple[int, ...]]
    shape: tuple[int, ...]
    strict: bool = False  # whether remat has to do less than torch, not only no more


D = WIDTH
MLP = {"up": (D, 4 * D), "down": (4 * D, D)}
SQUARE = (D, D)
IMAGES, KERNEL = (8, 16, 64, 64), (16, 16, 3, 3)

SUITE = {
    "MLP": Work(mlp, MLP, (256, D)),
    "conv, batch norm": Work(
        conv_norm, {"kernel": KERNEL, "scale": (16,), "shift": (16,)}, IMAGES
    ),
    "residual convs": Work(residual, {"first": KERNEL, "second": KERNEL}, IMAGES),
    "attention by hand": Work(
        written_out, dict.fromkeys(("query", "key", "value"), SQUARE), (8, 128, D)
    ),
    "transformer block": Work(
        transformer, {k: v.shape for k, v in block_params(D).items()}, (8, 128, D)
    ),
    "mixture of experts": Work(
        experts,
        {"router": (D, 4), "up": (4, D, 4 * D), "down": (4, 4 * D, D)},
        (512, D),
    ),
    "LSTM of 4 steps": Work(lstm, {"gates": (2 * D, 4 * D)}, (4, 64, D)),
    "unused head": Work(
        two_heads,
        MLP | dict.fromkeys(("hidden", "auxiliary", "wasted", "main"), SQUARE),
        (256, D),
        strict=True,
    ),
}


# --- The table -----------------------------------------------------------------------


def flops(work: Work, wrap: Wrapper) -> int:
    """Count forward and backward of a block, once a first call is over."""
    torch.manual_seed(0)
    fn = wrap(work.fn)
    params = {name: _normal(shape) for name, shape in work.params.items()}
    x = _normal(work.shape)

    def step() -> None:
        out = fn(params, x)
        (out[-1] if isinstance(out, tuple) else out).sum().backward()

    step()
    with FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        step()
    return counter.get_total_flops()


def _normal(shape: tuple[int, ...]) -> Tensor:
    return (torch.randn(shape) / shape[-1] ** 0.5).requires_grad_()


def report(results: Results) -> None:
    """Count and print the table."""
    title = "MFLOPs of a step, and those computed again"
    cells = results.table("flops", title, "block", CHOSEN, ",.1f")
    for name, work in track(SUITE.items(), transient=True, description="counting"):
        totals = {system: flops(work, SYSTEMS[system]) for system in CHOSEN}
        plain = totals[PLAIN]
        again = {system: total - plain for system, total in totals.items()}
        cells.add(name, *(n / 1e6 for n in (again | {PLAIN: plain}).values()))
        met = max(again[DEFAULT], again[PRUNED]) <= again[BASELINE]
        met &= not work.strict or again[PRUNED] < again[BASELINE]
        target = f"<= torch{', pruned <' if work.strict else ''}"
        cells.aim(name, target, f"{again[PRUNED] / 1e6:,.1f}, pruned", met)
    results.show(cells)


def main() -> None:
    """Count and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    torch.set_num_threads(1)
    results = Results(__file__)
    report(results)
    results.finish()


if __name__ == "__main__":
    main()
