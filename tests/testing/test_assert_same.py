"""The comparisons that judge everything else fail on wrong answers, and only there."""

import pytest
import torch
from torch import nn

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
