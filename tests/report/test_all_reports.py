"""What holds for all reports: what they refuse, and what they leave as it was."""

import contextlib
import random

import pytest
import torch
from support.kept import leaves
from support.tables import crossed
from torch import nn
from torch.nn.functional import dropout

from remat import (
    CaptureError,
    MutationError,
    compare,
    explain,
    remat as ckpt,
    saved_residuals,
)
from remat.testing import assert_same, check_replay, live_bytes


def of_step(fn, *args):
    """The report of a step: `explain` of a loss."""
    found = explain(lambda *args: fn(*args).square().sum(), *args)
    assert found.peak.nbytes > 0
    return found


REPORTS = {
    "explain": explain,
    "explain a step": of_step,
    "compare": compare,
    "saved_residuals": saved_residuals,
}
# The last one runs as a call does: it updates buffers and moves streams once.
EVERY = {**REPORTS, "check_replay": check_replay}
WRAPS = {"plain": lambda fn: fn, "remat": ckpt}


def assert_left_as_it_was(report, fn, *args, tensors, streams=()):
    """Assert what a report leaves: values, versions, memory, gradients and streams."""

    def state():
        found = [
            (t.clone(), None if t.grad is None else t.grad.clone()) for t in tensors
        ]
        where = [(t._version, t.data_ptr(), id(t.grad), t.grad_fn) for t in tensors]
        moved = torch.get_rng_state(), random.getstate()
        return found, where, [*moved, *(s.get_state() for s in streams)]

    before = state()
    with contextlib.suppress(MutationError):  # remat refuses to change an argument
        report(fn, *args)
    for then, now in zip(before, state(), strict=True):
        assert_same(now, then)


@crossed("report, wrap", REPORTS, WRAPS)
def test_buffers_streams_and_gradients_are_as_they_were(report, wrap):
    generator = torch.Generator().manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x, y = torch.randn(8, 4), torch.randn(4, requires_grad=True)
    fired = []
    for p in (*module.parameters(), y):
        p.grad = torch.ones_like(p)
        p.register_post_accumulate_grad_hook(fired.append)

    def f(x):
        noise = torch.randn(4, generator=generator) + random.random()
        return dropout(module(x), 0.5) * noise * y

    tensors = x, y, *module.parameters(), *module.buffers()
    wrapped = WRAPS[wrap](f)
    assert_left_as_it_was(
        REPORTS[report], wrapped, x, tensors=tensors, streams=[generator]
    )
    assert fired == []


@pytest.mark.parametrize("report", REPORTS)
def test_arguments_changed_in_place_are_as_they_were(report):
    x, leaf = torch.ones(4), torch.ones(4, requires_grad=True)
    h = leaf.exp()
    values = h.detach().clone()

    def f(x, h):
        x.add_(1)
        return (h.mul_(2) * x).exp()

    for tensors in ((x, h), (x, values)):  # in the second nothing requires grad
        assert_left_as_it_was(REPORTS[report], f, *tensors, tensors=tensors)


@pytest.mark.parametrize("report", REPORTS)
def test_everything_is_put_back_after_an_error(report):
    x = torch.ones(4)

    def f(x):
        x.add_(torch.rand(4))
        raise ValueError("half-way")

    def raised(*args):
        with pytest.raises(ValueError, match="half-way"):
            REPORTS[report](*args)

    assert_left_as_it_was(raised, f, x, tensors=[x])


@pytest.mark.parametrize("report", REPORTS)
def test_a_graph_of_the_user_is_left_alone(report):
    (x,) = leaves((4,))
    h = x.sin()
    with contextlib.suppress(MutationError):
        REPORTS[report](lambda h: h.mul_(2).exp(), h)
    (found,) = torch.autograd.grad(h.exp().sum(), x)
    assert torch.equal(found, x.sin().exp() * x.cos())


@pytest.mark.parametrize("report", EVERY)
def test_nothing_of_the_call_stays_alive(report):
    (x,) = leaves((64, 64))
    wrapped = ckpt(lambda x: (x @ x).tanh().sin())
    EVERY[report](wrapped, x)
    assert live_bytes(lambda: EVERY[report](wrapped, x) and None) == 0


@pytest.mark.parametrize("report", ["explain", "compare", "saved_residuals"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_around_change_no_report(report, mode):
    (x,) = leaves((4, 4))
    found = []
    for around in contextlib.nullcontext, mode:
        with around():
            found.append(REPORTS[report](torch.exp, x))
    assert found[0] == found[1]


def under_grad(report):
    torch.func.grad(lambda x: (report(torch.sin, x), x.sum())[1])(torch.ones(3))


def under_forward_mode(report):
    with torch.autograd.forward_ad.dual_level():
        report(torch.sin, torch.ones(3))


def of_a_lazy_module(report):
    report(nn.LazyLinear(3), torch.ones(2, 3))


def of_arguments_as_one(report):
    with contextlib.suppress(AttributeError):
        report(lambda w, x: w @ x, (torch.ones(3, 3), torch.ones(3)))


REFUSED = {
    "under torch.func": (under_grad, RuntimeError, r"called under a transform of tor"),
    "under forward mode": (under_forward_mode, RuntimeError, r"or forward-mode AD"),
    "a lazy module": (of_a_lazy_module, CaptureError, r"not initialized yet"),
    "arguments as one": (of_arguments_as_one, TypeError, r"missing 1 required|To pass"),
}


@crossed("report, case", EVERY, REFUSED)
def test_what_is_refused(report, case):
    run, kind, match = REFUSED[case]
    with pytest.raises(kind, match=match) as raised:
        run(EVERY[report])
    if case == "arguments as one":
        (told,) = raised.value.__notes__
        assert "(fn, *args), not" in told


@pytest.mark.parametrize("report", ["explain", "compare"])
def test_a_function_without_gradients_is_called(report):
    with pytest.raises(TypeError, match="unsupported operand"):
        REPORTS[report](lambda i: i + "1", torch.arange(9))
