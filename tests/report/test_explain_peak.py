"""`explain` of a loss: what holds the peak of a step, to the byte, and what to do."""

import functools
import re

import pytest
import torch
from support.fitted import Decoder, Lm
from support.kept import total
from support.tables import crossed, rows
from support.zoo import make
from torch import nn
from torch.func import grad, hessian, jvp
from torch.nn import functional as F  # noqa: N812

from remat import (
    compare,
    compat,
    explain,
    nn as remat_nn,
    policies,
    remat as ckpt,
    saved_residuals,
)
from remat.testing import peak_bytes


N, D, BLOCKS = 512, 32, 6
ACTIVATION, WEIGHT = 4 * N * D, 4 * D * D
BEFORE = {"parameters", "inputs"}


def example():
    ws = [make(D, D, seed=i).float().requires_grad_() for i in range(BLOCKS)]
    return ws, make(N, D, seed=9).float()


def block(w, x):
    return (x @ w).tanh().sin().exp().cos()


def model(wrap, ws, x):
    for w in ws:
        x = wrap(block)(w, x)
    return x.square().mean()


def plain(ws, x):
    return model(lambda f: f, ws, x)


def each(ws, x):
    return model(ckpt, ws, x)


def holds(report):
    """The bytes of each kind of holder."""
    found = {}
    for holder in report.peak.holders:
        found[holder.kind] = found.get(holder.kind, 0) + holder.nbytes
    return found


def during(report):
    """The bytes that the step itself holds at its peak."""
    return sum(n for kind, n in holds(report).items() if kind not in BEFORE)


def measured(loss, *args, wrt):
    """The peak of the second step, without any report."""

    def step():
        value = loss(*args)
        return value, torch.autograd.grad(value, wrt)

    step()
    return peak_bytes(step)


def assert_main(report, kind, nbytes, *words):
    """Assert what the largest holder is, its bytes, and words of the advice."""
    main, advice = report.peak.holders[0], report.peak.advice
    assert (main.kind, main.nbytes) == (kind, nbytes)
    assert main.share == pytest.approx(nbytes / report.peak.nbytes)
    for word in words:
        assert word in advice


# --- Each cause ---


def under(policy):
    return lambda ws, x: model(ckpt(policy=policy), ws, x)


INPUTS = (BLOCKS - 1) * ACTIVATION  # the first one is the user's
# A loss, what holds most, words of the advice, and what else holds how much.
CAUSES = {
    "one remat around everything holds what plain code saves": (
        *(ckpt(plain), "recompute", 3 * BLOCKS * ACTIVATION),
        *(("one remat around everything", "around each block"), {}),
    ),
    "inputs that blocks save": (
        *(each, "saved inputs", INPUTS, ("inputs that calls save", "several")),
        {"recompute": 2 * ACTIVATION},  # what tanh and exp return
    ),
    "results that a policy saves": (
        *(under(policies.dots_saveable), "policy", BLOCKS * ACTIVATION),
        *(("policies save", "saves less"), {"saved inputs": INPUTS}),
    ),
    # tanh and exp of each block; cos is the input of the next one.
    "a policy that saves everything": (
        *(under(policies.everything_saveable), "policy", 2 * BLOCKS * ACTIVATION),
        *(("policies save",), {"recompute": 0}),
    ),
    "one remat around calls of remat": (
        *(ckpt(each), "recompute", INPUTS, ("Split that block",), {}),
    ),
}


@rows("loss, kind, nbytes, words, others", CAUSES)
def test_the_main_cause(loss, kind, nbytes, words, others):
    ws, x = example()
    report = explain(loss, ws, x)
    assert_main(report, kind, nbytes, *words)
    assert {other: holds(report).get(other, 0) for other in others} == others
    assert during(report) == measured(loss, ws, x, wrt=ws)


def test_nothing_is_rematerialized():
    ws, x = example()
    peak = measured(plain, ws, x, wrt=ws)
    report = explain(plain, ws, x)
    words = "nothing is rematerialized", "each block", "test_explain_peak.py:"
    assert_main(report, "residuals", peak, *words)
    assert holds(report) == {
        "residuals": peak,
        "parameters": BLOCKS * WEIGHT,
        "inputs": ACTIVATION,
    }


def test_the_values_of_a_holder_are_listed():
    report = explain(under(policies.dots_saveable), *example())
    (values,) = report.peak.holders[0].values
    assert (values.op, values.count, values.shape) == ("mm", BLOCKS, (N, D))


