"""What holds for all reports: what they refuse, leave as it was, name and suggest."""

import contextlib
import random
import subprocess
import sys
import textwrap
import types

import pytest
import torch
from support.kept import leaves
from support.tables import crossed
from support.zoo import make
from torch import nn
from torch.nn.functional import dropout
from torch.utils.flop_counter import FlopCounterMode

from remat import (
    CaptureError,
    MutationError,
    compare,
    explain,
    policies,
    remat as ckpt,
    saved_residuals,
)
from remat._base.source import short
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


# --- The line of the user's code that reports and errors name ---


SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell, store_history=True).raise_error()
"""


def shown_by_cells(*cells):
    """Return what the cells of a notebook print."""
    code = SHELL.format(cells=[textwrap.dedent(cell).strip() for cell in cells])
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")


@pytest.mark.slow
def test_a_line_of_a_notebook_is_named_by_its_cell():
    pytest.importorskip("IPython")
    define = """
        import torch
        from remat import explain, remat
        @remat
        def f(x):
            return x.sin().exp()
    """
    show = """
        report = explain(f, torch.ones(3))
        print(*[op.source for op in report.ops], sep="\\n")
        print(f._label)
    """
    sin, exp, label, *_ = shown_by_cells(define, show)
    assert sin == exp == "Cell In[1]:5, in f"
    assert label == "`f` (rematerialized at Cell In[1]:3)"


LIBRARY = """
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        return self.act(self.up(x)).sin()
"""


@pytest.fixture
def mlp(monkeypatch):
    """A module that an installed package defines."""
    file = nn.__file__.replace("/torch/nn/", "/somebody/")
    library = types.ModuleType("somebody")
    library.__file__ = file
    monkeypatch.setitem(sys.modules, "somebody", library)
    exec(compile(LIBRARY, file, "exec"), vars(library))
    return library.Mlp


def lines_of(fn, *args):
    return {op.name: short(op.source) for op in explain(fn, *args).ops}


@pytest.mark.parametrize("wrap", [ckpt, lambda fn: fn], ids=["remat", "plain"])
def test_a_line_of_a_package_says_which_module_runs_it(mlp, wrap):
    model = nn.Sequential(nn.Identity(), mlp())
    lines = lines_of(wrap(lambda x: model(x)), torch.ones(2, 4))
    assert lines["addmm"] == "__init__.py:10 (1.up)"
    assert lines["tanh"] == "__init__.py:10 (1.act)"
    assert lines["sin"] == "__init__.py:10 (1)"


def test_a_line_of_a_package_outside_a_module_names_none(mlp):
    block = mlp()
    lines = lines_of(lambda x: block.forward(x), torch.ones(2, 4))
    assert lines["sin"] == "__init__.py:10"


def test_a_line_of_the_users_own_module_names_none():
    class Own(nn.Module):
        def forward(self, x):
            return x.sin()

    model = nn.Sequential(Own())
    where = f"test_all_reports.py:{Own.forward.__code__.co_firstlineno + 1}"
    assert lines_of(lambda x: model(x), torch.ones(2)) == {"sin": where}


# --- The policy to write, which `explain` and `compare` print as code that runs ---


def attend(params, x):
    q, k, v = ((x @ params[name]).sin().exp() for name in "qkv")
    weights = torch.softmax(q @ k.mT, -1)
    return torch.tanh(weights @ v @ params["out"]) @ params["out"]


PARAMS = {name: make(64, 64, seed=i).requires_grad_() for i, name in enumerate("qkv")}
PARAMS["out"] = make(64, 64, seed=3).requires_grad_()
# The scores of attention take more bytes for each of their FLOPs than the products.
X = make(2, 32, 64, seed=9)


def run_again(policy):
    """The FLOPs that a backward repeats: those beyond a plain backward."""
    totals = []
    for fn in attend, ckpt(attend, policy=policy):
        fn(PARAMS, X).sum().backward()  # the first call of a kind is recorded
        out = fn(PARAMS, X).sum()
        with FlopCounterMode(display=False) as counter:
            out.backward()
        totals.append(counter.get_total_flops())
    return totals[1] - totals[0]


@pytest.mark.parametrize("report", [explain, compare])
def test_it_runs_and_repeats_what_it_says(report):
    found = report(attend, PARAMS, X)
    assert str(found.suggested) in str(found).splitlines()
    code = found.suggested.code
    policy = eval(code, {"torch": torch, "policies": policies})
    under = explain(attend, PARAMS, X, policy=policy)
    assert under.saved_bytes == found.suggested.saved_bytes
    assert under.recomputed_share == found.suggested.recomputed_share
    again = run_again(policy)
    assert again == round(found.suggested.recomputed_share * under.flops)
    assert 0 < 2 * again <= run_again(None)


def test_a_policy_that_is_there_stays():
    own = policies.save_only_these_names("a")
    found = explain(attend, PARAMS, X, policy=own).suggested
    assert found.code.startswith("policies.save_only_these_names('a') | policies.save_")


def wide(x):
    return torch.sin(torch.sin(x))


NOTHING = {
    "no FLOPs": lambda: explain(wide, X),
    "all is saved": lambda: explain(attend, PARAMS, X, policy=policies.dots_saveable),
    "a budget": lambda: explain(attend, PARAMS, X, policy=policies.within("1 kB")),
    "blocks": lambda: explain(lambda p, x: ckpt(attend)(p, x), PARAMS, X),
    "compared, no FLOPs": lambda: compare(wide, X),
    "compared, a function": lambda: compare(
        attend, PARAMS, X, policies=[lambda op: op.nbytes > 0]
    ),
    "compared, blocks": lambda: compare(lambda p, x: ckpt(attend)(p, x), PARAMS, X),
}


@pytest.mark.parametrize("case", NOTHING.values(), ids=NOTHING)
def test_nothing_is_told_where_nothing_can_be(case):
    found = case()
    assert found.suggested is None
    assert "to recompute less" not in str(found)
