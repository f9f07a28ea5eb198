"""`explain` and `compare`: their totals are those of a real backward, to the byte.

The measure: a call that has been differentiated before, so that inputs which no
backward reads are dropped, against plain. Operations and FLOPs are counted in the
backward; bytes are the allocator's, of a graph that alone holds the arguments.
"""

import functools
import gc
import importlib.util
import math
import os
import pickle
import re
from collections import Counter
from html import escape

import pytest
import torch
from support.zoo import make
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import vmap
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

import remat._report.render
from remat import (
    checkpoint_name,
    compare,
    explain,
    policies,
    remat as ckpt,
    saved_residuals,
)
from remat.testing import count_ops, live_bytes, peak_bytes


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")


# --- Functions ---


def blk(w, x):
    return torch.tanh(w @ checkpoint_name(torch.tanh(w @ x), "up"))


def mlp(w, v, x):
    h = F.layer_norm(x, x.shape[-1:])
    return x + checkpoint_name(F.gelu(h @ w), "up") @ v


def attention(q, k, v):
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    return checkpoint_name(out.tanh(), "up")


def by_hand(q, k, v):
    scores = checkpoint_name((q @ k.mT).softmax(-1), "up")
    return (scores @ v).tanh()


def dropped(w, x):
    return F.dropout(checkpoint_name(w @ x, "up").exp(), 0.5).sin().sin()


def outputs(w, x):
    h = checkpoint_name(w @ x, "up").tanh()
    return {"sin": h.sin(), "rest": [h.exp() @ w, x.sum()], "index": h.argmax()}


def unused(w, x, bias):
    return w @ checkpoint_name(x.sin(), "up") + bias


def in_place(w, x):
    h = w @ x
    h.mul_(2)
    return checkpoint_name(h.tanh_().sin(), "up").exp()


