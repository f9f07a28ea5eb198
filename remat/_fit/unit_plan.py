"""Makes a plan by blocks from one record: chosen by the program, verified by one run.

Invariant: what is returned was run as a whole, as `FitPlan.apply` applies it, and stays
under the budget, in the first step, too.
"""

from collections.abc import Sequence
from functools import partial

import torch

from remat import nn as remat_nn
from remat._fit.block_plan import FitBlock, FitPlan
from remat._fit.choose import Chosen, chosen_for, has_solver
from remat._fit.record import recorded
from remat._fit.simulate import Simulation, TrainingStep, simulate
from remat._fit.units import OfBlock, UnitWalker


_TIMES = 3  # that a choice is made again
_NEAR = 0.01


def by_units(
    step: TrainingStep, device: torch.device, blocks: Sequence[str], budget: int
) -> FitPlan | None:
    """Return a plan; None if none was found, or a step is not as the walk predicts.

    That is so where a block changes in place what it returns: its call makes that again
    for its own backward, and the walk knows one storage.
    """
    record, is_real = recorded(step, device, blocks=blocks)
    assert record is not None
    walker, aim = UnitWalker(record), budget
    for _ in range(_TIMES):
        chosen = chosen_for(walker, aim)
        if chosen is None:
            return None
        policies = walker.policies(chosen)
        change = partial(_applied, policies=policies)
        found = simulate(step, device, change, is_real=is_real, times=2 - is_real)
        if abs(found.peak - walker(chosen).peak) > _NEAR * found.peak:
            return None
        if found.peak <= budget:
            return _plan(walker, chosen, policies, blocks, found, step, budget)
        aim -= found.peak - budget
    return None


def _applied(step: TrainingStep, policies: dict[str, OfBlock]) -> TrainingStep:
    model = step.model()
    if policies and model is not None:
        remat_nn.apply(model, policies)
    return step


def _plan(
    walker: UnitWalker,
    chosen: Chosen,
    policies: dict[str, OfBlock],
    blocks: Sequence[str],
    found: Simulation,
    step: TrainingStep,
    budget: int,
) -> FitPlan:
    record = walker.record
    return FitPlan(
        type(step.model()).__name__,
        budget,
        found.peak,
        found.resident,
        walker(walker.choices).peak,
        found.flops - record.flops,
        record.flops,
        walker.seconds(chosen),
        found.peak_at,
        tuple(_described(walker, chosen, policies, name) for name in blocks),
        lacks_budgets=bool(policies) and not has_solver(),
    )


def _described(
    walker: UnitWalker, chosen: Chosen, policies: dict[str, OfBlock], name: str
) -> FitBlock:
    """Return what a plan does with a block."""
    record, saved = walker.record, walker.storages(chosen)
    needed, runs = walker.closure(saved)
    alive = {n for n in range(len(record.sizes)) if record.dies[n] > record.turn}
    alive = {n for n in alive if n not in walker.makers} | (saved & needed)
    again = kept = 0
    for call in walker.blocks.get(name, ()):
        for i in call.operations:
            op = record.operations[i]
            again += op.flops if i in runs else 0
            kept += sum(record.sizes[n] for n in op.makes if n in alive)
    policy = policies.get(name)
    return FitBlock(name, policy is not None, policy, False, kept, again)
