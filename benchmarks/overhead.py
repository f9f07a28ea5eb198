"""Instructions that a checkpointed call costs beyond the plain one, in four styles.

Counted are forward and backward, on one thread, of two bodies so small that it is all
bookkeeping: four ops on four floats, and a transformer block. ``_styles.py`` says what
the styles are. In each, remat is compared to what torch's checkpoint costs in the same.
Then four ops under torch.func, and first calls, beside those that follow them.
Reproduce with

    python benchmarks/overhead.py

``_count.py`` says how they are counted, and what with.
"""

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from _block import HEADS, block, block_params, block_work, configured, stream
from _count import ROUNDS, Case, Counts, Label, count
from _styles import CLOSURE, FUNCTION, METHOD, MODULE, STYLES, Step, Work, module_work
from _systems import (
    BASELINE,
    COMPAT,
    COMPAT_SELECTIVE,
    DEFAULT,
    PLAIN,
    PRUNED,
    REENTRANT,
    SAVING,
    SELECTIVE,
    SYSTEMS,
    TORCH_REMAT,
    TensorFn,
)
from _tables import console, number, table, verdict
from rich.console import Console
from torch import Tensor, nn
from torch.func import grad


FOUR_OPS, BLOCK, FUNC_GRAD = "4 ops", "block", "func.grad"
SHAPE = (2, 8, 32)  # of the block: batch, time, width


# --- Four ops ------------------------------------------------------------------------


FACTOR = 2


def ops(x: Tensor) -> Tensor:
    """Run four ops, each of which saves something for its backward."""
    return torch.sin(torch.tanh(x * 2.0).exp())


def configured_ops(shift: int) -> TensorFn:
    """Return the same as a function that closes over its configuration."""

    def apply(x: Tensor, power: int = 1) -> Tensor:
        h = torch.tanh(x * FACTOR)
        if shift:
            h = h + shift
        return torch.sin(h.exp() if power == 1 else h**power)

    return apply


