"""`remat.nn.enable` and the switches of libraries, in models that have such switches.

tests/whole/test_enable.py and tests/whole/clients have those of transformers, diffusers
and peft.
"""

import copy
import pickle

import pytest
import torch
from support.switches import MODELS, Block, Newer, Older, Stacked, switch_off, switch_on
from support.tables import rows
from support.zoo import ops_of
from torch import nn

import remat
from remat import policies
from remat.testing import assert_same, live_bytes


X = torch.linspace(-1, 1, 32).reshape(8, 4)
every = pytest.mark.parametrize("kind", MODELS.values(), ids=[*MODELS])


def run(model):
    """Return how often a step runs `tanh` and `addmm`, and the gradients."""
    model.zero_grad()
    ops = ops_of(lambda: model(X).square().sum().backward())
    grads = [p.grad.clone() for p in model.parameters()]
    return (ops["tanh"], ops["addmm"]), grads


def assert_runs(model, tanh, addmm=None):
    """A step runs so many operations, and has the gradients of plain code."""
    run(model)  # a policy is not followed in the first call
    ops, grads = run(model)
    assert ops[0] == tanh
    assert addmm in (None, ops[1])
    assert_same(grads, run(type(model)())[1])


# --- Options ---


class _Odd(Block):
    """A block that draws, and runs an operation that nobody reads."""

    def run(self, x):
        x.exp()
        return super().run(nn.functional.dropout(x, 0.5, self.training))


class _Odds(Stacked):
    kind = _Odd


def exps_of_two_backwards(model):
    """How often that operation runs in a step whose backward is differentiated."""

    def step():
        loss, weights = model(X).square().sum(), [*model.parameters()]
        grads = torch.autograd.grad(loss, weights, create_graph=True)
        sum(grad.square().sum() for grad in grads).backward()

    try:
        return ops_of(step)["exp"]
    except remat.RandomnessError:
        return "refused"


OPTIONS = {
    "none": ({}, 3 * 3),
    "prune": ({"prune": True}, 3),
    "rng": ({"rng": "error"}, "refused"),
    "higher_order": ({"higher_order": True}, 3 * 4),
}


@pytest.mark.parametrize("way", [remat.nn.apply, remat.nn.enable])
@rows("options, exps", OPTIONS)
def test_options_are_those_of_remat(way, options, exps):
    assert exps_of_two_backwards(way(_Odds(), **options)) == exps


# --- The switch says which blocks, `enable` what recomputes them ---


@every
def test_all_blocks_are_recomputed(kind):
    model = remat.nn.enable(kind())
    assert_runs(model, tanh=3 + 3)
    assert_runs(remat.nn.remove(model), tanh=3)


@every
def test_the_switch_of_a_trainer_leaves_ours_and_its_policy_in(kind):
    """It was lost, and with it what the policy saves."""
    model = remat.nn.enable(kind(), policy=policies.dots_saveable)
    assert_runs(model, tanh=6, addmm=6)
    held = live_bytes(lambda: model(X))
    switch_on(model)
    assert_runs(model, tanh=6, addmm=6)
    assert live_bytes(lambda: model(X)) == held
    found = {found.by for found in remat.nn.applied(model).values()}
    assert found == {"remat.nn.enable"}
    assert_runs(remat.nn.remove(model), tanh=3)


@every
def test_the_switch_off_stores_everything_until_it_is_on_again(kind):
    model = remat.nn.enable(kind())
    switch_off(model)
    assert_runs(model, tanh=3)
    assert remat.nn.applied(model) == {}
    switch_on(model)
    assert_runs(model, tanh=6)
    assert {f.by for f in remat.nn.applied(model).values()} == {"remat.nn.enable"}


def test_the_trainers_choice_of_layers_holds():
    model = remat.nn.enable(Newer(), policy=policies.dots_saveable)
    model.activation_checkpointing_enable(every_n_layers=2)
    assert_runs(model, tanh=3 + 2, addmm=6)
    assert [*remat.nn.applied(model)] == ["layers.0", "layers.2"]


def test_what_is_switched_on_already_is_what_is_recomputed():
    model = Newer()
    model.activation_checkpointing_enable(every_n_layers=2)
    remat.nn.enable(model)
    assert_runs(model, tanh=3 + 2)
    remat.nn.enable(model, policy=policies.everything_saveable)
    assert [*remat.nn.applied(model)] == ["layers.0", "layers.2"]
    remat.nn.enable(model, every_n_layers=1)
    assert_runs(model, tanh=3 + 3)


