"""Plans in loops that people write: in the budget, bit for bit, and what is said."""

import copy
import functools

import pytest
import torch
from support.allocated import most_allocated
from support.fitted import (
    IDS,
    Lm,
    applied_mlps,
    mlps,
    peak_and_gradients,
    square,
    words,
)
from torch import nn

import remat
from remat.testing import assert_same, count_ops


X, ODD = torch.randn(256, 8), torch.randn(77, 8)


@functools.cache
def plan_of(make, x, loss, **options):
    """Return a plan for three quarters of plain code's peak."""
    torch.manual_seed(0)
    model = make()
    most = remat.fit(model, x, loss=loss, budget="1GB", **options).plain_peak
    return remat.fit(model, x, loss=loss, budget=int(0.75 * most), **options)


@pytest.fixture
def case():
    """Return a plain model, one that follows a plan, and the plan."""
    plan = copy.deepcopy(plan_of(mlps, X, square))
    model = mlps()
    return model, plan.apply(copy.deepcopy(model)), plan


def test_nothing_is_said_of_steps_as_planned(case, caplog):
    plain, ours, plan = case
    with caplog.at_level("INFO", "remat"):
        for x in (X, X, X, X):
            peak, found = peak_and_gradients(ours, x, loss=square)
            assert abs(peak - plan.peak) <= 200
            assert_same(found, peak_and_gradients(plain, x, loss=square)[1])
            ours.zero_grad()
            plain.zero_grad()
            ours.eval()
            with torch.no_grad():
                ours(ODD)
            ours.train()
    assert not caplog.messages


def test_an_odd_batch_and_a_copy_stay_in_the_budget(case):
    plain, ours, plan = case
    for model in (ours, copy.deepcopy(ours)):
        for x in (X, ODD, X):
            peak, found = peak_and_gradients(model, x, loss=square)
            assert_same(found, peak_and_gradients(plain, x, loss=square)[1])
            assert peak <= plan.budget
            plain.zero_grad()
            model.zero_grad()


def test_a_graph_that_is_retained_takes_less_than_plain_code(case, caplog):
    plain, ours, _ = case

    def twice(model):
        value = square(model(X))
        value.backward(retain_graph=True)
        model.zero_grad()
        value.backward()

    with caplog.at_level("INFO", "remat"):
        for _ in range(3):
            peaks = [most_allocated(twice, model)[0] for model in (ours, plain)]
            assert peaks[0] < peaks[1]
            assert_same(*([p.grad for p in m.parameters()] for m in (ours, plain)))
            ours.zero_grad()
            plain.zero_grad()
    assert not caplog.messages


def test_two_forwards_before_a_backward_are_told_once(case, caplog):
    plain, ours, _ = case
    with caplog.at_level("INFO", "remat"):
        for _ in range(2):
            found = []
            for model in (plain, ours):
                losses = [square(model(x)) for x in (X, X.sin())]
                sum(losses).backward()
                found.append([p.grad for p in model.parameters()])
                model.zero_grad()
            assert_same(*found)
    (said,) = caplog.messages
    assert "while the graph of an earlier one is alive" in said


def test_accumulated_gradients_stay_in_a_budget_for_one_step(case, caplog):
    plain, ours, plan = case
    with caplog.at_level("INFO", "remat"):
        for _ in range(4):
            most, want = peak_and_gradients(plain, X, loss=square)
            peak, found = peak_and_gradients(ours, X, loss=square)
            assert_same(found, want)
            assert peak <= plan.budget < most
        for model in (plain, ours):
            model.zero_grad(set_to_none=False)
        peak, found = peak_and_gradients(ours, X, loss=square)
        assert_same(found, peak_and_gradients(plain, X, loss=square)[1])
        assert peak <= plan.budget
    assert not caplog.messages


def test_what_gradients_hold_over_the_least_budget_is_told_once(caplog):
    _, ours, plan = applied_mlps()
    (over,) = [c.over for c in plan.applied.courses if c.over > 0]
    with caplog.at_level("INFO", "remat"):
        peak, _ = peak_and_gradients(ours, X, loss=square)
        assert peak <= plan.budget
        for _ in range(2):
            peak, _ = peak_and_gradients(ours, X, loss=square)
            assert plan.budget < peak <= plan.budget + over
    (said,) = caplog.messages
    assert f"over it by up to {over:,} bytes" in said


