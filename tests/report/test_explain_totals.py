"""`explain`: its totals are those of a real backward, to the byte.

The measure: a call that has been differentiated before, so that inputs which no
backward reads are dropped, against plain. Operations and FLOPs are counted in the
backward; bytes are the allocator's, of a graph that alone holds the arguments.
What a backward runs of nested calls is in the golden table.
"""

import importlib.util
import itertools
import math
import pickle
import re
from collections import Counter
from html.parser import HTMLParser

import pytest
import torch
from support.explained import CASES, POLICIES, SQUARE, blk, case_of, example, nest, two
from support.kept import measured, total
from support.tables import crossed
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from remat import compare, explain, policies, remat as ckpt, saved_residuals
from remat._report import render
from remat.testing import count_ops


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


def executed(report):
    """How often each operation is run again."""
    found = Counter()
    for op in report.ops:
        if not op.is_view:
            found[op.name] += op.times
    return found


# What a call does besides: copies of buffers, and autograd's own.
BESIDES = {"clone", "detach", "alias", "copy_"}


@crossed("name, policy, prune", CASES, POLICIES, [True, False])
def test_the_flops_and_operations_are_those_of_a_backward(name, policy, prune):
    fn, args = case_of(name)
    report = explain(fn, *args, policy=POLICIES[policy], prune=prune)
    rematerialized = ckpt(fn, policy=POLICIES[policy], prune=prune)
    warm(rematerialized, args)
    flops, ops = differentiate(rematerialized, args)
    plain_flops, plain_ops = differentiate(fn, args)
    assert report.recomputed_flops == flops - plain_flops
    found = executed(report)
    again = {n: ops[n] - plain_ops[n] for n in found if n not in BESIDES}
    assert again == {n: found[n] for n in again}


@crossed("name, policy", CASES, POLICIES)
def test_the_saved_bytes_are_what_is_alive_after_a_forward(name, policy):
    fn, args = case_of(name)
    fresh = [t.clone() for t in args]  # no leaves, which the graph would keep alive
    report = explain(fn, *fresh, policy=POLICIES[policy], prune=True)
    rematerialized = ckpt(fn, policy=POLICIES[policy], prune=True)
    warm(rematerialized, args)
    outside = held_by_module(report)
    assert report.saved_bytes - outside == measured(rematerialized, *args) > 0
    assert report.saved_bytes == total(saved_residuals(rematerialized, *fresh))


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_and_flops_of_plain_are_those_that_torch_has(name):
    fn, args = case_of(name)
    report = explain(fn, *args)
    assert report.plain_bytes == total(saved_residuals(fn, *args)) > 0
    with FlopCounterMode(display=False) as counter:
        fn(*args)
    assert report.flops == counter.get_total_flops()


def shape_of_layers(w, x):
    layer = ckpt(blk, prune=False)
    for _ in range(3):
        x = layer(w, x).sin()
    return x


# The function, and how many products plain's backward runs.
NESTED = {
    "twice": (nest(1), 4),
    "three times": (nest(2), 4),
    "dots within": (nest(1, policies.dots_saveable), 4),
    "two": (two, 8),
    "layers": (shape_of_layers, 12),
}


@crossed("name, policy", NESTED, ["none", "dots", "everything"])
def test_what_calls_within_recompute_is_counted(name, policy):
    (fn, plain), args = NESTED[name], example(*SQUARE)
    rematerialized = ckpt(fn, policy=POLICIES[policy], prune=True)
    report = explain(rematerialized, *args)
    warm(rematerialized, args)
    _, ops = differentiate(rematerialized, args)
    again = executed(report)
    assert (again["mm"], again["tanh"]) == (ops["mm"] - plain, ops["tanh"])
    assert report.saved_bytes == measured(rematerialized, *args)


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


MIB = 2**20


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


def test_as_plain_text():
    found, compared = reports()
    lines = str(found).splitlines()
    line = blk.__code__.co_firstlineno + 1
    assert lines[0] == "remat of `blk` under dots_saveable"
    assert lines[1].split()[:4] == ["operation", "line", "output", "bytes"]
    assert lines[2].split()[:5] == ["w", "input", "f32[64,64]", "16,384", "saved"]
    assert lines[4].split()[:6] == [
        *("mm", f"explained.py:{line}", "f32[64,64]"),
        *("16,384", "524,288", "saved"),
    ]
    again = "recomputed: 0 of 1,048,576 FLOPs (0%), 2 of 4 operations"
    assert lines[8:12] == [
        "saved: 65,536 bytes; plain: 65,536",
        "peak without gradients: 98,304 bytes",
        again,
        "pruned: yes",
    ]
    rows = [row.split() for row in str(compared).splitlines()]
    assert rows[2:4] == [
        ["plain", "65,536", "65,536", "0", "0", "0%"],
        ["nothing_saveable", "32,768", "65,536", "0", "1,048,576", "100%"],
    ]


class Html(HTMLParser):
    """The rows of the table, and the colours of fates."""

    def __init__(self, report):
        super().__init__()
        self.rows, self.colours, self.open = [], [], []
        self.feed(report._repr_html_())
        self.close()
        assert not self.open, "each tag is closed"

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        style = dict(attrs).get("style", "")
        if tag == "tr":
            self.rows.append([])
        self.colours += re.findall("solid (#[0-9a-f]{6})", style)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open:
            self.rows[-1].append(data)


