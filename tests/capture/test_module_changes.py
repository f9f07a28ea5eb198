"""A model that changes: a call sees it as it is, a recompute as it was.

What is remembered of a module is used only where nothing in it has changed.
"""

import gc
from collections import OrderedDict

import pytest
from support.changes import CHANGES, ODD, OF_VALUES, Block, Part, is_remembered
from support.runs import assert_replayed, replayed
from support.tables import crossed, rows
from support.zoo import Evaluations, make, plainly
from torch import nn

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


class Changing(Block):
    """Changes itself in each forward."""

    def __init__(self, change):
        super().__init__()
        self.change = CHANGES[change]

    def forward(self, x):
        y = super().forward(x)
        self.change(self)
        return (y * self.number()).sin().exp()


@pytest.mark.parametrize(
    "change",
    ["number", "entry of a list added", "nested list", "list of an object", "tuple"],
)
@replayed(exp=(10, 20))
def test_a_change_by_the_forward_is_made_once(wrap, change):
    model, x = model_of(Changing, change), leaf()
    call = wrap(model)
    for _ in range(5):
        call(x).sum().backward()
    return x.grad, float(model.number())


@replayed(exp=2 * 6)
def test_training_and_evaluating_in_turn(wrap):
    model, x = model_of(Block), leaf()
    call = wrap(model)
    for k in range(6):
        model.train(k % 2 == 0)
        call(x).sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


# --- What several share ------------------------------------------------------------


@replayed(exp=(2 * 4, 4 * 4))
def test_blocks_that_share_an_object_and_a_weight(wrap):
    first, second, x = model_of(Block), model_of(Block), leaf()
    second.part, second.weight = first.part, first.weight
    call = wrap(lambda x: second(first(x)))
    for _ in range(3):
        y = call(x).sum()
        first.part.sizes.append(1)
        y.backward()
    call(x).sum().backward()
    return x.grad, first.weight.grad, second.inner[0].weight.grad


class Sharing(nn.Module):
    """Counts in an object and a list that others may hold, too."""

    def __init__(self, part, listed):
        super().__init__()
        self.inner, self.part, self.listed = nn.Linear(4, 4), part, listed

    def forward(self, x):
        self.part.scale += 1
        self.listed[0] += 1
        h = self.inner(x).tanh() * self.part.scale * self.listed[0]
        self.listed.append(h)
        return h.sin()


SHARED = {
    "one after the other": (
        lambda first, second, listed: lambda x: second(first(x)) * len(listed),
        2,
    ),
    "in a sequence": (
        lambda first, second, listed: (
            lambda x: nn.Sequential(first, second)(x) * listed[0]
        ),
        2,
    ),
    "one beside the list": (
        lambda first, second, listed: lambda x: first(x) * listed[0] + listed[-1],
        1,
    ),
}


@rows("make, calls", SHARED)
def test_modules_and_closures_that_share_what_the_forward_changes(make, calls):
    def program(wrap):
        part, listed = Part(), [1.0]
        first, second = (model_of(Sharing, part, listed) for _ in range(2))
        call, x, states = wrap(make(first, second, listed)), leaf(), []
        for _ in range(3):
            call(x).sum().backward()
            states += [part.scale, listed[0], len(listed)]
            assert first.part is second.part is part
            assert first.listed is second.listed is listed
        return x.grad, states, first.inner.weight.grad

    assert_replayed(program, tanh=(3 * calls, 6 * calls))


# --- What is no change, or too much of one -----------------------------------------


def test_ordered_containers_are_compared_in_order():
    model, x, notes = model_of(Block), leaf(), Evaluations()
    model.table = OrderedDict(a=1, b=2)

    def fn(x):
        notes.note([*model.table])
        return model(x) * next(iter(model.table.values()))

    for _ in range(2):
        remat(fn)(x).sum().backward()
    y = remat(fn)(x).sum()
    model.table.move_to_end("a")
    y.backward()
    assert [*notes] == [["a", "b"]] * 6


class Other(Block):
    """The same with another forward."""

    def forward(self, x):
        return super().forward(x) * 3


@replayed(exp=(4, 8))
def test_another_class_is_used_after_the_backward(wrap):
    model, x = model_of(Block), leaf()
    call = wrap(model)
    for _ in range(3):
        call(x).sum().backward()
    model.__class__ = Other
    call(x).sum().backward()
    return x.grad


@replayed(exp=(1, 2))
def test_another_class_before_the_backward_is_not_that_of_a_recompute(wrap):
    model, x = model_of(Block), leaf()
    y = wrap(model)(x)
    model.__class__ = Other
    y.sum().backward()
    assert type(model) is Other
    return x.grad


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


@replayed(exp=2)
def test_an_argument_that_is_a_parameter_is_one_input(wrap):
    model = model_of(Block)
    wrap(model)(model.second.linear.weight).sum().backward()
    return [p.grad for p in model.parameters()]


@replayed(exp=6)
def test_a_module_and_its_submodule_are_one(wrap):
    model, x = model_of(Block), leaf()
    pair = [model, model.second]

    def listed(x):
        assert pair[0].second is pair[1]
        return pair[1](x) + pair[0](x)

    def reached(x):
        assert model.second is pair[1]
        return pair[1](x) + model(x)

    for fn in listed, reached, listed:
        wrap(fn)(x).sum().backward()
    return x.grad, [p.grad for p in model.parameters()]
