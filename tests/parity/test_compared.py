"""The comparison of `support.compared` fails on what is wrong."""

import pytest
import torch
from support.compared import assert_compared, compared, leaf
from support.zoo import plainly

from remat import remat


def program(wrap, counting, factor=1):
    x = leaf(3)
    wrap(counting(lambda x: factor * x.sin().exp()))(x).sum().backward()
    return x.grad


def off(fn):
    """A remat whose values are off by the last bits."""
    return lambda x: remat(fn)(x) * (1 + 1e-6)


@compared(evaluations=2, sin=2)
def test_a_program_passes(wrap, counting):
    return program(wrap, counting)


@pytest.mark.parametrize("factor", [2, 3])
@compared(evaluations=2)
def test_a_program_takes_the_parameters_of_its_test(wrap, counting, factor):
    assert factor in (2, 3)
    return program(wrap, counting, factor)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"evaluations": 2, "wrap": plainly}, "1 evaluations plain and 1 with remat"),
        ({"evaluations": 3}, "1 evaluations plain and 2 with remat"),
        ({"evaluations": 2, "plain": 2}, "1 evaluations plain and 2 with remat"),
        ({"evaluations": 2, "wrap": off}, "differs in value"),
        ({"sin": 2, "wrap": plainly}, "ran: "),
    ],
    ids=["an identity", "too few", "too few plain", "other bits", "too few sines"],
)
def test_the_comparison_of_programs_fails_on(options, said):
    with pytest.raises(AssertionError, match=said):
        assert_compared(program, **options)


def test_gradients_that_vanish_prove_nothing():
    with pytest.raises(AssertionError, match="only zeros"):
        assert_compared(lambda wrap, counting: torch.zeros(3))
