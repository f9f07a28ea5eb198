"""What is chosen for, the blocks of a model; and the plan of the best.

Called by `api`. A `Fitting` says which modules have options and how a copy of the step
follows a choice. `search` chooses; `fitted` describes what it found.

Invariant: a choice is applied to a copy as `FitPlan.apply` applies it to the model.
Rejected: a mode that recomputes blocks without `remat.nn.apply`. It would be simulated
well, and be something else.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from remat import nn as remat_nn
from remat._base.errors import BudgetError
from remat._fit.options import PLAIN, Option, has_solver, options_for
from remat._fit.plan import FitBlock, FitCandidate, FitPlan
from remat._fit.search import Candidate, Picks, Search, search
from remat._fit.simulate import Part, Simulation, place, simulate, undisturbed
from remat._fit.training_step import TrainingStep
from remat._report.render import mebibytes
from remat._transform.refused import has_forward
from remat.nn._applied import refuse_others
from remat.nn._apply import as_selectors, selected


@dataclass(frozen=True)
class Fitting:
    """What is chosen for.

    Attributes:
        label: the name of the model.
        step: the step.
        device: of tensors that are on the meta device.
        blocks: the names of the modules that have options.
        depths: the names of modules around several blocks, those of one depth together.
        change: makes a copy of the step follow a choice.
    """

    label: str
    step: TrainingStep
    device: torch.device
    blocks: tuple[str, ...]
    depths: tuple[tuple[str, ...], ...]
    change: Callable[[TrainingStep, dict[str, Option]], TrainingStep]


def over_blocks(step: TrainingStep, device: torch.device, select: object) -> Fitting:
    """Choose for each block of the model of a step."""
    model = step.model()
    if model is None:
        raise ValueError(_NO_MODEL)
    refuse_others(model, "remat.fit")
    blocks = _blocks(model, select)

    def change(step: TrainingStep, chosen: dict[str, Option]) -> TrainingStep:
        copy = step.model()
        if chosen and copy is not None:
            remat_nn.apply(copy, {name: o.of(name) for name, o in chosen.items()})
        return step

    label, depths = type(model).__name__, _around(model, blocks)
    return Fitting(label, step, device, blocks, depths, change)


def _blocks(model: nn.Module, select: object) -> tuple[str, ...]:
    if select is not None:
        found = selected(model, as_selectors(select))
        return tuple(name for name, _, _ in found)
    blocks = remat_nn.blocks(model)
    if not blocks:
        raise ValueError(_NO_BLOCKS.format(model=type(model).__name__))
    return tuple(blocks)


def _around(model: nn.Module, blocks: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    """Return the modules that several blocks are in, by depth."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        inside = [block for block in blocks if block and block.startswith(prefix)]
        if len(inside) > 1 and name not in blocks and has_forward(module):
            found.setdefault(prefix.count("."), []).append(name)
    return tuple(tuple(names) for _, names in sorted(found.items()))


# --- The plan ----------------------------------------------------------------------


def fitted(fitting: Fitting, budget: int) -> FitPlan:
    """Search, and return the plan of what was found.

    Raises:
        BudgetError: nothing that was found stays under the budget.
    """
    options = options_for(())
    around = [name for names in fitting.depths for name in names]

    def simulated(picks: Picks) -> Simulation:
        chosen = {name: options[option] for name, option in picks.items()}

        def change(step: TrainingStep) -> TrainingStep:
            return fitting.change(step, chosen)

        return simulate(fitting.step, fitting.device, change, fitting.blocks, around)

    searched = Search(budget, simulated)
    with undisturbed():
        plain = searched.run({}, PLAIN.name)
        assert plain is not None, "an error was raised otherwise"
        options |= options_for(plain.found.names)
        search(searched, options, fitting.blocks, fitting.depths)
    best = searched.best()
    if best is None:
        raise _too_small(fitting, searched, plain)
    return _plan(fitting, searched, plain, best, options)


def _too_small(fitting: Fitting, searched: Search, plain: Candidate) -> BudgetError:
    least = searched.candidates[0].found
    message = _TOO_SMALL.format(
        label=fitting.label,
        budget=mebibytes(searched.budget),
        least=mebibytes(least.peak),
        at=place(least),
        resident=mebibytes(least.resident),
        plain=mebibytes(plain.found.peak),
    )
    return BudgetError(message, least.peak)


def _plan(
    fitting: Fitting,
    searched: Search,
    plain: Candidate,
    best: Candidate,
    options: dict[str, Option],
) -> FitPlan:
    before, found = plain.found, best.found
    around = [name for names in fitting.depths for name in names]
    nested = [name for name in around if name in best.picks]
    blocks = [
        _block(name, plain, best, options, around=name in nested)
        for name in [*nested, *fitting.blocks]
    ]
    return FitPlan(
        fitting.label,
        searched.budget,
        found.peak,
        found.resident,
        before.peak,
        found.flops - before.flops,
        before.flops,
        found.seconds - before.seconds,
        place(found),
        tuple(blocks),
        tuple(_candidate(c, before) for c in searched.candidates),
        lacks_budgets=not searched.fits(plain) and not has_solver(),
    )


def _candidate(candidate: Candidate, plain: Simulation) -> FitCandidate:
    found = candidate.found
    again, seconds = found.flops - plain.flops, found.seconds - plain.seconds
    return FitCandidate(candidate.label, found.peak, again, seconds)


def _block(
    name: str,
    plain: Candidate,
    best: Candidate,
    options: dict[str, Option],
    *,
    around: bool,
) -> FitBlock:
    option = options[best.picks.get(name, PLAIN.name)]
    parts, before = [[*_parts(c.found, name)] for c in (best, plain)]
    saved = sum(part.saves for part in parts)
    again = sum(p.flops for p in parts) - sum(p.flops for p in before)
    return FitBlock(name, option.recomputes, option.of(name), around, saved, again)


def _parts(found: Simulation, name: str) -> Iterator[Part]:
    """Yield the windows of a module."""
    step = found.steps[-1]
    for nest, first, end in found.nests:
        if nest == name:
            yield from step[first:end]
            return
    yield from (part for part in step if part.name == name)


_NO_MODEL = (
    "remat.fit: no model is passed. Pass the model itself, or a function and, among "
    "its arguments, the model: fit(step, model, batch, budget=...). A function without "
    "blocks has a plan for its step: leave out over='blocks'."
)
_NO_BLOCKS = (
    "remat.fit: this {model} has no repeated blocks. Say which modules may be "
    "recomputed: select='layers.*', a class, or a function of a module. Or plan the "
    "whole step, without over='blocks'."
)
_TOO_SMALL = (
    "remat.fit: no plan for {label} stays under {budget}. The least budget for which "
    "there is one is {least} (`error.least`), with the peak {at}; {resident} of it are "
    "there before the step. Without remat the peak is {plain}. Pass a larger budget, "
    "or a smaller batch."
)
