"""Plans for whole steps: the budget holds, the bits are plain's, what runs again."""

import copy
import dataclasses
import pickle
import sys
import threading
import warnings

import pytest
import torch
from support.fitted import (
    CASES,
    IDS,
    Lm,
    Mlp,
    X,
    applied_mlps,
    assert_predicted,
    bytes_before,
    gradients,
    least,
    measured_peak,
    mlps,
    square,
    step,
    tight,
    words,
)
from support.traced import compiling, ran
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import remat
from remat.testing import assert_same, count_ops, memory_timeline


def around(plan):
    """Return a step in `with plan:`."""

    def run(model, args, kwargs, loss):
        with plan:
            out = model(*args, **kwargs)
            value = out.loss if loss is None else loss(out)
        value.backward()

    return run


def peak_around(plan, model, args, kwargs, loss):
    found = []
    for _ in range(2):
        timeline = memory_timeline(around(plan), model, args, kwargs, loss)
        model.zero_grad()
        found.append(timeline.peak)
    return bytes_before(model, *args, *kwargs.values()) + max(found)


def assert_plan_holds(plan, model, args, kwargs, loss):
    """Assert that a plan stays under its budget, as applied and as a context."""
    is_cast = isinstance(model, Autocast)
    expected = gradients(model, lambda: step(model, args, kwargs, loss))
    real = plan.apply(copy.deepcopy(model))
    applied = measured_peak(real, args, kwargs, loss)
    assert_same(gradients(real, lambda: step(real, args, kwargs, loss)), expected)
    remat.nn.remove(real)
    within = peak_around(plan, real, args, kwargs, loss)
    run = around(plan)
    assert_same(gradients(real, lambda: run(real, args, kwargs, loss)), expected)
    # oneDNN holds memory of its own for products in bfloat16.
    assert max(applied, within) <= plan.budget * (1.005 if is_cast else 1)
    assert_predicted(plan.applied.peak, applied)
    assert_predicted(plan.around.peak, within)


