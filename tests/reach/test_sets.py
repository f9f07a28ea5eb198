"""Sets hold in a recompute what they held at the call; their order is Python's."""

import pytest
import torch
from support.runs import leaf, replayed


def curve(x, factor):
    """Needs a recompute, and a right one: its slope depends on the factor."""
    return (x * factor).sin().exp()


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