class Convolutions(nn.Module):
    """Calls no modules: torch's FlopCounterMode would hook operations of its own in."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def run(self, images):
        h = F.conv2d(images, self.conv.weight, self.conv.bias)
        norm = self.norm
        h = F.batch_norm(
            *(h, norm.running_mean, norm.running_var, norm.weight, norm.bias),
            training=True,
        )
        return checkpoint_name(h, "up").relu().sin()


def example(*sizes):
    """Leaves that all require grad."""
    return tuple(
        make(*size, seed=i).float().requires_grad_() for i, size in enumerate(sizes)
    )


SQUARE = ((64, 64), (64, 64))
HEADS = ((2, 4, 16, 32),) * 3
CASES = {
    "blk": (blk, SQUARE),
    "mlp": (mlp, ((64, 256), (256, 64), (32, 64))),
    "attention": (attention, HEADS),
    "attention by hand": (by_hand, HEADS),
    "dropout": (dropped, SQUARE),
    "outputs": (outputs, SQUARE),
    "unused": (unused, (*SQUARE, (64,))),
    "in place": (in_place, SQUARE),
    "convolution": (None, ((2, 3, 32, 32),)),
}
POLICIES = {
    "none": None,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
    "names": policies.save_only_these_names("up"),
    "larger": policies.save_larger_than(2**14),
}


def case_of(name):
    fn, sizes = CASES[name]
    torch.manual_seed(0)
    return (Convolutions().run if fn is None else fn), example(*sizes)


def graph_of(tree):
    return [t.grad_fn for t in tree_leaves(tree) if isinstance(t, Tensor)]


def parameters_of(fn):
    owner = getattr(fn, "__self__", None)
    return [] if owner is None else [*owner.parameters()]


def held_by_module(report):
    """The bytes of what is kept of a module, without the copies of its buffers."""
    kept = [i for i in report.inputs if i.kept and i.name.startswith("self.")]
    return sum(math.prod(i.shape) * i.dtype.itemsize for i in kept)


def differentiate(fn, args):
    """A backward from every output to every input, and what it ran."""
    outs = [t for t in tree_leaves(fn(*args)) if t.requires_grad]
    cts = [torch.ones_like(t) for t in outs]
    inputs = (*args, *parameters_of(getattr(fn, "__wrapped__", fn)))
    with FlopCounterMode(display=False) as counter, count_ops() as ops:
        torch.autograd.grad(outs, inputs, cts, allow_unused=True)
    return counter.get_total_flops(), ops


def warm(fn, args):
    for _ in range(2):
        differentiate(fn, args)


def held(fn, args):
    """The bytes that the graph of a call holds, when it alone holds the arguments."""

    def run():
        fresh = tree_map_only(Tensor, Tensor.clone, args)
        return graph_of(fn(*fresh))

    run()
    return live_bytes(run)


def total(residuals):
    """The bytes of all tensors; the states of random streams are none."""
    return sum(r.nbytes for r in residuals if r.dtype is not None)


# What a call does besides: copies of buffers, and autograd's own.
BESIDES = {"clone", "detach", "alias", "copy_"}


def whys(report):
    return [(op.name, op.fate, op.why) for op in report.ops if not op.is_view]


# --- The totals are real ---


@pytest.mark.parametrize("prune", [True, False], ids=["prune", "no prune"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_the_flops_and_operations_are_those_of_a_backward(name, policy, prune):
    fn, args = case_of(name)
    report = explain(fn, *args, policy=POLICIES[policy], prune=prune)
    rematerialized = ckpt(fn, policy=POLICIES[policy], prune=prune)
    warm(rematerialized, args)
    flops, ops = differentiate(rematerialized, args)
    plain_flops, plain_ops = differentiate(fn, args)
    assert report.recomputed_flops == flops - plain_flops
    expected = Counter()
    for op in report.ops:
        if not op.is_view:
            expected[op.name] += op.times
    again = {
        op.name: ops[op.name] - plain_ops[op.name]
        for op in report.ops
        if not op.is_view and op.name not in BESIDES
    }
    assert again == {n: expected[n] for n in again}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", CASES)
def test_the_saved_bytes_are_what_is_alive_after_a_forward(name, policy):
    fn, args = case_of(name)
    fresh = [t.clone() for t in args]  # no leaves, which the graph would keep alive
    report = explain(fn, *fresh, policy=POLICIES[policy], prune=True)
    rematerialized = ckpt(fn, policy=POLICIES[policy], prune=True)
    warm(rematerialized, args)
    outside = held_by_module(report)
    assert report.saved_bytes - outside == held(rematerialized, args) > 0
    assert report.saved_bytes == total(saved_residuals(rematerialized, *fresh))


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_of_plain_are_those_that_autograd_saves(name):
    fn, args = case_of(name)
    report = explain(fn, *args)
    assert report.plain_bytes == total(saved_residuals(fn, *args)) > 0


@pytest.mark.parametrize("name", CASES)
def test_the_flops_of_the_forward_are_those_that_torch_counts(name):
    fn, args = case_of(name)
    report = explain(fn, *args)
    with FlopCounterMode(display=False) as counter:
        fn(*args)
    assert report.flops == counter.get_total_flops()


def nest(depth, *inner):
    fn = blk
    for k in range(depth):
        fn = ckpt(fn, prune=True, policy=inner[k] if k < len(inner) else None)
    return fn


def two(w, x):
    one = ckpt(blk, prune=True)
    return one(w, one(w, x))


def shape_of_layers(w, x):
    layer = ckpt(blk, prune=False)
    for _ in range(3):
        x = layer(w, x).sin()
    return x


NESTED = {
    "twice": nest(1),
    "three times": nest(2),
    "dots within": nest(1, policies.dots_saveable),
    "two": two,
    "layers": shape_of_layers,
}


@pytest.mark.parametrize("policy", ["none", "dots", "everything"])
@pytest.mark.parametrize("name", NESTED)
def test_what_calls_within_recompute_is_counted(name, policy):
    fn, args = NESTED[name], example(*SQUARE)
    rematerialized = ckpt(fn, policy=POLICIES[policy], prune=True)
    report = explain(rematerialized, *args)
    warm(rematerialized, args)
    _, ops = differentiate(rematerialized, args)
    base = {"twice": blk, "three times": blk, "dots within": blk}.get(name)
    plain = {"two": 8, "layers": 12}.get(name, 4)
    assert base is None or differentiate(base, args)[1]["mm"] == plain
    again = Counter()
    for op in report.ops:
        again[op.name] += op.times
    assert (again["mm"], again["tanh"]) == (ops["mm"] - plain, ops["tanh"])
    assert report.saved_bytes == held(rematerialized, args)


@pytest.mark.parametrize(
    ("fn", "policy", "mm", "tanh"),
    [
        pytest.param(blk, None, 2, 2, id="remat(blk)"),
        pytest.param(blk, policies.dots_saveable, 0, 2, id="remat(blk, dots)"),
        pytest.param(blk, policies.everything_saveable, 0, 0, id="remat(blk, all)"),
        pytest.param(nest(1), None, 2, 2, id="remat(remat(blk))"),
        pytest.param(
            nest(1, policies.dots_saveable), None, 2, 3, id="remat(remat(blk, dots))"
        ),
        pytest.param(
            nest(1), policies.dots_saveable, 0, 2, id="remat(remat(blk), dots)"
        ),
        pytest.param(two, None, 6, 6, id="remat(two)"),
    ],
)
def test_the_golden_table(fn, policy, mm, tanh):
    """JAX's counts of what is recomputed."""
    report = explain(ckpt(fn, policy=policy, prune=True), *example(*SQUARE))
    again = Counter()
    for op in report.ops:
        again[op.name] += op.times
    assert (again["mm"], again["tanh"]) == (mm, tanh)