class Mixed(nn.Module):
    """Different blocks, one of which is called twice."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 1, 1)
        self.norm = nn.GroupNorm(4, 16)
        self.wide, self.narrow = Mlp(16), nn.Linear(16, 8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x):
        x = functional.silu(self.norm(self.conv(x))).flatten(2).transpose(1, 2)
        return self.frozen(self.narrow(self.wide(self.wide(x)))).tanh()


def several(out):
    return [out.square().mean(), {"other": out.abs().sum()}]


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = mlps(3)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.inner(x)


MORE = {
    "mixed": (Mixed, (torch.randn(4, 3, 16, 16),), {}, square),
    "autocast": (Autocast, (X,), {}, lambda out: out.float().square().mean()),
}

SLOW = "mlps", "tied lm", "unet", "llama", "mixed", "autocast"


@pytest.mark.parametrize("share", [0.5, pytest.param(0.8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n
        for n in [*CASES, *MORE]
    ],
)
def test_no_step_is_over_the_budget(name, share):
    pytest.importorskip("scipy")
    make, args, kwargs, loss = (CASES | MORE)[name]
    torch.manual_seed(0)
    model = make()
    high = remat.fit(model, *args, loss=loss, budget="1GB", **kwargs).peak
    low = least(model, *args, loss=loss, **kwargs) if name in SLOW else high * 3 // 5
    budget = int(low + share * (high - low))
    plan = remat.fit(model, *args, loss=loss, budget=budget, **kwargs)
    assert plan.seconds > 0
    assert plan.peak <= budget < plan.plain_peak
    assert_plan_holds(plan, model, args, kwargs, loss)


@pytest.mark.parametrize("name", ["mlps", pytest.param("unet", marks=pytest.mark.slow)])
def test_the_least_budget_is_the_least_that_works(name):
    pytest.importorskip("scipy")
    make, args, kwargs, loss = CASES[name]
    model, options = make(), {"loss": loss, **kwargs}
    low = least(model, *args, **options)
    for budget in (low - 1, int(0.99 * low), int(0.97 * low)):
        with pytest.raises(remat.BudgetError, match=r"The least budget") as raised:
            remat.fit(model, *args, budget=budget, **options)
        assert raised.value.least == low > budget
    plan = remat.fit(model, *args, budget=low, **options)
    assert plan.peak == low
    real = plan.apply(copy.deepcopy(model))
    assert measured_peak(real, args, kwargs, loss) <= low
    for more in (1.0, 1.005, 1.02, 1.08):
        larger = remat.fit(model, *args, budget=int(more * low), **options)
        assert larger.seconds <= plan.seconds
        plan = larger


def test_the_comparison_fails_for_a_plan_that_is_over_its_budget():
    model = mlps()
    plan = remat.fit(model, X, loss=square, budget="1GB")
    worse = copy.copy(plan)
    object.__setattr__(worse, "budget", plan.peak - 1)
    with pytest.raises(AssertionError, match=r"1509416 <= \(1509415"):
        assert_plan_holds(worse, model, (X,), {}, square)


@pytest.mark.slow
def test_a_plan_for_a_function_wraps_it_or_is_applied_to_its_model():
    model = Lm()

    def run(model, ids):
        return words(model((ids + 1) - 1))

    plain = remat.fit(run, model, IDS, budget="1GB").peak
    plan = remat.fit(run, model, IDS, budget=int(0.8 * plain))
    followed = plan.apply(run)
    expected = gradients(model, lambda: run(model, IDS).backward())
    with count_ops() as ops:
        found = gradients(model, lambda: followed(model, IDS).backward())
    assert_same(found, expected)
    assert ops["gelu"] > 3
    plan = remat.fit(run, copy.deepcopy(model), IDS, budget="1.2MB")
    real = plan.apply(copy.deepcopy(model))
    assert_same(gradients(real, lambda: run(real, IDS).backward()), expected)
    real.zero_grad()
    peak = memory_timeline(lambda: run(real, IDS).backward()).peak
    assert bytes_before(real, IDS) + peak <= plan.budget < plan.plain_peak


def test_a_model_that_is_called_twice_needs_the_context():
    model = mlps(2)

    def run(model, x):
        return square(model(x)) + square(model(x.flip(0)))

    plan = remat.fit(run, model, X, budget=least(run, model, X))
    with pytest.raises(remat.BudgetError, match=r"calls the model several times"):
        plan.apply(model)
    expected = gradients(model, lambda: run(model, X).backward())
    followed = plan.apply(run)
    with count_ops() as ops:
        assert_same(gradients(model, lambda: followed(model, X).backward()), expected)
    assert ops["relu"] > 4


def test_a_function_without_a_model_is_planned():
    w = torch.randn(64, 64, requires_grad=True)
    x = torch.randn(256, 64)

    def chain(x, w):
        for _ in range(6):
            x = (x @ w).tanh().sin()
        return x

    plan = remat.fit(chain, x, w, loss=square, budget=least(chain, x, w, loss=square))
    with count_ops() as ops:
        (found,) = torch.autograd.grad(square(plan.apply(chain)(x, w)), w)
    assert ops["tanh"] > 6
    assert_same(found, torch.autograd.grad(square(chain(x, w)), w)[0])


class Branching(nn.Module):
    """Runs other operations if it is told to."""

    def __init__(self):
        super().__init__()
        self.inner, self.other = mlps(), False

    def forward(self, x):
        x = self.inner[1][:3](self.inner[0](x))
        return self.inner[1][3:](x.sin() if self.other else x)


def test_one_operation_more_is_recomputed_and_the_plan_goes_on(caplog):
    model = Branching()
    plan = remat.fit(model, X, loss=square, budget="1GB")
    plan.apply(model)
    model.other = True
    plain = copy.deepcopy(remat.nn.remove(copy.deepcopy(model)))
    with caplog.at_level("INFO", "remat"), count_ops() as ops:
        found = gradients(model, lambda: square(model(X)).backward())
        again = gradients(model, lambda: square(model(X)).backward())
    assert (ops["sin"], ops["relu"]) == (4, 12)
    assert_same(
        [found, again], [gradients(plain, lambda: square(plain(X)).backward())] * 2
    )
    (said,) = caplog.messages
    assert "in 32,768 bytes" in said
    assert "nothing more was planned, and aten.sin.default runs at" in said
    assert "test_step_plans.py" in said


def test_steps_with_gradients_have_a_course_and_evaluation_follows():
    model = Lm()
    budget = int(0.75 * remat.fit(model, IDS, loss=words, budget="1GB").peak)
    plan = remat.fit(model, IDS, loss=words, budget=budget)
    assert [c.counts_gradients for c in plan.applied.courses] == [False, True]
    plan.apply(model).eval()
    plain = remat.nn.remove(copy.deepcopy(model))
    with count_ops() as ops:
        found = gradients(model, lambda: words(model(IDS)).backward())
    assert ops["gelu"] > 3
    assert_same(found, gradients(plain, lambda: words(plain(IDS)).backward()))


def test_without_grad_a_plan_does_nothing():
    model, plan = mlps(), tight()
    expected = model(X)
    with torch.no_grad(), count_ops() as ops:
        assert_same(plan.apply(model)(X), expected.detach())
    assert ops["relu"] == 6


def test_two_micro_batches_in_one_context_restart():
    model, plan = mlps(), tight()
    other = torch.randn(256, 8)

    def plainly():
        square(model(X)).backward()
        square(model(other)).backward()

    def followed():
        with plan:
            square(model(X)).backward()
            square(model(other)).backward()

    expected = gradients(model, plainly)
    with count_ops() as ops:
        assert_same(gradients(model, followed), expected)
    assert ops["relu"] == 2 * (6 + 5)


class Asking(nn.Module):
    """Asks for a value, as masks of transformers do."""

    def __init__(self):
        super().__init__()
        self.inner = mlps()

    def forward(self, x):
        return self.inner(x if x.isfinite().all() else x.nan_to_num())


def test_a_model_that_asks_for_values_is_recorded_with_real_tensors():
    model, budget = Asking(), int(1.1 * tight().budget)
    state = torch.get_rng_state()
    before = copy.deepcopy(model.state_dict())
    plan = remat.fit(model, X, loss=square, budget=budget)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())
    assert plan.seconds > 0
    assert_plan_holds(plan, model, (X,), {}, square)


@torch.library.custom_op("fit::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@doubled.register_fake
def _(x):
    raise RuntimeError("another dtype is expected")


doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


def test_a_model_with_a_kernel_that_refuses_fake_tensors_is_recorded_with_real_ones():
    class Doubled(nn.Module):
        def forward(self, x):
            return doubled(x).sin()

    model = nn.Sequential(mlps(2), Doubled())
    budget = int(0.9 * remat.fit(mlps(2), X, loss=square, budget="1GB").peak)
    plan = remat.fit(model, X, loss=square, budget=budget)
    assert all(p.grad is None for p in model.parameters())
    assert plan.seconds > 0
    assert_plan_holds(plan, model, (X,), {}, square)


@pytest.mark.parametrize("make", [mlps, Asking])
@pytest.mark.parametrize("is_result", [False, True])
def test_a_model_that_was_not_passed_is_refused(make, is_result):
    model, other = make(), mlps()
    # Also what the other model has computed: a backward would go on from there.
    result = other(X)

    def step(model, x):
        return model(x) + (result if is_result else other(x))

    with pytest.raises(remat.CaptureError, match=r"requires grad and was not passed"):
        remat.fit(step, model, X, loss=square, budget="1GB")
    assert all(p.grad is None for m in (model, other) for p in m.parameters())


# --- Where no scope can follow a plan ------------------------------------------------


def _within(plan, model, x):
    with plan:
        return square(model(x))


def test_gradients_of_torch_func_are_refused():
    plain, model, plan = applied_mlps()
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, model=model):
        return square(torch.func.functional_call(model, params, (X,)))

    match = r"for `backward\(\)`.* pass over='functional' to remat\.fit"
    with pytest.raises(remat.RematError, match=match):
        torch.func.grad(loss)(params)
    with pytest.raises(remat.RematError, match=match):
        torch.func.grad(lambda x: _within(plan, plain, x))(X)
    with count_ops() as ops, torch.no_grad():
        assert torch.equal(torch.func.vmap(plain)(X), torch.func.vmap(model)(X))
    assert ops["relu"] == 2 * 6
    assert_same(
        gradients(model, lambda: square(model(X)).backward()),
        gradients(plain, lambda: square(plain(X)).backward()),
    )


def test_in_compiled_code_blocks_are_recomputed():
    plain, model, _ = applied_mlps()
    expected = gradients(plain, lambda: square(plain(X)).backward())
    with compiling():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        with pytest.warns(UserWarning, match=r"cannot be followed in compiled code"):
            square(compiled(X)).backward()
        found, ops = ran(
            lambda: gradients(model, lambda: square(compiled(X)).backward())
        )
    assert ops["relu"] == 6 + 5
    assert_same(found, expected)


def test_a_compiled_model_is_planned_by_blocks():
    model = torch.compile(mlps(), backend="aot_eager")
    plan = remat.fit(model, X, loss=square, budget="1GB")
    assert plan.over == "blocks"


# --- What is refused -----------------------------------------------------------------


@pytest.mark.parametrize("by", ["remat", "torch"])
def test_what_is_recomputed_already_is_refused(by):
    class Recomputed(Mlp):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    model = nn.Sequential(Recomputed(8), Mlp(8)) if by == "torch" else mlps()
    if by == "remat":
        remat.nn.apply(model)
    with pytest.raises(ValueError, match=r"is recomputed already, by \S*(remat|check)"):
        remat.fit(model, X, loss=square, budget="1GB")


def test_a_plan_for_another_device_is_refused():
    model = mlps()
    plan = remat.fit(model, X, loss=square, budget="1GB")
    other = dataclasses.replace(plan, device="cuda")
    with pytest.raises(ValueError, match=r"made for cuda, and the model is on cpu"):
        other.apply(model)


def test_a_followed_model_is_copied_and_pickled():
    _, model, _ = applied_mlps()
    for made in copy.deepcopy(model), pickle.loads(pickle.dumps(model)):
        with count_ops() as ops:
            step(made, (X,), {}, square)
        assert ops["relu"] == 6 + 5


def test_without_scipy_a_plan_is_made_and_says_so(monkeypatch):
    model = mlps()
    budget = (tight().budget + 1_500_000) // 2
    monkeypatch.setitem(sys.modules, "scipy", None)
    plan = remat.fit(model, X, loss=square, budget=budget)
    assert plan.lacks_solver
    assert "scipy is not installed" in " ".join(str(plan).split())
    assert_plan_holds(plan, model, (X,), {}, square)


class Named(Mlp):
    """Names what a scope asks about, so that it asks twice."""

    def forward(self, x):
        hidden = remat.checkpoint_name(self.up(x), "hidden")
        return x + self.down(torch.relu(hidden))


def test_names_of_values_change_no_plan():
    plain = nn.Sequential(*(Mlp(32) for _ in range(4)))
    named = nn.Sequential(*(Named(32) for _ in range(4)))
    x = torch.randn(256, 32)
    budget = int(0.8 * remat.fit(plain, x, loss=square, budget="1GB").peak)
    plan = remat.fit(named, x, loss=square, budget=budget)
    expected = remat.fit(plain, x, loss=square, budget=budget)
    assert (plan.peak, plan.recomputed) == (expected.peak, expected.recomputed)
    assert plan.recomputed > 0
    assert_plan_holds(plan, named, (x,), {}, square)


def test_two_threads_follow_a_plan_at_once():
    plain, model, _ = applied_mlps()
    both = threading.Barrier(2)

    def meet(*_):
        both.wait(timeout=60)

    model[1][3].register_forward_hook(meet)
    found = {}

    def run(k):
        x = torch.full((256, 8), k + 1.0)
        found[k] = torch.autograd.grad(square(model(x)), [*model.parameters()])

    threads = [threading.Thread(target=run, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(2):
        x = torch.full((256, 8), k + 1.0)
        assert_same(found[k], torch.autograd.grad(square(plain(x)), plain.parameters()))


def test_an_error_in_the_forward_leaves_no_scope_open():
    class Failing(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.fails = mlps(), False

        def forward(self, x):
            out = self.inner(x)
            if self.fails:
                raise RuntimeError("no")
            return out

    model = Failing()
    remat.fit(model, X, loss=square, budget="1GB").apply(model)
    model.fails = True
    with pytest.raises(RuntimeError, match="no"):
        model(X)
    model.fails = False
    with warnings.catch_warnings(), count_ops() as ops:
        warnings.simplefilter("error")
        step(model, (X,), {}, square)
    assert ops["relu"] == 6
