"""Every number in the README is measured here, by the script that the README names."""

import functools
import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint

import remat as remat_module
from remat import explain, policies, remat
from remat.testing import count_ops, live_bytes


torch_remat = pytest.importorskip("torch_remat", reason="needs the extra `bench`")

ROOT = Path(__file__).parents[2]
TEXT = " ".join((ROOT / "README.md").read_text().split())


def numbers(pattern):
    """The numbers in the one place of the README that the pattern fits."""
    found = re.findall(pattern, TEXT)
    assert len(found) == 1, f"{pattern!r} fits {len(found)} places"
    texts = [found[0]] if isinstance(found[0], str) else found[0]
    return [float(text.replace(",", "")) for text in texts]


def test_it_is_short():
    """What stands between spaces counts as a word, in code and tables too."""
    assert len(TEXT.split()) <= 800


# --- The picture ---------------------------------------------------------------------


@pytest.mark.slow
def test_the_picture_shows_the_peaks_that_its_script_measures(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the extra `viz`")
    picture = tmp_path / "memory.svg"
    command = [sys.executable, "benchmarks/picture.py", "--out", picture]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    plain, ours = numbers(r"falls from (\d+) MB to (\d+) MB")
    times = measured_times()
    assert done.stdout.splitlines() == [
        f"plain: {plain:.0f} MB",
        f"remat: {ours:.0f} MB",
        *(f"{system}: {ratio:.1f} times plain" for system, ratio in times.items()),
    ]
    stored = (ROOT / "docs/_static/memory.svg").read_text()
    peaks = [f">plain: {plain:.0f} MB<", f">remat: {ours:.0f} MB<"]
    for text in [*peaks, *(f">{ratio:.1f}<" for ratio in times.values())]:
        assert text in picture.read_text()
        assert text in stored


def measured_times():
    """Times of a step of a block, of plain's, as they are stored."""
    of_plain = medians("block", "times", "of plain")
    return {name: of_plain[name] for name in ("plain", "remat", "torch non-reentrant")}


def stored_rows(script, table):
    found = json.loads((ROOT / f"benchmarks/results/{script}.json").read_text())
    return found["tables"][table]["rows"]


def medians(script, table, column):
    rows = stored_rows(script, table)
    return {row: cells[column]["median"] for row, cells in rows.items()}


def test_times_are_those_that_the_benchmarks_wrote():
    """A test measures no times: they are rounded from the results that are stored."""
    times = measured_times()
    (stated,) = numbers(r"A block takes ([\d.]+) times as long, as with torch's")
    assert stated == round(times["remat"], 1) == round(times["torch non-reentrant"], 1)
    of_torch = medians("layers", "times", "remat, of torch non-reentrant")
    assert "up to twice that of torch's checkpoint" in TEXT
    assert round(max(of_torch.values()), 1) <= 2


# --- The table ---------------------------------------------------------------------


def cells(row):
    """The code in a row of the table, of remat, torch and torch_remat."""
    lines = (ROOT / "README.md").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"| {row} |"))
    return [re.findall(r"`(.*?)`", cell) for cell in line.split("|")[2:-1]]


def block(x):
    return (x.sin() @ x.cos()).sin().sum()


def evaluated(code, module):
    """The value of a cell, and how many sines its backward runs."""
    x = torch.linspace(0, 1, 9).view(3, 3).requires_grad_()
    names = {**vars(module), "block": block, "x": x, "torch": torch}
    out = eval(code, names)
    with count_ops() as ops:
        out.backward()
    return out.detach(), x.grad, ops["sin"]


def test_each_system_recomputes_a_block_as_the_table_says():
    plain, plain_grad, plain_sines = evaluated("block(x)", torch)
    modules = remat_module, torch.utils.checkpoint, torch_remat
    for (code,), module in zip(cells("a block recomputed"), modules, strict=True):
        out, grad, sines = evaluated(code, module)
        assert torch.equal(out, plain)
        assert torch.equal(grad, plain_grad)
        assert sines > plain_sines


