"""The comparisons that judge all else, clients too, fail on wrong answers alone."""

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
from remat.testing import assert_same, assert_same_gradients


def sines(count):
    def fn(x):
        for _ in range(count):
            x = x.sin()
        return x

    return fn


def off_by_one_ulp(x):
    return torch.nextafter(x, torch.full_like(x, torch.inf))


# --- assert_same ---------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3),
        torch.tensor([1.0, torch.nan, torch.inf]),
        torch.tensor([1 + 2j, complex("nan")]),
        torch.arange(3),
        torch.tensor([True, False]),
        torch.randn(0, 2),
        torch.randn(()),
        torch.randn(3, requires_grad=True),
        torch.eye(3).to_sparse(),
        {"a": [torch.randn(2), (1, "text", None, 2.5)], "b": float("nan")},
    ],
    ids=str,
)
@pytest.mark.parametrize("reassociated", [False, True, torch.bfloat16])
def test_a_value_is_the_same_as_itself(value, reassociated):
    assert_same(value, value, reassociated=reassociated)


X = torch.linspace(-2, 1, 6).reshape(2, 3)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (off_by_one_ulp(X), X, r"the result differs in value: 6 of 6 .* \(0, 0\)"),
        (X.double(), X, "differs in dtype"),
        (X.T, X, "differs in shape"),
        (X.to("meta"), X, "differs in device"),
        (X.to_sparse(), X, "differs in layout"),
        (X.clone().requires_grad_(), X, "differs in requires_grad"),
        (X * torch.nan, X, "differs in value: 6 of 6"),
        (X, X * torch.nan, "differs in value: 6 of 6"),
        (X, None, "structures differ"),
        (X, 1.0, "differs in type"),
        (X, X.tolist(), "structures differ"),
        (torch.arange(3), torch.arange(3) + 1, "differs in value: 3 of 3"),
        ({"a": X}, {"a": X, "b": X}, "structures differ"),
        ([X], (X,), "structures differ"),
        (1, 2, "differs in value"),
        (1, 1.0, "differs in type"),
        (1, True, "differs in type"),
        (0.0, float("nan"), "differs in value"),
        ("a", "b", "differs in value"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_difference_is_named(actual, expected, message, wrapped):
    if wrapped:
        actual, expected = {"k": [0, actual]}, {"k": [0, expected]}
        message = message.replace("the result", r"`\['k'\]\[1\]`")
    with pytest.raises(AssertionError, match=message):
        assert_same(actual, expected)


def test_one_element_of_many_is_found():
    wrong = X.clone()
    wrong[1, 2] += 1
    message = r"1 of 6 elements, first at index \(1, 2\): 2.0, expected 1.0"
    with pytest.raises(AssertionError, match=message):
        assert_same(wrong, X)


def test_the_message_shows_both_values():
    with pytest.raises(AssertionError, match="differs in dtype") as error:
        assert_same([X.double().requires_grad_()], [X])
    assert str(error.value) == (
        "assert_same: `[0]` differs in dtype.\n"
        "  actual:   float64[2, 3] on cpu, requires_grad=True\n"
        "  expected: float32[2, 3] on cpu, requires_grad=False"
    )


def test_reassociated_accepts_rounding_and_the_message_says_so():
    with pytest.raises(AssertionError, match="pass reassociated=True"):
        assert_same(off_by_one_ulp(X), X)
    assert_same(off_by_one_ulp(X), X, reassociated=True)


def test_reassociated_accepts_a_sum_in_another_order():
    terms = torch.randn(1000, 5, generator=torch.Generator().manual_seed(0))
    forth, back = sum(terms), sum(reversed(terms))
    assert not torch.equal(forth, back)
    assert_same(forth, back, reassociated=True)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (X * (1 + 1e-4), X),
        (X.double() * (1 + 1e-12), X.double()),
        (torch.tensor([1.0, torch.inf]), torch.tensor([2.0, torch.inf])),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, -torch.inf])),
        (torch.tensor([1.0, 5.0]), torch.tensor([1.0, torch.inf])),
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, 2.0])),
        (torch.arange(3), torch.arange(3) + 1),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j])),
        (torch.tensor([1e-30]), torch.zeros(1)),
    ],
)
def test_reassociated_rejects_more_than_rounding(actual, expected):
    with pytest.raises(AssertionError, match="differs in value"):
        assert_same(actual, expected, reassociated=True)


def test_reassociated_takes_a_lower_precision():
    rounded = X.bfloat16().float()
    with pytest.raises(AssertionError, match="differs in value"):
        assert_same(rounded, X, reassociated=True)
    assert_same(rounded, X, reassociated=torch.bfloat16)
    with pytest.raises(AssertionError, match="differs in value"):
        assert_same(X * 2, X, reassociated=torch.bfloat16)


