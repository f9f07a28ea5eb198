"""Compiled code: peak bytes, time and products, plain and with remat.

Six blocks of a perceptron are differentiated by each transform, compiled by inductor.
Torch's checkpoint works for `.backward()` alone. Bytes are those of the allocator's
events. All steps take turns, and of the times the ratio in each round counts. Reproduce
with

    python benchmarks/compiled.py
"""

import argparse
import itertools
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _systems import BASELINE, SYSTEMS
from _tables import console, table, verdict
from _times import Ratio, Step, Times, interleaved
from rich.console import Console
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from remat import remat


BATCH, WIDTH, HIDDEN, DEPTH = 1024, 128, 1024, 6
PLAIN, REMAT, EAGER = "plain", "remat", "remat, not compiled"
WRAPS: dict[str, Callable[..., Any]] = {
    PLAIN: lambda fn: fn,
    BASELINE: SYSTEMS[BASELINE],
    REMAT: remat,
    EAGER: remat,
}
Loss = Callable[..., Tensor]


def block(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """Apply a residual perceptron with a gate."""
    h = torch.tanh(x @ w1)
    return x + torch.tanh((h * torch.sigmoid(h)) @ w2)


def loss_of(wrap: Callable[..., Any]) -> Loss:
    """Return the loss of blocks that are wrapped one by one."""
    step = wrap(block)

    def loss(weights: Any, x: Tensor) -> Tensor:
        for pair in weights:
            x = step(x, *pair)
        return x.square().mean()

    return loss


def second_order(loss: Loss) -> Callable[..., Any]:
    """Return the gradient of the squared norm of the gradient."""

    def norm(weights: Any, x: Tensor) -> Tensor:
        return sum(g.square().sum() for g in tree_leaves(grad(loss)(weights, x)))

    return grad(norm)


def hessian_product(loss: Loss) -> Callable[..., Any]:
    """Return a product of the Hessian and the weights."""
    return lambda weights, x: jvp(lambda w: grad(loss)(w, x), (weights,), (weights,))[1]


@dataclass(frozen=True)
class Case:
    """A transform, and the targets: peak and time beyond compiled plain."""

    transform: Callable[..., Any] | None
    peak: float
    time: float | None = None
    rows: int = 1


CASES = {
    ".backward()": Case(None, 0.36),
    "grad": Case(grad, 0.25, 1.5),
    "vmap(grad)": Case(lambda loss: vmap(grad(loss), (None, 0)), 0.46, rows=4),
    "grad(grad)": Case(second_order, 0.30),
    "jvp(grad)": Case(hessian_product, 0.35, 1.8),
}


def step_of(case: Case, system: str) -> Step:
    """Return a step, compiled unless the system is not."""
    torch.manual_seed(0)
    shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    weights = [
        tuple(torch.randn(*shape) / shape[0] ** 0.5 for shape in shapes)
        for _ in range(DEPTH)
    ]
    x = torch.randn(BATCH, WIDTH)
    loss = loss_of(WRAPS[system])
    compiled: Any = (lambda fn: fn) if system == EAGER else torch.compile
    if case.transform is not None:
        batch = x if case.rows == 1 else x.view(case.rows, -1, WIDTH)
        fn = compiled(case.transform(loss))
        return lambda: fn(weights, batch)
    fn = compiled(loss)

    def step() -> object:
        leaves = [[w.detach().requires_grad_() for w in pair] for pair in weights]
        fn(leaves, x).backward()
        return [w.grad for pair in leaves for w in pair]

    return step


def measured(step: Step) -> tuple[float, int]:
    """Return the peak of a step in MiB, and how many products it computes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    assert found.profiler is not None
    events = found.profiler.kineto_results.events()
    memory = [e for e in events if e.name() == "[memory]"]
    sizes = [e.nbytes() for e in sorted(memory, key=lambda e: e.start_ns())]
    names = "aten::mm", "aten::bmm"
    products = sum(e.name() in names for e in events)
    return max(itertools.accumulate(sizes)) / 2**20, products


def report(
    name: str, case: Case, found: dict[str, tuple[float, int]], times: Times
) -> tuple[Any, bool]:
    """Return the table of one transform, and whether its targets are met."""
    headings = "peak, MiB", "of plain", "time, of plain", "products"
    cells = table(f"Compiled {name}", "system", *headings)
    for system, (peak, products) in found.items():
        share = f"{peak / found[PLAIN][0]:.2f}"
        ratio = str(Ratio.of(times[system], times[PLAIN]))
        cells.add_row(system, f"{peak:.1f}", share, ratio, f"{products}")
    share = found[REMAT][0] / found[PLAIN][0]
    own = times[REMAT]
    met = [share <= case.peak, Ratio.of(own, times[EAGER]).low <= 1]
    cells.add_row("target: peak", "", verdict(met[0], f"{case.peak}"), "", "")
    cells.add_row("target: time", "", "", verdict(met[1], "not compiled"), "")
    bounds = {PLAIN: case.time, BASELINE: 1.0 if BASELINE in found else None}
    for other, bound in bounds.items():
        if bound is not None:
            met.append(Ratio.of(own, times[other]).low <= bound)
            ratio = f"{bound} of {other}: {Ratio.of(own, times[other])}"
            cells.add_row("target: time", "", "", verdict(met[-1], ratio), "")
    return cells, all(met)


def run(options: argparse.Namespace, screen: Console) -> bool:
    """Measure all cases; return whether all targets are met."""
    met = True
    for name, case in CASES.items():
        torch.compiler.reset()
        systems = [s for s in WRAPS if s != BASELINE or case.transform is None]
        steps = {system: step_of(case, system) for system in systems}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            times = interleaved(steps, options.rounds)
        found = {system: measured(step) for system, step in steps.items()}
        cells, is_met = report(name, case, found, times)
        screen.print(cells)
        met = met and is_met
    return met


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    return 0 if run(options, console()) else 1


if __name__ == "__main__":
    sys.exit(main())