# --- Why ---


def test_what_the_backward_reads_is_recomputed_and_the_rest_is_dead():
    report = explain(lambda x: x.sin().sin().sin(), *example((64, 64)), prune=True)
    assert whys(report) == [
        ("sin", "recomputed", "read by the backward of sin"),
        ("sin", "recomputed", "read by the backward of sin"),
        ("sin", "dead", "a result that the backward does not read"),
    ]
    assert [(i.name, i.kept, i.why) for i in report.inputs] == [
        ("x", True, "read by the backward of sin")
    ]


def test_what_the_policy_keeps_says_so_and_what_for():
    w, x = example(*SQUARE)
    report = explain(blk, w, x, policy=policies.dots_saveable)
    line = blk.__code__.co_firstlineno + 1
    kept = f"the policy keeps it, read by tanh (test_explain.py:{line})"
    assert whys(report) == [
        ("mm", "saved", kept),
        ("tanh", "recomputed", "read by the backward of mm, tanh"),
        ("mm", "saved", kept),
        ("tanh", "recomputed", "read by the backward of tanh"),
    ]
    assert report.ops[0].source == f"{__file__}:{line}, in blk"
    assert [op.kept for op in report.ops] == [2**14, 0, 2**14, 0]


def test_what_makes_something_that_is_read_names_its_reader():
    report = explain(lambda x: (x.neg() + 1).sin(), *example((64, 64)), prune=True)
    name, fate, why = whys(report)[0]
    assert (name, fate) == ("neg", "recomputed")
    assert re.fullmatch(r"read by add \(test_explain\.py:\d+\)", why)


def test_what_only_feeds_what_is_left_out_is_dead():
    report = explain(lambda x: (x.sin() * 2).neg(), *example((64, 64)), prune=True)
    name, fate, why = whys(report)[1]
    assert (name, fate) == ("mul", "dead")
    pattern = r"read only by what is not recomputed: neg \(test_explain\.py:\d+\)"
    assert re.fullmatch(pattern, why)


def test_what_nothing_reads_is_dead():
    def f(x):
        x.exp()
        return x.sin()

    report = explain(f, *example((64, 64)), prune=True)
    assert whys(report)[0] == ("exp", "dead", "nothing reads it")


def test_what_python_reads_runs():
    def f(x):
        return (x.sin() * int(x.argmax())).exp()

    report = explain(f, *example((64, 64)), prune=True)
    found = {name: (fate, why) for name, fate, why in whys(report)}
    assert found["_local_scalar_dense"] == ("recomputed", "Python reads its result")
    assert found["argmax"][0] == "recomputed"
    assert found["argmax"][1].startswith("read by _local_scalar_dense (")


