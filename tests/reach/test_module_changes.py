"""A model that changes: a call sees it as it is, a recompute as it was.

What is remembered of a module is used only where nothing in it has changed.
"""

import gc

import pytest
from support.changes import CHANGES, ODD, OF_VALUES, Block, is_remembered
from support.runs import replayed
from support.tables import crossed
from support.zoo import make, plainly

from remat import RecomputeError, remat


def leaf():
    return make(4, 4, seed=2).requires_grad_()


def model_of(cls, *args):
    return cls(*args).double()


def state_of(model):
    """Which objects each module holds, by name."""
    return [
        (id(m), {name: identities(v) for name, v in vars(m).items()})
        for m in model.modules()
    ]


def identities(value):
    return [*map(id, value.values())] if isinstance(value, dict) else id(value)


STYLES = {
    "module": lambda model: model,
    "forward": lambda model: model.forward,
    "closure": lambda model: lambda x: model(x),
}


@crossed("change, style", [*CHANGES, *ODD, *OF_VALUES], STYLES)
@replayed(exp=2 * 5)
def test_a_change_is_seen_by_later_calls_and_not_by_a_recomputation(
    wrap, change, style
):
    x = leaf()
    model = model_of(Block)
    params, call = [*model.parameters()], wrap(STYLES[style](model))
    run = lambda: call(x.to(model.weight.dtype)).sum()
    state = state_of(model)
    for _ in range(2):
        run().backward()
    assert state_of(model) == state
    assert wrap is plainly or is_remembered(model)
    y = run()
    if change in OF_VALUES:
        y.backward()
        OF_VALUES[change](model)
    else:
        (CHANGES | ODD)[change](model)
        state = state_of(model)
        y.backward()  # as it was
        assert state_of(model) == state
    for _ in range(2):
        y = run()
        y.backward(retain_graph=True)  # as it is
    return y, [p.grad for p in (*params, *model.parameters())]


# --- What is no change, or too much of one -----------------------------------------


class Other(Block):
    """The same with another forward."""

    def forward(self, x):
        return super().forward(x) * 3


def test_a_class_that_is_gone_before_the_backward_is_an_error():
    class Listed(Block):
        seen = []  # noqa: RUF012 - a call holds no class with a list

    model = model_of(Listed)
    y = remat(model)(leaf())
    model.__class__ = Other
    del Listed
    gc.collect()
    with pytest.raises(RecomputeError, match=r"Listed that the function .* is gone"):
        y.sum().backward()