def test_the_recompute_of_the_largest_block():
    w, v = make(D, D, seed=1).float(), make(D, 8 * D, seed=2).float()
    w.requires_grad_(), v.requires_grad_()
    x = make(N, D, seed=3).float()

    def wide(v, x):
        for _ in range(4):
            x = (x @ v).tanh().exp() @ v.T
        return x / 1000

    def loss(w, v, x):
        return ckpt(block)(w, ckpt(wide)(v, ckpt(block)(w, x))).mean()

    report = explain(loss, w, v, x)
    words = "wide", "is the largest", "Split that block", "policy"
    # tanh and exp of each layer, and the inputs of all but the first.
    held = 4 * 2 * 8 * ACTIVATION + 3 * ACTIVATION
    assert_main(report, "recompute", held, *words)
    assert report.peak.holders[0].name.startswith("recompute of `")
    assert "wide` (rematerialized at" in report.peak.holders[0].name
    assert during(report) == measured(loss, w, v, x, wrt=[w, v])


def test_calls_of_one_label_are_numbered():
    ws, x = example()
    names = [h.name for h in explain(each, ws, x).peak.holders]
    (name,) = (name for name in names if name.startswith("recompute"))
    assert name.endswith("(call 6 of 6)")


def test_calls_of_remat_within_a_recompute_are_holders_of_their_own():
    report = explain(ckpt(each), *example())
    outer, inner = (h for h in report.peak.holders if h.kind == "recompute")
    assert (outer.nbytes, inner.nbytes) == (INPUTS, 2 * ACTIVATION)
    assert ("each" in outer.name, "block" in inner.name) == (True, True)


def test_blocks_that_are_left_plain():
    ws, x = example()

    def loss(ws, x):
        for w in ws[:-1]:
            x = block(w, x)
        return ckpt(block)(ws[-1], x).mean()

    report = explain(loss, ws, x)
    # tanh, exp and cos of each, but the last cos is the input of the call.
    held = (3 * (BLOCKS - 1) - 1) * ACTIVATION
    (holder,) = (h for h in report.peak.holders if h.kind == "residuals")
    forward = [v for v in holder.values if v.shape == (N, D) and not v.is_gradient]
    # What the call returns is not read by the backward of mean.
    assert sum(v.nbytes for v in forward) == held
    assert report.peak.holders[0] == holder
    assert "outside of remat calls" in report.peak.advice
    assert "those blocks, too" in report.peak.advice


def test_gradients_of_parameters():
    ws = [make(D, D, seed=i).float().requires_grad_() for i in range(BLOCKS)]
    x = make(1, D, seed=9).float()
    report = explain(each, ws, x)
    words = "gradients of the parameters", "not in activations"
    assert_main(report, "gradients", BLOCKS * WEIGHT, *words)
    assert holds(report)["parameters"] == BLOCKS * WEIGHT


def test_parameters_that_are_frozen():
    frozen = nn.Linear(64, 64, bias=False).requires_grad_(False)
    x = make(1, 64, seed=1).float().requires_grad_()
    report = explain(lambda: ckpt(frozen)(x).sin().sum())
    assert_main(report, "parameters", 4 * 64 * 65, "the parameters hold", "Shard")


def test_inputs_of_the_step():
    w, x = make(D, 1, seed=1).float().requires_grad_(), make(4 * N, D, seed=2).float()
    report = explain(lambda: ckpt(lambda w: (x @ w).sin())(w).sum())
    assert_main(report, "inputs", 4 * ACTIVATION, "inputs of the step", "batch")


def test_a_peak_in_the_forward_of_a_call():
    ws, x = example()

    def copies(x):
        return x.repeat(16, 1).exp().mean()

    def large(w, x):
        result = (x @ w).sin()
        with torch.no_grad():  # after what is saved, so no recompute gets there
            copies(result)
        return result

    report = explain(lambda: ckpt(large)(ws[0], x).mean())
    made = peak_bytes(lambda: copies(x))
    assert made >= 2 * 16 * ACTIVATION
    words = "the forward of", "large", "Split that block"
    assert_main(report, "recompute", made + ACTIVATION, *words)


def test_gradients_on_their_way():
    ws, x = example()

    def sums(w, x):
        return sum((x @ w + k).sum() for k in range(3))

    report = explain(lambda: ckpt(sums)(ws[0], x.requires_grad_()))
    report_of = {h.kind: h for h in report.peak.holders}
    (values,) = (v for v in report_of["cotangents"].values if v.shape == (N, D))
    assert values.is_gradient
    assert values.nbytes == values.count * ACTIVATION