SAVED, RECOMPUTED, DEAD = "#1f77b4", "#ff7f0e", "#c7c7c7"


def test_in_a_notebook_fates_are_coloured_and_names_escaped():
    w, x = example(*SQUARE)
    found = explain(blk, w, x.detach(), policy=policies.dots_saveable)
    shown, compared = Html(found), Html(compare(blk, w, x))
    names = [row[0] for row in shown.rows[1:]]
    assert names == ["w", "x", "mm", "tanh", "mm", "tanh"]
    assert shown.colours == [SAVED, SAVED, *[SAVED, RECOMPUTED] * 2]
    assert len(compared.rows) == 1 + len(compare(blk, w, x).rows) + 1
    assert not compared.colours
    x, y = (t * 1 for t in example((3,), (3,)))
    dropped = explain(lambda x, y: x.sin().sin() + y, x, y, prune=True)
    assert Html(dropped).colours == [SAVED, DEAD, RECOMPUTED, DEAD, DEAD]
    assert "&lt;lambda&gt;`" in dropped._repr_html_()
    assert "<lambda>" not in dropped._repr_html_()


def test_many_parameters_of_a_module_have_one_line():
    linear, x = lambda: torch.nn.Linear(64, 64), torch.ones(2, 64)
    few, many = (torch.nn.Sequential(*(linear() for _ in range(n))) for n in (2, 3))
    found = explain(many, x)
    assert [leaf.is_parameter for leaf in found.inputs] == [False] + [True] * 6
    line = str(found).splitlines()[2]
    assert line.split()[:5] == ["6", "parameters", "input", "49,920", "saved"]
    assert Html(found).rows[1][0] == "6 parameters"
    assert "0.weight" in str(explain(few, x))
    assert "0.weight" not in str(found)


def test_the_repr_is_one_short_line():
    found, compared = reports()
    assert repr(found) == (
        "<Explanation of `blk` under dots_saveable: 4 operations (2 saved, "
        "2 recomputed); 65,536 bytes saved, 65,536 plain>"
    )
    assert repr(compared) == (
        "<Comparison for `blk`: 5 rows; 32,768 to 65,536 bytes saved>"
    )
    nothing = repr(explain(lambda x: x + 1, torch.arange(3)))
    assert nothing.endswith(
        "<lambda>`: no tensor requires grad, so remat just calls the function>"
    )


def test_as_bars(pyplot):
    found, _ = reports()
    axes = found.plot()
    assert sorted(bar.get_width() for bar in axes.patches) == [2**14 / MIB] * 4
    assert axes.get_xlabel() == "size of the result, MiB"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels == ["saved", "recomputed"]
    names = [label.get_text().split()[0] for label in axes.get_yticklabels()]
    assert names == ["mm", "tanh", "mm", "tanh"]
    ours = pyplot.figure().add_subplot()
    assert found.plot(ours) is ours


def test_as_points(pyplot):
    _, compared = reports()
    axes = compared.plot()
    points = {tuple(dots.get_offsets()[0]) for dots in axes.collections}
    rows = {(row.saved_bytes / MIB, row.recomputed_flops) for row in compared.rows}
    assert points == rows
    assert len(axes.collections) == len(rows) < len(compared.rows)
    assert axes.get_xlabel() == "saved memory, MiB"
    assert axes.get_ylabel() == "recomputed work, FLOPs"
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    named = [*(row.name for row in compared.rows), "policies.within(...)"]
    assert sorted("\n".join(labels).split("\n")) == sorted(named)
    ours = pyplot.figure().add_subplot()
    assert compared.plot(ours) is ours


def texts_of(axes):
    """Each text of a plot, with the box that it is drawn in."""
    axes.figure.draw_without_rendering()
    titles = [axes._left_title, axes.xaxis.label, axes.yaxis.label]
    drawn = [*axes.xaxis._update_ticks(), *axes.yaxis._update_ticks()]
    ticks = [tick.label1 for tick in drawn]
    found = [*axes.get_legend().get_texts(), *titles, *ticks]
    return [(t.get_text(), t.get_window_extent()) for t in found if t.get_text()]


def collisions(axes):
    texts, whole = texts_of(axes), axes.figure.bbox
    found = [
        (name, other)
        for (name, box), (other, at) in itertools.combinations(texts, 2)
        if box.overlaps(at)
    ]
    outside = [n for n, b in texts if not whole.contains(b.x0, b.y0)]
    return found + outside + [n for n, b in texts if not whole.contains(b.x1, b.y1)]


LONG = policies.save_only_these_names(*map("layer.{}.projection".format, range(9)))
MANY = [*POLICIES.values(), LONG, *map(policies.save_larger_than, range(8))]


@pytest.mark.parametrize("style", ["default", "dark_background"])
def test_no_label_of_a_plot_collides_with_another(pyplot, style):
    with pyplot.style.context(style):
        fn, args = case_of("mlp")
        report = explain(fn, *args, policy=LONG | policies.dots_saveable)
        assert not collisions(report.plot())
        assert not collisions(compare(fn, *args, policies=MANY).plot())


def test_a_plot_without_matplotlib_says_what_to_install(monkeypatch):
    without(monkeypatch, "matplotlib")
    for report in reports():
        with pytest.raises(ImportError, match="pip install matplotlib"):
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
    assert render.short_array(dtype, (2,)) == text
