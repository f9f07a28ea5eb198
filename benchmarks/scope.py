"""What noise on weights keeps for the backward: noisy weights, or nothing.

The model is 8 linear layers, each with a weight of 1 MB that noise is added to, on a
batch of 8. Printed are the bytes that are alive after the forward, besides parameters
and input, the peak of forward and backward, without gradients, and how many operations
run more often than in plain. Reproduce with

    python benchmarks/scope.py

torch's checkpoint has no way to name a value: here it wraps each layer as a whole,
which the model's author has to do. The block of `weight_noise` needs no change of the
model.
"""

import sys
from collections.abc import Callable

import torch
from _tables import console, table, verdict
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from remat.nn import weight_noise
from remat.testing import count_ops, live_bytes, peak_bytes


LAYERS, WIDTH, BATCH, STD = 8, 512, 8, 0.1
MB = 2**20


class _Stored(nn.Module):
    @override
    def forward(self, weight: Tensor) -> Tensor:
        return weight + STD * torch.randn_like(weight)


def _layers(noise: Callable[[nn.Linear], object]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        assert isinstance(layer, nn.Linear)
        noise(layer)
    return model


def _stored(layer: nn.Linear) -> object:
    return parametrize.register_parametrization(layer, "weight", _Stored(), unsafe=True)


def _plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x)


def _checkpointed(model: nn.Sequential, x: Tensor) -> Tensor:
    for layer in model:
        x = checkpoint(layer, x, use_reentrant=False)
    return x


SYSTEMS: dict[
    str,
    tuple[Callable[[nn.Linear], object], Callable[[nn.Sequential, Tensor], Tensor]],
] = {
    "plain": (_stored, _plain),
    "torch's checkpoint, each layer": (_stored, _checkpointed),
    "remat.scope": (lambda layer: weight_noise(layer, STD), _plain),
}


def measured(name: str) -> tuple[float, float, int]:
    """Return bytes after the forward, the peak, and how many operations run."""
    noise, forward = SYSTEMS[name]
    model = _layers(noise)
    x = torch.randn(BATCH, WIDTH, requires_grad=True)

    def step() -> None:
        forward(model, x).sum().backward()

    step()  # gradients are there from now on
    after = live_bytes(lambda: forward(model, x))
    peak = peak_bytes(step)
    with count_ops() as ops:
        step()
    views = ("detach", "alias", "as_strided", "t", "view")
    count = sum(n for op, n in ops.items() if op not in views)
    return after / MB, peak / MB, count


def main() -> int:
    """Print the table; return 1 if a target is missed."""
    found = {name: measured(name) for name in SYSTEMS}
    headings = "system", "MB after", "peak MB", "again"
    shown = table("Noise on 8 weights of 1 MB", *headings)
    base = found["plain"][2]
    for name, (after, peak, ops) in found.items():
        shown.add_row(name, f"{after:.1f}", f"{peak:.1f}", str(ops - base))
    console().print(shown)
    ours, plain = found["remat.scope"], found["plain"]
    met = ours[0] < 0.1 * plain[0] and ours[1] < plain[1]
    console().print(verdict(met, "a tenth of plain after the forward"))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
