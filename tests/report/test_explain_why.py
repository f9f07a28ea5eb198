"""`explain` says why each operation is recomputed or not; and of which calls it can."""

import functools
import os
import re

import pytest
import torch
from support.explained import POLICIES, SQUARE, blk, example, mlp, nest, two, whys
from support.zoo import make
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812

from remat import compare, explain, policies, remat as ckpt


def explained(fn, *sizes, prune=True):
    return explain(fn, *example(*(sizes or [(64, 64)])), prune=prune)


# --- Operations ---


def test_what_the_backward_reads_is_recomputed_and_the_rest_is_dead():
    report = explained(lambda x: x.sin().sin().sin())
    assert whys(report) == [
        ("sin", "recomputed", "read by the backward of sin"),
        ("sin", "recomputed", "read by the backward of sin"),
        ("sin", "dead", "the backward does not read it"),
    ]
    assert [(i.name, i.kept, i.why) for i in report.inputs] == [
        ("x", True, "read by the backward of sin")
    ]


def with_dead_end(x):
    x.exp()
    return x.sin()


def with_write_to_view(x):
    h = x.sin()
    h[1:] *= x[1:]
    return h.exp()


def with_numpy(x):
    y = x.detach().sin()
    return (x * float(y.numpy().sum())).exp()


def with_scalar(x):
    return (x.sin() * int(x.argmax())).exp()


def with_draw(x):
    torch.rand(3)
    return F.dropout(x, 0.5)


HERE = r"\(test_explain_why\.py:\d+\)"
# What an operation's fate is, and why.
OPERATIONS = {
    "makes what is read": (
        lambda x: (x.neg() + 1).sin(),
        ("neg", "recomputed", f"read by add {HERE}"),
    ),
    "feeds what is left out": (
        lambda x: (x.sin() * 2).neg(),
        ("mul", "dead", f"read only by operations that are not recomputed: neg {HERE}"),
    ),
    "is read by nothing": (
        with_dead_end,
        ("exp", "dead", "the backward does not read it"),
    ),
    "is read by Python": (
        with_scalar,
        ("_local_scalar_dense", "recomputed", "Python reads its result"),
    ),
    "makes what Python reads": (
        with_scalar,
        ("argmax", "recomputed", f"read by _local_scalar_dense {HERE}"),
    ),
    "is a draw before one that is needed": (
        with_draw,
        ("rand", "recomputed", "draws random numbers, .*"),
    ),
    "changes a view": (
        with_write_to_view,
        ("clone", "recomputed", "perhaps read by the backward of a change to .*"),
    ),
    "has its memory taken": (
        with_numpy,
        ("sin", "recomputed", "its value is read outside of operations"),
    ),
}


@pytest.mark.parametrize(("fn", "row"), OPERATIONS.values(), ids=list(OPERATIONS))
def test_the_reason_for_an_operation_that(fn, row):
    name, fate, pattern = row
    found = next(why for why in whys(explained(fn)) if why[0] == name)
    assert found[1] == fate
    assert re.fullmatch(pattern, found[2])


def test_the_state_of_a_stream_that_is_kept_is_named():
    report = explained(with_draw)
    assert report.streams == ("cpu",)
    assert "also saved: the state of random streams: cpu" in str(report)


def test_what_the_policy_keeps_says_so_and_what_for():
    w, x = example(*SQUARE)
    report = explain(blk, w, x, policy=policies.dots_saveable)
    line = blk.__code__.co_firstlineno + 1
    kept = f"the policy saves it, read by tanh (explained.py:{line})"
    assert whys(report) == [
        ("mm", "saved", kept),
        ("tanh", "recomputed", "read by the backward of mm, tanh"),
        ("mm", "saved", kept),
        ("tanh", "recomputed", "read by the backward of tanh"),
    ]
    assert report.ops[0].source == f"{blk.__code__.co_filename}:{line}, in blk"
    assert [op.kept for op in report.ops] == [2**14, 0, 2**14, 0]


def test_a_view_has_no_bytes_of_its_own():
    report = explained(lambda x: x.t().sin())
    view = report.ops[0]
    assert (view.name, view.is_view, view.nbytes) == ("t", True, 0)
    assert view.fate == "recomputed"
    assert " t " not in str(report)


# --- Inputs ---


def test_an_input_that_no_backward_reads_is_dropped():
    x, bias = (t.detach() for t in example((64, 64), (64,)))
    report = explain(lambda x, bias: x.sin() + bias, x, bias, prune=True)
    row = report.inputs[1]
    why = "nothing that is recomputed reads it"
    assert (row.name, row.kept, row.why) == ("bias", False, why)
    assert report.saved_bytes == x.nbytes


def test_parameters_are_not_dropped():
    report = explained(nn.Linear(64, 64), (2, 64))
    rows = {i.name: (i.kept, i.why) for i in report.inputs}
    assert rows == {
        "input": (True, "read by the backward of addmm"),
        "weight": (True, "read by the backward of addmm"),
        "bias": (True, "a leaf, which is alive anyway"),
    }


def test_one_storage_is_counted_once():
    (x,) = example((64, 64))
    report = explain(lambda x, y: x.sin() * y, x, x.view(-1).view(64, 64), prune=True)
    assert [i.nbytes for i in report.inputs] == [x.nbytes, 0]
    assert report.saved_bytes == x.nbytes


# --- Calls within ---


def test_calls_within_are_named():
    report = explain(nest(2), *example(*SQUARE))
    whole = "in the backward of remat(blk), within this"
    assert {why for _, _, why in whys(report)} == {whole}
    assert {op.times for op in report.ops} == {1}


