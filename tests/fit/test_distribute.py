"""`distribute.front` against all choices there are, with and without nests."""

import itertools
import random

import pytest

from remat._fit.distribute import WHOLE, ChainStage, Cost, Nest, flat, front, peak, work


def chain_of(seed, count, options=3):
    rng = random.Random(seed)
    return [stage_of(rng, str(k), options) for k in range(count)]


def stage_of(rng, key, options=3):
    made = {}
    for name in "abc"[:options]:
        saves = rng.randrange(12)
        made[name] = Cost(saves, saves + rng.randrange(12), float(rng.randrange(8)))
    return ChainStage(key, made)


def every_assignment(items):
    """Yield all choices, as (picks, work, memory)."""
    for wholes in itertools.product([False, True], repeat=len(nests_in(items))):
        chosen = {n.key for n, w in zip(nests_in(items), wholes, strict=True) if w}
        stages = flat(items)
        for names in itertools.product(*(stage.choices for stage in stages)):
            picks = dict(zip((stage.key for stage in stages), names, strict=True))
            cost, memory, _ = walked(items, picks, chosen)
            yield picks | dict.fromkeys(chosen, WHOLE), cost, memory


def nests_in(items):
    found = []
    for item in items:
        if isinstance(item, Nest):
            found += [item, *nests_in(item.items)]
    return found


def walked(items, picks, wholes, held=0):
    """Return the work, the most bytes and the bytes held after some items."""
    cost, highest = 0.0, held
    for item in items:
        if isinstance(item, ChainStage):
            choice = item.choices[picks[item.key]]
            highest = max(highest, held + choice.needs)
            cost, held = cost + choice.work, held + choice.saves
        else:
            inside = walked(item.items, picks, wholes, held)
            cost, highest = cost + inside[0], max(highest, inside[1])
            if item.key in wholes:
                highest = max(highest, held + item.whole.needs)
                cost, held = cost + item.whole.work, held + item.whole.saves
            else:
                held = inside[2]
        highest = max(highest, held)
    return cost, highest, held


def assert_best(items, memory):
    """Assert that the front has the least work for every amount of memory."""
    found = front(items, memory, units=memory)
    every = [*every_assignment(items)]
    for limit in range(memory + 1):
        best = min((c for _, c, m in every if m <= limit), default=None)
        ours = [a.work for a in found if a.memory <= limit]
        assert (ours[-1] if ours else None) == best, limit


@pytest.mark.parametrize("seed", range(8))
def test_the_front_is_the_best_of_all_choices(seed):
    items = chain_of(seed, 4)
    assert_best(items, 80)


@pytest.mark.parametrize("seed", range(8))
def test_nests_are_recomputed_where_that_is_best(seed):
    rng = random.Random(seed)
    first, *inner, last = (stage_of(rng, str(k), 2) for k in range(6))
    deepest = Nest("deepest", tuple(inner[2:]), Cost(1, 3, 2.0))
    nest = Nest("nest", (*inner[:2], deepest), Cost(1, 4, float(rng.randrange(6))))
    items = [first, nest, last]
    assert_best(items, 100)


def test_some_nests_pay():
    stages = [ChainStage(str(k), {"a": Cost(5, 6, 0.0)}) for k in range(4)]
    nests = [
        Nest(f"n{k}", tuple(stages[2 * k : 2 * k + 2]), Cost(1, 1, 1.0))
        for k in range(2)
    ]
    found = front(nests, 30, 30)
    assert [(a.memory, a.work) for a in found] == [(12, 1.0), (21, 0.0)]
    assert dict(found[0].picks)["n0"] == WHOLE
    assert "n1" not in found[0].picks


def test_a_front_that_is_not_the_best_is_noticed(monkeypatch):
    items = chain_of(3, 3)
    monkeypatch.setitem(globals(), "front", lambda *args, **kwargs: front_of_last())
    with pytest.raises(AssertionError, match=r"assert"):
        assert_best(items, 60)


def front_of_last():
    return []


@pytest.mark.parametrize("units", [7, 50, 333])
def test_rounding_never_exceeds_the_memory(units):
    items = chain_of(1, 6)
    scaled = [
        ChainStage(
            s.key,
            {
                name: Cost(1013 * c.saves + 7, 1013 * c.needs + 7, c.work)
                for name, c in s.choices.items()
            },
        )
        for s in items
    ]
    found = front(scaled, 80_000, units)
    assert found
    for assignment in found:
        assert peak(scaled, assignment.picks) <= assignment.memory
        assert work(scaled, assignment.picks) == assignment.work


def test_less_memory_never_costs_less_work():
    costs = [a.work for a in front(chain_of(5, 12), 200, 100)]
    assert len(costs) > 5
    assert costs == sorted(costs, reverse=True)


def test_stages_that_free_memory():
    items = [
        ChainStage("a", {"x": Cost(10, 10, 0.0)}),
        ChainStage("", {"x": Cost(-10, 2, 0.0)}),
        ChainStage("b", {"x": Cost(10, 10, 0.0)}),
    ]
    assert [a.memory for a in front(items, 40, 40)] == [12]
