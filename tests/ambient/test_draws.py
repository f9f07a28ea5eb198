"""The guard refuses what moves a global stream, and nothing else."""

import re

import pytest
import torch
from torch import nn

from remat import RandomnessError
from remat._ambient.draws import Guard


ONES = torch.ones(3)
LIBRARY = torch.library.Library("remat_test_draws", "DEF")
LIBRARY.define("noisy(Tensor x) -> Tensor")
LIBRARY.define("quiet(Tensor x) -> Tensor")
LIBRARY.impl("noisy", lambda x: x + torch.rand(3), "CompositeExplicitAutograd")
LIBRARY.impl("quiet", lambda x: x + 1, "CompositeExplicitAutograd")


def guarded(fn, *args):
    with Guard("no {op} at {where}"):
        return fn(*args)


@pytest.mark.parametrize(
    ("op", "draw"),
    {
        "aten.rand.default": lambda: torch.rand(3),
        "aten.bernoulli_.float": lambda: nn.functional.dropout(ONES),
        "aten.normal_.default": lambda: torch.empty(3).normal_(),
        "remat_test_draws.noisy.default": lambda: torch.ops.remat_test_draws.noisy(
            ONES
        ),
    }.items(),
)
def test_a_draw_is_refused_with_its_name_and_line_and_the_stream_is_put_back(op, draw):
    before = torch.get_rng_state()
    message = rf"^no {re.escape(op)} at {re.escape(__file__)}:\d+, in \S+$"
    with pytest.raises(RandomnessError, match=message):
        guarded(draw)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_draws_nothing_passes_though_torch_calls_it_random():
    heads = torch.ones(1, 1, 4, 8)
    guarded(nn.functional.scaled_dot_product_attention, heads, heads, heads)
    guarded(nn.functional.dropout, ONES, 0.5, False)
    guarded(torch.ops.remat_test_draws.quiet, ONES)
    guarded(torch.sin, ONES)


def test_a_generator_passes_and_moves():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    guarded(lambda: torch.rand(3, generator=generator))
    assert not torch.equal(generator.get_state(), before)


def test_operators_of_higher_order_pass():
    def branch():
        return torch.cond(ONES.sum() > 2, torch.sin, torch.cos, (ONES,))

    assert torch.equal(guarded(branch), ONES.sin())