# --- A language model ---


VOCABULARY, WIDTH, BATCH, LENGTH = 2000, 16, 4, 64
LOGITS = 4 * BATCH * LENGTH * VOCABULARY


def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).view(-1, VOCABULARY), tokens.view(-1))


def tokens():
    generator = torch.Generator().manual_seed(0)
    return torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator)


def by_wrapping(model):
    model.layers = nn.ModuleList(map(ckpt, model.layers))


def by_apply(model):
    remat_nn.apply(model, Decoder)


def by_checkpoint(model):
    again = functools.partial(compat.checkpoint, use_reentrant=False)
    for layer in model.layers:
        layer.forward = functools.partial(again, layer.forward)


def passed(model):
    return explain(loss_of, model, tokens())


def closed_over(model):
    return explain(lambda: loss_of(model, tokens()))


@crossed(
    "change, explained",
    [by_wrapping, by_apply, by_checkpoint],
    [passed, closed_over],
)
def test_logits(change, explained):
    model = Lm(4, WIDTH, VOCABULARY)
    change(model)
    report = explained(model)
    # log_softmax, its cotangent and its gradient; the loss, and what it starts from.
    head = 3 * LOGITS + 4 + 4
    words = "logits", "in chunks", f"f32[{BATCH * LENGTH},{VOCABULARY}]"
    assert_main(report, "loss", head, *words)
    assert re.search(r"made by .* at test_explain_peak\.py:\d+", report.peak.advice)
    assert holds(report)["saved inputs"] == 4 * (4 * BATCH * LENGTH * WIDTH)
    wrt = [*model.parameters()]
    found = during(report)
    random_state = 0  # what `tokens()` of a closure makes is of the step
    if explained is closed_over:
        random_state = 8 * BATCH * LENGTH
    assert found == measured(loss_of, model, tokens(), wrt=wrt) + random_state


# --- Ways to write a step ---


def test_functions_of_parameters_that_require_no_grad():
    ws, x = example()
    report = explain(each, [w.detach() for w in ws], x)
    # Every argument is differentiated. None is a parameter.
    assert holds(report)["inputs"] == ACTIVATION + BLOCKS * WEIGHT
    assert holds(report)["saved inputs"] == (BLOCKS - 1) * ACTIVATION
    assert holds(report)["recompute"] == 2 * ACTIVATION


def test_a_gradient_of_torch_func_is_a_step():
    ws, x = example()
    ws = [w.detach() for w in ws]
    gradient = torch.func.grad(each)
    report = explain(gradient, ws, x)
    assert during(report) == peak_bytes(lambda: gradient(ws, x))
    assert holds(report)["gradients"] % WEIGHT == 0
    # What the last operation gives is freed before the pull.
    assert holds(report)["recompute"] == 2 * ACTIVATION
    assert holds(report)["saved inputs"] == (BLOCKS - 1) * ACTIVATION


