"""`explain`: what it is asked, what it leaves behind, and what it advises."""

import functools
import gc

import pytest
import torch
from support.explained import POLICIES, SQUARE, blk, example, mlp, whys
from support.zoo import make
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812

from remat import compare, explain, policies, remat as ckpt
from remat.testing import count_ops, live_bytes, peak_bytes


# --- What is asked for ---


dots, everything = policies.dots_saveable, policies.everything_saveable


@pytest.mark.parametrize(
    ("asked", "policy", "reason"),
    [
        ({}, dots, "prune=False"),
        ({"prune": True}, dots, ""),
        ({"policy": everything, "prune": True}, everything, ""),
        ({"policy": None}, None, "prune=False"),
    ],
    ids=["nothing", "prune", "both", "no policy"],
)
def test_a_rematerialized_function_keeps_its_own_options_but(asked, policy, reason):
    own = ckpt(blk, policy=dots, prune=False)
    report = explain(own, *example(*SQUARE), **asked)
    assert (report.policy, report.reason) == (policy, reason)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(make(64, 64, seed=0).float())

    @ckpt(policy=policies.dots_saveable)
    def hidden(self, x):
        return (x @ self.w).tanh()


@pytest.mark.parametrize(
    "bind",
    [
        pytest.param(lambda block: block.hidden, id="method"),
        pytest.param(lambda block: functools.partial(block.hidden), id="partial"),
    ],
)
def test_a_method_or_a_partial_keeps_the_options_of_its_function(bind):
    report = explain(bind(Block()), *example((64, 64)))
    assert report.policy == policies.dots_saveable
    assert [op.fate for op in report.ops] == ["saved", "recomputed"]
    assert report.label.startswith("`Block.hidden` (rematerialized at ")


def test_other_keywords_go_to_the_function():
    def f(x, *, power):
        return x.sin() ** power

    report = explain(f, *example((64, 64)), power=3)
    assert [op.name for op in report.ops] == ["sin", "pow"]


def test_a_keyword_called_policy_is_bound_beforehand():
    def f(x, policy):
        return x.sin() * policy

    (x,) = example((64, 64))
    report = explain(functools.partial(f, policy=2.0), x)
    assert [op.name for op in report.ops] == ["sin", "mul"]
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        explain(f, x, policy=None)


def test_options_are_checked_as_by_remat():
    x = example(*SQUARE)
    with pytest.raises(ValueError, match="prune='never'"):
        explain(blk, *x, prune="never")
    with pytest.raises(TypeError, match="not a policy"):
        explain(blk, *x, policy=object())
    with pytest.raises(TypeError, match="not a policy"):
        compare(blk, *x, policies=[object()])


# --- What it leaves behind ---


def test_buffers_streams_and_gradients_are_as_they_were():
    torch.manual_seed(1)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5))
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    x.grad = torch.ones_like(x)
    before = {name: t.clone() for name, t in module.state_dict().items()}
    versions = {name: t._version for name, t in module.state_dict().items()}
    state, grad = torch.get_rng_state(), x.grad
    explain(module, x, prune=True)
    compare(module, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert x.grad is grad
    assert torch.equal(grad, torch.ones_like(x))
    for name, t in module.state_dict().items():
        assert torch.equal(t, before[name])
        assert t._version == versions[name]


def test_nothing_of_the_call_stays_alive():
    (x,) = example((64, 64))
    rematerialized = ckpt(blk, policy=policies.everything_saveable)
    explain(rematerialized, x, x)
    gc.collect()
    assert live_bytes(lambda: explain(rematerialized, x, x) and None) == 0


def test_an_argument_with_a_graph_is_left_alone():
    (x,) = example((64, 64))
    y = x * 2
    report = explain(lambda y: y.sin(), y, prune=True)
    assert report.saved_bytes == y.nbytes
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2.0))


def test_floating_arguments_require_grad_where_nothing_does():
    w, x = (t.detach() for t in example(*SQUARE))
    assert explain(blk, w, x).ops == explain(blk, *example(*SQUARE)).ops
    assert (w.requires_grad, x.requires_grad) == (False, False)


def test_with_nothing_to_differentiate_it_says_so():
    report = explain(lambda i: i + 1, torch.arange(9))
    assert (report.ops, report.inputs, report.saved_bytes) == ((), (), 0)
    assert report.reason == "no tensor requires grad, so remat just calls the function"
    assert "there is no backward to recompute for" in report.advice[0]
    assert report.recomputed_share == 0
    assert report._repr_html_()
    with pytest.raises(ValueError, match="found nothing to differentiate"):
        compare(lambda i: i + 1, torch.arange(9))


@pytest.mark.parametrize("report", [explain, compare], ids=["explain", "compare"])
def test_with_nothing_to_differentiate_the_function_is_called(report):
    with pytest.raises(TypeError, match="unsupported operand"):
        report(lambda i: i + "1", torch.arange(9))


def without_grad(x):
    with torch.no_grad():
        return x.sin()