def test_a_draw_before_one_that_is_needed_runs():
    def f(x):
        torch.rand(3)
        return F.dropout(x, 0.5)

    report = explain(f, *example((64, 64)), prune=True)
    name, fate, why = whys(report)[0]
    assert (name, fate) == ("rand", "recomputed")
    assert why.startswith("draws random numbers before bernoulli_ (")
    assert report.streams == ("cpu",)
    assert "kept besides: the state of cpu" in str(report)


def test_an_input_that_no_backward_reads_is_dropped():
    x, bias = (t.detach() for t in example((64, 64), (64,)))
    report = explain(lambda x, bias: x.sin() + bias, x, bias, prune=True)
    row = report.inputs[1]
    why = "nothing that is recomputed reads it"
    assert (row.name, row.kept, row.why) == ("bias", False, why)
    assert report.saved_bytes == x.nbytes


def test_parameters_are_not_dropped():
    module = nn.Linear(64, 64)
    report = explain(module, *example((2, 64)), prune=True)
    rows = {i.name: (i.kept, i.why) for i in report.inputs}
    assert rows == {
        "input": (True, "read by the backward of addmm"),
        "weight": (True, "read by the backward of addmm"),
        "bias": (True, "a leaf is alive anyway"),
    }


def test_one_storage_is_counted_once():
    (x,) = example((64, 64))
    report = explain(lambda x, y: x.sin() * y, x, x.view(-1).view(64, 64), prune=True)
    assert [i.nbytes for i in report.inputs] == [x.nbytes, 0]
    assert report.saved_bytes == x.nbytes


def test_a_view_has_no_bytes_of_its_own():
    report = explain(lambda x: x.t().sin(), *example((64, 64)), prune=True)
    view = report.ops[0]
    assert (view.name, view.is_view, view.nbytes, view.fate) == (
        "t",
        True,
        0,
        "recomputed",
    )
    assert " t " not in str(report)


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


def test_what_changes_a_view_does_not_tell_what_it_reads():
    def f(x):
        h = x.sin()
        h[1:] *= x[1:]
        return h.exp()

    report = explain(f, *example((64, 64)), prune=True)
    found = {name: why for name, _, why in whys(report)}
    assert found["clone"].startswith("perhaps read by the backward of what changes")


def test_what_python_takes_the_memory_of_runs():
    def f(x):
        y = x.detach().sin()
        return (x * float(y.numpy().sum())).exp()

    report = explain(f, *example((64, 64)), prune=True)
    assert whys(report)[0] == ("sin", "recomputed", "read other than by operations")


class Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.y = x.exp()
        return ctx.y * 2

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * ctx.y


def in_bfloat16(w, x):
    with torch.autocast("cpu", torch.bfloat16):
        return (w @ x).tanh()


