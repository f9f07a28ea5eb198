"""Chains under every transform: the values of plain loops, and how many steps run."""

import pytest
from support.loops import (
    PROGRAMS,
    Plain,
    derivatives,
)
from support.tables import rows
from support.transforms import ALL
from support.zoo import assert_not_vanishing

from remat import chain
from remat.testing import assert_same, count_ops


# How many steps run at most, for each step of the plain loop, by order. One order
# runs a step in the forward and again in the backward; the next does both again.
MOST = {1: 6, 2: 10, 3: 20}
FAST = (
    *("backward", "twice", "grad", "jvp", "vmap_grad", "grad_vmap"),
    *("hessian", "batched_cotangents", "retained"),
)


# torch's own, of any function under linearize.
LINEARIZE = "ignore:Attempted to insert a get_attr Node:UserWarning"


@pytest.mark.filterwarnings(LINEARIZE)
@rows("checkpoints", {"sqrt": None, "three": 3, "all": "all"}, fast=("three",))
@rows("program", PROGRAMS)
@rows("transform", ALL, fast=FAST)
def test_derivatives_are_those_of_plain_loops(transform, program, checkpoints):
    with count_ops() as plain:
        expected = derivatives(transform, program, Plain)
    with count_ops() as ops:
        actual = derivatives(transform, program, chain, checkpoints=checkpoints)
    assert_not_vanishing(expected)
    assert_same(actual, expected, reassociated=True)
    assert plain["tanh"] < ops["tanh"] <= MOST[transform.order] * plain["tanh"]
