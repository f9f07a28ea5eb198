"""What JAX's tests say of state, effects, errors and forwarded values.

Numbers are items of the survey of JAX's tests: see `test_jax_transforms.py`. Values
that leave a call (23) and prints (debugging_primitives) are in `whole/test_docs_*.py`.
"""

import functools
import traceback
from queue import SimpleQueue

import pytest
import torch
from support.compared import compared, points
from support.zoo import Evaluations, counted
from torch import nn
from torch.autograd import gradcheck
from torch.func import grad

from remat import remat
from remat.testing import assert_same, count_ops, live_bytes


def test_a_check_at_run_time_is_still_reported():
    """checkify: `torch._assert` inside, in the forward and in the recompute."""
    limits = SimpleQueue()
    for limit in (0.0, 10.0, 0.0):
        limits.put(limit)
    next_limit = limits.get

    def f(x):
        torch._assert(bool((x < next_limit()).all()), "x is too large")
        return x.sin().exp().sum()

    with pytest.raises(AssertionError, match="x is too large"):
        remat(f)(points(3).requires_grad_())
    out = remat(f)(points(3).requires_grad_())
    with pytest.raises(AssertionError, match="x is too large") as info:
        out.backward()
    assert "raised while recomputing" in "".join(info.value.__notes__)


def test_gradients_accumulate_into_a_users_buffer():
    """80: by a hook of the user's, over several calls."""
    buffer = torch.zeros(3)
    body, calls = counted(lambda x: x.sin().exp().sum())
    x = points(3).requires_grad_()
    x.register_hook(lambda g: buffer.add_(g))
    for _ in range(3):
        remat(body)(x).backward()
    assert len(calls) == 6
    assert_same(buffer, sum(grad(body)(points(3)) for _ in range(3)))


# --- Effects ---


def test_effects_in_triple_nesting_run_four_times(capsys):
    """mutable_array: nesting is not free for effects: each level runs the next."""

    def f(x):
        print("here")  # noqa: T201
        return x.sin().sum()

    assert_same(grad(remat(remat(remat(f))))(points(3)), points(3).cos())
    assert capsys.readouterr().out.split() == ["here"] * 4


class Counter(nn.Module):
    def __init__(self, sine):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.weight = nn.Parameter(points(3))
        self.sine = sine

    def forward(self, x):
        self.count += 1
        return self.sine(x * self.weight) * self.count


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_state_is_updated_once_however_deep(depth):
    """mutable_array, flax BatchStat, haiku: a counter is 1 after a remat call."""
    sine, calls = counted(torch.sin)
    module = Counter(sine)
    fn = module
    for _ in range(depth):
        fn = remat(fn)
    fn(points(3)).sum().backward()
    # Two evaluations at any depth: only the innermost call has anything to recompute.
    assert (module.count, len(calls)) == (1, 2)
    assert_same(module.weight.grad, points(3) * (points(3) * points(3)).cos())


# --- Forwarded values, and cotangents that do not exist ---


def test_a_residual_that_is_also_an_output_is_kept_once_without_a_policy():
    """Remat3Test: exp's result is its own residual; the output is all there is."""
    x = points(1000).requires_grad_()

    def f(x):
        y = x.sin().exp()
        return y, y.exp()

    assert live_bytes(lambda: remat(f)(x)) == 2 * x.nbytes
    assert live_bytes(lambda: f(x)) == 2 * x.nbytes  # sin keeps x, exp its result
    with count_ops() as ops:
        got = torch.autograd.grad(sum(remat(f)(x)).sum(), x)
    assert ops["exp"] == 4
    assert_same(got, torch.autograd.grad(sum(f(x)).sum(), x))


def test_inputs_forwarded_to_outputs_are_the_inputs():
    """Remat3Test, scan's forwarded residuals: the same object, never a copy."""
    x, n = points(3).requires_grad_(), points(3)
    with count_ops() as ops:
        a, b, c = remat(lambda x, n: (x, x.sin().sin(), n))(x, n)
        assert a is x
        assert c is n
        (got,) = torch.autograd.grad((a * b).sum(), x)
    assert ops["sin"] == 2 + 1
    assert_same(got, torch.autograd.grad((x * x.sin().sin()).sum(), x)[0])


