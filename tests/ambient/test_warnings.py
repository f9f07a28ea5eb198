"""Warnings stand at the user's line, and a recompute shows none a second time."""

import warnings

import pytest
import torch
from torch.nn import functional

from remat import policies, remat
from remat.testing import count_ops


TARGET = torch.tensor(1)
W, X = torch.linspace(-1, 1, 16).view(4, 4), torch.linspace(0, 1, 12).view(3, 4)


def unbatched(w, x):
    """A loss without rules for batches: torch warns in its forward and its backward."""
    return functional.multi_margin_loss((x @ w).sin().sin(), TARGET)


def of_one(w, x):
    """A value for which torch warns in C++, and in Python at the line of its caller."""
    spread = torch.std((w * x[0]).sin()[:1, 0])
    return spread + functional.mse_loss(x[0].sin(), w[:1].sin())


def caught(call, action="always"):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter(action)
        call()
    return found


def by_backward(fn, **options):
    w = W.clone().requires_grad_()
    fn(w, X, **options).sum().backward()


def batched_backward(fn):
    by_backward(torch.vmap(fn, in_dims=(None, 0)))


def grad(fn):
    torch.func.grad(fn)(W, X)


def batched_grad(fn):
    torch.vmap(torch.func.grad(fn), in_dims=(None, 0))(W, X)


def grad_of_batched(fn):
    batched = torch.vmap(fn, in_dims=(None, 0))
    torch.func.grad(lambda w: batched(w, X).sum())(W)


@pytest.mark.parametrize("options", [{}, {"policy": policies.dots_saveable}])
@pytest.mark.parametrize(
    ("fn", "run"),
    [
        (unbatched, batched_backward),
        (unbatched, batched_grad),
        (unbatched, grad_of_batched),
        (of_one, by_backward),
        (of_one, grad),
    ],
)
def test_torch_warns_as_often_as_in_plain_code_and_at_no_line_of_remat(
    fn, run, options
):
    plain = caught(lambda: run(fn))
    with count_ops() as ops:
        ours = caught(lambda: run(remat(fn, **options)))
    assert ops["sin"] > 2
    texts = [[str(w.message) for w in found] for found in (plain, ours)]
    assert sorted(texts[0]) == sorted(texts[1]) != []
    assert {w.filename for w in ours} <= {__file__, *(w.filename for w in plain)}


def speaking(x):
    warnings.warn("seen", stacklevel=1)
    return x.sin().sin()


def test_a_recompute_makes_no_error_of_what_was_ignored_around_the_forward():
    """Warnings are errors in these tests."""
    x = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="seen"):
        out = remat(speaking)(x)
    with count_ops() as ops:
        out.sum().backward()
    assert ops["sin"] == 1


def test_a_recompute_leaves_what_was_shown_to_be_shown_once():
    def steps():
        for _ in range(3):
            x = torch.ones(3, requires_grad=True)
            warnings.warn("each step", stacklevel=1)
            with count_ops() as ops:
                remat(speaking)(x).sum().backward()
            assert ops["sin"] == 3

    found = caught(steps, "default")
    assert sorted(str(w.message) for w in found) == ["each step", "seen"]


def raising(x):
    try:
        warnings.warn("caught here", stacklevel=1)
    except UserWarning:
        return x.sin().sin()
    return x.cos()


def recording(x):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warnings.warn("recorded here", stacklevel=1)
    return x.sin().sin() if found else x.cos()


@pytest.mark.parametrize("fn", [raising, recording])
def test_what_a_function_catches_it_catches_again(fn):
    x = torch.linspace(0, 1, 3, requires_grad=True)
    out = remat(fn)(x)
    with count_ops() as ops:
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert ops["sin"] == 1
    assert torch.equal(grad, torch.autograd.grad(fn(x).sum(), x)[0])


def test_a_warning_of_remat_is_at_the_line_of_the_user():
    policy = policies.save_only_these_names("nobody gives this name")
    found = caught(lambda: by_backward(remat(unbatched_named, policy=policy)))
    (told,) = found
    assert "nobody gives this name" in str(told.message)
    assert told.filename == __file__


def unbatched_named(w, x):
    return (x @ w).sin().sin()
