"""Peak of a step against recomputed work: `remat.fit` beside other ways to choose.

Five small models are fitted into the peaks of the uniform choices (all blocks under one
policy, every k-th block), and into budgets between. Each plan is applied, and the peak
of two steps is measured by the profiler. Beside the plans for whole steps stand plans
by blocks, torch's selective checkpoint (SAC) in all blocks and in every k-th, and the
memory budget of torch.compile: the graphs that inductor would get run eagerly,
operation by operation. The bound is that of a program in which a recompute takes no
memory of its own: no choice recomputes less in a budget.

Work is the time of operations at nominal rates, beyond that of plain code; FLOPs are
those that torch counts. For torch.compile plain code is the same graphs with nothing
recomputed: at a budget of 1.0 it recomputes already. Reproduce with

    python benchmarks/fit.py [--models mlps lm resnet unet llama llama-8b]

where the last one is only planned, on the meta device.

``make fit`` writes all that was measured, and a plot, to ``out/``.
"""

import argparse
import copy
import functools
import importlib
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _results import Results
from _systems import DOTS, brief
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import remat
from remat._fit import meter
from remat._fit.choose import program_of
from remat._fit.record import record
from remat._fit.simulate import TrainingStep, copied, isolated
from remat._fit.walk import Walker
from remat._torch.tensors import fake_mode


sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.fitted import CASES, measured_peak, step


MODELS = "mlps", "lm", "resnet", "unet", "llama"
FIT, BLOCKS, UNIFORM = "remat.fit", "remat.fit, by blocks", "remat, uniform"
TORCH, COMPILED = "torch", "torch.compile"
OTHERS = BLOCKS, UNIFORM, TORCH, COMPILED
BOUND = "lower bound"
LARGE, LARGE_BUDGETS = "llama-8b", (70 * 10**9, 45 * 10**9)
NEAR = 1.1  # of the bound
BUDGETS = 0.02, 0.1, 0.2, 0.5, 0.8, 1.0  # of torch.compile
SHARES = 0.0, 0.15, 0.3, 0.5, 0.75, 0.95  # of what lies between least and plain


@dataclass(frozen=True)
class Row:
    """One way to run a step.

    Attributes:
        model: the name of the model.
        system: what chooses.
        choice: what it chose, or was asked for.
        peak: bytes, as measured.
        predicted: bytes, by `fit`; 0 if nothing predicts.
        flops: recomputed.
        work: recomputed, in milliseconds at nominal rates.
        budget: bytes that were asked for.
    """

    model: str
    system: str
    choice: str
    peak: int
    predicted: int
    flops: int
    work: float
    budget: int = 0


Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[..., Any] | None]


# --- Work --------------------------------------------------------------------------


class Work(TorchDispatchMode):
    """Adds up what operations cost."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.seconds = 0, 0.0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operation and note its cost."""
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            seconds, flops = meter.work_of(func, args, kwargs or {}, result)
            self.seconds += seconds
            self.flops += flops
        return result


def work_of(case: Case) -> tuple[int, float]:
    """Return FLOPs and milliseconds of a second step."""
    model = copy.deepcopy(case[0])
    step(model, *case[1:])
    model.zero_grad()
    with Work() as work:
        step(model, *case[1:])
    return work.flops, work.seconds * 1e3


# --- Systems -----------------------------------------------------------------------


