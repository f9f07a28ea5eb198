"""What holds for both kinds of plans of `remat.fit`: for a step, and by blocks."""

import copy
import io
import json
import pickle
import re
import sys
import threading

import pytest
import torch
from support.fitted import (
    IDS,
    Decoder,
    Lm,
    X,
    applied_mlps,
    bytes_before,
    gradients,
    least,
    llama,
    measured_peak,
    mlps,
    refused,
    square,
    step,
    tight,
    words,
)
from support.tables import rows
from torch import nn

import remat
from remat._partial.decide import CACHES
from remat.testing import assert_same, count_ops, memory_timeline


# A search by blocks takes seconds.
both = pytest.mark.parametrize(
    "over", ["step", pytest.param("blocks", marks=pytest.mark.slow)]
)


# --- The plan ------------------------------------------------------------------------


@both
def test_the_recomputed_flops_are_those_that_run(over):
    _, model, plan = applied_mlps(over)
    counter = torch.utils.flop_counter.FlopCounterMode(display=False)
    with counter:
        step(model, (X,), {}, square)
    assert counter.get_total_flops() == plan.flops + plan.recomputed
    rows = plan.segments
    assert 0 < plan.recomputed == sum(row.recomputed for row in rows) < plan.flops
    assert plan.share == plan.recomputed / plan.flops


@both
def test_a_large_budget_recomputes_nothing(over):
    model = mlps()
    plan = remat.fit(model, X, loss=square, budget="1 GB", over=over)
    assert plan.recomputed == plan.seconds == 0
    assert plan.peak == plan.plain_peak
    with count_ops() as plain:
        step(mlps(), (X,), {}, square)
    with count_ops() as ops:
        step(plan.apply(model), (X,), {}, square)
    assert ops["addmm"] == plain["addmm"]


@pytest.mark.parametrize(
    ("over", "where"),
    [("step", "meta"), pytest.param("blocks", "fake", marks=pytest.mark.slow)],
)
def test_the_model_need_not_exist(over, where):
    with torch.device("meta") if where == "meta" else remat._torch.fake_mode():
        model = mlps()
    plan = tight(over)
    assert plan == remat.fit(model, X, loss=square, budget=plan.budget, over=over)
    real = plan.apply(mlps())
    assert measured_peak(real, (X,), {}, square) <= plan.budget


@both
def test_a_step_that_accumulates_has_gradients_before(over):
    model, plan = mlps(), tight(over)
    size = sum(p.nbytes for p in model.parameters())
    budget, options = plan.budget + 2 * size, {"over": over, "accumulates": True}
    plan = remat.fit(model, X, loss=square, budget=budget, **options)
    assert plan.resident == tight(over).resident + size
    plan.apply(model)
    step(model, (X,), {}, square)
    timeline = memory_timeline(step, model, (X,), {}, square)
    assert bytes_before(model, X) + size + timeline.peak <= budget < plan.plain_peak


@both
def test_outputs_of_transformers_have_a_loss(over):
    plan = remat.fit(llama(), IDS, labels=IDS, budget="1GB", over=over)
    rows = plan.segments
    assert {f"model.layers.{k}" for k in range(3)} <= {row.name for row in rows}


# --- What is passed, and what is refused ----------------------------------------------


def test_a_function_is_passed_its_model():
    model = Lm()

    def run(model, ids):
        return words(model(ids))

    def fit(*args, **options):
        return remat.fit(*args, budget="1GB", over="blocks", **options)

    passed = fit(model, IDS, loss=words)
    assert fit(model.forward, IDS, loss=words).peak == passed.peak
    inside = fit(run, model, IDS)
    assert inside.flops == passed.flops
    # Nothing holds the logits of `run` in its backward.
    assert inside.peak < passed.peak


def test_of_what_is_no_scalar_all_is_differentiated():
    model = mlps(2)
    assert remat.fit(model, X, budget="1GB", over="blocks").flops > 0
    several = remat.fit(lambda m, x: [m(x), {"a": x}], model, X, budget="1GB")
    assert several.flops > 0


REFUSED = {
    "no gradients": (
        lambda: (mlps(2).requires_grad_(False), X),
        (ValueError, r"nothing in the result requires grad"),
    ),
    "lazy": (
        lambda: (nn.Sequential(mlps(2), nn.LazyLinear(3)), X),
        (remat.CaptureError, r"Call the model once before"),
    ),
    "recomputed already": (
        lambda: (remat.nn.apply(mlps()), X),
        (ValueError, r"is recomputed already"),
    ),
}