def test_what_code_keeps_adds_at_most_its_bytes():
    plain, ours, plan = applied_mlps()
    kept = []
    for model in (plain, ours):
        model[1][2].register_forward_hook(lambda *args: kept.append(args[-1]))
    most, want = peak_and_gradients(plain, X, loss=square)
    peak, found = peak_and_gradients(ours, X, loss=square)
    assert_same(found, want)
    assert plan.budget < peak <= plan.budget + kept[-1].nbytes < most


def test_a_batch_of_other_bytes_is_told_once_with_its_line(case, caplog):
    _, ours, _ = case
    with caplog.at_level("INFO", "remat"):
        for _ in range(2):
            square(ours(ODD)).backward()
            ours.zero_grad()
    (said,) = caplog.messages
    assert f"{X[:, :1].nbytes * 32:,} bytes were planned" in said
    assert f"makes {ODD[:, :1].nbytes * 32:,} bytes at {__file__}" in said


def test_what_is_not_run_is_told_with_its_module(case, caplog):
    _, ours, _ = case
    ours[1][2] = nn.Identity()
    with caplog.at_level("INFO", "remat"):
        square(ours(X)).backward()
    (said,) = caplog.messages
    assert "was planned in 1.2" in said
    assert "and is not run" in said


def test_a_step_that_raises_says_nothing(case, caplog):
    _, ours, _ = case

    def fail(*_):
        raise KeyError

    hook = ours[1][2].register_forward_hook(fail)
    with caplog.at_level("INFO", "remat"):
        with pytest.raises(KeyError):
            ours(X)
        hook.remove()
        square(ours(X)).backward()
    assert not caplog.messages


def test_dropout_stays_in_the_budget_in_training_and_in_evaluation(caplog):
    torch.manual_seed(0)
    plain = Lm(2, dropout=0.4)
    most = remat.fit(plain, IDS, loss=words, budget="1GB").plain_peak
    plan = remat.fit(plain, IDS, loss=words, budget=int(0.75 * most))
    ours = plan.apply(copy.deepcopy(plain))
    for mode in (True, True, False):
        found = []
        for model in (plain, ours):
            torch.manual_seed(3)
            model.train(mode)
            with caplog.at_level("INFO", "remat"), count_ops() as ops:
                found.append((*peak_and_gradients(model, IDS, loss=words), ops))
            model.zero_grad()
        (_, want, least), (peak, got, most) = found
        assert_same(got, want)
        assert peak <= plan.budget
        assert most.total() > least.total()
        assert not (mode and caplog.messages)


class Experts(nn.Module):
    """Rows go to the expert that a gate chooses, which only values tell."""

    def __init__(self, count=3, width=32):
        super().__init__()
        self.gate = nn.Linear(width, count)
        parts = nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)
        experts = [nn.Sequential(*copy.deepcopy(parts)) for _ in range(count)]
        self.experts = nn.ModuleList(experts)

    def forward(self, x):
        share, which = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (which == k).nonzero().squeeze(1)
            out = out.index_add(0, rows, expert(x[rows]) * share[rows, None])
        return x + out


@pytest.mark.parametrize(
    "over", [pytest.param("step", marks=pytest.mark.slow), "blocks"]
)
def test_experts_that_rows_are_sent_to_stay_in_the_budget(over):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 32), *[Experts() for _ in range(3)])
    options = {"loss": square, "over": over}
    most = remat.fit(plain, X, budget="1GB", **options).plain_peak
    plan = remat.fit(plain, X, budget=int(0.8 * most), **options)
    ours = plan.apply(copy.deepcopy(plain))
    for _ in range(2):
        most, want = peak_and_gradients(plain, X, loss=square)
        peak, got = peak_and_gradients(ours, X, loss=square)
        assert_same(got, want)
        assert peak <= 1.01 * plan.budget < most
        ours.zero_grad()
        plain.zero_grad()
