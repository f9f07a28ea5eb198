"""`remat.fit` by blocks chooses what they keep, and leaves the model as it is."""

import copy
import dataclasses
import pickle
import re
import sys

import pytest
import torch
from support.fitted import (
    CASES,
    IDS,
    Decoder,
    Lm,
    Mlp,
    ResNet,
    assert_predicted,
    llama,
    measured_peak,
    mlps,
    square,
    staged,
    words,
)
from torch import nn

import remat
from remat._fit.simulate import TrainingStep, simulate, undisturbed
from remat._partial.cache import CACHES
from remat._torch import fake_mode
from remat.testing import assert_same, count_ops


X = torch.randn(256, 8)


def fit(*args, **options):
    return remat.fit(*args, over="blocks", **options)


def least(model, *args, **options):
    """Return the least budget that there is a plan for."""
    with pytest.raises(remat.BudgetError, match=r"The least budget") as raised:
        fit(model, *args, budget=1, **options)
    return raised.value.least


def middle(model, *args, share=0.4, **options):
    """Return a budget between the least and the peak without remat."""
    low = least(model, *args, **options)
    high = fit(model, *args, budget="1TB", **options).peak
    return int(low + share * (high - low))


def gradients(model, *args, loss=square, seed=0, **kwargs):
    torch.manual_seed(seed)
    model.zero_grad()
    out = model(*args, **kwargs)
    (out.loss if loss is None else loss(out)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


# --- The plan ------------------------------------------------------------------------


# Each takes seconds for a search.
SLOW = "tied lm", "resnet", "unet", "llama"
MODELS = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]


@pytest.mark.parametrize("name", MODELS)
def test_the_measured_peak_stays_under_the_budget(name):
    make, args, kwargs, loss = CASES[name]
    model = make()
    budget = middle(model, *args, loss=loss, **kwargs)
    plan = fit(model, *args, budget=budget, loss=loss, **kwargs)
    assert plan.peak <= budget < plan.plain_peak
    assert any(block.recomputes for block in plan.blocks)
    real = plan.apply(copy.deepcopy(model))
    measured = measured_peak(real, args, kwargs, loss)
    assert_predicted(plan.peak, measured)
    assert measured <= 1.02 * budget
    expected = gradients(model, *args, loss=loss, **kwargs)
    assert_same(gradients(real, *args, loss=loss, **kwargs), expected)


def test_the_recomputed_flops_are_those_that_run():
    model = mlps()
    plan = fit(model, X, budget=middle(model, X, loss=square), loss=square)
    flops = plan.flops
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        gradients(plan.apply(model), X)
    assert counter.get_total_flops() == flops + plan.recomputed
    assert 0 < plan.recomputed < flops
    assert plan.share == plan.recomputed / flops
    assert plan.recomputed == sum(block.recomputed for block in plan.blocks)


def test_a_budget_that_plain_code_stays_under_recomputes_nothing():
    model = mlps()
    plan = fit(model, X, budget="1 GB", loss=square)
    assert plan.recomputed == plan.seconds == 0
    assert plan.peak == plan.plain_peak
    assert not any(block.recomputes for block in plan.blocks)
    assert type(plan.apply(model)[1][0]) is Mlp


def test_less_memory_never_costs_less_work():
    model = mlps(4)
    low, high = least(model, X, loss=square), fit(model, X, budget="1GB").peak
    costs = [
        fit(model, X, budget=int(low + k / 4 * (high - low)), loss=square).seconds
        for k in range(5)
    ]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_the_least_budget_would_do():
    model = staged()
    budget = least(model, X, loss=square)
    assert fit(model, X, budget=budget, loss=square).peak == budget
    with pytest.raises(remat.BudgetError, match=r"The least budget") as raised:
        fit(model, X, budget=budget - 1, loss=square)
    assert raised.value.least == budget
    assert "before the step" in str(raised.value)


def test_modules_around_blocks_are_recomputed_where_that_pays():
    model, x = staged(), torch.randn(4096, 8)
    budget = least(model, x, loss=square)
    plan = fit(model, x, budget=budget, loss=square)
    around = [block.name for block in plan.blocks if block.around]
    assert around
    every = remat.nn.apply(copy.deepcopy(model), [*remat.nn.blocks(model)])
    assert simulated(every, (x,), {}, square).peak > budget
    real = plan.apply(copy.deepcopy(model))
    assert_predicted(plan.peak, measured_peak(real, (x,), {}, square))
    assert_same(gradients(real, x), gradients(model, x))