@pytest.mark.parametrize("f", [without_grad, lambda x: x.sin().detach(), torch.isnan])
def test_with_no_result_that_requires_grad_it_says_so(f):
    found = explain(f, torch.ones(9))
    assert [line[:24] for line in found.advice] == ["No result requires grad:"]
    assert len(found.ops) > 0


@pytest.mark.parametrize("report", [explain, compare], ids=["explain", "compare"])
def test_it_is_refused_under_a_transform(report):
    def f(x):
        report(torch.sin, x)
        return x.sum()

    with pytest.raises(RuntimeError, match=r"under a transform of torch\.func"):
        torch.func.grad(f)(torch.ones(3))


def test_it_runs_in_inference_mode_and_without_grad_mode():
    x = example(*SQUARE)
    expected = explain(blk, *x, prune=True)
    with torch.no_grad():
        assert explain(blk, *x, prune=True) == expected
    with torch.inference_mode():
        assert explain(blk, *x, prune=True) == expected


# --- A model larger than memory ---

WIDTH = 2**17  # of a square matrix of 64 GiB


class Large(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


def large(kind):
    if kind == "meta":
        with torch.device("meta"):
            return Large(), torch.empty(1024, WIDTH, requires_grad=True)
    with FakeTensorMode():
        return Large(), torch.empty(1024, WIDTH, requires_grad=True)


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_a_model_larger_than_memory(kind):
    model, x = large(kind)
    assert sum(p.nbytes for p in model.parameters()) > 100 * 10**9

    def report():
        return explain(model, x, prune=True), compare(model, x)

    (found, compared), row = report(), 1024 * WIDTH * 4
    assert peak_bytes(report) < 2**16
    parameters = sum(p.nbytes for p in model.parameters())
    assert found.saved_bytes == row + parameters
    assert found.plain_bytes == 3 * row + parameters - 2 * WIDTH * 4
    assert found.recomputed_flops == found.flops // 2 == 2 * 1024 * WIDTH**2
    assert [r.recomputed_flops for r in compared.rows] == [
        *(0, 2 * 1024 * WIDTH**2),
        *(0, 0, 0),
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_found_on_meta_tensors_is_what_is_found_on_real_ones(policy):
    x, policy = example(*SQUARE), POLICIES[policy]
    on_meta = (t.detach().to("meta").requires_grad_() for t in x)
    report = explain(blk, *on_meta, policy=policy, prune=True)
    real = explain(blk, *x, policy=policy, prune=True)
    assert whys(report) == whys(real)
    assert report.saved_bytes == real.saved_bytes
    assert report.recomputed_flops == real.recomputed_flops


# --- Advice ---


def constants(*sizes):
    return [t.detach() for t in example(*sizes)]


MLP = (64, 256), (256, 64), (512, 64)


@pytest.mark.parametrize("policy", [None, POLICIES["names"] & dots], ids=repr)
def test_no_advice_where_remat_is_worth_it(policy):
    assert not explain(mlp, *constants(*MLP), policy=policy).advice


def loss(w, v, x):
    return mlp(w, v, x).square().sum()


# The function, its arguments and policy, and what the advice says.
ADVICE = {
    "nothing is saved": (lambda w, x: w @ x, lambda: constants(*SQUARE), None),
    "all is kept": (blk, lambda: constants(*SQUARE), everything),
    "a whole loss": (loss, lambda: example(*MLP), None),
    "parameters are not counted": (
        nn.Linear(64, 64),
        lambda: [torch.ones(8, 64)],
        None,
    ),
    "a name that nothing has": (
        blk,
        lambda: example(*SQUARE),
        policies.save_only_these_names("up", "down"),
    ),
}
SAID = {
    "nothing is saved": [
        "32,768 bytes stay alive with it and 32,768 without",
        "Put remat around more operations",
    ],
    "all is kept": ["saves next to nothing"],
    "a whole loss": [
        "The result is a single number, like that of a whole loss.",
        "Put remat around each part of the model",
    ],
    "parameters are not counted": [
        "besides parameters and other leaves, 2,048 bytes stay alive"
    ],
    "a name that nothing has": [
        "The policy has the name 'down', but no checkpoint_name in this call gives it"
    ],
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_where(case):
    fn, args, policy = ADVICE[case]
    found = "\n".join(explain(fn, *args(), policy=policy).advice)
    assert [text for text in SAID[case] if text not in found] == []
    assert "'up'" not in found


def test_it_advises_higher_order_after_a_backward_was_differentiated():
    def net(x, w):
        return (x @ w).tanh().sin()

    def explained(**options):
        wrapped = ckpt(net, **options)
        x, w = (torch.full((4, 4), 0.5).requires_grad_() for _ in range(2))
        before = explain(wrapped, x, w).advice
        with count_ops() as ops:
            (slope,) = torch.autograd.grad(wrapped(x, w).sum(), x, create_graph=True)
            slope.square().sum().backward()
        assert ops["tanh"] > 1
        return before, explain(wrapped, x, w).advice

    before, after = explained()
    assert not any("higher_order=True" in line for line in before)
    assert any("With higher_order=True it is recomputed" in line for line in after)
    assert not any(
        "higher_order=True" in line for line in explained(higher_order=True)[1]
    )
