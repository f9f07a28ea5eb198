"""What recomputes which module: `remat.nn.applied`, and who refuses whom."""

import copy
import functools
import gc
import pickle
import threading
import weakref

import pytest
import torch
from support.switches import MODELS, Newer, Stacked, switch_off, switch_on
from support.tables import rows
from support.zoo import Evaluations, make, ops_of
from torch import nn

import remat
from remat import policies, remat as rematerialize
from remat.nn import Applied


X = torch.linspace(-1, 1, 64 * 4).reshape(64, 4)


def loss(out):
    return out.square().sum()


@functools.cache  # a plan by blocks may be applied to any of these models
def by_blocks():
    return remat.fit(Newer(), X, loss=loss, budget=22_000, over="blocks")


@functools.cache
def of_a_step(kind=Newer):
    return remat.fit(kind(), X, loss=loss, budget=22_000)


def tanhs(model):
    ops = ops_of(lambda: loss(model(X)).backward())
    return ops["tanh"]


WAYS = {
    "remat.nn.apply": remat.nn.apply,
    "remat.nn.enable": remat.nn.enable,
    "remat.fit by blocks": lambda model: by_blocks().apply(model),
    "remat.fit": lambda model: of_a_step(type(model)).apply(model),
    "gradient_checkpointing": switch_on,
}
BY = {"remat.fit by blocks": "remat.fit"}


# --- What is listed ---


@pytest.mark.parametrize("way", WAYS)
def test_what_recomputes_is_listed(way):
    model = Newer()
    assert remat.nn.applied(model) == {}
    WAYS[way](model)
    found = remat.nn.applied(model)
    assert {each.by for each in found.values()} == {BY.get(way, way)}
    if way != "gradient_checkpointing":
        assert all("test_applied.py:" in each.where for each in found.values())
        assert remat.nn.applied(remat.nn.remove(model)) == {}
        assert tanhs(model) == 3


@pytest.mark.parametrize("change", [remat.nn.apply, remat.nn.enable])
def test_policies_are_listed(change):
    policy = policies.dots_saveable | policies.save_only_these_names("a")
    model = change(Newer(), policy=policy)
    found = remat.nn.applied(model)
    assert [*found] == ["layers.0", "layers.1", "layers.2"]
    assert {each.policy for each in found.values()} == {policy}
    if change is remat.nn.apply:
        assert f"(0-2): 3 x remat(policy={policy}) Layer(" in repr(model)


def test_a_module_of_remat_is_listed():
    model = nn.Sequential(remat.remat(Newer().layers[0]), nn.Tanh())
    assert [*remat.nn.applied(model)] == ["0"]
    assert remat.nn.applied(model)["0"].by == "remat.remat"
    assert repr(model[0]).startswith("remat Layer(\n  (up): Linear(")


def test_a_module_that_calls_the_blocks_is_listed_for_them():
    model = remat.nn.enable(Stacked())
    assert [*remat.nn.applied(model)] == [""]
    switch_off(model)
    assert not remat.nn.applied(model)


def test_the_plan_of_a_step_is_listed_once():
    model = of_a_step().apply(Newer())
    found = remat.nn.applied(model)
    assert [(name, each.by, each.policy) for name, each in found.items()] == [
        ("", "remat.fit", None)
    ]


def test_what_is_listed_is_a_value():
    first, second = (remat.nn.apply(Newer()) for _ in range(2))
    found = [remat.nn.applied(model)["layers.0"] for model in (first, second)]
    assert found[0] == found[1]
    assert found[0] == Applied("remat.nn.apply", None, found[0].where)
    assert pickle.loads(pickle.dumps(found[0])) == found[0]


def test_something_else_is_no_model():
    with pytest.raises(
        TypeError, match=r"applied: list is not a module\. Pass a model"
    ):
        remat.nn.applied([Newer()])


@pytest.mark.parametrize("change", [remat.nn.enable, lambda m: of_a_step().apply(m)])
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_a_copy_is_listed_as_what_it_was_copied_from(change, again):
    model = change(Newer())
    copied = again(model)
    assert remat.nn.applied(copied) == remat.nn.applied(model)
    remat.nn.remove(model)
    assert remat.nn.applied(copied)


@pytest.mark.parametrize("change", [remat.nn.enable, lambda m: of_a_step().apply(m)])
def test_a_model_is_freed_at_once(change):
    of_a_step()
    gc.disable()
    try:
        model = change(Newer())
        ref = weakref.ref(model.layers[0])
        del model
        assert ref() is None
    finally:
        gc.enable()


