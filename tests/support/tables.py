"""Tables of test cases: some of them in each run, all where slow tests run."""

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import pytest


def rows(
    names: str, table: Mapping[str, Any], *, fast: Collection[str] | None = None
) -> pytest.MarkDecorator:
    """Parametrize by the members of a table, which are named by its keys.

    Args:
        names: of the parameters.
        table: the members, which are tuples where there are several names.
        fast: keys of those that are not slow; by default all.
    """
    is_one = "," not in names

    def case(key: str, member: Any) -> Any:
        marks = () if fast is None or key in fast else pytest.mark.slow
        return pytest.param(*((member,) if is_one else member), id=key, marks=marks)

    return pytest.mark.parametrize(names, [case(*item) for item in table.items()])


def crossed(
    names: str,
    first: Collection[Any],
    second: Collection[Any],
    *,
    each: int = 1,
    whole: Collection[Any] = (),
) -> pytest.MarkDecorator:
    """Parametrize by all pairs. Those that are not representative are slow.

    Args:
        names: of both parameters.
        first: the values of the first one.
        second: those of the second one.
        each: how many of `second` are fast with each of `first`: others in turn.
        whole: those of `first` with which all are fast.
    """
    count = len(second)

    def case(i: int, a: Any, k: int, b: Any) -> Any:
        is_fast = a in whole or (k - i * each) % count < each
        return pytest.param(a, b, marks=() if is_fast else pytest.mark.slow)

    pairs = [(*x, *y) for x in enumerate(first) for y in enumerate(second)]
    return pytest.mark.parametrize(names.split(", "), [case(*pair) for pair in pairs])


def rotated(names, *factors):
    """Parametrize by all combinations of factors; most of them are slow tests.

    Each value of a factor is in a test that is not slow: the longest factor is gone
    through, and the others go round with it.
    """
    longest = max(range(len(factors)), key=lambda k: len(factors[k]))
    found = []
    for indices in itertools.product(*(range(len(f)) for f in factors)):
        first = indices[longest]
        is_usual = all(
            i == first % len(f) for i, f in zip(indices, factors, strict=True)
        )
        values = [list(f)[i] for i, f in zip(indices, factors, strict=True)]
        marks = () if is_usual else pytest.mark.slow
        found.append(pytest.param(*values, marks=marks))
    return pytest.mark.parametrize(names, found)
