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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from _block import HEADS, block, block_params, block_work, configured, stream
from _count import ROUNDS, Case, Counts, Label, count
from _results import THOUSANDS, Results
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
from _tables import number
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
            *(REENTRANT, BASELINE, SELECTIVE, TORCH_REMAT),
            *(DEFAULT, PRUNED, SAVING),
            *(COMPAT, COMPAT_SELECTIVE),
        ),
        6,
    ),
}
LENGTH, FRESH = "a new length", "a new function"
AGAIN, KNOWN_CALL = "called again", "the same function"
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
    Target(FOUR_OPS, DEFAULT, BASELINE, 0.70, 0.85),
    Target(BLOCK, DEFAULT, BASELINE, 0.65, 0.78),
    Target(BLOCK, PRUNED, BASELINE, 1.05, 1.05),
    Target(BLOCK, SAVING, SELECTIVE, 0.80, 0.80),
    Target(BLOCK, COMPAT, BASELINE, 0.80, 0.80),
    Target(BLOCK, COMPAT_SELECTIVE, SELECTIVE, 1.0, 1.0),
)
SPREAD = 1.5  # of ours, the most expensive style beside the cheapest
MOST_FUNC_GRAD = 510_000  # beyond plain
FIRST_CALL = 3.0  # of a warm one


def beyond(counts: Counts, body: str, style: str, system: str) -> float | str:
    """Return the instructions beyond plain, or why there are none."""
    total, plain = counts[body, style, system], counts[body, style, PLAIN]
    return total if isinstance(total, str) else total - plain


def all_beyond(counts: Counts, body: str, results: Results) -> None:
    """Print what each system costs in each style."""
    title = f"Thousands of instructions of {body}: {PLAIN}, and beyond it"
    cells = results.table(body, title, "system", STYLES, THOUSANDS)
    cells.add(PLAIN, *(counts[body, style, PLAIN] for style in STYLES))
    for system in BODIES[body].systems:
        cells.add(system, *(beyond(counts, body, style, system) for style in STYLES))
    results.show(cells)


def shares(counts: Counts, results: Results) -> None:
    """Print ours as shares of what they replace."""
    title = "Shares of what another system costs beyond plain"
    columns = dict.fromkeys(STYLES, ".3f") | {"most expensive / cheapest": ".2f"}
    cells = results.table("shares", title, "system, of another", columns)
    for target in TARGETS:
        ours, other = (
            [_number(beyond(counts, target.body, style, system)) for style in STYLES]
            for system in (target.ours, target.other)
        )
        parts = [a / b for a, b in zip(ours, other, strict=True)]
        limits = map(target.limit, STYLES)
        met = all(a <= b for a, b in zip(parts, limits, strict=True))
        spread = max(ours) / min(ours)
        row = f"{target.body}: {target.ours}, of {target.other}"
        cells.add(row, *parts, spread)
        reached = f"{min(parts):.3f} to {max(parts):.3f}"
        cells.aim(row, target.bound, reached, met)
        cells.aim(row, f"spread <= {SPREAD}", f"{spread:.2f}", spread <= SPREAD)
    results.show(cells)


def _number(value: float | str) -> float:
    """Return a number that misses every target where there is none."""
    return float("nan") if isinstance(value, str) else value


def func_grads(counts: Counts, results: Results) -> None:
    """Print four ops under torch.func."""
    title = f"Thousands of instructions of {FOUR_OPS} under {FUNC_GRAD}, beyond plain"
    cells = results.table(FUNC_GRAD, title, "system", ["instructions"], THOUSANDS)
    for system in BODIES[FOUR_OPS].systems:
        own = beyond(counts, FUNC_GRAD, FUNCTION, system)
        cells.add(system, own)
        if system == DEFAULT:
            met = _number(own) <= MOST_FUNC_GRAD
            cells.aim(system, f"<= {MOST_FUNC_GRAD:,}", number(own), met)
    results.show(cells)


def first_calls(counts: Counts, results: Results) -> None:
    """Print what first calls cost."""
    title = f"Thousands of instructions of a whole first call of a {BLOCK}, and later"
    columns = {LENGTH: THOUSANDS, AGAIN: THOUSANDS, "ratio": ".2f"}
    columns |= {FRESH: THOUSANDS, KNOWN_CALL: THOUSANDS, "its ratio": ".2f"}
    cells = results.table("first calls", title, "system", columns)
    for system in FIRST_CALLS:
        first, again = counts[LENGTH, system], counts[AGAIN, system]
        fresh, known = counts[FRESH, system], counts[BLOCK, CLOSURE, system]
        ratio = _number(first) / _number(again)
        cells.add(
            system,
            *(first, again, ratio),
            *(fresh, known, _number(fresh) / _number(known)),
        )
        if system != BASELINE:
            met = ratio <= FIRST_CALL
            cells.aim(system, f"<= {FIRST_CALL}", f"{ratio:.2f}", met)
    results.show(cells)


def main() -> None:
    """Count and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.parse_args()
    torch.set_num_threads(1)
    counts, results = count(__file__), Results(__file__)
    for name in BODIES:
        all_beyond(counts, name, results)
    for report in shares, func_grads, first_calls:
        report(counts, results)
    results.finish()


if __name__ == "__main__":
    main()
