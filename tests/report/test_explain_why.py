"""`explain` says of each operation and input why it is recomputed, saved or dead."""

import os
import re

import pytest
import torch
from support.explained import SQUARE, blk, example, nest, two, whys
from torch import nn
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812

from remat import explain, policies, remat as ckpt


def explained(fn, *sizes, prune=True):
    return explain(fn, *example(*(sizes or [(64, 64)])), prune=prune)


# --- Operations ---


def test_what_the_backward_reads_is_recomputed_and_the_rest_is_dead():
    report = explained(lambda x: x.sin().sin().sin())
    assert whys(report) == [
        ("sin", "recomputed", "read by the backward of sin"),
        ("sin", "recomputed", "read by the backward of sin"),
        ("sin", "dead", "a result that the backward does not read"),
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
    "is read by nothing": (with_dead_end, ("exp", "dead", "nothing reads it")),
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
        ("rand", "recomputed", f"draws random numbers before bernoulli_ {HERE}.*"),
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
    assert "also saved: the state of the CPU's random stream" in str(report)


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
