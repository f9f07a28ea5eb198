"""Compiled code: peak bytes, time, products and the cost to compile.

Six blocks of a perceptron are differentiated by each transform, compiled by inductor.
Torch's checkpoints, torch_remat and the memory budget of torch.compile work for
`.backward()` alone. Bytes are those of the allocator's events. All steps take turns,
and of the times the ratio in each round counts. The last table has what it costs to
compile 6, 12 and 24 blocks: without caches on disk, and with them. Reproduce with

    python benchmarks/compiled.py
"""

import argparse
import functools
import importlib
import itertools
import statistics
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _compile_times import COMPARED, DEPTHS, Found, all_rounds
from _results import Results
from _systems import BASELINE, REENTRANT, SYSTEMS, TORCH_REMAT, brief
from _times import Ratio, Step, Times, interleaved
from torch import Tensor
from torch.func import grad, jvp, vmap
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

from remat import remat


BATCH, WIDTH, HIDDEN, DEPTH = 1024, 128, 1024, 6
PLAIN, REMAT, EAGER = "plain", "remat", "remat, not compiled"
BUDGETS = 0.5, 0.2, 0.05  # of torch.compile: a share of what plain saves
Loss = Callable[..., Tensor]
Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True)
class Way:
    """How the blocks are wrapped, and the whole is compiled."""

    wrap: Callable[..., Any] = lambda fn: fn
    compile: Compile = torch.compile


def within(budget: float) -> Compile:
    """Compile by inductor with a memory budget, in a backend of its own.

    Dynamo would take the code of another budget for the same function.
    """
    config: Any = importlib.import_module("torch._functorch.config")
    inductor: Any = importlib.import_module("torch._inductor.compile_fx")

    def backend(graph: Any, inputs: Any) -> Any:
        with config.patch(activation_memory_budget=budget):
            return inductor.compile_fx(graph, inputs)

    return functools.partial(torch.compile, backend=backend)


WAYS = {
    PLAIN: Way(),
    **{f"plain, budget {share}": Way(compile=within(share)) for share in BUDGETS},
    REENTRANT: Way(SYSTEMS[REENTRANT]),
    BASELINE: Way(SYSTEMS[BASELINE]),
    TORCH_REMAT: Way(SYSTEMS[TORCH_REMAT]),
    REMAT: Way(remat),
    EAGER: Way(remat, lambda fn: fn),
}
TRANSFORMED = PLAIN, REMAT, EAGER


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


def step_of(case: Case, way: Way) -> Step:
    """Return a step."""
    torch.manual_seed(0)
    shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    weights = [
        tuple(torch.randn(*shape) / shape[0] ** 0.5 for shape in shapes)
        for _ in range(DEPTH)
    ]
    x = torch.randn(BATCH, WIDTH)
    loss = loss_of(way.wrap)
    if case.transform is not None:
        batch = x if case.rows == 1 else x.view(case.rows, -1, WIDTH)
        fn = way.compile(case.transform(loss))
        return lambda: fn(weights, batch)
    fn = way.compile(loss)

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
    name: str,
    case: Case,
    found: dict[str, tuple[float, int] | str],
    times: Times,
    results: Results,
) -> None:
    """Print the table of one transform."""
    columns = {"peak, MiB": ",.1f", "of plain": ".2f", "time, of plain": ".3f"}
    title = f"Compiled {name}"
    cells = results.table(name, title, "system", columns | {"products": ","})
    plain = found[PLAIN]
    for system, numbers in found.items():
        if isinstance(numbers, str):
            cells.add(system, numbers, None, None, None)
            continue
        peak, products = numbers
        ratio = Ratio.of(times[system], times[PLAIN])
        cells.add(system, peak, peak / plain[0], ratio, products)
    share = found[REMAT][0] / plain[0]
    cells.aim(REMAT, f"peak <= {case.peak}", f"{share:.2f}", share <= case.peak)
    bounds = {EAGER: 1.0, PLAIN: case.time, BASELINE: 1.0}
    for other, bound in bounds.items():
        if bound is not None and other in times:
            ratio = Ratio.of(times[REMAT], times[other])
            target = f"time <= {bound} of {other}"
            cells.aim(REMAT, target, ratio, ratio.low <= bound)
    results.show(cells)


def systems_of(case: Case) -> dict[str, Way]:
    """Return the systems that can run a transform."""
    # Where torch.func is inside, the graph is one: nothing is partitioned.
    return WAYS if case.transform is None else {n: WAYS[n] for n in TRANSFORMED}


def compile_times(rounds: int, results: Results) -> None:
    """Measure and print what it costs to compile."""
    found, title = all_rounds(rounds), "The cost to compile, in CPU seconds"
    columns = {
        "cold": ".2f",
        "cold, of torch's": ".3f",
        "C++ compilers": ".2f",
        "warm": ".2f",
        "warm, of torch's": ".3f",
        "warm hits": ",",
        "nodes of the backward": ",",
    }
    cells = results.table("compile", title, "system, blocks", columns)
    for blocks in DEPTHS:
        other = seconds(found[BASELINE, blocks])
        nodes = found[BASELINE, blocks][0][0]["nodes"]
        for system in COMPARED:
            own, row = found[system, blocks], f"{system}, {blocks}"
            cold, warm = map(Ratio.of, seconds(own), other)
            (first, second), *_ = own
            cells.add(
                row,
                *(statistics.median(seconds(own)[0]), cold),
                statistics.median(pair[0]["of compilers"] for pair in own),
                *(statistics.median(seconds(own)[1]), warm),
                *(second["hits"], first["nodes"]),
            )
            if system == REMAT:
                share = first["nodes"] / nodes
                cells.aim(row, "cold <= 1.2 of torch's", cold, cold.low <= 1.2)
                cells.aim(row, "warm <= 1 of torch's", warm, warm.low <= 1)
                cells.aim(row, "nodes <= 1.05", f"{share:.3f}", share <= 1.05)
    results.show(cells)


def seconds(pairs: list[tuple[Found, Found]]) -> tuple[list[float], list[float]]:
    """Return the seconds without caches and with them, by round."""
    cold, warm = zip(*pairs, strict=True)
    return [one["seconds"] for one in cold], [one["seconds"] for one in warm]


def run(options: argparse.Namespace, results: Results) -> None:
    """Measure all cases."""
    for name, case in CASES.items():
        torch.compiler.reset()
        steps: dict[str, Step] = {}
        found: dict[str, tuple[float, int] | str] = {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for system, way in systems_of(case).items():
                step = step_of(case, way)
                try:
                    step()
                except Exception as error:  # noqa: BLE001, Dynamo has its own errors
                    found[system] = brief(error)
                    continue
                steps[system], found[system] = step, ""
            times = interleaved(steps, options.rounds)
        found |= {system: measured(step) for system, step in steps.items()}
        report(name, case, found, times, results)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--processes", type=int, default=5, help="rounds of compiling")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(__file__)
    run(options, results)
    compile_times(options.processes, results)
    results.finish()


if __name__ == "__main__":
    main()
