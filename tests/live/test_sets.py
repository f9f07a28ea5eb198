"""Sets are given the order in which they were read, whatever happened to them since."""

import contextlib
import random

import pytest
import torch
from support.runs import leaf, replayed

from remat import RecomputeError
from remat._capture.container_kinds import in_order, new_frozenset, write_set


def curve(x, factor):
    """Needs a recompute, and a right one: its slope depends on the factor."""
    return (x * factor).sin().exp()


def _grow(found, draw):
    found.update(draw.sample(range(1 << 41), 1 + 2 * len(found)))


def _empty(found, draw):
    while found:
        found.pop()


def _halve(found, draw):
    found.difference_update([*found][::2])


def _replace(found, draw):
    found.difference_update(draw.sample([*found], 1 + len(found) // 9))
    found.update(draw.sample(range(1 << 41), 3))


@pytest.mark.parametrize("history", [0, 1, 7], ids="discarded_{}".format)
@pytest.mark.parametrize("change", [_grow, _empty, _halve, _replace])
def test_a_set_gets_the_order_that_it_had(change, history):
    draw = random.Random(history)
    for count in [1, 2, 3, 4, 5, 8, 13, 19, 24, 70, 77, 300]:
        found = set()
        for value in draw.sample(range(1 << 41), count + history):
            found.add(value)
        found.difference_update(draw.sample([*found], history))
        values = [*found]
        change(found, draw)
        write_set(found, values)
        assert in_order(found, values), count
        assert len(found) == count


@pytest.mark.parametrize("seed", [0, 35, 40, 53])
def test_a_set_that_was_popped_is_popped_in_its_order_again(seed):
    draw = random.Random(seed)
    for count in [3, 8, 8, 8, 8, 20, 70]:
        values = [*(found := set(draw.sample(range(1 << 41), count)))]
        for popped in range(1, 1 + draw.randrange(count)):
            assert found.pop() is values[popped - 1]
        if draw.random() < 0.3:
            found.update(range(draw.randrange(50)))
        with contextlib.suppress(RecomputeError):
            write_set(found, values)
            assert [found.pop() for _ in values] == values


@replayed(sin=(1, 2))
def test_a_set_that_grew_before_it_was_popped_is_popped_in_its_order_again(wrap):
    found, x = {3, 4, 5}, leaf()

    def fn(x):
        found.update(range(1000))
        return curve(x, 1 + found.pop())

    y = wrap(fn)(x).sum()
    return torch.autograd.grad(y, x), len(found)


class Same:
    """All instances have one hash."""

    def __init__(self, _):
        pass

    def __hash__(self):
        return 1


class Narrow:
    """Equal to its kind alone; any other is an error."""

    def __init__(self, number):
        self.number = number

    def __hash__(self):
        return self.number

    def __eq__(self, other):
        return self.number == other.number


@pytest.mark.parametrize("kind", [Same, Narrow])
def test_values_of_one_hash_or_that_are_not_to_meet_others_keep_their_order(kind):
    found = {kind(k * 8) for k in range(9)}
    order = [*found]
    found.clear()
    write_set(found, order)
    assert in_order(found, order)


def test_an_order_that_no_table_has_is_an_error():
    with pytest.raises(RecomputeError, match="would read it in another order"):
        write_set(set(), [*range(600)][::-1])


def test_a_frozenset_has_the_order_or_is_an_error():
    draw, made = random.Random(0), 0
    for _ in range(20):
        values = [*frozenset(draw.sample(range(1 << 41), 8))]
        with contextlib.suppress(RecomputeError):
            assert in_order(new_frozenset(frozenset, values), values)
            made += 1
    assert made >= 16


@pytest.mark.parametrize("count", [3, 70])
@replayed(sin=(1, 2))
def test_a_forward_empties_a_set_in_the_same_order_again(wrap, count):
    todo, x = {f"name {k}" for k in range(count)}, leaf()

    def fn(x):
        names = [todo.pop() for _ in range(count)]
        first, second, *_ = [int(name.split()[1]) for name in names]
        return curve(x, 1 + first + second / 1000)

    y = wrap(fn)(x).sum()
    return torch.autograd.grad(y, x), len(todo)
