"""Finds what each block keeps: options are measured, distributed, and simulated.

    1. The step is simulated without remat, and under each option for all blocks. Each
       run measures every block: what it saves, needs and costs.
    2. `chain` distributes memory over the blocks, for all amounts at once.
    3. The assignments that it finds are simulated, until the one of least work is known
       that stays under the budget. The numbers of step 1 are those of a block among
       others of its kind; a simulation knows.

Called by `api`.

Invariant: what is returned was simulated as a whole and stays under the budget, and no
uniform choice that does costs less.
Rejected: to trust the sums. What one block saves, another may hold anyway.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from remat._base.errors import RematError
from remat._fit import distribute
from remat._fit.distribute import WHOLE, Assignment, Choice, Item, Nest, Stage
from remat._fit.options import NOTHING, PLAIN, Option, budgets_for
from remat._fit.simulate import Part, Simulation


# The options of modules by name; a module that is not in there is called as it is.
Picks = Mapping[str, str]
Simulate = Callable[[Picks], Simulation]
_TRIES = 12  # simulations of assignments


@dataclass(frozen=True, slots=True)
class Candidate:
    """An assignment that was simulated.

    Attributes:
        label: for plots; "" if the search made it.
        picks: the assignment.
        found: what it does.
    """

    label: str
    picks: Picks
    found: Simulation


@dataclass(slots=True)
class Search:
    """Simulates assignments, each once.

    Attributes:
        budget: the bytes that a step may take.
        simulate: runs a step.
        tried: what was simulated, by what was chosen.
    """

    budget: int
    simulate: Simulate
    tried: dict[frozenset[tuple[str, str]], Candidate | None] = field(
        default_factory=dict
    )

    def run(self, picks: Picks, label: str = "") -> Candidate | None:
        """Simulate an assignment; None if it does not work."""
        named = {n: NOTHING.name if o == WHOLE else o for n, o in picks.items()}
        chosen = {name: o for name, o in named.items() if o != PLAIN.name}
        key = frozenset(chosen.items())
        if key not in self.tried:
            try:
                self.tried[key] = Candidate(label, chosen, self.simulate(chosen))
            except RematError:
                if not chosen:
                    raise
                self.tried[key] = None
        return self.tried[key]

    @property
    def candidates(self) -> list[Candidate]:
        """What was simulated, the one with the lowest peak first."""
        found = [c for c in self.tried.values() if c is not None]
        return sorted(found, key=lambda c: (c.found.peak, c.found.seconds))

    def best(self) -> Candidate | None:
        """Return the candidate of least work that fits."""
        fits = [c for c in self.candidates if self.fits(c)]
        return min(fits, key=lambda c: c.found.seconds, default=None)

    def fits(self, candidate: Candidate | None) -> bool:
        """Say whether a candidate works, and stays under the budget."""
        return candidate is not None and candidate.found.peak <= self.budget


def search(
    search: Search,
    options: dict[str, Option],
    blocks: Sequence[str],
    nests: Sequence[Sequence[str]],
) -> None:
    """Simulate what may be the best; the search holds what was found.

    Args:
        search: holds what was simulated.
        options: of a block, by name. Those with budgets are added.
        blocks: the names of the blocks.
        nests: the names of modules around blocks, those of one depth together.
    """
    plain = search.run({}, PLAIN.name)
    assert plain is not None, "an error was raised otherwise"
    if search.fits(plain) or not blocks:
        return
    uniform = _try_all(search, options, blocks)
    freed = _freed(plain, uniform[NOTHING.name], blocks)
    more = {option.name: option for option in budgets_for(freed)}
    options |= more
    uniform |= _try_all(search, more, blocks)
    whole = [search.run(_nested(blocks, names)) for names in nests]
    items = _items(plain.found, _measured(plain, uniform), _wholes(plain, whole))
    start = plain.found.steps[-1][0].entered
    found = _front(items, max(plain.found.peak - start, 1))
    _try_front(search, found, start)
    for label, picks in _every_kth(blocks):
        _try_uniform(search, label, picks, items, start)


def _try_all(
    search: Search, options: Iterable[str], blocks: Sequence[str]
) -> dict[str, Candidate | None]:
    return {o: search.run(dict.fromkeys(blocks, o), f"all {o}") for o in options}


def _freed(
    plain: Candidate, nothing: Candidate | None, blocks: Sequence[str]
) -> dict[str, int]:
    """Return the bytes that recomputing each block frees, in each of its calls."""
    if nothing is None:
        return {}
    both = plain.found.steps[-1], nothing.found.steps[-1]
    before, after = [{p.name: p.saves for p in step} for step in both]
    return {name: before[name] - after[name] for name in blocks if name in before}


def _nested(blocks: Sequence[str], around: Sequence[str]) -> dict[str, str]:
    return dict.fromkeys([*around, *blocks], NOTHING.name)


# --- The chain ---------------------------------------------------------------------


def _measured(
    plain: Candidate, uniform: Mapping[str, Candidate | None]
) -> dict[str, Candidate]:
    """Return the options that work and cut the step into the same windows."""
    names = [part.name for part in plain.found.steps[-1]]
    return {
        option: candidate
        for option, candidate in uniform.items()
        if candidate is not None
        and all([p.name for p in step] == names for step in candidate.found.steps)
    }


def _items(
    plain: Simulation, options: Mapping[str, Candidate], wholes: Mapping[str, Choice]
) -> tuple[Item, ...]:
    """Return the chain of a step: its windows, in the nests around them."""
    stages: list[Item] = []
    for k, part in enumerate(plain.steps[-1]):
        choices = {
            name: _choice([step[k] for step in candidate.found.steps], part)
            for name, candidate in options.items()
            if part.name or name == PLAIN.name
        }
        stages.append(Stage(part.name, choices))
    return tuple(_grouped(stages, 0, _outermost(plain.nests, wholes), wholes))


def _choice(parts: Sequence[Part], plain: Part) -> Choice:
    work = max(parts[-1].seconds - plain.seconds, 0.0)
    return Choice(parts[-1].saves, max(part.needs for part in parts), work)


_Nests = list[tuple[str, int, int]]


def _outermost(
    nests: Sequence[tuple[str, int, int]], wholes: Mapping[str, Choice]
) -> _Nests:
    """Return the modules that are called once and may be recomputed, as they nest."""
    names = [name for name, _, _ in nests]
    known = [n for n in nests if n[0] in wholes and names.count(n[0]) == 1]
    return sorted(known, key=lambda nest: (nest[1], -nest[2]))


def _grouped(
    stages: Sequence[Item], start: int, nests: _Nests, wholes: Mapping[str, Choice]
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


def _wholes(plain: Candidate, runs: Sequence[Candidate | None]) -> dict[str, Choice]:
    """Return what it costs to recompute each nest as a whole."""
    found: dict[str, Choice] = {}
    for candidate in runs:
        if candidate is None:
            continue
        again = candidate.found
        for name, first, end in plain.found.nests:
            if name in candidate.picks and again.nests == plain.found.nests:
                parts = again.steps[-1][first:end]
                saves = parts[-1].left - parts[0].entered
                work = sum(part.forward for part in parts)
                # What its forward needs, its stages need anyway.
                found[name] = Choice(saves, saves, work)
    return found


def _front(items: tuple[Item, ...], memory: int) -> list[Assignment]:
    """Return the assignments in which a module has one option in all of its calls."""
    keys = [stage.key for stage in distribute.flat(items) if stage.key]
    tied = {key for key in keys if keys.count(key) > 1}
    if not tied:
        return distribute.front(items, memory)
    names = {n for s in distribute.flat(items) if s.key in tied for n in s.choices}
    found: list[Assignment] = []
    for name in sorted(names):
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
            made.append(Stage(item.key, {name: item.choices[name]}))
        else:
            made.append(item)
    return tuple(made)


# --- What is simulated -------------------------------------------------------------


def _try_front(search: Search, found: Sequence[Assignment], start: int) -> None:
    """Find the last assignment that fits, by bisection from where it should be."""
    low, high = -1, len(found)
    guess = sum(a.memory <= search.budget - start for a in found) - 1
    for _ in range(_TRIES):
        if low + 1 >= high:
            return
        k = min(max(guess, low + 1), high - 1)
        tried = search.run(found[k].picks)
        if search.fits(tried):
            low, off = k, search.budget - tried.found.peak if tried else 0
        else:
            high, off = k, search.budget - tried.found.peak if tried else 0
        aim = found[k].memory + off
        guess = sum(a.memory <= aim for a in found) - 1


def _every_kth(blocks: Sequence[str]) -> Iterator[tuple[str, Picks]]:
    """Yield the choices in which every k-th block is recomputed, or all others are."""
    for k in range(2, len(blocks)):
        kth = {name for i, name in enumerate(blocks) if i % k == k - 1}
        yield f"every {k}th", dict.fromkeys(kth, NOTHING.name)
        others = [name for name in blocks if name not in kth]
        yield f"all but every {k}th", dict.fromkeys(others, NOTHING.name)


def _try_uniform(
    search: Search, label: str, picks: Picks, items: Sequence[Item], start: int
) -> None:
    """Simulate a choice that may fit and cost less than the best."""
    stages = {stage.key for stage in distribute.flat(items) if stage.key}
    every = {key: picks.get(key, PLAIN.name) for key in stages}
    best = search.best()
    if not all(every[s.key] in s.choices for s in distribute.flat(items) if s.key):
        return
    plain = min(c.found.seconds for c in search.candidates)
    less = best is None or plain + distribute.work(items, every) < best.found.seconds
    if less and start + distribute.peak(items, every) <= search.budget * _DOUBT:
        search.run(picks, label)


_DOUBT = 1.1  # what sums may be off by
