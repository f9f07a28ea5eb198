"""The comparison of clients fails on what is wrong."""

import pytest
import torch
from support.clients import (
    STYLES,
    Client,
    assert_changed_trains_as_plain,
    assert_leaves_nothing_behind,
    assert_moved,
    assert_no_more_than_theirs,
    assert_recomputed,
    assert_trains_as_plain,
    of_style,
    replace_forward,
    theirs,
    train,
)
from support.restless import KINDS, SETTINGS, WAYS, assert_sweeps, trained
from support.tables import crossed
from support.zoo import plainly
from torch import nn
from torch.utils.checkpoint import CheckpointError

import remat


def build():
    return nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))


CLIENT = Client(
    build,
    lambda model: [model],
    lambda: {"input": torch.randn(4, 8)},
    lambda out: out.square().mean(),
)
styles = pytest.mark.parametrize("style", STYLES)


def scaled(fn):
    """A remat whose gradients are off by the last bits."""

    def call(*args):
        out = theirs(fn)(*args)
        out.register_hook(lambda cotangent: cotangent * (1 + 1e-6))
        return out

    return call


def twice(fn):
    """A remat that runs a block once more than it has to."""

    def call(*args):
        out = theirs(fn)(*args)
        out.register_hook(lambda cotangent: (cotangent, fn(*args))[0])
        return out

    return call


@styles
def test_a_checkpoint_passes(style):
    assert_trains_as_plain(CLIENT, style, theirs)


@styles
def test_an_identity_fails(style):
    with pytest.raises(AssertionError, match=r"^0 products run again"):
        assert_trains_as_plain(CLIENT, style, plainly)


def weaker(model):
    with torch.no_grad():
        model[0][0].weight.mul_(1 + 1e-6)


def test_a_model_that_is_changed_in_place():
    assert_changed_trains_as_plain(CLIENT, remat.nn.apply)
    with pytest.raises(AssertionError, match=r"^0 products run again"):
        assert_changed_trains_as_plain(CLIENT, lambda model: model)
    with pytest.raises(AssertionError, match="differs in value"):
        assert_changed_trains_as_plain(CLIENT, weaker)


@styles
def test_gradients_that_differ_in_the_last_bits_fail(style):
    with pytest.raises(AssertionError, match="differs in value"):
        assert_trains_as_plain(CLIENT, style, scaled)


@styles
def test_blocks_that_are_recomputed_too_often_fail(style):
    model = of_style(CLIENT, style, twice)
    assert_recomputed(CLIENT, model, times=2)
    with pytest.raises(AssertionError, match=r"^6 products run again"):
        assert_recomputed(CLIENT, model)


def test_a_block_that_is_called_twice_in_the_forward_fails():
    def forward_twice(fn):
        return lambda *args: (fn(*args) + fn(*args)) / 2

    model = of_style(CLIENT, "forward", forward_twice)
    with pytest.raises(AssertionError, match="6 products forward, not 3"):
        assert_recomputed(CLIENT, model)


def test_a_model_without_gradients_fails():
    model = build()
    model[1].requires_grad_(False)
    run = train(CLIENT, model)
    with pytest.raises(AssertionError, match=r"no gradient for \['1.0.weight'"):
        assert_moved(model, run)
    assert_moved(model, run, is_adapted=True)
    model.requires_grad_(True).zero_grad()
    with pytest.raises(AssertionError, match=r"no gradient for \['0.0.weight'"):
        assert_moved(model, run, is_adapted=True)


@styles
def test_more_work_and_more_bytes_than_with_torchs_checkpoint_fail(style):
    assert_no_more_than_theirs(CLIENT, style, theirs)
    with pytest.raises(AssertionError, match=r"11\) products, .* with torch's"):
        assert_no_more_than_theirs(CLIENT, style, twice)
    kept = []

    def hoarding(fn):
        return lambda x: (kept.append(torch.ones(4096)), theirs(fn)(x))[1]

    with pytest.raises(AssertionError, match=r"bytes, .* with torch's"):
        assert_no_more_than_theirs(CLIENT, style, hoarding)


@styles
def test_a_step_that_leaves_bytes_behind_fails(style):
    kept = []

    def leaking(fn):
        return lambda *args: kept.append(theirs(fn)(*args)) or kept[-1]

    assert_leaves_nothing_behind(CLIENT, style, theirs)
    with pytest.raises(AssertionError, match="bytes are left"):
        assert_leaves_nothing_behind(CLIENT, style, leaking)


# --- State that goes on between forward and backward ---


def changed_by(wrap):
    def change(model):
        replace_forward(CLIENT.blocks(model), wrap)
        return model

    return change


def test_a_checkpoint_passes_where_nothing_goes_on():
    assert_sweeps(CLIENT, (), [changed_by(theirs)])


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_identity_fails_in_each_setting(setting):
    with pytest.raises(AssertionError, match=r"^0 products run again"):
        assert_sweeps(CLIENT, SETTINGS[setting], [changed_by(plainly)])


@crossed("kind, way", KINDS, WAYS)
def test_a_recompute_that_sees_what_went_on_fails(kind, way):
    """It is that of torch's checkpoint. What it does to a state shows, too."""
    reasons = r"^assert_same: |A different number of tensors|Recomputed values"
    with pytest.raises((AssertionError, CheckpointError), match=reasons):
        assert_sweeps(CLIENT, [WAYS[way]], [changed_by(theirs)], kinds=[kind])


def test_what_states_hold_in_the_end_is_seen():
    _, seen = trained(CLIENT, plainly, [WAYS["by_forward"]], ["a log"])
    assert seen["states"] == [[[], [3, 3]]]


def test_a_state_that_no_module_reaches_fails():
    def deaf(module, state):
        """Reach nothing."""

    with pytest.raises(AttributeError, match="has no attribute 'calls'"):
        assert_sweeps(CLIENT, [deaf], [remat.nn.apply], kinds=["attributes"])