def every_kth(blocks: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield which blocks are recomputed: all, every k-th, all but every k-th."""
    yield "all", [*blocks]
    for k in range(2, len(blocks)):
        kth = [*blocks[k - 1 :: k]]
        yield f"every {k}th", kth
        yield f"all but every {k}th", [b for b in blocks if b not in kth]


def uniform(blocks: Sequence[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the uniform choices of remat."""
    for name in "dots_saveable", "everything_saveable":
        policy = getattr(remat.policies, name)
        yield f"all {name}", functools.partial(applied, dict.fromkeys(blocks, policy))
    for name, chosen in every_kth(blocks):
        yield name, functools.partial(applied, dict.fromkeys(chosen))


def applied(policies: dict[str, Any], model: nn.Module) -> nn.Module:
    """Recompute blocks by remat."""
    return remat.nn.apply(model, policies)


def selective(blocks: Sequence[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield torch's checkpoint, and SAC, in all blocks and in some."""
    dots = [packet.default for packet in (*DOTS, torch.ops.aten.convolution)]
    contexts = functools.partial(create_selective_checkpoint_contexts, dots)
    for name, chosen in every_kth(blocks):
        yield (
            f"SAC dots, {name}",
            functools.partial(checkpointed, chosen, {"context_fn": contexts}),
        )
        yield f"checkpoint, {name}", functools.partial(checkpointed, chosen, {})


def checkpointed(
    blocks: Sequence[str], options: dict[str, Any], model: nn.Module
) -> nn.Module:
    """Put torch's checkpoint around the forward of blocks."""
    for name in blocks:
        block = model.get_submodule(name)
        forward = functools.partial(
            checkpoint, type(block).forward, block, use_reentrant=False, **options
        )
        object.__setattr__(block, "forward", forward)
    return model


def compiled(case: Case, budget: float, backend: Any) -> int:
    """Return the peak of a step of a compiled model with a memory budget."""
    config: Any = importlib.import_module("torch._functorch.config")
    torch.compiler.reset()
    with config.patch(activation_memory_budget=budget):
        model = torch.compile(copy.deepcopy(case[0]), backend=backend)
        step(model, *case[1:])
        return peak_of(model, case)


def run_graph(graph: Any, args: list[Any]) -> Any:
    """Run a graph of a compiled model, and drop each value after its last use."""
    return torch.fx.Interpreter(graph).boxed_run(args)


def eagerly(partition: Callable[..., Any], run: Callable[..., Any] = run_graph) -> Any:
    """Return a backend that has inductor's operations, and runs them one by one.

    Args:
        partition: splits a graph into a forward and a backward.
        run: runs each of the two, given its inputs as a list.
    """
    common: Any = importlib.import_module("torch._dynamo.backends.common")
    inductor: Any = importlib.import_module("torch._inductor.compile_fx")

    def runs(graph: Any, inputs: Any) -> Any:
        del inputs
        boxed: Any = functools.partial(run, graph)
        boxed._boxed_call = True  # it gets a list, and empties it
        return boxed

    return common.aot_autograd(
        fw_compiler=runs,
        bw_compiler=runs,
        decompositions=inductor.select_decomp_table,
        partition_fn=partition,
    )


def min_cut(graph: Any, inputs: Any, **options: Any) -> Any:
    """Split a graph as inductor does, within the memory budget."""
    aot: Any = importlib.import_module("functorch.compile")
    partition = aot.min_cut_rematerialization_partition
    return partition(graph, inputs, compiler="inductor", **options)


def saving_all(graph: Any, inputs: Any, **options: Any) -> Any:
    """Split a graph with nothing recomputed, as eager plain code does."""
    aot: Any = importlib.import_module("functorch.compile")
    return aot.default_partition(graph, inputs, **options)


def compiled_work(
    case: Case, budget: float, partition: Callable[..., Any]
) -> tuple[int, float]:
    """Return FLOPs and work of the graphs of a compiled model."""
    work = Work()

    def counted(graph: Any, args: list[Any]) -> Any:
        with work:  # a compiled function is not called under a mode
            return run_graph(graph, args)

    compiled(case, budget, eagerly(partition, counted))
    # It ran two steps.
    return work.flops // 2, work.seconds * 500


def peak_of(model: nn.Module, case: Case) -> int:
    """Return the peak of a step of a model that was compiled."""
    from support.fitted import bytes_before

    from remat.testing import memory_timeline

    model.zero_grad()
    found = memory_timeline(step, model, *case[1:])
    model.zero_grad()
    return bytes_before(case[0], *case[1], *case[2].values()) + found.peak


# --- The measurement ---------------------------------------------------------------


def rows_of(name: str, inductor: bool) -> Iterator[Row]:
    """Measure all ways to run one model."""
    make, *rest = CASES[name]
    torch.manual_seed(0)
    case: Case = (make(), *rest)
    blocks = [*remat.nn.blocks(case[0])]
    plain = work_of(case)
    highest = measured_peak(*case)
    yield Row(name, "plain", "plain", highest, 0, 0, 0.0)
    found = [measured(case, n, plain, *c) for n, c in changes(name, blocks)]
    found = [row for row in found if row is not None]
    yield from found
    budgets = {r.peak for r in found if r.system == UNIFORM}
    low = least(case)
    budgets |= {int(low + share * (highest - low)) for share in SHARES}
    for budget in sorted(b for b in budgets if low <= b < highest):
        yield fitted(case, name, plain, budget)
        if budget >= least(case, over="blocks"):
            yield fitted(case, name, plain, budget, BLOCKS, over="blocks")
        yield Row(name, BOUND, f"{budget:,}", budget, 0, 0, bound(case, budget), budget)
    yield from compiled_rows(case, name, inductor)


def changes(name: str, blocks: Sequence[str]) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the ways that change a model."""
    for choice, change in uniform(blocks):
        yield name, (UNIFORM, choice, change)
    for choice, change in selective(blocks):
        yield name, (TORCH, choice, change)


def measured(
    case: Case,
    name: str,
    plain: tuple[int, float],
    system: str,
    choice: str,
    change: Callable[..., Any],
) -> Row | None:
    """Measure a model that is changed; say if another system cannot run it."""
    changed: Case = (change(copy.deepcopy(case[0])), *case[1:])
    try:
        peak, work = measured_peak(*changed), work_of(changed)
    except RuntimeError as error:
        if system != TORCH:
            raise
        print(f"{name}: {choice} failed: {brief(error)}")
        return None
    return Row(name, system, choice, peak, 0, work[0] - plain[0], work[1] - plain[1])


def fit(case: Case, budget: int, **options: Any) -> remat.Plan:
    """Fit a model into a budget."""
    model, args, kwargs, loss = case
    return remat.fit(model, *args, budget=budget, loss=loss, **kwargs, **options)


def least(case: Case, **options: Any) -> int:
    """Return the least budget that there is a plan for."""
    try:
        fit(case, 1, **options)
    except remat.BudgetError as error:
        return error.least
    raise AssertionError("a step takes more than a byte")


def fitted(
    case: Case,
    name: str,
    plain: tuple[int, float],
    budget: int,
    system: str = FIT,
    **options: Any,
) -> Row:
    """Measure a plan."""
    plan = fit(case, budget, **options)
    changed: Case = (plan.apply(copy.deepcopy(case[0])), *case[1:])
    peak, work = measured_peak(*changed), work_of(changed)
    extra = work[0] - plain[0], work[1] - plain[1]
    return Row(name, system, f"{budget:,}", peak, plan.peak, *extra, budget)


def bound(case: Case, budget: int) -> float:
    """Return the milliseconds that any choice recomputes at least in a budget."""
    model, args, kwargs, loss = case
    with isolated():
        mode = fake_mode()
        made = copied(
            TrainingStep(model, args, kwargs, loss), mode, torch.device("cpu")
        )
        found = record(made, mode)
    walker = Walker(found)
    program = program_of(walker)
    for at, nbytes in enumerate(walker.base):
        program.limits[at] = budget - nbytes
    program.solve(node_limit=5000, mip_rel_gap=1e-4)
    return program.bound / 1e3


def compiled_rows(case: Case, name: str, inductor: bool) -> Iterator[Row]:
    """Measure torch.compile under memory budgets; say what fails.

    Work and peak are of the same graphs.
    """
    try:
        plain = compiled_work(case, 1.0, saving_all)
        for budget in BUDGETS:
            costs = compiled_work(case, budget, min_cut)
            peak = compiled(case, budget, eagerly(min_cut))
            extra = costs[0] - plain[0], costs[1] - plain[1]
            yield Row(name, COMPILED, f"{budget}", peak, 0, *extra)
            if inductor:
                peak = compiled(case, budget, "inductor")
                yield Row(name, "inductor", f"{budget}", peak, 0, *extra)
    except Exception as error:  # noqa: BLE001
        print(f"{name}: torch.compile failed: {brief(error)} {error}"[:300])


# --- The comparison ----------------------------------------------------------------


def points(rows: Sequence[Row], model: str, results: Results) -> None:
    """Keep all that was measured of a model."""
    columns = {"peak": ",", "predicted / peak": ".3f", "GFLOPs": ".3f", "work": ".3f"}
    title = f"{model}: peak, and what is recomputed, in GFLOPs and milliseconds"
    cells = results.table(f"{model}, all", title, "system: choice", columns)
    for row in rows:
        ratio = row.predicted / row.peak if row.predicted else None
        name = f"{row.system}: {row.choice}"
        cells.add(name, row.peak, ratio, row.flops / 1e9, row.work)


def plans(rows: Sequence[Row], model: str, results: Results) -> None:
    """Print the plans, each with the best of each other system in the same peak."""
    title = f"{model}: recomputed work in a budget of bytes, milliseconds"
    columns = {"predicted / measured": ".3f", BOUND: ".3f", FIT: ".3f"}
    columns |= dict.fromkeys(OTHERS, ".3f")
    cells = results.table(model, title, "budget", columns)
    for row in rows:
        if row.system != FIT:
            continue
        best = {
            system: min((r.work for r in rows if fits(r, row, system)), default=None)
            for system in OTHERS
        }
        ratio, budget = row.predicted / row.peak, f"{row.budget:,}"
        at_least = next(r.work for r in rows if is_bound(r, row))
        cells.add(budget, ratio, at_least, row.work, *best.values())
        met = row.peak <= row.budget
        cells.aim(budget, "peak <= budget", f"{row.peak:,}", met)
        most = at_least * NEAR
        cells.aim(budget, f"<= {most:.3f}", f"{row.work:.3f}", row.work <= most + 1e-4)
    results.show(cells)


def is_bound(row: Row, plan: Row) -> bool:
    """Say whether a row is the bound for a plan."""
    return row.system == BOUND and row.budget == plan.budget


def fits(row: Row, plan: Row, system: str) -> bool:
    """Say whether a way of some system stays under the budget of a plan."""
    return row.system == system and row.peak <= plan.budget


def large(results: Results) -> None:
    """Plan a Llama of 8 B on the meta device, with 8,192 tokens in bfloat16."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.empty(1, 8192, dtype=torch.long)
    case: Case = (model, (ids,), {"labels": ids, "use_cache": False}, None)
    columns = {"seconds": ".1f", "peak, GB": ".1f", "recomputed": ".1%"}
    cells = results.table(LARGE, f"{LARGE}: planning", "budget", columns)
    low, took = timed(least, case)
    cells.add("least", took, low / 1e9, None)
    for budget in LARGE_BUDGETS:
        plan, took = timed(fit, case, budget)
        cells.add(f"{budget // 10**9} GB", took, plan.peak / 1e9, plan.share)
    results.show(cells)


def timed(run: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Return a result, and the seconds that it took."""
    begin = time.perf_counter()
    return run(*args), time.perf_counter() - begin


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [*MODELS, LARGE]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    parser.add_argument("--inductor", action="store_true", help="its peaks, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = Results(__file__)
    for name in options.models:
        if name == LARGE:
            large(results)
            continue
        rows = [*rows_of(name, options.inductor)]
        plans(rows, name, results)
        points(rows, name, results)
    results.finish()


if __name__ == "__main__":
    main()