@pytest.mark.parametrize("name", MODELS)
def test_no_uniform_choice_costs_less(name):
    make, args, kwargs, loss = CASES[name]
    model = make()
    choices = uniform_choices(model, args, kwargs, loss)
    for share in 0.2, 0.7:
        budget = middle(model, *args, share=share, loss=loss, **kwargs)
        plan = fit(model, *args, budget=budget, loss=loss, **kwargs)
        assert_no_choice_costs_less(plan, choices)


def assert_no_choice_costs_less(plan, choices):
    """Assert that no choice that stays under the budget recomputes less."""
    for name, peak, seconds in choices:
        assert peak > plan.budget or plan.seconds <= seconds + 1e-12, name


def uniform_choices(model, args, kwargs, loss):
    """Return the peak and the work of uniform choices, as (name, peak, seconds)."""
    blocks = [*remat.nn.blocks(model)]
    names = "nothing_saveable", "dots_saveable", "everything_saveable"
    choices = {n: dict.fromkeys(blocks, getattr(remat.policies, n)) for n in names}
    for k in range(2, len(blocks)):
        kth = blocks[k - 1 :: k]
        choices[f"every {k}th"] = dict.fromkeys(kth)
        choices[f"others than {k}th"] = dict.fromkeys(b for b in blocks if b not in kth)
    plain = simulated(model, args, kwargs, loss)
    found = []
    for name, choice in choices.items():
        chosen = remat.nn.apply(copy.deepcopy(model), choice)
        again = simulated(chosen, args, kwargs, loss)
        found.append((name, again.peak, again.seconds - plain.seconds))
    return found


def simulated(model, args, kwargs, loss):
    step = TrainingStep(model, args, kwargs, loss)
    with undisturbed():
        return simulate(step, torch.device("cpu"), lambda step: step)


def test_a_plan_that_costs_more_is_noticed():
    model = mlps(4)
    plan = fit(model, X, budget=middle(model, X, loss=square), loss=square)
    choices = uniform_choices(model, (X,), {}, square)
    worse = dataclasses.replace(plan, budget=plan.plain_peak, seconds=1.0)
    with pytest.raises(AssertionError, match=r"nothing_saveable"):
        assert_no_choice_costs_less(worse, choices)


# --- What is passed ------------------------------------------------------------------


def test_a_function_is_passed_its_model():
    model = Lm()

    def step(model, ids):
        return words(model(ids))

    passed = fit(model, IDS, budget="1GB", loss=words)
    assert fit(model.forward, IDS, budget="1GB", loss=words).peak == passed.peak
    inside = fit(step, model, IDS, budget="1GB")
    assert inside.flops == passed.flops
    # Nothing holds the logits of `step` in its backward.
    assert inside.peak < passed.peak


def test_outputs_of_transformers_have_a_loss():
    model = llama()
    low = least(model, IDS, labels=IDS)
    plan = fit(model, IDS, labels=IDS, budget=low)
    assert {block.name for block in plan.blocks if not block.around} == {
        f"model.layers.{k}" for k in range(3)
    }


def test_of_what_is_no_scalar_all_is_differentiated():
    model = mlps(2)
    assert fit(model, X, budget="1GB").flops > 0
    assert fit(lambda m, x: [m(x), {"a": x}], model, X, budget="1GB").flops > 0


@pytest.mark.parametrize("where", ["meta", "fake"])
def test_the_model_need_not_exist(where):
    with torch.device("meta") if where == "meta" else fake_mode():
        model = mlps()
    real = mlps()
    budget = middle(real, X, loss=square)
    plan = fit(model, X, budget=budget, loss=square)
    assert plan == fit(real, X, budget=budget, loss=square)
    plan.apply(real)
    assert measured_peak(real, (X,), {}, square) <= budget