@both
@pytest.mark.parametrize("case", REFUSED)
def test_what_no_plan_can_be_made_for_is_refused(case, over):
    make, (kind, message) = REFUSED[case]
    with pytest.raises(kind, match=message):
        remat.fit(*make(), budget="1GB", over=over)


@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_a_device_that_is_not_there_is_refused(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match=f"torch finds no {device} here"):
        remat.fit(mlps(2), X, budget="1GB", device=device)


def reading(model, x):
    return model(x) if x.sum() > 0 else model(x + 1)


def of_lists():
    model = nn.ModuleDict({"layers": nn.ModuleList([mlps(2), mlps(2)])})
    return lambda m, x: m["layers"][0](x), model


# What is fitted, options, and what the error says.
ARGUMENTS = {
    "values that do not exist are read": (
        *(lambda: (reading, mlps(2).to("meta")), {"over": "blocks"}),
        *(remat.CaptureError, r"test_fit\.py:\d+, in reading"),
    ),
    "over is neither": (
        *(lambda: (mlps(2),), {"over": "layers"}),
        *(ValueError, r"\"blocks\", .* or None, got 'layers'"),
    ),
    "blocks are selected for a step": (
        *(lambda: (mlps(),), {"select": "1.*"}),
        *(ValueError, r"select= says which modules are blocks"),
    ),
    "no model is passed": (
        *(lambda: (torch.sin,), {"over": "blocks"}),
        *(ValueError, r"no model is passed"),
    ),
    "a list of blocks is a block": (
        *(of_lists, {"over": "blocks", "select": "layers"}),
        *(ValueError, r"`layers` is a ModuleList, which has no"),
    ),
    "a loss reads more than the result": (
        *(lambda: (mlps(2),), {"loss": nn.CrossEntropyLoss()}),
        *(TypeError, r"a function of the result alone, got CrossEntropyLoss: missing"),
    ),
    "a loss runs the backward": (
        *(lambda: (mlps(2),), {"loss": lambda out: square(out).backward()}),
        *(ValueError, r"runs the backward itself\. Have it return the loss"),
    ),
    "an iterator is no batch": (
        *(lambda: (lambda *_: X, iter([X])), {}),
        *(TypeError, r"an argument is an iterator, a list_iterator, which can be read"),
    ),
    "a tensor is no model": (
        *(lambda: (X,), {}),
        *(TypeError, r"Tensor is no model and no function\. Write fit\(model"),
    ),
    "a device is none of torch's": (
        *(lambda: (mlps(2),), {"device": "foo"}),
        *(ValueError, r"device is a device of torch, got 'foo'"),
    ),
    "there are no blocks": (
        *(lambda: (nn.Linear(8, 8),), {"over": "blocks"}),
        *(ValueError, r"Linear has no repeated blocks"),
    ),
}


@rows("make, options, error, match", ARGUMENTS)
def test_arguments_are_refused_where(make, options, error, match):
    with pytest.raises(error, match=match):
        remat.fit(*make(), X, budget="1GB", **options)


@pytest.mark.parametrize("budget", ["8 parsecs", -1, None, "1e6", "60M", "60Mb"])
def test_a_budget_is_bytes(budget):
    with pytest.raises((ValueError, TypeError), match=r"fit takes a number of bytes"):
        remat.fit(mlps(2), X, budget=budget)


def test_a_budget_is_any_whole_number():
    numpy = pytest.importorskip("numpy")
    assert remat.fit(mlps(2), X, budget=numpy.int64(10**9)).budget == 10**9


@pytest.mark.parametrize("given", [None, [1], torch.optim.SGD([torch.ones(1)])])
def test_a_plan_is_applied_to_a_model_or_a_function(given):
    with pytest.raises(TypeError, match=r"the model or the function of the step; got"):
        tight().apply(given)


def test_a_plan_for_another_model_is_refused():
    with pytest.raises(ValueError, match=r"for other modules than those of this Lm"):
        tight().apply(Lm())


def test_a_wrong_shape_writes_no_log(caplog):
    with pytest.raises(
        RuntimeError, match=r"mat1 and mat2 shapes cannot be multiplied"
    ):
        remat.fit(mlps(2), X[:, :5], loss=square, budget="1GB")
    assert not caplog.records


def test_element_wise_work_is_shown_in_bytes_and_seconds():
    model = nn.Sequential(*(nn.GELU() for _ in range(4)))
    x = torch.ones(256, 8, requires_grad=True)
    plan = remat.fit(model, x, budget="50kB")
    assert (plan.recomputed, plan.again) == (0, 8192)
    assert "8.192 kB (8,192 bytes) of results, 0.00" in str(plan)
    pytest.importorskip("matplotlib").use("Agg")
    assert plan.plot().get_ylim() == (0, 1)