def test_under_torch_func_grad_only_remat_works():
    x = torch.linspace(0, 1, 9).view(3, 3)
    (ours,), *_ = cells("the same in `torch.func.grad`")
    with count_ops() as ops:
        grad = eval(ours, {"torch": torch, "remat": remat, "block": block})(x)
    with count_ops() as plain_ops:
        assert torch.equal(grad, torch.func.grad(block)(x))
    assert ops["sin"] > plain_ops["sin"]
    checkpoint = torch.utils.checkpoint.checkpoint
    by_torch = functools.partial(checkpoint, block, use_reentrant=False)
    for wrapped in (by_torch, torch_remat.checkpoint()(block)):
        with pytest.raises(RuntimeError, match="saved tensor hooks"):
            torch.func.grad(wrapped)(x)


def test_matmuls_are_saved_as_the_table_says():
    (ours,), (contexts,), (region,) = cells("the matmuls saved")
    names = {"remat": remat, "block": block, "policies": policies}
    x = torch.linspace(0, 1, 9).view(3, 3).requires_grad_()
    out = eval(ours, names)(x)
    with count_ops() as ops:
        out.backward()
    assert ops["mm"] == 2  # those of the backward itself
    assert ops["sin"] > evaluated("block(x)", torch)[2]
    assert contexts in inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    sin = eval(region, {"region": torch_remat.region, "f": torch.sin})
    assert torch.equal(sin(x), x.sin())


def test_only_remat_repeats_the_numbers_of_a_generator():
    def gradient(wrap):
        generator = torch.Generator().manual_seed(0)

        def noisy(x):
            return (x * torch.rand(x.shape, generator=generator)).sin().sum()

        x = torch.ones(3, requires_grad=True)
        out = wrap(noisy)(x)
        with count_ops() as ops:
            out.backward()
        return x.grad, ops.total()

    plain, plain_count = gradient(lambda fn: fn)
    ours, count = gradient(remat)
    assert torch.equal(ours, plain)
    assert count > plain_count  # it draws again
    checkpoint = torch.utils.checkpoint.checkpoint
    by_torch = functools.partial(functools.partial, checkpoint, use_reentrant=False)
    for wrap in (by_torch, torch_remat.checkpoint()):
        assert not torch.allclose(gradient(wrap)[0], plain)


# --- What no other checkpoint does ---------------------------------------------------


def test_the_programs_of_the_issues_peak_at_these_shares_of_plain(scripts):
    issues = scripts("torch_issues")
    stated = numbers(r"peak at ([\d.]+), ([\d.]+) and ([\d.]+) of plain")
    for share, program in zip(stated, issues.PROGRAMS.values(), strict=True):
        row = issues.measured(program)
        assert f"{row.peaks['remat'] / row.peaks['plain']:.2f}" == f"{share:.2f}"
        others = [row.peaks[name] for name in issues.COMPARED[1:-1]]
        assert others == ["n/a (RuntimeError)"] * 3
        assert row.difference < 1e-6


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method:DeprecationWarning")
def test_compiled_grad_peaks_below_this_share_of_compiled_plain(scripts):
    compiled = scripts("compiled")
    torch.compiler.reset()
    peaks = {}
    for system in (compiled.PLAIN, compiled.REMAT):
        step = compiled.step_of(compiled.CASES["grad"], compiled.WAYS[system])
        step()
        peaks[system], products = compiled.measured(step)
        assert products > 0
    (bound,) = numbers(r"peaks at less than ([\d.]+) of compiled plain")
    assert peaks[compiled.REMAT] < bound * peaks[compiled.PLAIN]


@pytest.mark.slow
def test_a_plan_for_half_of_the_memory_runs_so_much_again(scripts):
    model = scripts("model")
    sizes = scripts("_model").Sizes(layers=6, batch=4, time=256, width=256)
    rows = {name: model.measure(name, sizes) for name in ("plain", "remat", model.FIT)}
    half, whole, *stated = numbers(
        r"half of the memory of the six blocks, (\d+) MB for (\d+), it runs (\d+) "
        r"matmuls and attentions again; remat around each block runs (\d+) \("
    )
    assert round(rows["plain"].peak / 1e6) == whole
    assert rows[model.FIT].peak <= rows["plain"].peak // 2
    assert round(rows["plain"].peak / 2e6) == half
    again = [rows[name].again - rows["plain"].again for name in (model.FIT, "remat")]
    assert stated == again


