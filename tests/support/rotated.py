"""Some combinations in each run, and all of them where slow tests run."""

import itertools

import pytest


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