def test_what_runs_twice_says_so():
    report = explain(two, *example(*SQUARE), prune=True)
    assert [op.times for op in report.ops] == [2, 2, 2, 2, 1, 1, 1, 1]
    assert "recomputed x2" in str(report)


def test_a_call_under_vmap_is_named():
    inner = ckpt(blk, prune=True)
    report = explain(lambda w, x: vmap(inner, (None, 0))(w, x), *example(*SQUARE))
    assert report.inputs[0].why == "read by the backward of mm"
    assert "in the backward of remat(blk), within this" in [w for *_, w in whys(report)]


# --- Whether it is pruned ---


SMALL = r"its inputs have only 128 elements in all"
CHEAP = r"it would save about 0 us of work, and cost 32 us of bookkeeping"
HANDLES = r"the graph itself tells what its backward reads"
DOTS = {"prune": False, "policy": policies.dots_saveable}
NOT_PRUNED = {
    "prune=False": ({"prune": False}, 64, r"prune=False"),
    "prune=False with a policy": (DOTS, 64, r"prune=False"),
    "handles": ({}, 64, HANDLES),
    "small": ({"higher_order": True}, 8, SMALL),
    "not worth it": ({"higher_order": True}, 256, CHEAP),
}


@pytest.mark.parametrize(
    ("options", "size", "reason"), NOT_PRUNED.values(), ids=list(NOT_PRUNED)
)
def test_why_it_is_not_pruned(options, size, reason):
    report = explain(ckpt(blk, **options), *example((size, size), (size, size)))
    assert (report.pruned, report.reason) == (False, reason)
    assert f"pruned: no, {reason}" in str(report)
    # The last result is read, so that the recompute runs to its end.
    assert [op.fate for op in report.ops if op.name == "tanh"] == ["recomputed"] * 2


def test_without_pruning_all_inputs_are_kept():
    def f(x, bias):
        h = x.sin()
        h + bias
        return h.exp()

    x, bias = (t.detach() for t in example((64, 64), (64,)))
    report = explain(f, x, bias, prune=False)
    assert [i.kept for i in report.inputs] == [True, True]
    assert report.inputs[1].why.startswith("read by add (")
    assert whys(report)[1][2] == "nothing is left out: prune=False"


def test_what_is_worth_it_is_pruned_by_default_with_higher_order():
    product = ckpt(lambda w, x: w @ x, higher_order=True)
    report = explain(product, *example((512, 512), (512, 512)))
    assert (report.pruned, report.reason) == (True, "")
    assert "pruned: yes" in str(report)
    assert (report.flops, report.recomputed_flops) == (2 * 512**3, 0)


def test_compiled_code_is_not_pruned():
    report = explain(torch.compile(blk, backend="eager"), *example(*SQUARE), prune=True)
    assert (
        report.reason == "it calls compiled code, whose operations cannot be left out"
    )
    assert {op.times for op in report.ops} == {1}


@pytest.mark.filterwarnings("ignore:.* is not followed any more")
def test_calls_that_did_other_things_each_time_are_given_up(monkeypatch):
    def f(x):
        for _ in range(int(os.environ["DEPTH"])):
            x = x.sin()
        return x.sin()

    (x,) = example((64, 64))
    rematerialized = ckpt(f, prune=True)
    for depth in range(1, 9):
        monkeypatch.setenv("DEPTH", str(depth))
        rematerialized(x).sum().backward()
    report = explain(rematerialized, x)
    assert not report.pruned
    assert report.reason.endswith("records did not fit the calls after them")


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


def test_a_call_of_an_earlier_graph_may_be_recomputed_inside():
    (x,) = example((64, 64))
    earlier = ckpt(lambda x: x.sin().exp())(x).sum()

    def f(z):
        return z * torch.autograd.grad(earlier, x, retain_graph=True)[0]

    report = explain(f, torch.ones(64, 64))
    assert [op.name for op in report.ops].count("exp") == 1
    assert report.peak.nbytes > report.saved_bytes


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


def without_grad(x):
    with torch.no_grad():
        return x.sin()


@pytest.mark.parametrize("f", [without_grad, lambda x: x.sin().detach(), torch.isnan])
def test_with_no_result_that_requires_grad_it_says_so(f):
    found = explain(f, torch.ones(9))
    assert [line[:24] for line in found.advice] == ["No result requires grad:"]
    assert len(found.ops) > 0


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
    with torch.profiler.profile(profile_memory=True) as profile:
        report()
    events = profile.key_averages()
    assert sum(max(0, event.self_cpu_memory_usage) for event in events) < row // 1000
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


@pytest.mark.parametrize("fn", [loss, ckpt(loss), torch.func.grad(loss)])
def test_of_a_step_the_only_advice_is_that_on_its_peak(fn):
    report = explain(fn, *constants(*MLP))
    assert report.advice == ()
    assert report.peak.advice in str(report)


# The function, its arguments and policy, and what the advice says.
ADVICE = {
    "nothing is saved": (lambda w, x: w @ x, lambda: constants(*SQUARE), None),
    "all is kept": (blk, lambda: constants(*SQUARE), everything),
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
    "parameters are not counted": [
        "besides parameters and other leaves, 2,048 bytes stay alive"
    ],
    "a name that nothing has": ["The policy has the key 'down', but no value"],
}


@pytest.mark.parametrize("case", ADVICE)
def test_advice_where(case):
    fn, args, policy = ADVICE[case]
    found = "\n".join(explain(fn, *args(), policy=policy).advice)
    assert [text for text in SAID[case] if text not in found] == []
    assert "'up'" not in found
