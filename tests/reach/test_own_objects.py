"""What a recompute cannot read as the forward did is an error that names it.

What it can read are programs of `support.adversarial`.
"""

import csv
import gc
import itertools
import weakref
from fractions import Fraction

import pytest
import torch
from support.adversarial.program import State
from support.runs import configurations, leaf, replayed
from support.tables import rows
from support.zoo import ops_of
from torch import nn

from remat import RecomputeError, remat


def curve(x, factor):
    """Needs a recompute, and a right one: its slope depends on the factor."""
    return (x * float(factor)).sin().exp()


ITERATORS = {
    "count of fractions": lambda: itertools.count(Fraction(2), Fraction(1)),
    "repeat": lambda: itertools.repeat(2.0, 2),
    "list iterator": lambda: iter([2.0, 3.0]),
    "zip": lambda: map(sum, zip([1.0, 2.0], [1.0, 1.0], strict=True)),
    "generator": lambda: (float(i) for i in (2, 3)),
}


@configurations
@rows("make", ITERATORS)
def test_an_iterator_that_a_recompute_reads_is_named(make, ours):
    numbers, results = make(), []
    fn, x = ours(lambda x: curve(x, next(numbers))), leaf()
    assert ops_of(lambda: results.append(fn(x).sum()))["sin"] == 1
    with pytest.raises(RecomputeError, match=r"reads the \w+ `numbers`, which"):
        results[0].backward()


@configurations
def test_an_iterator_that_a_recompute_reads_by_its_method_is_named(ours):
    read, results = iter([2.0, 3.0]).__next__, []
    fn, x = ours(lambda x: curve(x, read())), leaf()
    assert ops_of(lambda: results.append(fn(x).sum()))["sin"] == 1
    with pytest.raises(RecomputeError, match=r"reads the list_iterator `read\[1\]`"):
        results[0].backward()


PASSED = {
    "alone": (lambda held: held, lambda found: found, "numbers"),
    "in a list": (lambda held: [0, held], lambda found: found[1], r"numbers\[1\]"),
    "of an object": (lambda held: State(k=held), lambda found: found.k, "k"),
}


@rows("make", ITERATORS)
@rows("put, get, name", PASSED)
def test_a_passed_iterator_is_read_once_and_named(put, get, name, make):
    numbers, results = put(make()), []
    fn, x = remat(lambda x, numbers: curve(x, next(get(numbers)))), leaf()
    assert ops_of(lambda: results.append(fn(x, numbers).sum()))["sin"] == 1
    with pytest.raises(RecomputeError, match=rf"reads the \w+ `{name}`, which"):
        results[0].backward()


def test_a_passed_iterator_that_is_not_read_stays():
    x, numbers = leaf(), iter([2.0])
    y = remat(lambda x, numbers: curve(x, 2.0 if numbers else 3.0))(x, numbers)
    assert ops_of(lambda: y.sum().backward())["sin"] == 1
    assert [*numbers] == [2.0]


@configurations
@pytest.mark.parametrize("read", [next, list, iter, lambda rows: rows.__next__()])
def test_a_reader_that_a_recompute_reads_is_an_error(read, ours):
    rows = csv.reader(["1", "2", "3"])
    y = ours(lambda x: curve(x, len([*read(rows)])))(leaf())
    with pytest.raises(RecomputeError, match="reads the reader `rows`"):
        y.sum().backward()


@configurations
def test_what_has_a_finalizer_is_not_made_again(ours):
    class Handle:
        scale = 2.0

        def __del__(self):
            pass

    handles, results, x = [Handle()], [], leaf()
    fn = ours(lambda x: curve(x, handles[0].scale))
    assert ops_of(lambda: results.append(fn(x).sum()))["sin"] == 1
    handles.clear()
    with pytest.raises(RecomputeError, match="Handle, which has `__del__`,"):
        results[0].backward()


def with_a_list():
    class Local:
        scales = [2.0]  # noqa: RUF012 - a call holds no class with one

        def __call__(self, module, args):
            return (args[0] * self.scales[0],)

    return Local()


def with_a_list_in_a_variable():
    scales = [2.0]

    class Local:
        def __call__(self, module, args):
            return (args[0] * scales[0],)

    return Local()


def with_an_object():
    class Local:
        other = with_a_list()

        def __call__(self, module, args):
            return self.other(module, args)

    return Local()


@pytest.mark.parametrize(
    "make", [with_a_list, with_a_list_in_a_variable, with_an_object]
)
@configurations
def test_a_hook_of_a_class_that_is_gone_is_an_error_with_its_name(ours, make):
    module, results, x = Curve(), [], leaf()
    handle = module.register_forward_pre_hook(make())
    ops = ops_of(lambda: results.append(ours(module)(x * 1).sum()))
    assert ops["sin"] == 1
    handle.remove()
    gc.collect()  # a class holds itself
    with pytest.raises(RecomputeError, match=r"The class with_a.*Local .* gone"):
        results[0].backward()


def test_a_graph_that_is_dropped_frees_what_a_local_class_kept():
    seen = []

    def keeping():
        kept = []

        class Keeping:
            def __call__(self, x):
                kept.append(x.sin())
                seen.append(weakref.ref(kept[-1]))
                return kept[-1] * kept[-1]

        return Keeping()

    fn = keeping()
    assert ops_of(lambda: remat(fn)(leaf()).sum().backward())["sin"] == 2
    remat(keeping())(leaf())
    gc.collect()  # a class holds itself
    assert seen[-1]() is None


class Curve(nn.Module):
    def forward(self, x):
        return curve(x, 2.0)


# --- Sets, whose order is Python's ---


@replayed(sin=(1, 2))
def test_a_set_that_a_forward_adds_to_holds_what_it_held(wrap):
    found, x = {3, 4, 5}, leaf()

    def fn(x):
        found.update(range(1000))
        return curve(x, 1 + (sum(found) - 1e5) / 4e5)

    y = wrap(fn)(x).sum()
    return torch.autograd.grad(y, x), len(found)


@pytest.mark.parametrize("count", [3, 70])
@replayed(sin=(1, 2))
def test_a_set_that_a_forward_empties_is_filled_again(wrap, count):
    todo, x = {f"name {k}" for k in range(count)}, leaf()

    def fn(x):
        names = [todo.pop() for _ in range(count)]
        return curve(x, 1 + sum(int(name.split()[1]) for name in names))

    y = wrap(fn)(x).sum()
    return torch.autograd.grad(y, x), len(todo)
