"""A step with an optimizer: what the whole process takes, in the first four steps.

The profiler counts, and nothing of remat's.
"""

import copy
import functools
import pickle

import pytest
import torch
from support.allocated import most_allocated
from support.fitted import X, bytes_before, mlps, square
from torch import nn
from torch.optim import SGD, Adafactor, Adagrad, AdamW

import remat


FEW = X[:8].clone()
EACH, ONE = (functools.partial(AdamW, foreach=is_each) for is_each in (True, False))
FUSED = functools.partial(AdamW, fused=True)
MOMENTUM = functools.partial(SGD, lr=0.01, momentum=0.9)


def trained(model, x, make, loss=square, *, count=1, set_to_none=True, scaler=None):
    """Run four steps of a training loop; return the peak of the process."""

    def loop():
        optimizer = make(model.parameters())
        for _ in range(4):
            for _ in range(count):
                out = model(x)
                value = loss(out)
                value.backward()
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad(set_to_none=set_to_none)

    return bytes_before(model, x) + most_allocated(loop)[0]


CASES = {
    "foreach": (X, EACH, {}),
    "one by one": (X, ONE, {}),
    "momentum": (X, MOMENTUM, {}),
    "two micro-batches": (X, EACH, {"count": 2}),
    "gradients of zeros": (X, ONE, {"set_to_none": False}),
    # The step of the optimizer holds most.
    "few, foreach": (FEW, EACH, {}),
    "few, one by one": (FEW, ONE, {}),
    "few, fused": (FEW, FUSED, {}),
    "few, momentum": (FEW, MOMENTUM, {}),
    "few, two micro-batches": (FEW, EACH, {"count": 2}),
    "few, gradients of zeros": (FEW, ONE, {"set_to_none": False}),
    "few, asks for numbers": (FEW, Adafactor, {}),
    "few, states at once": (FEW, Adagrad, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_four_steps_take_what_was_predicted(case):
    pytest.importorskip("scipy")
    x, make, loop = CASES[case]
    model = mlps(3)
    accumulates = "set_to_none" in loop or loop.get("count", 1)
    options = {"loss": square, "optimizer": make, "accumulates": accumulates}
    plan = remat.fit(model, x, budget="1GB", **options)
    if x is X:
        plan = remat.fit(model, x, budget=int(0.8 * plan.peak), **options)
        assert plan.recomputed > 0
    assert plan.peak <= plan.budget
    real = plan.apply(copy.deepcopy(model))
    found = trained(real, x, make, **loop)
    assert abs(plan.peak - found) < 64, (plan.peak, found)
    plain = trained(model, x, make, **loop)
    assert abs(plan.plain_peak - plain) < 64, (plan.plain_peak, plain)


def test_a_plan_changes_no_step():
    plan = remat.fit(mlps(3), X, loss=square, optimizer=EACH, budget="900kB")
    models = [mlps(3)]
    models.append(plan.apply(copy.deepcopy(models[0])))
    for model in models:
        trained(model, X, EACH)
    assert plan.recomputed > 0
    for a, b in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(a, b)


def test_an_optimizer_that_is_there_stays_as_it_is():
    model = mlps(3)
    optimizer = ONE(model.parameters())
    made = remat.fit(model, X, loss=square, optimizer=ONE, budget="1GB")
    before = remat.fit(model, X, loss=square, optimizer=optimizer, budget="1GB")
    assert not optimizer.state
    square(model(X)).backward()
    optimizer.step()
    optimizer.zero_grad()
    states = pickle.dumps(optimizer.state_dict())
    later = remat.fit(model, X, loss=square, optimizer=optimizer, budget="1GB")
    assert pickle.dumps(optimizer.state_dict()) == states
    assert made == before == later
    nbytes = sum(p.nbytes for p in model.parameters())
    assert 2 * nbytes <= made.states <= 2 * nbytes + 64
    alone = remat.fit(model, X, loss=square, budget="1GB")
    assert made.resident == alone.resident + made.states
    assert made.peak == alone.peak + made.states


@pytest.mark.parametrize("over", ["step", "blocks"])
def test_the_budget_is_that_of_the_whole_process(over):
    pytest.importorskip("scipy")
    model, options = mlps(), {"loss": square, "over": over}
    budget = remat.fit(model, X, budget="1GB", **options).peak
    plan = remat.fit(model, X, budget=budget, optimizer=MOMENTUM, **options)
    assert plan.peak <= budget < plan.plain_peak
    real = plan.apply(copy.deepcopy(model))
    assert trained(real, X, MOMENTUM) <= budget * (1.01 if over == "blocks" else 1)


def test_a_step_of_the_optimizer_may_hold_most():
    options = {"loss": square, "optimizer": EACH}
    plan = remat.fit(mlps(3), FEW, budget="1GB", **options)
    assert plan.peak_at == "in _foreach_sqrt in the step of AdamW"
    least = (
        r"least .* is 509,968 bytes.*_foreach_sqrt in the step of AdamW.*foreach=False"
    )
    with pytest.raises(remat.BudgetError, match=least) as raised:
        remat.fit(mlps(3), FEW, budget=plan.peak - 1, **options)
    assert raised.value.least == plan.peak == plan.plain_peak


def test_a_scaler_multiplies_the_loss_and_makes_its_scale_later():
    model, scaler = mlps(3), torch.amp.GradScaler("cpu")

    def loss(out):
        with torch.autocast("cpu", torch.bfloat16):
            value = square(out)
        return scaler.scale(value)

    for x in (X, FEW):
        plan = remat.fit(model, x, loss=loss, optimizer=ONE, budget="1GB")
        assert scaler._scale is None or type(scaler._scale) is torch.Tensor
        found = trained(copy.deepcopy(model), x, ONE, loss, scaler=scaler)
        assert abs(plan.peak - found) < 64, (plan.peak, found)


class Casting(nn.Module):
    """Casts its weights, which autocast keeps until the forward is over."""

    def __init__(self):
        super().__init__()
        self.inner = mlps(3, width=64)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x).float()


@pytest.fixture
def _without_mkldnn():
    # It copies to other layouts, which ones depends on the processor.
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.usefixtures("_without_mkldnn")
def test_casts_of_weights_count():
    plan = remat.fit(Casting(), FEW, loss=square, optimizer=FUSED, budget="1GB")
    found = trained(Casting(), FEW, FUSED)
    assert abs(plan.peak - found) <= 0.01 * found, (plan.peak, found)


def test_what_is_no_optimizer_of_the_step_is_refused():
    def fit(optimizer, **options):
        remat.fit(mlps(1), X, loss=square, budget=1, optimizer=optimizer, **options)

    for bad in (3, "adamw", [AdamW]):
        with pytest.raises(TypeError, match=r"optimizer is a class such as .* got "):
            fit(bad)
    with pytest.raises(ValueError, match=r"a function .* returns an optimizer.*int"):
        fit(lambda _: 3)
    with pytest.raises(ValueError, match=r"AdamW, has none of the parameters"):
        fit(AdamW(mlps().parameters()))
    with pytest.raises(ValueError, match=r"LBFGS.step needs a closure.*Leave out"):
        fit(torch.optim.LBFGS)
    with pytest.raises(ValueError, match=r"a TypeError: .*Pass a function of them"):
        fit(lambda: AdamW)
    for bad in (0, -1, 1.5, "2"):
        with pytest.raises(
            ValueError, match=r"accumulates is True, False, or how many"
        ):
            fit(None, accumulates=bad)