# --- assert_same_gradients -----------------------------------------------------


def double_sine(x):
    return {"y": x["a"].sin().sin(), "aux": 3}


def arguments():
    return {"a": X.clone().requires_grad_(), "b": X.clone().requires_grad_()}


def test_gradients_of_equal_functions_agree():
    x = arguments()
    assert_same_gradients(double_sine, double_sine, x)
    assert x["a"].grad is None


class ScaledSine(torch.autograd.Function):
    """Sine with a gradient that is wrong by a factor."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sin()

    @staticmethod
    def backward(ctx, ct):
        return ct * ctx.saved_tensors[0].cos() * ctx.scale, None


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x: {"y": x["a"].sin().cos(), "aux": 3}, r"results.*\['y'\].* value"),
        (lambda x: {"y": x["a"].sin().sin(), "aux": 4}, r"results.*\['aux'\].* value"),
        (lambda x: {"y": x["a"].sin().sin()}, "results: .*structures differ"),
        (
            lambda x: {"y": x["a"].sin().sin().detach(), "aux": 3},
            r"results.*\['y'\].*differs in requires_grad",
        ),
        (
            lambda x: {"y": ScaledSine.apply(x["a"].sin(), 1.5), "aux": 3},
            r"gradients.*\['args'\]\[0\]\['a'\].*differs in value",
        ),
        (
            lambda x: {"y": x["a"].sin().sin() + 0 * x["b"], "aux": 3},
            r"gradients.*\['args'\]\[0\]\['b'\].*differs in type",
        ),
    ],
    ids=["value", "static", "missing", "requires_grad", "gradient", "None"],
)
def test_wrong_functions_are_found(fn, message):
    with pytest.raises(AssertionError, match=message):
        assert_same_gradients(fn, double_sine, arguments())


def test_a_missing_gradient_is_found():
    zero = lambda x: x["a"].sin().sin() + 0 * x["b"]
    none = lambda x: x["a"].sin().sin() + 0 * x["b"].detach()
    with pytest.raises(AssertionError, match="no gradient"):
        assert_same_gradients(none, zero, arguments())


def test_cotangents_tell_transposed_gradients_apart():
    class Transposed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, ct):
            return ct.T

    x = torch.randn(3, 3, requires_grad=True)
    with pytest.raises(AssertionError, match=r"\['args'\]\[0\].*differs in value"):
        assert_same_gradients(Transposed.apply, torch.clone, x)


def test_a_comparison_of_no_gradients_is_refused():
    with pytest.raises(AssertionError, match="no output of the reference requires"):
        assert_same_gradients(torch.sin, torch.sin, X)


def test_keyword_arguments_may_share_tensors():
    def fn(x, *, scale):
        assert x is scale
        return x * scale

    x = X.clone().requires_grad_()
    assert_same_gradients(fn, fn, x, scale=x)


def test_non_leaf_arguments_become_leaves():
    x = X.clone().requires_grad_().sin()
    assert_same_gradients(torch.sin, torch.sin, x)


def test_gradients_of_parameters_are_compared_and_their_grad_is_as_before():
    model = nn.Linear(3, 2)
    model.bias.grad = torch.ones(2)
    parameters = dict(model.named_parameters())
    assert_same_gradients(model, model, X, wrt=parameters)
    assert model.weight.grad is None
    assert torch.equal(model.bias.grad, torch.ones(2))

    frozen = lambda x: x @ model.weight.T + model.bias.detach()
    by_hand = lambda x: x @ model.weight.T + model.bias
    with pytest.raises(AssertionError, match=r"\['wrt'\]\['bias'\].*differs in type"):
        assert_same_gradients(frozen, by_hand, X, wrt=parameters)
    assert torch.equal(model.bias.grad, torch.ones(2))


def test_reassociated_is_for_gradients_not_for_results():
    def forth(x):
        return sum(sines(n)(x) for n in range(9))

    def back(x):
        return sum(sines(n)(x) for n in reversed(range(9)))

    def gradient_of(fn):
        return lambda x: (fn(x) - fn(x).detach()).exp()

    x = torch.linspace(-2, 1, 100).requires_grad_()
    with pytest.raises(AssertionError, match=r"in the gradients.*differs in value"):
        assert_same_gradients(gradient_of(forth), gradient_of(back), x)
    assert_same_gradients(gradient_of(forth), gradient_of(back), x, reassociated=True)
    with pytest.raises(AssertionError, match=r"in the results.*differs in value"):
        assert_same_gradients(forth, back, x, reassociated=True)


# --- The comparison of clients fails on what is wrong ---


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
