"""The last part of docs/distributed.md, by its script, and by hand."""

import importlib
from pathlib import Path

import pytest
import torch.distributed as dist

from remat import explain


pytestmark = pytest.mark.skipif(
    not dist.is_available(), reason="needs the operators of torch.distributed"
)
ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/distributed.md").read_text().partition("## A thousand GPUs")[2]


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("thousand_gpus")


@pytest.mark.parametrize("title", ["One block", "The model", "Stages"])
def test_the_page_has_the_tables_of_the_script(script, title):
    assert script.tables()[title] in PAGE


def test_the_page_has_no_other_tables(script):
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert lines == "\n".join(script.tables().values()).splitlines()


# Bytes for each token: a rank has 1024 columns of the stream, 8 heads of queries and
# one each of keys and values, all of size 128, and 3584 hidden columns.
STREAM = 2 * 8192 // 8
GATHERED = 2 * 8192
ATTENTION = 2 * 8 * 128 + 4 * 8  # and a statistic of each head
QKV = 2 * 10 * 128
HIDDEN = 2 * 2 * 3584
BY_HAND = {
    "nothing": STREAM,
    "attention": STREAM + ATTENTION,
    "attention, scattered": STREAM + ATTENTION + STREAM,
    "attention, scattered, qkv, hidden": 2 * STREAM + ATTENTION + QKV + HIDDEN,
    # What goes into the first reduce-scatter is as large as a whole stream.
    "`dots_saveable`": STREAM + ATTENTION + QKV + HIDDEN + GATHERED,
    "attention, scattered, gathered": 2 * STREAM + ATTENTION + 2 * GATHERED,
}


def test_bytes_per_token_are_those_counted_by_hand(script):
    found = {name: int(row.per_token) for name, row in script.rows().items()}
    assert found.pop(script.PLAIN) > 2 * BY_HAND["attention, scattered, qkv, hidden"]
    assert found == BY_HAND


def test_flops_are_those_counted_by_hand(script):
    qkv, out, up = 10 * 128, 8 * 128, 3584
    products = {"qkv": qkv, "out": out, "hidden": 2 * up, "down": up}
    flops = {name: 2 * 8192 * 8192 * columns for name, columns in products.items()}
    flops["attention"] = 2 * 2 * 8 * 8192 * 8192 * 128
    total = sum(flops.values())
    again = {
        "nothing": total - flops["down"],
        "attention": total - flops["down"] - flops["attention"],
        "attention, scattered": flops["qkv"] + flops["hidden"],
        "attention, scattered, qkv, hidden": 0,
        "`dots_saveable`": 0,
        "attention, scattered, gathered": flops["qkv"] + flops["hidden"],
    }
    found = {name: row.share for name, row in script.rows().items()}
    assert found.pop(script.PLAIN) == 0
    assert found == {name: n / total for name, n in again.items()}


def test_explain_finds_as_many_bytes(script):
    shape = script.SHAPE
    for name, policy in script.POLICIES.items():
        args = shape.params(), shape.stream(), shape.angles(), shape
        report = explain(script.block, *args, policy=policy)
        shared = [i for i in report.inputs if i.name.startswith(("params", "angles"))]
        kept = report.saved_bytes - sum(i.nbytes for i in shared if i.kept)
        assert kept == script.rows()[name].kept, name


def test_the_text_has_the_numbers_of_the_script(script):
    text, rows = " ".join(PAGE.split()), script.rows()
    billions, state = script.parameters() / 1e9, script.state() / 1e9
    assert f"{billions:.1f} billion parameters" in text
    assert f"take {state:.1f} GB a GPU" in text
    attention = rows["attention"].per_token - rows["nothing"].per_token
    fewer = rows["nothing"].share - rows["attention"].share
    assert f"costs {attention:,.0f} bytes per token" in text
    assert f"saves {fewer:.0%} " in text
    assert f"{GATHERED:,} bytes per token" in text
    assert f"costs {STREAM:,}, and repeats" in text
