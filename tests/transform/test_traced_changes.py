"""Compiled code that changes inputs in place: right numbers, or an error."""

import subprocess
import sys

import pytest
import torch
from support.tables import rows
from support.traced import begins_again, ran
from torch import nn
from torch.nn import functional

from remat import policies, remat
from remat.testing import assert_same


# Dynamo warns of its own deprecations.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def weights():
    return torch.arange(1.0, 4).requires_grad_()


def gradient(f, *args):
    w = weights()
    f(w, *args).backward()
    return w.grad


def recomputed(f, *args):
    """The gradient of a compiled function, which recomputes."""
    w = weights()
    value = compiled(f)(w, *args)
    _, ops = ran(value.backward)
    assert begins_again(ops)
    return w.grad


def compiled(f, backend="aot_eager"):
    return torch.compile(f, fullgraph=True, backend=backend)


# --- Changed after the call ---


# A compilation that fails leaves torch with levels, so each has a process of its own.
AFTER = """
import torch
from remat import remat

{}

def step(w):
    x = w * 1
    {}

torch.compile(step, backend="aot_eager")(torch.ones(3, requires_grad=True)).backward()
"""
COUNTED = (
    "g = remat(lambda x, c: (x + c).sin())",
    "c = x.detach() * 0; y = g(x, c); c.add_(1); return y.sum() + g(x, c).sum()",
)
STREAM = "g = remat(lambda x: (x * 2).sin())", "x.add_(g(x)); return x.sum()"


def refusal(program):
    """What a program that is refused writes to the screen."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AFTER.format(*program)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1
    return run.stderr


@rows("program", {"counted": COUNTED, "stream": STREAM}, fast=[])
def test_an_input_that_changes_before_the_backward_is_refused(program):
    """As outside of graphs."""
    said = refusal(program)
    assert "MutationError" in said
    assert "was changed in place between the forward" in said


@pytest.mark.slow
def test_a_draw_is_refused_also_where_nothing_is_recomputed():
    """The result is the input that is changed."""
    draws = "lambda x: x.mul_(2).add_(torch.rand_like(x))"
    said = refusal((f"g = remat({draws}, rng='error')", "return g(x).sum()"))
    assert "drew from a global random stream in aten.rand_like" in said


# --- Changed inside ---


def aliased(wrap):
    g = wrap(lambda x, y: (y.mul_(2), x * x)[1])

    def f(w):
        x = w * 1
        return g(x, x[:2]).sum()

    return f


def returned(wrap):
    g = wrap(lambda x: x.mul_(2))

    def f(w):
        x = w * 1
        g(x).add_(1)
        return (x * x).sum()

    return f


@pytest.mark.parametrize("program", [aliased, returned])
def test_a_changed_input_that_shares_memory_is_not_recomputed(program):
    want = gradient(program(lambda f: f))
    with pytest.warns(
        UserWarning, match="changes an input in place that shares memory"
    ):
        got = gradient(compiled(program(lambda f: remat(f))))
    assert_same(got, want)


def by_list(x, b):
    torch._foreach_add_([b], 1.0)
    return x * b


def by_data(x, b):
    b.data.add_(1)
    return x * b


class Centred(nn.Module):
    """Reads a mean, and then moves it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, dtype=torch.double)
        self.register_buffer("mean", torch.ones(8, dtype=torch.double))

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        z = torch.tanh(y - self.mean)
        self.mean.lerp_(y.detach().mean(0), 0.5)
        return self.linear(z)


@rows("backend", {k: k for k in ("aot_eager", "inductor")}, fast=["aot_eager"])
def test_a_recompute_reads_what_a_buffer_was_before_its_update(backend):
    x = torch.linspace(0, 1, 32, dtype=torch.double).reshape(4, 8)

    def steps(wrap):
        torch._dynamo.reset()
        module = Centred()
        fn = wrap(module)
        for _ in range(3):
            fn(x).square().sum().backward()
        return module.linear.weight.grad, module.mean

    for policy in None, policies.dots_saveable:
        found = steps(lambda m, p=policy: compiled(remat(m, policy=p), backend))
        torch.testing.assert_close(found, steps(lambda m: m))


@pytest.mark.parametrize("change", [by_list, by_data])
def test_a_change_that_counts_no_version_happens_once(change):
    g = remat(change)
    b = torch.ones(3)
    got = recomputed(lambda w, b: g(w, b).sum(), b)
    assert_same(got, torch.full((3,), 2.0))
    assert_same(b, torch.full((3,), 2.0))


def test_sizes_that_change_are_inputs_beside_a_changed_one():
    g = remat(lambda n, x, b: (b.add_(n), x * b)[1])
    f = torch.compile(
        lambda x, b: g(x.shape[0], x, b).sum(), backend="aot_eager", dynamic=True
    )
    for size in (3, 5):
        x, b = torch.ones(size, requires_grad=True), torch.ones(size)
        _, ops = ran(f(x, b).backward)
        assert begins_again(ops)
        assert_same(b, torch.full((size,), 1.0 + size))
        assert_same(x.grad, b)


def test_a_draw_that_writes_its_noise_leaves_its_input():
    def f(w):
        y = functional.rrelu(-torch.ones(3), 0.5, 0.5, True)
        x = -torch.ones(3)
        return (x * w * w + y).sum()

    assert_same(recomputed(remat(f)), gradient(f))
    slope = remat(lambda w: functional.rrelu(-w, 0.5, 0.5, True).sum())
    assert_same(recomputed(slope), torch.full((3,), -0.5))


# --- Traced otherwise, or with sizes that change ---


def test_a_policy_by_size_decides_about_sizes_that_change():
    g = remat(lambda x: x.sin().sin(), policy=policies.save_larger_than(20))
    f = torch.compile(lambda x: g(x).sum(), backend="aot_eager", dynamic=True)
    for size in (3, 5, 8):
        x = torch.linspace(0, 1, size, requires_grad=True)
        y = x.detach().requires_grad_()
        _, ops = ran(f(x).backward)
        assert begins_again(ops)
        y.sin().sin().sum().backward()
        assert_same(x.grad, y.grad)
