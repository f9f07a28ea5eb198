"""Random numbers in the steps of a chain: those of the forward, once more."""

import random as python_random

import numpy as np
import pytest
import torch
from support.loops import Plain
from support.tables import rows
from torch.nn import functional

from remat import chain, random
from remat.testing import assert_same, count_ops


X = torch.linspace(0.1, 2, 40, dtype=torch.double)
GENERATOR = torch.Generator()


def drops(i, x):
    return functional.dropout(torch.sin(x) + x, 0.3)


def by_generator(i, x):
    noise = torch.rand(x.shape, generator=GENERATOR, dtype=x.dtype)
    return torch.sin(x) * noise + x


def by_python(i, x):
    return torch.sin(x) * python_random.random() + x


def by_numpy(i, x):
    return torch.sin(x) * np.random.rand() + x


def sometimes(i, x):
    return drops(i, x) if i % 3 == 1 else torch.sin(x) + x


def by_key(i, x):
    return random.dropout(random.fold_in(KEY, i), torch.sin(x) + x, 0.3)


KEY = random.key(0)
MADE = {}


def by_a_generator_of_a_step(i, x):
    """The third step makes it, and later ones draw from it; the sixth makes another."""
    if i in (2, 5):
        MADE["generator"] = torch.Generator().manual_seed(i)
    return by_the_latest(x) if MADE else torch.sin(x) + x


def by_the_latest(x):
    return torch.sin(x) * torch.rand(40, generator=MADE["generator"]).double() + x


BODIES = {
    f.__name__: f
    for f in (
        *(drops, by_generator, by_python, by_numpy, sometimes, by_key),
        by_a_generator_of_a_step,
    )
}


def seed():
    torch.manual_seed(3)
    GENERATOR.manual_seed(4)
    python_random.seed(5)
    np.random.seed(6)
    MADE.clear()


def after():
    """The next numbers of all streams."""
    rest = python_random.random(), np.random.rand(), torch.rand(()).item()
    generators = GENERATOR, *MADE.values()
    return *rest, *(torch.rand((), generator=g).item() for g in generators)


@rows("name", {name: name for name in BODIES})
@rows("checkpoints", {"sqrt": None, "one": 1, "three": 3}, fast=("sqrt", "three"))
@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_a_step_draws_the_same_numbers_again(name, checkpoints, transform):
    length, found = 10, []
    for loop, options in (
        (Plain.fori_loop, {}),
        (chain.fori_loop, {"checkpoints": checkpoints}),
    ):
        seed()

        def value(x, loop=loop, options=options):
            return loop(0, length, BODIES[name], x, **options).sum()

        with count_ops() as ops:
            if transform == "grad":
                gradient = torch.func.grad(value)(X)
            else:
                x = X.clone().requires_grad_()
                (gradient,) = torch.autograd.grad(value(x), x)
        found.append((gradient, after(), ops["sin"]))
    (want, next_plain, plain), (got, next_ours, again) = found
    assert_same(got, want)
    assert next_ours == next_plain
    assert again >= plain + length


def test_states_of_streams_are_stored_only_if_something_was_drawn(monkeypatch):
    seen = []
    load = chain._steps.Stored.load

    def loading(self, step):
        live = load(self, step)
        seen.append((step, live.ambient is None))
        return live

    monkeypatch.setattr(chain._steps.Stored, "load", loading)
    x = X.clone().requires_grad_()
    for body, is_plain in ((drops, False), (by_key, True)):
        seen.clear()
        chain.fori_loop(0, 12, body, x, checkpoints="all").sum().backward()
        assert len(seen) == 12
        assert {plain for step, plain in seen if step} == {is_plain}