def heat(model, points):
    """The residual of a PDE, as of a network informed by physics."""

    def loss(points):
        (slope,) = torch.autograd.grad(model(points).sum(), points, create_graph=True)
        (bend,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
        return (slope[:, 1] - bend[:, 0]).square().mean()

    return explain(loss, points)


def solution(wrap):
    torch.manual_seed(0)
    layer = lambda n: nn.Sequential(nn.Linear(n, 64), nn.Tanh(), nn.Linear(64, 64))
    return nn.Sequential(layer(2), *(wrap(layer(64)) for _ in range(4)), nn.Tanh())


def test_a_backward_that_is_differentiated():
    points = make(512, 2, seed=1).float().requires_grad_()
    found = heat(solution(ckpt), points)
    assert "a backward of `Sequential` (rematerialized at " in found.peak.advice
    assert "is differentiated (create_graph=True)" in found.peak.advice
    assert "Pass higher_order=True to remat" in found.peak.advice
    assert "logits" not in found.peak.advice
    followed = heat(solution(lambda block: ckpt(block, higher_order=True)), points)
    assert followed.peak.nbytes < found.peak.nbytes / 1.5
    assert "higher_order" not in followed.peak.advice
    left_out = heat(solution(lambda block: block), points)
    assert "nothing is rematerialized" in left_out.peak.advice


def test_a_function_that_runs_its_own_backward_is_a_step():
    ws, x = example()
    ours, theirs = explain(lambda: each(ws, x).backward()), explain(each, ws, x)
    assert holds(ours) == holds(theirs)
    assert all(w.grad is None for w in ws)


class Stack(nn.Module):
    def __init__(self, ws):
        super().__init__()
        self.ws = nn.ParameterList(ws)

    def forward(self, x):
        return each([*self.ws], x)


def test_detached_parameters_of_a_functional_call_are_differentiated():
    ws, x = example()
    model, detached = Stack(ws), [w.detach() for w in ws]

    def call(ws, x):  # the module's own parameters require grad
        named = {f"ws.{i}": w for i, w in enumerate(ws)}
        return torch.func.functional_call(model, named, (x,))

    report, plainly = explain(call, detached, x), explain(each, detached, x)
    assert during(report) == during(plainly) > (BLOCKS - 1) * ACTIVATION
    assert "parameters" not in holds(report)  # the arguments share their memory
    assert total(saved_residuals(call, detached, x)) == total(
        saved_residuals(each, detached, x)
    )
    found, expected = (compare(f, detached, x).rows for f in (call, each))
    assert [row.peak_bytes for row in found] == [row.peak_bytes for row in expected]
    assert not any("leave" in line for line in report.advice)


def slopes(ws, x):
    """A loss of a gradient that torch.func takes, as of a PDE."""
    return torch.func.grad(plain, argnums=1)(ws, x).square().sum()


@pytest.mark.parametrize("captured", [False, True])
def test_a_loss_of_a_gradient_by_torch_func_is_differentiated_itself(captured):
    ws, x = example()
    detached, unused = [w.detach() for w in ws], nn.Linear(2, 2) if captured else None
    report = explain(lambda ws, x: (slopes(ws, x), unused)[0], detached, x)
    inputs = [*ws, x.clone().requires_grad_()]
    peak = measured(lambda *ws: slopes(ws[:-1], ws[-1]), *inputs, wrt=inputs)
    assert during(report) == peak > 6 * BLOCKS * ACTIVATION
    assert "cotangents" not in holds(report)  # there are no calls
    assert report.plain_bytes > 6 * BLOCKS * ACTIVATION


def bend(wrap):
    def f(x):
        return wrap(lambda x: x.sin().exp().cos())(x).sum()

    return f


FORWARD_MODES = {
    "jvp of grad": lambda f: lambda x: jvp(grad(f), (x,), (x,))[1],
    "hessian": hessian,
    "jvp": lambda f: lambda x: jvp(f, (x,), (x,))[1],
}


@crossed("mode, wrap", FORWARD_MODES, ["plain", "remat"])
def test_forward_mode_is_explained(mode, wrap):
    f = bend(ckpt if wrap == "remat" else lambda f: f)
    transformed, x = FORWARD_MODES[mode](f), torch.linspace(0.1, 1, 64)
    report = explain(transformed, x)
    assert report.flops == 0 < report.saved_bytes <= report.plain_bytes
    if mode != "jvp":  # which is no step: it is a loss
        assert during(report) == peak_bytes(lambda: transformed(x))


def test_what_is_no_step_has_no_peak():
    ws, x = example()
    assert explain(ckpt(block), ws[0], x).peak is None
    assert explain(lambda x: x.argmax(), x).peak is None
    with torch.device("meta"):
        layer, batch = nn.Linear(4, 4), torch.ones(2, 4)
    assert explain(lambda: layer(batch).sum()).peak is None


# --- How it shows ---


def test_the_shares_add_up_and_the_largest_comes_first():
    ws, x = example()
    peak = explain(each, ws, x).peak
    sizes = [h.nbytes for h in peak.holders]
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == peak.nbytes
    assert sum(h.share for h in peak.holders) == pytest.approx(1)
    for holder in peak.holders:
        assert sum(v.nbytes for v in holder.values) == holder.nbytes


def test_print_shows_a_section():
    ws, x = example()
    report = explain(each, ws, x)
    shown = "".join(str(report).split())
    for line in report.peak.lines():
        assert "".join(line.split()) in shown
    lines = [*report.peak.lines()]
    assert lines[0] == f"peak of a step: {report.peak.nbytes:,} bytes, in mul"
    assert str(report.peak).splitlines()[0] == lines[0]
    inputs = (BLOCKS - 1) * ACTIVATION
    assert lines[1].endswith(f" {inputs:,} bytes: the inputs that remat calls save")
    assert re.match(r" +largest: 5 x f32\[512,32\], made by cos at test", lines[2])
    assert lines[-1] == f"what to do: {report.peak.advice}"
