"""docs/limits.md: what is put back and watched, what leaves, derivatives inside."""

from types import ModuleType

import pytest
import torch
from support.claims import gradient, ones, scaled
from torch import nn
from torch.autograd import forward_ad

from remat import MutationError, RecomputeError, remat
from remat.testing import count_ops


# --- What the function changes ---


def test_prints_run_again_and_changes_to_lists_do_not(capsys):
    ran = []

    def fn(x):
        ran.append(1)
        print("here")  # noqa: T201
        return x.sin().exp()

    remat(fn)(ones(3)).sum().backward()
    assert len(ran) == 1
    assert capsys.readouterr().out.split() == ["here", "here"]


def test_an_embedding_whose_rows_are_scaled_is_refused_under_torch_func():
    embed = nn.Embedding(4, 3, max_norm=0.1)
    fn = remat(lambda i, x: (embed(i) * x).sin())

    def loss(x):
        return fn(torch.arange(3), x).sum()

    with pytest.raises(MutationError, match=r"`embed\.weight`"):
        torch.func.grad(loss)(ones(3))


# --- What changes between the call and its backward ---


def test_a_module_of_another_dtype_by_then_fails_in_the_backward():
    module = nn.Linear(3, 3)
    out = remat(lambda x: module(x).sin().exp())(ones(2, 3))
    module.double()
    moved = pytest.warns(UserWarning, match="was given other memory")
    with moved, pytest.raises(RecomputeError, match="float64"):
        out.sum().backward()


settings = ModuleType("settings")

settings.CONSTANT = torch.ones(3)
settings.WEIGHT = ones(3)


def test_attributes_of_python_modules_are_found_under_torch_func():
    x = ones(3)

    def fn(x):
        return (x * settings.WEIGHT).exp()

    assert torch.equal(gradient(remat(fn)(x), settings.WEIGHT), gradient(fn(x), x))
    with count_ops() as ops:
        found = torch.func.grad(lambda x: remat(fn)(x).sum())(x)
    assert torch.equal(found, torch.func.grad(lambda x: fn(x).sum())(x))
    assert ops["exp"] == 2


def test_attributes_that_are_found_by_computed_names_are_read_as_they_are_by_then():
    x, name = ones(3), "SCALE"
    settings.SCALE = 2.0
    y = remat(lambda x: scaled(x, getattr(settings, name)))(x)
    settings.SCALE = 5.0
    with count_ops() as ops:
        got = gradient(y, x)
    assert ops["mul"] == 1 + 2
    # The sine's part is of the recompute; what the product saved is a number.
    assert torch.equal(got, 2 * (5 * x).cos())


# --- What is watched ---


@pytest.mark.parametrize("rows", [128, 129])
def test_captured_tensors_without_a_gradient_may_change_if_they_are_small(rows):
    x, table = ones(3), torch.zeros(rows, 128)

    def fn(x):
        table.add_(1)
        return (x * table[0, :3]).sin()

    if rows == 129:
        with pytest.raises(MutationError, match="`table` was changed in place inside"):
            gradient(remat(fn)(x), x)
        return
    with count_ops() as ops:
        got = gradient(remat(fn)(x), x)
    assert ops["add_"] == 2
    assert torch.equal(got, x.cos())
    assert torch.equal(table, torch.ones(rows, 128))


# --- What leaves, and results ---


def test_a_dual_result_that_shares_memory_may_be_changed_in_place():
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, 3), torch.ones(3, 3))
        remat(lambda x: x[0])(dual).mul_(2)


def test_dropout_of_what_is_not_contiguous_draws_as_at_the_base():
    """A transform of torch's takes another kernel for it, on the CPU."""
    x = torch.linspace(1, 2, 20).view(5, 4)

    def drawn(fn, transform):
        torch.manual_seed(0)
        return transform(lambda x: fn(x.t()).sum())(x)

    drop, of_x = nn.Dropout(0.4), torch.func.grad
    with count_ops() as ops:
        ours = drawn(remat(drop), of_x)
    assert ops["bernoulli_"] == 2
    torch.manual_seed(0)
    at_base = drop(x.t()).t() / x
    assert torch.allclose(ours, at_base)
    assert not torch.equal(drawn(drop, of_x), ours)