def test_a_config_names_the_policy():
    model = remat.nn.enable(Newer(), policy="dots")
    assert_runs(model, tanh=6, addmm=6)
    assert_runs(remat.nn.enable(Newer(), policy="every_2"), tanh=3 + 2)
    with pytest.raises(ValueError, match="policy: 'every_2' says which layers"):
        remat.nn.enable(Newer(), policy="every_2", every_n_layers=3)
    told = r"remat.nn.enable, policy: 'dotz' is no policy. Do you mean 'dots'"
    with pytest.raises(ValueError, match=told):
        remat.nn.enable(Newer(), policy="dotz")


@every
def test_a_second_call_has_another_policy_and_no_more_work(kind):
    model = remat.nn.enable(remat.nn.enable(kind()), policy=policies.dots_saveable)
    assert_runs(model, tanh=6, addmm=6)
    hooks = [len(m._forward_pre_hooks) for m in model.modules()]
    assert max(hooks) == 1
    assert_runs(remat.nn.remove(model), tanh=3)
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(("n", "layers"), [(2, 2), (9, 1)])
def test_every_so_many_layers(n, layers):
    model = remat.nn.enable(Newer(), every_n_layers=n)
    assert_runs(model, tanh=3 + layers)
    assert [*remat.nn.applied(model)] == [f"layers.{k}" for k in range(0, 3, n)]


@pytest.mark.parametrize("n", [0, -1, 1.5, "2"])
def test_no_number_of_layers(n):
    with pytest.raises(ValueError, match=r"every_n_layers=.* is not a positive number"):
        remat.nn.enable(Newer(), every_n_layers=n)


@pytest.mark.parametrize("kind", [Older, Stacked])
def test_a_library_that_cannot_leave_out_layers(kind):
    model = kind()
    with pytest.raises(ValueError, match=r"every_n_layers=2, but .* remat\.nn\.apply"):
        remat.nn.enable(model, every_n_layers=2)
    assert remat.nn.applied(model) == {}
    assert_runs(remat.nn.enable(model, every_n_layers=1), tanh=6)


# --- What remat would not do ---


OPTIONS = {
    "offload": {"offload": True},
    "context_fn": {"activation_checkpointing_kwargs": {"context_fn": None}},
}


@rows("options", OPTIONS)
def test_options_that_remat_does_not_have_are_refused(options):
    model = Newer()
    model.activation_checkpointing_enable(**options)
    with pytest.raises(ValueError, match=r"on with .*, which does more.* context_fn"):
        remat.nn.enable(model)
    model = remat.nn.enable(Newer())
    model.activation_checkpointing_enable(**options)
    with pytest.raises(ValueError, match=r"since \S*test_switches\.py:\d+, would not"):
        model(X)


def test_a_function_of_the_users_is_refused():
    model = remat.nn.enable(Stacked())
    model.enable_gradient_checkpointing(lambda function, *args: function(*args))
    with pytest.raises(ValueError, match=r"on with test_a_function\S*lambda>, which"):
        model(X)


@pytest.mark.parametrize("reentrant", [True, False])
def test_reentrant_or_not_is_the_same_to_remat(reentrant):
    model = remat.nn.enable(Older())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_runs(model, tanh=6)


def test_compat_in_the_place_of_torchs(monkeypatch):
    model = Newer()
    with remat.compat.patch():
        model.activation_checkpointing_enable()
        switch_on(remat.nn.enable(model))
        assert_runs(model, tanh=6)


# --- Copies and compiled code ---


@every
@pytest.mark.parametrize(
    "again", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_copy_keeps_it_too(kind, again):
    model = again(remat.nn.enable(kind(), policy=policies.dots_saveable))
    switch_on(model)
    assert_runs(model, tanh=6, addmm=6)
    found = {found.policy for found in remat.nn.applied(model).values()}
    assert found == {policies.dots_saveable}


@rows("kind", MODELS, fast=("stacked",))
def test_compiled_code_has_ours_after_the_switch_too(kind):
    torch.compiler.reset()
    model = remat.nn.enable(kind())
    switch_on(model)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    compiled(X).square().sum().backward()
    found = [p.grad for p in model.parameters()]
    assert_same(found, run(kind())[1])
    assert {f.by for f in remat.nn.applied(model).values()} == {"remat.nn.enable"}