class FourOps(nn.Module):
    """The same as a module without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = FACTOR

    def forward(self, x: Tensor) -> Tensor:
        """Run the four ops."""
        return torch.sin(torch.tanh(x * self.factor).exp())


def four_ops(style: str) -> Work:
    """Return one call of the four ops in a style."""
    x = torch.linspace(-1, 1, 4).requires_grad_()
    if style in (MODULE, METHOD):
        return module_work(FourOps(), x, style)
    return Work(ops if style == FUNCTION else configured_ops(0), (x,), [x])


# --- What is counted -----------------------------------------------------------------


@dataclass(frozen=True)
class Body:
    """What is checkpointed, by which systems beside plain, so often in each round."""

    in_style: Callable[[str], Work]
    systems: Sequence[str]
    loops: int


BODIES = {
    FOUR_OPS: Body(four_ops, (REENTRANT, BASELINE, TORCH_REMAT, DEFAULT, PRUNED), 30),
    BLOCK: Body(
        lambda style: block_work(style, *SHAPE),
        (
            *(BASELINE, SELECTIVE, TORCH_REMAT, DEFAULT, PRUNED, SAVING),
            *(COMPAT, COMPAT_SELECTIVE),
        ),
        6,
    ),
}
LENGTH, FRESH, AGAIN = "a new length", "a new function", "called again"
FIRST_CALLS = BASELINE, DEFAULT, PRUNED, SAVING
PER_ROUND = 3  # first calls, each of a length of its own
NEW = [*range(9, 9 + 2 * PER_ROUND * ROUNDS, 2)]  # of sequences
KNOWN = [n + 1 for n in NEW]  # remat knows those of its other calls, too
OTHERS = [*range(40, 44)]  # to warm up on


def body_step(name: str, style: str, system: str) -> Step:
    """Return a step of a body."""
    return BODIES[name].in_style(style).step(SYSTEMS[system])


def func_grad_step(system: str) -> Step:
    """Return a derivative of the four ops by torch.func."""
    fn, x = SYSTEMS[system](ops), torch.linspace(-1, 1, 4)
    gradient = grad(lambda x: fn(x).sum())
    return lambda: gradient(x)


def step_of_lengths(system: str, lengths: Sequence[int]) -> Step:
    """Return a step that takes the next length each time it is called."""
    (batch, _, width), wrapped = SHAPE, SYSTEMS[system](block)
    params = block_params(width)
    steps = [
        Work(wrapped, (params, x, HEADS), [x, *params.values()]).step(SYSTEMS[PLAIN])
        for x in (stream(batch, n, width) for n in lengths)
    ]
    turns = itertools.cycle(steps)
    return lambda: next(turns)()


def step_of_new_functions(system: str) -> Step:
    """Return a step that makes the function, and wraps it, each time it is called."""
    params, x = block_params(SHAPE[-1]), stream(*SHAPE)
    leaves = [x, *params.values()]
    wrap = SYSTEMS[system]
    return lambda: Work(configured(True, 3), (params, x), leaves).step(wrap)()


def cases() -> dict[Label, Case]:
    """Return all that is counted."""
    found: dict[Label, Case] = {}
    for name, of in BODIES.items():
        for style, system in itertools.product(STYLES, (PLAIN, *of.systems)):
            make = functools.partial(body_step, name, style, system)
            found[name, style, system] = Case(make, loops=of.loops)
    for system in (PLAIN, *BODIES[FOUR_OPS].systems):
        make = functools.partial(func_grad_step, system)
        found[FUNC_GRAD, FUNCTION, system] = Case(make)
    for system in FIRST_CALLS:
        first = functools.partial(step_of_lengths, system, OTHERS + NEW)
        again = functools.partial(step_of_lengths, system, KNOWN)
        new = functools.partial(step_of_new_functions, system)
        found[LENGTH, system] = Case(first, len(OTHERS), PER_ROUND)
        found[AGAIN, system] = Case(again, 2 * len(KNOWN), PER_ROUND)
        found[FRESH, system] = Case(new, len(OTHERS), PER_ROUND)
    return found


# --- Instructions beyond plain -------------------------------------------------------


@dataclass(frozen=True)
class Target:
    """The share of another system that one of ours may cost beyond plain."""

    body: str
    ours: str
    other: str
    functions: float
    modules: float

    def limit(self, style: str) -> float:
        """Return the share in one style."""
        return self.modules if style in (MODULE, METHOD) else self.functions

    @property
    def bound(self) -> str:
        """Write it down."""
        if self.functions == self.modules:
            return f"<= {self.functions}"
        return f"<= {self.functions}, modules {self.modules}"


TARGETS = (
    Target(FOUR_OPS, DEFAULT, BASELINE, 0.53, 0.53),
    Target(BLOCK, DEFAULT, BASELINE, 0.60, 0.78),
    Target(BLOCK, PRUNED, BASELINE, 1.0, 1.0),
    Target(BLOCK, SAVING, SELECTIVE, 0.60, 0.60),
    Target(BLOCK, COMPAT, BASELINE, 0.80, 0.80),
    Target(BLOCK, COMPAT_SELECTIVE, SELECTIVE, 1.0, 1.0),
)
SPREAD = 1.5  # of ours, the most expensive style beside the cheapest
MOST_FUNC_GRAD = 510_000  # beyond plain: it is 500,000, and repeats to one in a hundred
FIRST_CALL = 3.0  # of a warm one


def beyond(counts: Counts, body: str, style: str, system: str) -> float | str:
    """Return the instructions beyond plain, or why there are none."""
    total, plain = counts[body, style, system], counts[body, style, PLAIN]
    return total if isinstance(total, str) else total - plain


def all_beyond(counts: Counts, body: str, screen: Console) -> None:
    """Print what each system costs in each style."""
    cells = table(f"Instructions of {body}: {PLAIN}, and beyond it", "system", *STYLES)
    plain = [number(counts[body, style, PLAIN]) for style in STYLES]
    cells.add_row(PLAIN, *plain)
    for system in BODIES[body].systems:
        row = [number(beyond(counts, body, style, system)) for style in STYLES]
        cells.add_row(system, *row)
    screen.print(cells)


def shares(counts: Counts, screen: Console) -> bool:
    """Print ours as shares of what they replace; return whether targets are met."""
    title = "Shares of what another system costs beyond plain"
    headings = "target", "most expensive / cheapest", "target"
    cells = table(title, "system, of another", *STYLES, *headings)
    all_met = True
    for target in TARGETS:
        ours, other = (
            [_number(beyond(counts, target.body, style, system)) for style in STYLES]
            for system in (target.ours, target.other)
        )
        parts = [a / b for a, b in zip(ours, other, strict=True)]
        limits = map(target.limit, STYLES)
        met = all(a <= b for a, b in zip(parts, limits, strict=True))
        spread = max(ours) / min(ours)
        cells.add_row(
            f"{target.body}: {target.ours}, of {target.other}",
            *(f"{part:.3f}" for part in parts),
            verdict(met, target.bound),
            f"{spread:.2f}",
            verdict(spread <= SPREAD, f"<= {SPREAD}"),
        )
        all_met &= met and spread <= SPREAD
    screen.print(cells)
    return all_met


def _number(value: float | str) -> float:
    """Return a number that misses every target where there is none."""
    return float("nan") if isinstance(value, str) else value


def func_grads(counts: Counts, screen: Console) -> bool:
    """Print four ops under torch.func; return whether the target is met."""
    title = f"Instructions of {FOUR_OPS} under {FUNC_GRAD}, beyond plain"
    cells = table(title, "system", "instructions", "target")
    found = {
        system: beyond(counts, FUNC_GRAD, FUNCTION, system)
        for system in BODIES[FOUR_OPS].systems
    }
    met = _number(found[DEFAULT]) <= MOST_FUNC_GRAD
    for system, own in found.items():
        target = verdict(met, f"<= {MOST_FUNC_GRAD:,}") if system == DEFAULT else ""
        cells.add_row(system, number(own), target)
    screen.print(cells)
    return met


def first_calls(counts: Counts, screen: Console) -> bool:
    """Print what first calls cost; return whether the targets are met."""
    title = f"Instructions of a whole first call of a {BLOCK}, and once it is known"
    headings = LENGTH, AGAIN, "ratio", "target", FRESH, AGAIN, "ratio"
    cells = table(title, "system", *headings)
    all_met = True
    for system in FIRST_CALLS:
        first, again = counts[LENGTH, system], counts[AGAIN, system]
        fresh, known = counts[FRESH, system], counts[BLOCK, CLOSURE, system]
        ratio = _number(first) / _number(again)
        cells.add_row(
            system,
            *(number(first), number(again), f"{ratio:.2f}"),
            ""
            if system == BASELINE
            else verdict(ratio <= FIRST_CALL, f"<= {FIRST_CALL}"),
            *(number(fresh), number(known)),
            f"{_number(fresh) / _number(known):.2f}",
        )
        all_met &= system == BASELINE or ratio <= FIRST_CALL
    screen.print(cells)
    return all_met


def main() -> None:
    """Count, print the tables, and exit with 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    counts, screen = count(__file__), console()
    for name in BODIES:
        all_beyond(counts, name, screen)
    results = [report(counts, screen) for report in (shares, func_grads, first_calls)]
    sys.exit(not all(results))


if __name__ == "__main__":
    main()
