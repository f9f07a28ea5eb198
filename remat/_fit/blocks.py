"""Plans by blocks: which blocks of a model are recomputed, and under which policies.

    1. The step is simulated without remat, with all blocks under each option, and with
       the modules around blocks recomputed. Each run measures every block: what it
       saves, needs and costs.
    2. `distribute` distributes memory over the blocks, for all amounts at once.
    3. The assignments that it finds are simulated, until the one of least work is known
       that stays under the budget. The numbers of step 1 are those of a block among
       others of its kind; a simulation knows.

Invariant: what is returned was simulated as a whole, as `FitPlan.apply` applies it, and
stays under the budget. No uniform choice that does costs less.
Rejected: to trust the sums. What one block saves, another may hold anyway.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from remat import nn as remat_nn, policies
from remat._base.errors import BudgetError, RematError
from remat._fit import distribute
from remat._fit.block_plan import FitBlock, FitPlan
from remat._fit.choose import has_solver
from remat._fit.distribute import WHOLE, Assignment, ChainStage, Cost, Item, Nest
from remat._fit.meter import Window
from remat._fit.simulate import (
    Nests,
    Simulation,
    TrainingStep,
    isolated,
    simulate,
    without_values_if_possible,
)
from remat._fit.step_plan import too_small
from remat._fit.unit_plan import by_units
from remat._transform.refused import has_forward
from remat.nn._applied import refuse_others
from remat.nn._apply import as_selectors, selected
from remat.policies import Policy


# The options of modules by name; a module that is not in there is called as it is.
Picks = Mapping[str, str]
PLAIN, NOTHING = "plain", "nothing_saveable"
_USUAL: tuple[Policy, ...] = (
    policies.dots_saveable,
    policies.dots_with_no_batch_dims_saveable,
    policies.everything_saveable,
)
# Of what a block saves beyond its input, if it saves everything: for `within`.
_SHARES = (0.1, 0.25, 0.4, 0.6, 0.8)
_TRIES = 12  # simulations of assignments
_DOUBT = 1.1  # what sums may be off by


def fitted(
    step: TrainingStep, device: torch.device, select: object, budget: int
) -> FitPlan:
    """Return a plan for the blocks of the model of a step, or raise a BudgetError."""
    model = step.model()
    if model is None:
        raise ValueError(_NO_MODEL)
    refuse_others(model, "remat.fit")
    blocks = _blocks(model, select)
    with isolated():
        found = by_units(step, device, blocks, budget)
    if found is not None:
        return found
    depths = _around(model, blocks)
    trials = _Trials(
        step, device, blocks, [name for names in depths for name in names], budget
    )
    with isolated():
        plain = trials.plain()
        if not trials.fits(plain) and blocks:
            _search(trials, plain, depths)
    best, label = trials.best(), type(model).__name__
    before = plain.found
    if best is None:
        least = trials.candidates[0].found
        where = least.peak, least.peak_at, before.resident, before.peak
        raise BudgetError(too_small(label, budget, *where), least.peak)
    nested = [name for name in trials.around if name in best.picks]
    found = best.found
    return FitPlan(
        label,
        budget,
        found.peak,
        found.resident,
        before.peak,
        found.flops - before.flops,
        before.flops,
        found.seconds - before.seconds,
        found.peak_at,
        tuple(trials.described(name, plain, best) for name in (*nested, *blocks)),
        lacks_budgets=not trials.fits(plain) and not has_solver(),
    )


def _blocks(model: nn.Module, select: object) -> tuple[str, ...]:
    if select is not None:
        found = selected(model, as_selectors(select))
        return tuple(name for name, _, _ in found)
    blocks = remat_nn.blocks(model)
    if not blocks:
        raise ValueError(_NO_BLOCKS.format(model=type(model).__name__))
    return tuple(blocks)


def _around(model: nn.Module, blocks: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the modules that several blocks are in, by depth."""
    found: dict[int, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        inside = [block for block in blocks if block and block.startswith(prefix)]
        if len(inside) > 1 and name not in blocks and has_forward(module):
            depth = prefix.count(".")
            found[depth] = (*found.get(depth, ()), name)
    return [names for _, names in sorted(found.items())]


# --- What was simulated ---


class _Candidate(NamedTuple):
    """An assignment that was simulated, and what it does."""

    picks: Picks
    found: Simulation


class _Trials:
    """Simulates assignments, each once."""

    def __init__(
        self,
        step: TrainingStep,
        device: torch.device,
        blocks: tuple[str, ...],
        around: list[str],
        budget: int,
    ) -> None:
        self._step, self._device = step, device
        self.blocks, self.around, self.budget = blocks, around, budget
        every = [*around, *blocks]
        # By name, the policies of modules; None to save nothing.
        self.options: dict[str, dict[str, Policy | None]] = {
            NOTHING: dict.fromkeys(every)
        }
        for policy in _USUAL:
            self.options[str(policy)] = dict.fromkeys(every, policy)
        self._tried: dict[frozenset[tuple[str, str]], _Candidate | None] = {}
        self._is_real = False  # whether the step asks for values

    def plain(self) -> _Candidate:
        """Simulate the step as it is; find out whether that takes real tensors."""

        def run(is_real: bool) -> _Candidate | None:
            self._is_real = is_real
            return self.run({})

        found, _ = without_values_if_possible(self._step, run)
        assert found is not None, "an error was raised otherwise"
        return found

    def run(self, picks: Picks) -> _Candidate | None:
        """Simulate an assignment; None if it does not work."""
        named = {n: NOTHING if o == WHOLE else o for n, o in picks.items()}
        chosen = {n: o for n, o in named.items() if o != PLAIN}
        key = frozenset(chosen.items())
        if key not in self._tried:

            def change(step: TrainingStep) -> TrainingStep:
                copy = step.model()
                if chosen and copy is not None:
                    each = {n: self.options[o][n] for n, o in chosen.items()}
                    remat_nn.apply(copy, each)
                return step

            step = self._step, self._device
            try:
                where = self.blocks, self.around
                found = simulate(*step, change, *where, is_real=self._is_real)
                self._tried[key] = _Candidate(chosen, found)
            except RematError:
                if not chosen:
                    raise
                self._tried[key] = None
        return self._tried[key]

    @property
    def candidates(self) -> list[_Candidate]:
        """What was simulated, the one with the lowest peak first."""
        found = [c for c in self._tried.values() if c is not None]
        return sorted(found, key=lambda c: (c.found.peak, c.found.seconds))

    def fits(self, candidate: _Candidate | None) -> bool:
        """Say whether a candidate works, and stays under the budget."""
        return candidate is not None and candidate.found.peak <= self.budget

    def best(self) -> _Candidate | None:
        """Return the candidate of least work that fits."""
        fits = filter(self.fits, self.candidates)
        return min(fits, key=lambda c: c.found.seconds, default=None)

    def described(self, name: str, plain: _Candidate, best: _Candidate) -> FitBlock:
        """Return what an assignment does with a module."""
        option = best.picks.get(name, PLAIN)
        policy = None if option == PLAIN else self.options[option][name]
        parts, before = [_windows_of(c.found, name) for c in (best, plain)]
        again = sum(w.flops for w in parts) - sum(w.flops for w in before)
        saved = sum(w.saves for w in parts)
        around = name in self.around
        return FitBlock(name, option != PLAIN, policy, around, saved, again)


def _windows_of(found: Simulation, name: str) -> Sequence[Window]:
    step = found.steps[-1]
    for nest, first, end in found.nests:
        if nest == name:
            return step[first:end]
    return [w for w in step if w.name == name]


# --- The search ---


def _search(
    trials: _Trials, plain: _Candidate, depths: Sequence[tuple[str, ...]]
) -> None:
    """Simulate what may be the best."""
    blocks = trials.blocks
    if plain.found.names:
        policy = policies.save_only_these_names(*sorted(plain.found.names))
        trials.options[repr(policy)] = dict.fromkeys(blocks, policy)
    uniform = {o: trials.run(dict.fromkeys(blocks, o)) for o in trials.options}
    nothing = uniform[NOTHING]
    if nothing is not None and has_solver():
        freed = _freed(plain.found, nothing.found, blocks)
        for share in _SHARES:
            trials.options[f"within {share:.0%}"] = {
                block: policies.within(int(share * max(size, 0)))
                for block, size in freed.items()
            }
        budgets = [o for o in trials.options if o not in uniform]
        uniform |= {o: trials.run(dict.fromkeys(freed, o)) for o in budgets}
    nested = [trials.run(dict.fromkeys((*names, *blocks), NOTHING)) for names in depths]
    items = _items(plain.found, uniform, _wholes(plain.found, nested))
    start = plain.found.steps[-1][0].entered
    found = _front(items, max(plain.found.peak - start, 1))
    _try_front(trials, found, start)
    for picks in _every_kth(blocks):
        _try_uniform(trials, picks, items, start)


def _freed(
    plain: Simulation, nothing: Simulation, blocks: Sequence[str]
) -> dict[str, int]:
    """Return the bytes that recomputing each block frees, in each of its calls."""
    before, after = [{w.name: w.saves for w in f.steps[-1]} for f in (plain, nothing)]
    return {name: before[name] - after[name] for name in blocks if name in before}


def _items(
    plain: Simulation,
    options: Mapping[str, _Candidate | None],
    wholes: Mapping[str, Cost],
) -> tuple[Item, ...]:
    """Return the chain of a step: its windows, in the nests around them."""
    names = [w.name for w in plain.steps[-1]]
    # Those that work, and cut the step into the same windows.
    measured = {PLAIN: plain} | {
        option: candidate.found
        for option, candidate in options.items()
        if candidate is not None
        and all([w.name for w in step] == names for step in candidate.found.steps)
    }
    stages: list[Item] = []
    for k, window in enumerate(plain.steps[-1]):
        costs: dict[str, Cost] = {}
        for option, found in measured.items():
            if window.name or option == PLAIN:
                windows = [step[k] for step in found.steps]
                work = max(windows[-1].work - window.work, 0.0)
                needs = max(w.needs for w in windows)
                costs[option] = Cost(windows[-1].saves, needs, work)
        stages.append(ChainStage(window.name, costs))
    # The modules that are called once and may be recomputed, as they nest.
    called = [name for name, _, _ in plain.nests]
    nests = [n for n in plain.nests if n[0] in wholes and called.count(n[0]) == 1]
    nests.sort(key=lambda nest: (nest[1], -nest[2]))
    return tuple(_grouped(stages, 0, nests, wholes))


def _grouped(
    stages: Sequence[Item], start: int, nests: Nests, wholes: Mapping[str, Cost]
) -> Iterator[Item]:
    """Yield stages, with those of each nest in a `Nest`."""
    at = start
    while nests:
        (name, first, end), *nests = nests
        inner = [nest for nest in nests if nest[2] <= end]
        nests = [nest for nest in nests if nest[1] >= end]
        yield from stages[at - start : first - start]
        inside = stages[first - start : end - start]
        yield Nest(name, tuple(_grouped(inside, first, inner, wholes)), wholes[name])
        at = end
    yield from stages[at - start :]


def _wholes(plain: Simulation, runs: Iterable[_Candidate | None]) -> dict[str, Cost]:
    """Return what it costs to recompute each nest as a whole."""
    found: dict[str, Cost] = {}
    for candidate in filter(None, runs):
        again = candidate.found
        for name, first, end in plain.nests:
            if name in candidate.picks and again.nests == plain.nests:
                windows = again.steps[-1][first:end]
                saves = windows[-1].left - windows[0].entered
                # What its forward needs, its stages need anyway.
                found[name] = Cost(saves, saves, sum(w.seconds for w in windows))
    return found


def _front(items: tuple[Item, ...], memory: int) -> list[Assignment]:
    """Return the assignments in which a module has one option in all of its calls."""
    stages = distribute.flat(items)
    keys = [stage.key for stage in stages if stage.key]
    tied = {key for key in keys if keys.count(key) > 1}
    if not tied:
        return distribute.front(items, memory)
    found: list[Assignment] = []
    for name in sorted({n for s in stages if s.key in tied for n in s.choices}):
        found += distribute.front(_fixed(items, tied, name), memory)
    found.sort(key=lambda a: (a.memory, a.work))
    best: list[Assignment] = []
    for assignment in found:
        if not best or assignment.work < best[-1].work:
            best.append(assignment)
    return best


def _fixed(items: Sequence[Item], tied: set[str], name: str) -> tuple[Item, ...]:
    """Return a chain in which some stages have one option."""
    made: list[Item] = []
    for item in items:
        if isinstance(item, Nest):
            made.append(Nest(item.key, _fixed(item.items, tied, name), item.whole))
        elif item.key in tied:
            made.append(ChainStage(item.key, {name: item.choices[name]}))
        else:
            made.append(item)
    return tuple(made)


def _try_front(trials: _Trials, found: Sequence[Assignment], start: int) -> None:
    """Find the last assignment that fits, by bisection from where it should be."""
    low, high = -1, len(found)
    guess = sum(a.memory <= trials.budget - start for a in found) - 1
    for _ in range(_TRIES):
        if low + 1 >= high:
            return
        k = min(max(guess, low + 1), high - 1)
        tried = trials.run(found[k].picks)
        off = trials.budget - tried.found.peak if tried else 0
        low, high = (k, high) if trials.fits(tried) else (low, k)
        aim = found[k].memory + off
        guess = sum(a.memory <= aim for a in found) - 1


def _every_kth(blocks: Sequence[str]) -> Iterator[Picks]:
    """Yield the choices in which every k-th block is recomputed, or all others are."""
    for k in range(2, len(blocks)):
        kth = blocks[k - 1 :: k]
        yield dict.fromkeys(kth, NOTHING)
        yield dict.fromkeys((name for name in blocks if name not in kth), NOTHING)


def _try_uniform(
    trials: _Trials, picks: Picks, items: Sequence[Item], start: int
) -> None:
    """Simulate a choice that may fit and cost less than the best."""
    stages = [stage for stage in distribute.flat(items) if stage.key]
    every = {stage.key: picks.get(stage.key, PLAIN) for stage in stages}
    if not all(every[stage.key] in stage.choices for stage in stages):
        return
    best, plain = trials.best(), min(c.found.seconds for c in trials.candidates)
    less = best is None or plain + distribute.work(items, every) < best.found.seconds
    if less and start + distribute.peak(items, every) <= trials.budget * _DOUBT:
        trials.run(picks)


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