# --- One of them on a model ---


REFUSING = [way for way in WAYS if way != "gradient_checkpointing"]
# Its own switch is what `enable` uses.
TOGETHER = {
    ("gradient_checkpointing", "remat.nn.enable"),
    ("remat.nn.enable", "remat.nn.enable"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("second", REFUSING)
@pytest.mark.parametrize("first", WAYS)
def test_a_second_one_is_refused_by_name(first, second):
    if (first, second) in TOGETHER or first == second == "remat.nn.apply":
        return
    model = Newer()
    WAYS[first](model)
    before = tanhs(model), remat.nn.applied(model)
    names = {"gradient_checkpointing": "the gradient checkpointing of support"}
    by = names.get(first, BY.get(first, first))
    with pytest.raises(ValueError, match=rf"is recomputed already, by {by}"):
        WAYS[second](model)
    assert (tanhs(model), remat.nn.applied(model)) == before


@rows("kind", MODELS, fast=("stacked",))
@pytest.mark.parametrize("first", ["remat.nn.apply", "remat.fit"])
def test_a_switch_that_comes_later_is_refused_in_the_forward(first, kind):
    model = kind()
    WAYS[first](model)
    before = tanhs(model)
    switch_on(model)
    with pytest.raises(
        ValueError, match=rf"of support is on .* and {first} recomputes"
    ):
        model(X)
    with torch.no_grad():
        model(X)
    switch_off(model)
    assert tanhs(model) == before
    remat.nn.remove(model)
    switch_on(model)
    assert tanhs(model) == 6


@pytest.mark.parametrize("name", MODELS)
def test_the_advice_is_to_switch_it_off(name):
    model = MODELS[name]()
    switch_on(model)
    with pytest.raises(ValueError, match="Switch that off first"):
        remat.nn.apply(model)
    switch_off(model)
    remat.nn.apply(model)
    switch_on(model)
    with pytest.raises(ValueError, match="switch that off, in the model"):
        model(X)


def test_fit_by_blocks_refuses_what_recomputes():
    for change in remat.nn.enable, remat.nn.apply, switch_on:
        model = Newer()
        change(model)
        with pytest.raises(ValueError, match=r"remat\.fit: .* is recomputed already"):
            remat.fit(model, X, loss=loss, budget=22_000, over="blocks")


def test_remat_inside_of_what_is_applied_is_the_users_own():
    """Recursive checkpointing: a module in a block, and the block."""
    model = Newer()
    for layer in model.layers:
        layer.up = remat.remat(layer.up)
    remat.nn.apply(model, "layers.*")
    assert tanhs(model) == 6
    assert len(remat.nn.applied(model)) == 6


def test_parts_of_a_model_each_have_their_own():
    model = nn.ModuleDict({"a": Newer(), "b": Newer()})
    remat.nn.apply(model["a"])
    remat.nn.enable(model["b"])
    assert {each.by for each in remat.nn.applied(model).values()} == {
        "remat.nn.apply",
        "remat.nn.enable",
    }


# --- `remat.is_recomputing` tells code inside whether it runs again ---


def leaf(n):
    return make(n, seed=2).requires_grad_()


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("prune", [False, True])
def test_it_is_true_in_a_recompute_alone(higher_order, prune):
    seen = Evaluations()

    @rematerialize(higher_order=higher_order, prune=prune)
    def f(x):
        seen.note(remat.is_recomputing())
        return x.sin().sin()

    f(leaf(3)).sum().backward()
    assert [*seen] == [False, True]
    assert not remat.is_recomputing()


def test_it_is_true_under_torch_func():
    seen = Evaluations()

    def f(x):
        seen.note(remat.is_recomputing())
        return x.sin().sin().sum()

    torch.func.grad(rematerialize(f))(torch.ones(3))
    assert [*seen] == [False, True]


def test_it_is_of_the_thread_that_asks():
    asked, seen = threading.Event(), []

    def other():
        asked.wait(10)
        seen.append(remat.is_recomputing())

    def f(x):
        if remat.is_recomputing():
            asked.set()
            thread.join(10)
        return x.sin().sin()

    thread = threading.Thread(target=other)
    thread.start()
    rematerialize(f)(leaf(3)).sum().backward()
    assert seen == [False]
