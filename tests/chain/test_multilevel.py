"""Schedules with carries in memory and on disk, against all places on disk."""

import itertools
import math

import pytest
from hypothesis import given, strategies as st
from support.interpreter import (
    LENGTHS,
    SLOTS,
    WIDTHS,
    assert_as_predicted,
    fewest_advances,
)

from remat.chain.schedules import Binomial, Multilevel, Storage


COSTS = st.sampled_from([0, 0.5, 1, 3, 10, 100])


@given(LENGTHS, SLOTS, st.none() | st.integers(0, 30), COSTS, COSTS, WIDTHS)
def test_two_levels_run_what_they_predict(length, memory, disk, write, read, unroll):
    schedule = Multilevel(memory, disk, write, read, unroll)
    most = math.inf if disk is None else disk
    found = assert_as_predicted(
        schedule, length, memory=memory, disk=most, width=unroll
    )
    assert found.peak[Storage.DISK] == schedule.on_disk(length)
    assert len(found.written) == len(set(found.written)) == schedule.on_disk(length)
    assert found.read == found.written[::-1]


def price(schedule, length):
    transfers = schedule.write_cost + schedule.read_cost
    steps = schedule.evaluations(length).backward
    return steps + transfers * schedule.on_disk(length)


def least_price(length, memory, disk, transfers):
    """The least price over all sets of carries on disk."""
    return min(
        length
        + count * transfers
        + fewest_advances(length - cuts[-1] + 1, memory)
        - (length - cuts[-1])
        + sum(fewest_advances(b - a, memory) for a, b in itertools.pairwise(cuts))
        for count in range(min(length, disk + 1))
        for rest in itertools.combinations(range(1, length), count)
        for cuts in [(0, *rest)]
    )


@pytest.mark.parametrize("transfers", [0, 1, 2.5, 6])
@pytest.mark.parametrize("disk", [0, 1, 3, 12])
@pytest.mark.parametrize("memory", [1, 2, 3])
def test_no_other_carries_on_disk_cost_less(memory, disk, transfers):
    for length in range(1, 13):
        schedule = Multilevel(memory, disk, transfers, 0)
        assert price(schedule, length) == least_price(length, memory, disk, transfers)


@given(st.integers(1, 300), SLOTS, COSTS)
def test_no_other_number_of_carries_on_disk_costs_less(length, memory, transfers):
    best = price(Multilevel(memory, None, transfers, 0), length)
    for disk in range(length):
        found = Multilevel(memory, disk, transfers, 0)
        assert price(found, length) >= best


def price_with_many_reads(longest, memory, write, read):
    """The least price for each length, if a carry on disk may be read again and again.

    The dynamic program of Aupy, Herrmann, Hovland and Robert, 2016, without a limit of
    carries on disk.
    """
    in_memory = [fewest_advances(length, memory) for length in range(longest + 2)]
    fresh, on_disk = [0], [0]  # by length, and by where the first carry is
    for length in range(1, longest + 2):
        splits = [k + fresh[length - k] + on_disk[k] for k in range(1, length)]
        on_disk.append(read + min([in_memory[length], *splits]))
        fresh.append(min([in_memory[length], *(write + split for split in splits)]))
    # The forward goes over the last step: a chain that is one longer.
    return fresh[1:]


@pytest.mark.parametrize("memory", [3, 5, 10])
@pytest.mark.parametrize(
    ("write", "read", "most"),
    [(0, 0, 1), (1, 1, 1), (5, 5, 1), (20, 20, 1), (5, 0, 1.1), (100, 1, 1.1)],
)
def test_many_reads_of_a_carry_on_disk_hardly_pay(memory, write, read, most):
    best = price_with_many_reads(80, memory, write, read)
    for length in range(1, 81):
        found = price(Multilevel(memory, None, write, read), length)
        assert best[length] <= found
        assert found + length <= most * (best[length] + length)  # with the forward


def test_without_a_disk_two_levels_are_binomial():
    for length in range(30):
        one, two = Binomial(4), Multilevel(4, disk=0)
        assert list(one.forward(length)) == list(two.forward(length))
        assert list(one.backward(length)) == list(two.backward(length))


def test_a_free_disk_stores_what_it_takes_to_run_each_step_once_more():
    schedule = Multilevel(4, None, 0, 0)
    assert schedule.evaluations(100) == (100, 100)
    assert schedule.on_disk(100) == 96