def test_plans_recompute_less_than_the_compiler_at_nearly_all_budgets():
    found = json.loads((ROOT / "benchmarks/results/fit.json").read_text())
    rows = [
        row
        for table in found["tables"].values()
        if "torch.compile" in table["columns"]
        for row in table["rows"].values()
    ]
    compiled = [row for row in rows if row["torch.compile"] is not None]
    less = [row["remat.fit"] < row["torch.compile"] for row in compiled]
    least = [row["remat.fit"] <= 1.01 * row["lower bound"] for row in rows]
    assert min(sum(less) / len(less), sum(least) / len(least)) > 0.9


def test_masks_by_key_keep_these_bytes(scripts):
    dropout = scripts("dropout")
    x = torch.linspace(0, 1, 2**18, requires_grad=True)

    def masks(name):
        block, _ = dropout.CHOSEN[name]
        return dropout.kept(block, x, dropout.P) - dropout.kept(block, x, 0.0)

    ours, torchs, plain = numbers(
        r"eight layers of 1 MB, ([\d,]+) bytes are kept. torch's checkpoint keeps "
        r"([\d,]+), plain code ([\d,]+) \("
    )
    assert (masks("remat, key"), masks("plain")) == (ours, plain)
    checkpointed, _ = dropout.CHOSEN["torch non-reentrant"]
    assert dropout.kept(checkpointed, x, dropout.P) == torchs


def carries_of_a_loop():
    """Steps, carries, steps that run; and the carries of plain code and of chunks."""
    return numbers(
        r"differentiates ([\d,]+) steps with (\d+) carries alive, and runs ([\d,]+) "
        r"steps .*? has ([\d,]+) alive, torch's checkpoint around (\d+) .*? time "
        r"(\d+) \("
    )


@pytest.mark.slow
def test_a_long_loop_holds_these_carries(scripts):
    chain = scripts("chain")
    steps, ours, runs, plain, chunk, chunks = carries_of_a_loop()
    assert (steps, chunk) == (chain.STEPS, chain.CHUNK)
    systems = "scan, 10", "plain", f"torch non-reentrant, {chain.CHUNK} steps"
    stored = stored_rows("chain", "steps")
    for name, stated in zip(systems, (ours, plain, chunks), strict=True):
        measured, _ = chain.Work(chain.SYSTEMS[name].loop).carries()
        assert round(measured) == stated
        assert round(measured, 1) == round(stored[name]["peak, carries"], 1)
    assert sum(chain.Work(chain.SYSTEMS["scan, 10"].loop).counts()) == runs


def test_carries_are_those_that_the_benchmark_wrote():
    stored = stored_rows("chain", "steps")
    peaks = {name: round(cells["peak, carries"]) for name, cells in stored.items()}
    steps, ours, runs, plain, chunk, chunks = carries_of_a_loop()
    chunked = f"torch non-reentrant, {chunk:.0f} steps"
    stated = {"scan, 10": ours, "plain": plain, chunked: chunks}
    assert stated == {name: peaks[name] for name in stated}
    assert stored["plain"]["forward"] == steps
    assert stored["scan, 10"]["forward"] + stored["scan, 10"]["backward"] == runs
    page = (ROOT / "docs/chains.md").read_text()
    rows = re.findall(
        r"^\| `(scan|while_loop)`, ([^|]+) \| ([\d,]+) ", page, re.MULTILINE
    )
    of_page = {
        f"{n}, {how}".replace("`", ""): int(p.replace(",", "")) for n, how, p in rows
    }
    assert len(of_page) == 8
    assert of_page == {name: peaks[name] for name in of_page}


def test_the_bytes_of_the_report_are_those_that_stay_alive():
    def block(params, x):
        return x + torch.tanh(x @ params["in"]) @ params["out"]

    params = {
        name: torch.randn(shape, requires_grad=True)
        for name, shape in {"in": (16, 64), "out": (64, 16)}.items()
    }
    x = torch.randn(8, 16, requires_grad=True)
    report = explain(remat(block), params, x)
    stated = numbers(r"([\d,]+) bytes saved, ([\d,]+) by plain code")
    inputs = sum(t.nbytes for t in (*params.values(), x))
    # What is alive after the forward, without its result, and the inputs.
    alive = [live_bytes(lambda f=f: f(params, x)) - x.nbytes + inputs
             for f in (remat(block), block)]  # fmt: skip
    assert stated == [report.saved_bytes, report.plain_bytes] == alive
