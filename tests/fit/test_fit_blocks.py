"""`remat.fit` by blocks chooses what each block keeps, near the best that is known."""

import copy
import dataclasses

import pytest
import torch
from support.fitted import (
    CASES,
    IDS,
    Decoder,
    Lm,
    Mlp,
    ResNet,
    X,
    assert_predicted,
    gradients,
    least,
    measured_peak,
    mlps,
    square,
    staged,
    step,
    tight,
    words,
)
from torch import nn

import remat
from remat._fit.simulate import TrainingStep, simulate, undisturbed
from remat._partial.cache import CACHES
from remat.testing import assert_same


def fit(*args, **options):
    return remat.fit(*args, over="blocks", **options)


def assert_followed(plan, model, *args, loss=square, **kwargs):
    """Assert that a model that follows a plan has its peak and plain's gradients."""
    real = plan.apply(copy.deepcopy(model))
    measured = measured_peak(real, args, kwargs, loss)
    assert_predicted(plan.peak, measured)
    assert measured <= 1.02 * plan.budget
    found, expected = (
        gradients(m, lambda m=m: step(m, args, kwargs, loss)) for m in (real, model)
    )
    assert_same(found, expected)


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
    made = TrainingStep(model, args, kwargs, loss)
    with undisturbed():
        return simulate(made, torch.device("cpu"), lambda step: step)


def assert_no_choice_costs_less(plan, choices):
    """Assert that no choice that stays under the budget recomputes less."""
    for name, peak, seconds in choices:
        assert peak > plan.budget or plan.seconds <= seconds + 1e-12, name


SLOW = "lm", "tied lm", "resnet", "unet", "llama"


# Each takes seconds for a search.
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_budgets_hold_and_no_uniform_choice_costs_less(name):
    make, args, kwargs, loss = CASES[name]
    model = make()
    choices = uniform_choices(model, args, kwargs, loss)
    low = least(model, *args, over="blocks", loss=loss, **kwargs)
    high = simulated(model, args, kwargs, loss).peak
    for share in (0.2, 0.4, 0.7) if name in SLOW else (0.4,):
        budget = int(low + share * (high - low))
        plan = fit(model, *args, budget=budget, loss=loss, **kwargs)
        assert plan.peak <= budget < plan.plain_peak == high
        assert any(block.recomputes for block in plan.blocks)
        assert_no_choice_costs_less(plan, choices)
        assert_followed(plan, model, *args, loss=loss, **kwargs)
    worse = dataclasses.replace(plan, budget=plan.plain_peak, seconds=1.0)
    with pytest.raises(AssertionError, match=r"saveable|every|others"):
        assert_no_choice_costs_less(worse, choices)


@pytest.mark.slow
def test_less_memory_never_costs_less_work():
    model, low = mlps(), tight("blocks").budget
    high = tight("blocks").plain_peak
    costs = [
        fit(model, X, budget=int(low + share * (high - low)), loss=square).seconds
        for share in (0.4, 0.8)
    ]
    assert tight("blocks").seconds >= costs[0] >= costs[1] > 0


@pytest.mark.slow
def test_modules_around_blocks_are_recomputed_where_that_pays():
    model, x = staged(), torch.randn(4096, 8)
    every = remat.nn.apply(copy.deepcopy(model), [*remat.nn.blocks(model)])
    budget = simulated(every, (x,), {}, square).peak - 1
    plan = fit(model, x, budget=budget, loss=square)
    assert any(block.around for block in plan.blocks)
    assert_followed(plan, model, x)


def test_blocks_are_selected_as_by_apply():
    model = mlps(4)
    plan = fit(model, X, budget="1GB", select="1.[02]")
    assert {b.name for b in plan.blocks if not b.around} == {"1.0", "1.2"}


class Named(Mlp):
    """Its name is of the one product whose result a recompute needs."""

    def forward(self, x):
        product = remat.checkpoint_name(self.up(x), "up")
        return x + self.down(product.sin().cos().sin()).tanh()


def test_names_of_values_are_an_option():
    model = nn.Sequential(*(Named(8) for _ in range(3)))
    tried = []
    applied = remat.nn.apply

    def noted(model, choice):
        tried.extend(map(str, choice.values()))
        return applied(model, choice)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(remat.nn, "apply", noted)
        least(model, X, over="blocks")
    assert "save_only_these_names('up')" in tried


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
    budget = int(0.9 * simulated(model, (X,), {}, square).peak)
    plan = fit(model, X, budget=budget, loss=square)
    assert any(block.recomputes for block in plan.blocks)
    assert [block.name for block in plan.blocks] == [f"layers.{k}" for k in range(3)]
    assert_followed(plan, model, X)


@pytest.mark.slow
def test_a_model_in_evaluation_mode():
    model = ResNet().eval()
    image = torch.randn(2, 3, 16, 16)
    budget = int(0.95 * fit(model, image, budget="1GB", loss=square).peak)
    assert_followed(fit(model, image, budget=budget, loss=square), model, image)


# --- What is refused -----------------------------------------------------------------


def test_a_step_without_a_model_is_refused():
    with pytest.raises(ValueError, match=r"no model is passed"):
        fit(torch.sin, X, budget="1GB")


def test_a_list_of_blocks_for_blocks_is_refused():
    model = nn.ModuleDict({"layers": nn.ModuleList([mlps(2), mlps(2)])})
    with pytest.raises(ValueError, match=r"`layers` is a ModuleList, which has no"):
        fit(lambda m, x: m["layers"][0](x), model, X, budget=1, select="layers")


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"Linear has no repeated blocks"):
        fit(nn.Linear(8, 8), X, budget="1GB")


@pytest.mark.slow
def test_a_plan_refuses_a_function_and_another_model():
    with pytest.raises(TypeError, match=r"for the blocks of Sequential: pass the mod"):
        tight("blocks").apply(lambda x: x)
    with pytest.raises(ValueError, match=r"selects no module"):
        tight("blocks").apply(mlps(1))


def test_calls_outside_share_nothing_with_simulated_ones():
    model = remat.nn.apply(Lm(), Decoder, policy=remat.policies.dots_saveable)
    words(model(IDS)).backward()
    known = len(CACHES)
    least(mlps(2), X, over="blocks", loss=square)
    assert len(CACHES) == known > 0
