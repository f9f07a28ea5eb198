"""`compare`, what is offloaded, and how reports show: text, tables, HTML and plots."""

import importlib.util
import pickle
from html import escape

import pytest
import torch
from support.explained import CASES, POLICIES, SQUARE, blk, case_of, example, two
from support.kept import total

import remat._report.render
from remat import compare, explain, policies, remat as ckpt, saved_residuals


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
        *("mm", f"explained.py:{line}", "f32[64,64]"),
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
    assert "the policy saves it, read by tanh" in found
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