def test_what_is_saved_for_the_backward_is_the_input_itself():
    """lax_control_flow: the residual for `xs` is forwarded, not copied."""
    x = points(3).requires_grad_()
    second = remat(lambda x: x.sin().sin())(x).grad_fn
    (first, _), *_ = second.next_functions
    with count_ops() as ops:
        assert first._saved_self.data_ptr() == x.data_ptr()
    assert ops["sin"] == 0
    with count_ops() as ops:
        saved = second._saved_self
    assert ops["sin"] == 1
    assert_same(saved.detach(), x.detach().sin())


@pytest.mark.parametrize("seed", range(6))
def test_random_permutations_of_forwarded_and_computed_leaves(seed):
    """api_test: inputs and outputs in any order, some passed through."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(6, generator=generator).tolist()
    sine, calls = counted(torch.sin)

    def f(*xs):
        made = [sine(xs[0] * xs[1]), xs[2].exp() * xs[0], xs[1].cos()]
        pool = [*xs, *made]
        return [pool[i] for i in order]

    leaves = [(points(3).double() + k).requires_grad_() for k in range(3)]

    def loss(g, *xs):
        return sum((k + 1) * o.sin().sum() for k, o in enumerate(g(*xs)))

    got = torch.autograd.grad(loss(remat(f), *leaves), leaves)
    assert len(calls) == 2
    assert_same(got, torch.autograd.grad(loss(f, *leaves), leaves))
    assert gradcheck(functools.partial(loss, remat(f)), leaves)


@compared(evaluations=6, plain=3)
def test_zero_size_buffers_and_integer_carries(wrap, counting):
    """equinox: zero-size arrays and values without a derivative in the carry."""
    body = counting(lambda x: x.sin().exp())

    @wrap
    def step(carry):
        x, empty, n = carry["x"], carry["empty"], carry["n"]
        return {"x": body(x), "empty": empty * 2.0, "n": n + 1}

    x, empty = points(3).requires_grad_(), torch.zeros(0, requires_grad=True)
    out = {"x": x, "empty": empty, "n": torch.tensor(0)}
    for _ in range(3):
        out = step(out)
    assert (out["n"], out["n"].requires_grad, out["empty"].shape) == (3, False, (0,))
    return torch.autograd.grad(out["x"].sum() + out["empty"].sum(), (x, empty))


def test_an_error_in_the_recompute_shows_the_users_line():
    """74, 75."""
    count = Evaluations()

    def f(x):
        count.note(None)
        if len(count) == 2:
            raise ValueError("on the second evaluation")
        return x.sin().exp().sum()

    out = remat(f)(points(3).requires_grad_())
    with pytest.raises(ValueError, match="on the second evaluation") as info:
        out.backward()
    text = "".join(traceback.format_exception(info.value))
    assert 'raise ValueError("on the second evaluation")' in text
    assert "raised while recomputing" in text
    assert f"{__file__}:" in "".join(info.value.__notes__)


def test_an_output_without_tangent_stays_so():
    """api_test: `stop_gradient(x) * 2` returned from remat is not differentiated."""
    x = points(3).requires_grad_()
    a, b = remat(lambda x: (x.detach() * 2, x.sin().sin()))(x)
    assert (a.requires_grad, b.requires_grad) == (False, True)
    with count_ops() as ops:
        b.sum().backward()
    assert ops["sin"] == 1
    assert_same(x.grad, x.detach().sin().cos() * x.detach().cos())


def test_a_backward_of_nothing_costs_nothing():
    """equinox: with no cotangent for the call the body is not evaluated again."""
    body, calls = counted(lambda x: x.sin().exp().sum())
    x = points(3).requires_grad_()
    out = remat(body)(x)
    (got,) = torch.autograd.grad(x.cos().sum() + 0 * out.detach(), x)
    assert len(calls) == 1
    assert_same(got, -x.detach().sin())
    (out + x.cos().sum()).backward()
    assert len(calls) == 2