OTHERS = {
    "vmap": (lambda w, x: vmap(lambda row: (w @ row).tanh())(x), SQUARE),
    "Function": (lambda x: Kept.apply(x.sin()), ((64, 64),)),
    "autocast": (in_bfloat16, SQUARE),
    "complex": (lambda x: (x.to(torch.complex64) * 1j).exp().abs(), ((64, 64),)),
    "sparse": (lambda w, x: torch.sparse.mm(w.to_sparse(), x).sin(), SQUARE),
    "LSTM": (nn.LSTM(16, 16), ((5, 4, 16),)),
    "Transformer": (
        nn.TransformerEncoderLayer(32, 4, 64, batch_first=True),
        ((4, 16, 32),),
    ),
    "many outputs": (lambda x: [(x + i).sin() for i in range(20)], ((64, 64),)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_it_explains_all_kinds_of_functions(name):
    fn, sizes = OTHERS[name]
    args = example(*sizes)
    report = explain(fn, *args, prune=True)
    assert report.plain_bytes == total(saved_residuals(fn, *args))
    assert report.saved_bytes == total(saved_residuals(ckpt(fn, prune=True), *args))
    assert {op.fate for op in report.ops} & {"recomputed", "dead"}
    assert all(op.why for op in report.ops)
    assert all(row.why for row in report.inputs)


# --- Whether it is pruned ---


@pytest.mark.parametrize(
    ("options", "size", "reason"),
    [
        pytest.param({"prune": False}, 64, r"prune=False", id="prune=False"),
        pytest.param(
            {"prune": False, "policy": policies.dots_saveable},
            *(64, r"prune=False"),
            id="prune=False with a policy",
        ),
        pytest.param(
            {}, 64, r"the graph itself tells what its backward reads", id="handles"
        ),
        pytest.param(
            {"higher_order": True},
            *(8, r"its inputs have only 128 elements in all"),
            id="small",
        ),
        pytest.param(
            {"higher_order": True},
            *(256, r"it would save about 0 us of work, and cost 32 us of bookkeeping"),
            id="not worth it",
        ),
    ],
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


def options_of(report):
    return report.policy, report.reason


def test_a_rematerialized_function_keeps_its_own_options():
    x = example(*SQUARE)
    own = ckpt(blk, policy=policies.dots_saveable, prune=False)
    assert options_of(explain(own, *x)) == (policies.dots_saveable, "prune=False")
    assert options_of(explain(own, *x, prune=True)) == (policies.dots_saveable, "")
    everything = policies.everything_saveable
    assert options_of(explain(own, *x, policy=everything, prune=True)) == (
        everything,
        "",
    )
    assert options_of(explain(own, *x, policy=None)) == (None, "prune=False")


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


def test_without_anything_that_requires_grad_floating_arguments_do():
    w, x = (t.detach() for t in example(*SQUARE))
    assert explain(blk, w, x).ops == explain(blk, *example(*SQUARE)).ops
    assert not (w.requires_grad)
    assert not (x.requires_grad)


def test_with_nothing_to_differentiate_it_says_so():
    report = explain(lambda i: i + 1, torch.arange(9))
    assert (report.ops, report.inputs, report.saved_bytes) == ((), (), 0)
    assert report.reason == "no tensor requires grad, so remat just calls the function"
    assert "there is no backward to recompute for" in report.advice[0]
    assert report.recomputed_share == 0
    assert report._repr_html_()
    with pytest.raises(ValueError, match="without anything to differentiate"):
        compare(lambda i: i + 1, torch.arange(9))


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


def test_what_is_found_on_meta_tensors_is_what_is_found_on_real_ones():
    x = example(*SQUARE)
    for policy in POLICIES.values():
        on_meta = (t.detach().to("meta").requires_grad_() for t in x)
        report = explain(blk, *on_meta, policy=policy, prune=True)
        real = explain(blk, *x, policy=policy, prune=True)
        assert whys(report) == whys(real)
        assert report.saved_bytes == real.saved_bytes
        assert report.recomputed_flops == real.recomputed_flops


# --- Advice ---


def advice(fn, *args, **kwargs):
    return "\n".join(explain(fn, *args, **kwargs).advice)


def test_no_advice_where_remat_is_worth_it():
    w, v, x = (t.detach() for t in example((64, 256), (256, 64), (512, 64)))
    assert not explain(mlp, w, v, x).advice
    assert not explain(mlp, w, v, x, policy=POLICIES["names"] & POLICIES["dots"]).advice


def test_advice_where_nothing_is_saved():
    x = [t.detach() for t in example(*SQUARE)]
    found = advice(lambda w, x: w @ x, *x)
    assert "32,768 bytes stay alive with it and 32,768 without" in found
    assert "Put remat around more operations" in found
    assert "saves next to nothing" in advice(
        blk, *x, policy=policies.everything_saveable
    )


def test_advice_against_remat_of_a_whole_loss():
    w, v, x = example((64, 256), (256, 64), (512, 64))
    found = advice(lambda w, v, x: mlp(w, v, x).square().sum(), w, v, x)
    assert found.startswith("The result is a single number, as of a whole loss.")
    assert "Put remat around the parts of the model" in found


def test_advice_does_not_count_parameters():
    found = advice(nn.Linear(64, 64), torch.ones(8, 64))
    assert "besides parameters and other leaves, 2,048 bytes stay alive" in found


def test_advice_on_names_that_nothing_has():
    x = example(*SQUARE)
    policy = policies.save_only_these_names("up", "down")
    found = advice(blk, *x, policy=policy)
    assert "No checkpoint_name in this call gives the name 'down'" in found
    assert "'up'" not in found


# --- compare ---


@pytest.mark.parametrize("name", CASES)
def test_the_rows_are_what_explain_says(name):
    fn, args = case_of(name)
    compared = compare(fn, *args, policies=POLICIES.values(), prune=True)
    reports = [explain(fn, *args, policy=p, prune=True) for p in POLICIES.values()]
    plain, full, *rest = compared.rows
    assert (plain.name, plain.saved_bytes, plain.recomputed_flops) == (
        *("plain", reports[0].plain_bytes),
        0,
    )
    assert full == rest[0]
    for row, report in zip(rest, reports, strict=True):
        assert row.name == str(report.policy or "nothing_saveable")
        assert row.saved_bytes == report.saved_bytes
        assert row.offloaded_bytes == report.offloaded_bytes
        assert row.recomputed_flops == report.recomputed_flops
        assert row.recomputed_share == report.recomputed_share


def test_the_function_is_called_once_for_all_policies():
    calls = []

    def f(w, x):
        calls.append(None)
        return blk(w, x)

    found = compare(f, *example(*SQUARE), policies=POLICIES.values())
    assert (len(found.rows), len(calls)) == (2 + len(POLICIES), 1)


def test_a_policy_reaches_into_calls_within():
    dots = policies.dots_saveable
    found = compare(two, *example(*SQUARE), policies=[dots], prune=True)
    assert [row.recomputed_flops // (2 * 64**3) for row in found.rows] == [4, 6, 0]


# --- Offloading ---


def test_on_the_host_offloading_to_the_host_is_saving():
    x = example(*SQUARE)
    policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    report = explain(blk, *x, policy=policy)
    assert [op.fate for op in report.ops[::2]] == ["saved", "saved"]


def test_what_is_kept_elsewhere_is_counted_apart():
    x = example(*SQUARE)
    policy = policies.dots_saveable.but_offload(to="disk")
    report = explain(blk, *x, policy=policy)
    saved = explain(blk, *x, policy=policies.dots_saveable)
    assert [op.fate for op in report.ops[::2]] == ["offloaded", "offloaded"]
    assert report.offloaded_bytes == 2 * x[0].nbytes
    assert report.saved_bytes + report.offloaded_bytes == saved.saved_bytes
    assert "32,768 offloaded" in str(report)
    found = saved_residuals(ckpt(blk, policy=policy), *x)
    away = [r for r in found if r.place]
    assert (total(away), total(found)) == (report.offloaded_bytes, saved.saved_bytes)
    assert compare(blk, *x, policies=[policy]).rows[2].offloaded_bytes == 2**15


# --- How it shows ---


def test_it_is_a_value():
    x = example(*SQUARE)
    found, compared = explain(blk, *x), compare(blk, *x)
    assert pickle.loads(pickle.dumps(found)) == found == explain(blk, *x)
    assert pickle.loads(pickle.dumps(compared)) == compared
    assert {found: 1, compared: 2}[compared] == 2
    with pytest.raises(AttributeError, match="cannot assign"):
        found.pruned = True


def reports():
    x = example(*SQUARE)
    return explain(blk, *x, policy=policies.dots_saveable), compare(blk, *x)


def without(monkeypatch, module):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda m: None if m == module else real(m)
    )


def test_as_plain_text(monkeypatch):
    without(monkeypatch, "rich")
    found, compared = reports()
    lines = str(found).splitlines()
    line = blk.__code__.co_firstlineno + 1
    assert lines[0] == "remat of `blk` under dots_saveable"
    assert lines[1].split()[:4] == ["operation", "line", "output", "bytes"]
    assert lines[2].split()[:5] == ["w", "input", "f32[64,64]", "16,384", "saved"]
    assert lines[4].split()[:6] == [
        *("mm", f"test_explain.py:{line}", "f32[64,64]"),
        *("16,384", "524,288", "saved"),
    ]
    again = "recomputed: 0 of 1,048,576 FLOPs (0%), 2 of 4 operations"
    assert lines[8:11] == [
        "saved: 65,536 bytes; plain: 65,536",
        again,
        "pruned: yes",
    ]
    rows = [row.split() for row in str(compared).splitlines()]
    assert rows[2:4] == [
        ["plain", "65,536", "0", "0", "0%"],
        ["nothing_saveable", "32,768", "0", "1,048,576", "100%"],
    ]


def test_as_a_table_of_rich():
    pytest.importorskip("rich")
    found, compared = map(str, reports())
    assert "┃ operation ┃" in found
    assert "f32[64,64]" in found  # no markup
    assert "the policy keeps it, read by tanh" in found
    assert "pruned: yes" in found
    assert "┃ policy" in compared
    assert "\x1b" not in found + compared


def test_rich_shows_it_in_colours():
    console = pytest.importorskip("rich.console")
    with (shown := console.Console(force_terminal=True, width=160)).capture() as text:
        for report in reports():
            shown.print(report)
    assert "\x1b[" in text.get()
    assert "operation" in text.get()


def test_as_html():
    pytest.importorskip("rich")
    found, compared = reports()
    html = found._repr_html_()
    assert html.startswith("<pre")
    assert "remat of `blk` under dots_saveable" in html
    assert html.count("color: #000080") >= 7, "saved rows are blue"
    assert html.count("│") == 8 * (2 + 4), "each row is one line"
    other = explain(lambda x: x.sin(), *example((64, 64)))._repr_html_()
    assert "&lt;lambda&gt;`" in other
    assert compared._repr_html_().count("│") == 6 * len(compared.rows)


def test_as_html_without_rich(monkeypatch):
    found, compared = reports()
    without(monkeypatch, "rich")
    for report in (found, compared):
        assert report._repr_html_() == f"<pre>{escape(str(report))}</pre>"


def test_as_text_in_a_notebook(monkeypatch):
    console = pytest.importorskip("rich.console")
    found, _ = reports()
    text = str(found)
    monkeypatch.setattr(console, "_is_jupyter", lambda: True)
    assert str(found) == text
    assert "operation" in text


@pytest.fixture
def pyplot():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pyplot = pytest.importorskip("matplotlib.pyplot")
    yield pyplot
    pyplot.close("all")


def test_as_bars(pyplot):
    found, _ = reports()
    axes = found.plot()
    assert sorted(bar.get_width() for bar in axes.patches) == [2**14] * 4
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["saved", "recomputed"]
    names = [label.get_text().split()[0] for label in axes.get_yticklabels()]
    assert names == ["mm", "tanh", "mm", "tanh"]
    ours = pyplot.figure().add_subplot()
    assert found.plot(ours) is ours


def test_as_points(pyplot):
    _, compared = reports()
    axes = compared.plot()
    points = [tuple(dots.get_offsets()[0]) for dots in axes.collections]
    assert points == [(r.saved_bytes, r.recomputed_flops) for r in compared.rows]
    assert [text.get_text() for text in axes.texts] == [r.name for r in compared.rows]
    assert len({text.xyann for text in axes.texts[2:]}) == 3  # though at one point
    ours = pyplot.figure().add_subplot()
    assert compared.plot(ours) is ours


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    without(monkeypatch, "matplotlib")
    for report in reports():
        with pytest.raises(ImportError, match=r"pip install 'remat\[viz\]'"):
            report.plot()


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        *((torch.float32, "f32[2]"), (torch.bfloat16, "bf16[2]")),
        *((torch.complex64, "c64[2]"), (torch.uint8, "u8[2]")),
        *((torch.int64, "i64[2]"), (torch.bool, "bool[2]")),
    ],
    ids=str,
)
def test_dtypes_are_written_as_by_jax(dtype, text):
    assert remat._report.render.short(dtype, (2,)) == text


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
