"""Parameters that are given other memory between a forward and its backward."""

import pytest
import torch

from remat import MutationError, remat
from remat.testing import count_ops


def test_a_warning_names_the_parameter():
    w = torch.nn.Parameter(torch.ones(4))
    fn = remat(lambda x: (x * w).sin().exp())
    with count_ops() as ops:
        y = fn(torch.ones(4))
        w.data = w.data * 2
        with pytest.warns(UserWarning, match=r"`w` of .* was given other memory"):
            y.sum().backward()
    assert ops["sin"] == 2


def test_other_memory_for_a_computed_input_is_refused_where_another_stands_in():
    def fn(h):
        h.data = h.detach() * 2  # plain code's caller reads it afterwards
        return h.square().sin()

    x = torch.ones(4, requires_grad=True)
    with pytest.raises(MutationError, match=r"`h` was changed in place inside"):
        remat(fn, higher_order=True)(x * 2)


def test_a_table_that_the_call_around_makes_again_is_no_constant_that_moved():
    def program(wrap):
        tables = {}
        within = wrap(lambda x: (x * tables["a"]).sin(), higher_order=True)

        def fn(x):
            if "a" not in tables:
                tables["a"] = torch.arange(4.0).sin()
            return within((x * tables["a"]).tanh()).sin()

        x = torch.ones(4, requires_grad=True)
        return torch.autograd.grad(wrap(fn)(x).sum(), x)[0]

    assert torch.equal(program(remat), program(lambda fn, **_: fn))