def test_all_may_be_on_the_meta_device():
    with torch.device("meta"):
        model, x = mlps(2), torch.randn(256, 8)
    found = fit(model, x, budget="1GB")
    assert found.peak == fit(mlps(2), X, budget="1GB", device="cpu").peak


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_that_is_not_there_is_refused(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=f"torch finds no {device} here"):
        fit(mlps(2), X, budget="1GB", device=device)


def test_blocks_are_selected_as_by_apply():
    model = mlps(4)
    low = least(model, X, select="1.[02]")
    plan = fit(model, X, budget=low, select="1.[02]")
    assert {b.name for b in plan.blocks if not b.around} == {"1.0", "1.2"}


def test_names_of_values_are_an_option():
    class Named(Mlp):
        def forward(self, x):
            y = x.sin().cos().sin().cos()
            return x + self.down(remat.checkpoint_name(self.up(y), "up").relu())

    model = nn.Sequential(*(Named(8) for _ in range(3)))
    plan = fit(model, X, budget=middle(model, X, share=0.3))
    assert "save_only_these_names('up')" in str([b.policy for b in plan.blocks])


class Twice(nn.Module):
    """Calls each block twice, and one of them under two names."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Mlp(8) for _ in range(3))
        self.again = self.layers[0]

    def forward(self, x):
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return self.again(x)


def test_blocks_that_are_called_twice_have_one_option():
    model = Twice()
    budget = middle(model, X, loss=square)
    plan = fit(model, X, budget=budget, loss=square)
    assert [block.name for block in plan.blocks] == [f"layers.{k}" for k in range(3)]
    real = plan.apply(copy.deepcopy(model))
    assert_predicted(plan.peak, measured_peak(real, (X,), {}, square))
    assert_same(gradients(real, X), gradients(model, X))


def test_a_model_in_evaluation_mode():
    model = ResNet().eval()
    image = torch.randn(2, 3, 16, 16)
    plan = fit(model, image, budget=least(model, image, loss=square), loss=square)
    real = plan.apply(copy.deepcopy(model))
    assert_predicted(plan.peak, measured_peak(real, (image,), {}, square))


def test_gradients_that_exist_are_there_before():
    model = mlps()
    first = fit(model, X, budget="1GB", loss=square)
    model(X).sum().backward()
    again = fit(model, X, budget="1GB", loss=square)
    assert again.resident > first.resident


# --- What is refused -----------------------------------------------------------------


def test_a_step_without_a_model_is_refused():
    with pytest.raises(ValueError, match=r"no model is passed"):
        fit(torch.sin, X, budget="1GB")


def test_a_list_of_blocks_for_blocks_is_refused():
    model = nn.ModuleDict({"layers": nn.ModuleList([mlps(2), mlps(2)])})
    with pytest.raises(ValueError, match=r"`layers` is a ModuleList, which has no"):
        fit(lambda m, x: m["layers"][0](x), model, X, budget=1, select="layers")


def test_a_plan_for_blocks_refuses_a_function():
    model = mlps()
    plan = fit(model, X, budget="1GB", loss=square)
    with pytest.raises(TypeError, match=r"for the blocks of Sequential: pass the mod"):
        plan.apply(lambda x: model(x))


def test_budgets_are_written_in_one_unit():
    model = mlps()
    with pytest.raises(remat.BudgetError, match=r"under 0\.001 MiB\. ") as raised:
        fit(model, X, budget=1000, loss=square)
    assert "bytes" not in str(raised.value)
    least = re.search(r"there is one is (\S+ MiB)", str(raised.value))[1]
    plan = fit(model, X, budget=least, loss=square)
    assert plan.peak == raised.value.least
    assert f"peak: {least}, in " in " ".join(str(plan).split())


def test_a_plan_says_what_it_was_made_without(monkeypatch):
    model = mlps()
    budget = least(model, X, loss=square)
    assert "policies.within" not in str(fit(model, X, budget=budget, loss=square))
    monkeypatch.setitem(sys.modules, "scipy", None)
    plan = fit(model, X, budget=budget, loss=square)
    note = "without policies.within: scipy is not installed (pip install scipy)"
    assert plan.lacks_budgets
    assert note in " ".join(str(plan).split())  # its lines are wrapped
    assert "without policies.within" in plan._repr_html_()
    assert not fit(model, X, budget="1GB", loss=square).lacks_budgets


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no repeated blocks"):
        fit(nn.Linear(8, 8), X, budget="1GB")


def test_a_model_that_is_recomputed_already_is_refused():
    model = remat.nn.apply(mlps())
    with pytest.raises(ValueError, match=r"`1\.0` \(\w+\) is recomputed already"):
        fit(model, X, budget="1GB")


def test_a_model_that_is_not_passed_is_refused():
    model, other = mlps(2), mlps(2)
    with pytest.raises(remat.CaptureError, match=r"requires grad and was not passed"):
        fit(lambda m, x: m(x) + other(x), model, X, budget="1GB")
    assert all(p.grad is None for p in other.parameters())


def test_values_that_do_not_exist_cannot_be_read():
    def step(model, x):
        return model(x) if x.sum() > 0 else model(x + 1)

    with pytest.raises(remat.CaptureError, match=r"test_fit_blocks\.py:\d+, in step"):
        fit(step, mlps(2), X, budget="1GB")


def test_a_step_without_gradients_is_refused():
    with pytest.raises(ValueError, match=r"nothing in the result requires grad"):
        fit(mlps(2).requires_grad_(False), X, budget="1GB")


def test_lazy_modules_are_refused():
    model = nn.Sequential(mlps(2), nn.LazyLinear(3))
    with pytest.raises(remat.CaptureError, match=r"Call the model once before"):
        fit(model, X, budget="1GB")


@pytest.mark.parametrize("budget", ["8 parsecs", -1, None])
def test_a_budget_is_bytes(budget):
    with pytest.raises((ValueError, TypeError), match=r"fit takes a number of bytes"):
        fit(mlps(2), X, budget=budget)


def test_over_is_step_or_blocks():
    with pytest.raises(ValueError, match=r"\"blocks\" or None, got 'layers'"):
        remat.fit(mlps(2), X, budget=1, over="layers")


# --- What is left as it is -----------------------------------------------------------


def test_the_model_stays_as_it_is():
    model = ResNet()
    image = torch.randn(2, 3, 16, 16)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    classes = [type(module) for module in model.modules()]
    fit(model, image, budget=least(model, image, loss=square), loss=square)
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(module) for module in model.modules()] == classes
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_calls_outside_share_nothing_with_simulated_ones():
    model = remat.nn.apply(Lm(), Decoder, policy=remat.policies.dots_saveable)
    words(model(IDS)).backward()
    known = len(CACHES)
    other = Lm()
    fit(other, IDS, budget=least(other, IDS, loss=words), loss=words)
    assert len(CACHES) == known > 0


def test_apply_is_undone_by_remove():
    model = mlps()
    plan = fit(model, X, budget=least(model, X, loss=square), loss=square)
    remat.nn.remove(plan.apply(model))
    with count_ops() as ops:
        gradients(model, X)
    assert ops["relu"] == 6


def test_messages_name_the_line_that_applied_the_plan():
    model = mlps()
    plan = fit(model, X, budget=least(model, X, loss=square), loss=square)
    plan.apply(model)
    with pytest.raises(
        ValueError, match=r"already, by remat\.fit, since \S*test_fit_blocks\.py:"
    ):
        plan.apply(model)


def test_a_plan_for_another_model_is_refused():
    plan = fit(mlps(), X, budget=least(mlps(), X, loss=square), loss=square)
    with pytest.raises(ValueError, match=r"selects no module"):
        plan.apply(mlps(1))


# --- How it shows --------------------------------------------------------------------


def test_a_plan_is_a_value():
    model = mlps()
    plan = fit(model, X, budget=least(model, X, loss=square), loss=square)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert re.match(r"<FitPlan of Sequential: \d of 6 blocks recomputed", repr(plan))
    text = str(plan)
    assert all(f"1.{k}" in text for k in range(6))
    assert "MiB, in " in text


def test_a_plan_draws_itself():
    pytest.importorskip("matplotlib").use("Agg")
    model = mlps()
    plan = fit(model, X, budget=least(model, X, loss=square), loss=square)
    axes = plan.plot()
    labels = axes.get_legend_handles_labels()[1]
    assert any("fit" in label for label in labels)
    assert axes.get_xlabel() == "peak of the step, MiB"