@both
def test_a_plan_is_applied_once(over):
    _, model, plan = applied_mlps(over)
    with pytest.raises(ValueError, match=r"already, by remat\.fit, since \S*fitted\."):
        plan.apply(model)


# --- What is left as it is -----------------------------------------------------------


@both
def test_the_model_stays_as_it_is(over):
    layer = lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    model = nn.Sequential(*(layer() for _ in range(3)))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    classes = [type(module) for module in model.modules()]
    plain = remat.fit(model, X, loss=square, budget="1GB", over=over).plain_peak
    plan = remat.fit(model, X, loss=square, budget=plain - 1, over=over)
    assert plan.recomputed + plan.seconds > 0
    assert_same(model.state_dict(), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert [type(module) for module in model.modules()] == classes
    assert all(p.grad is None for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@both
def test_remove_undoes_apply(over):
    plain, model, _ = applied_mlps(over)
    remat.nn.remove(model)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    with count_ops() as ops:
        found = gradients(model, lambda: step(model, (X,), {}, square))
    assert ops["relu"] == 6
    assert_same(found, gradients(plain, lambda: step(plain, (X,), {}, square)))


# --- What it shows meanwhile ---------------------------------------------------------


class Terminal(io.StringIO):
    def __init__(self, is_terminal):
        super().__init__()
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(
    ("is_terminal", "after", "is_shown"),
    [(True, 0.0, True), (True, 1e3, False), (False, 0.0, False)],
)
def test_progress_is_shown_on_a_terminal_if_it_takes_long(
    is_terminal, after, is_shown, monkeypatch
):
    terminal = Terminal(is_terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("remat._fit.api._AFTER", after)
    monkeypatch.setattr("remat._fit.api._EVERY", 1e-3)
    remat.fit(mlps(2), X, loss=square, budget="1GB")
    said = terminal.getvalue()
    assert bool(said) == is_shown
    assert not said or said.endswith("\r\x1b[K")
    assert ("remat.fit of Sequential: " in said) == is_shown
    assert "remat.fit" not in {thread.name for thread in threading.enumerate()}


# --- How it shows --------------------------------------------------------------------


@both
def test_a_plan_is_a_value(over):
    plan = tight(over)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert re.match(r"<Plan of Sequential: \d+\.\d% of its FLOPs recomp", repr(plan))
    assert all(f"1.{k}" in str(plan) for k in range(6))
    assert f"peak: {plan.peak:,} bytes, {plan.peak_at}" in str(plan)


@both
def test_a_plan_is_a_file(over, tmp_path):
    plan, path = tight(over), tmp_path / "plan.json"
    plan.save(path)
    found = remat.Plan.load(path)
    assert found == plan
    assert found.applied.units == plan.applied.units
    model = found.apply(mlps())
    with count_ops() as ops:
        step(model, (X,), {}, square)
    assert ops["relu"] == 6 + len(plan.blocks)


@pytest.mark.parametrize(
    ("text", "match"),
    [("[1]", r"holds no plan"), ('{"remat.Plan": 9}', r"of version 9, and this is")],
)
def test_a_file_of_something_else_is_refused(text, match, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        remat.Plan.load(path)


def _set(*keys):
    def change(found, value):
        *before, last = keys
        for key in before:
            found = found[key]
        found[last] = value

    return change


WRONG = {
    "a number": (_set("budget"), "9", r"budget is '9', and should be of type int"),
    "a key more": (_set("colour"), 1, r"colour is not known"),
    "a word": (_set("over"), "all", r"over is 'all', and should be one of"),
    "a unit": (_set("unit"), "XB", r"unit is 'XB', and should be one of"),
    "no object": (_set("applied"), [], r"applied is no object with keys"),
    "a key fewer": (_set("applied"), {}, r"applied\.\w+ is missing"),
    "no list": (_set("applied", "units"), 3, r"applied\.units is no list"),
    "in a list": (_set("blocks", 1), None, r"blocks\[1\] is None, and should"),
    "a pair": (_set("applied", "units", 0), ["1.0"], r"units\[0\] has 1 items"),
    "lengths": (
        _set("applied", "courses", 0, "placed", 0, 1),
        ["mm"] * 99,
        r"applied\.courses\[0\]\.placed\[0\] has lists of several lengths",
    ),
}


@rows("change, value, match", WRONG)
def test_a_file_that_was_changed_is_refused(change, value, match, tmp_path):
    path = tmp_path / "plan.json"
    tight().save(path)
    found = json.loads(path.read_text())
    change(found, value)
    path.write_text(json.dumps(found))
    with pytest.raises(ValueError, match=match) as raised:
        remat.Plan.load(path)
    assert str(raised.value).startswith(f"remat: {path} holds a plan that was changed")


def test_a_plan_for_a_step_says_that_it_is_not_applied():
    plan = tight()
    note = "not applied yet: plan.apply(model)"
    assert note in str(plan)
    assert note in repr(plan)
    plan.apply(mlps())
    assert note not in str(plan) + repr(plan)


@both
def test_a_budget_that_is_too_small_says_which_would_do(over):
    error = refused(over)
    assert error.least == tight(over).budget == tight(over).peak
    said = str(error)
    assert "stays under 1,000 bytes. " in said
    assert f"there is one is {error.least:,} bytes" in said
    assert "before the step" in said
    assert f"peak: {error.least:,} bytes, in " in str(tight(over))


def test_a_plan_and_errors_speak_in_the_unit_of_the_budget():
    plan = remat.fit(mlps(2), X, loss=square, budget="1.5 mib")
    assert str(plan).startswith("Sequential in 1.5 MiB (1,572,864 bytes)\n")
    shown = f"{-(-plan.peak * 1000 // 2**20) / 1000:g} MiB ({plan.peak:,} bytes)"
    assert f"peak: {shown}, in " in str(plan)
    assert f"peak {shown}, not applied yet" in repr(plan)
    assert "saved MiB  saved bytes" in str(plan)
    for budget, unit in ("64KiB", "KiB"), ("65.536kb", "kB"):
        with pytest.raises(remat.BudgetError, match=r"stays under 6") as raised:
            remat.fit(mlps(2), X, loss=square, budget=budget)
        said, least = str(raised.value), raised.value.least
        assert f" {unit} (65,536 bytes). The least budget" in said
        assert f" {unit} ({least:,} bytes) (`error.least`), with the peak in " in said


def test_where_nothing_can_be_saved_the_least_budget_is_said():
    said = (
        r"least .* is 5,121.6 kB \(5,121,600 bytes\).*the peak in sum in the backward"
    )
    with pytest.raises(remat.BudgetError, match=said):
        remat.fit(nn.Linear(200, 200), torch.ones(2000, 200), budget="1kB")


@both
def test_a_plan_draws_itself(over):
    pytest.importorskip("matplotlib").use("Agg")
    axes = tight(over).plot()
    assert axes.get_xlabel() == "peak of the step, MiB"
    labels = axes.get_legend_handles_labels()[1]
    ours = "plan.apply(model)" + ("\nwith plan" if over == "step" else "")
    assert labels == ["plain", ours, "budget"]


@pytest.mark.slow
def test_a_plan_by_blocks_says_what_it_was_made_without(monkeypatch):
    budget = tight("blocks").budget
    assert "without a solver" not in str(tight("blocks"))
    monkeypatch.setitem(sys.modules, "scipy", None)
    plan = remat.fit(mlps(), X, budget=budget, loss=square, over="blocks")
    assert plan.lacks_solver
    note = "without a solver: scipy is not installed (pip install scipy)"
    assert note in str(plan)
    assert "without a solver" in plan._repr_html_()


# --- Over blocks ---


def fit(*args, **options):
    return remat.fit(*args, over="blocks", **options)


def test_blocks_are_selected_as_by_apply():
    model = mlps(4)
    most = fit(model, X, loss=square, budget="1GB").peak
    plan = fit(model, X, loss=square, budget=int(0.8 * most), select="1.[02]")
    assert {*plan.blocks} == {"1.0", "1.2"}


# --- What is refused -----------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_refuses_a_function_and_another_model():
    with pytest.raises(TypeError, match=r"covers its blocks, and is applied to the mo"):
        tight("blocks").apply(lambda x: x)
    with pytest.raises(TypeError, match=r"is applied to the model: plan\.apply\(mod"):
        tight("blocks").__enter__()
    with pytest.raises(ValueError, match=r"selects no module"):
        tight("blocks").apply(mlps(1))


def test_calls_outside_share_nothing_with_simulated_ones():
    model = remat.nn.apply(Lm(), Decoder, policy=remat.policies.dots_saveable)
    words(model(IDS)).backward()
    known = len(CACHES)
    least(mlps(2), X, over="blocks", loss=square)
    assert len(CACHES) == known > 0
