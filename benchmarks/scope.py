"""What noise on weights keeps for the backward: noisy weights, or nothing.

The model is 8 linear layers, each with a weight of 1 MB that noise is added to, on a
batch of 8. Printed are the bytes that are alive after the forward, besides parameters
and input, the peak of forward and backward, without gradients, and how many operations
run more often than in plain. Reproduce with

    python benchmarks/scope.py

torch's checkpoint has no way to name a value: here it wraps each layer as a whole,
which the model's author has to do. The block is in a parametrization, and the model is
as it was.
"""

from collections.abc import Callable

import torch
from _results import Results
from _systems import BASELINE, PLAIN, REENTRANT, SYSTEMS as WRAPS
from torch import Tensor, nn
from torch.nn.utils import parametrize
from typing_extensions import override

import remat
from remat.testing import count_ops, live_bytes, peak_bytes


LAYERS, WIDTH, BATCH, STD = 8, 512, 8, 0.1
MB = 2**20


class _Stored(nn.Module):
    @override
    def forward(self, weight: Tensor) -> Tensor:
        return weight + STD * torch.randn_like(weight)


class _Recomputed(_Stored):
    @override
    def forward(self, weight: Tensor) -> Tensor:
        with remat.scope():
            return super().forward(weight)


def _layers(noise: Callable[[nn.Linear], object]) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    for layer in model:
        assert isinstance(layer, nn.Linear)
        noise(layer)
    return model


def _stored(layer: nn.Linear) -> object:
    return parametrize.register_parametrization(layer, "weight", _Stored(), unsafe=True)


def _recomputed(layer: nn.Linear) -> object:
    made = _Recomputed()
    return parametrize.register_parametrization(layer, "weight", made, unsafe=True)


def _plain(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x)


def _each(system: str) -> Callable[[nn.Sequential, Tensor], Tensor]:
    def forward(model: nn.Sequential, x: Tensor) -> Tensor:
        for layer in model:
            x = WRAPS[system](layer)(x)
        return x

    return forward


OURS = "remat.scope"
SYSTEMS: dict[
    str,
    tuple[Callable[[nn.Linear], object], Callable[[nn.Sequential, Tensor], Tensor]],
] = {
    PLAIN: (_stored, _plain),
    f"{REENTRANT}, each layer": (_stored, _each(REENTRANT)),
    f"{BASELINE}, each layer": (_stored, _each(BASELINE)),
    OURS: (_recomputed, _plain),
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


def main() -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    results = Results(__file__)
    columns = {"MB after": ".1f", "peak MB": ".1f", "again": ","}
    cells = results.table("noise", "Noise on 8 weights of 1 MB", "system", columns)
    found = {name: measured(name) for name in SYSTEMS}
    ours, plain = found[OURS], found[PLAIN]
    for name, (after, peak, ops) in found.items():
        cells.add(name, after, peak, ops - plain[2])
    after, peak = (own / of for own, of in zip(ours[:2], plain[:2], strict=True))
    cells.aim(OURS, "after the forward < 0.1 of plain", f"{after:.3f}", after < 0.1)
    cells.aim(OURS, "peak < plain", f"{peak:.3f} of it", peak < 1)
    results.show(cells)
    results.finish()


if __name__ == "__main__":
    main()
