"""docs/benchmarks.md is what the benchmarks wrote; `make gpu` runs on a CPU, too."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks.md"
RESULTS = ROOT / "benchmarks/results"


# --- The page ------------------------------------------------------------------------


def test_the_page_is_made_of_the_results(scripts):
    made = scripts("_page")
    assert PAGE.read_text() == made.page(made.found()), "run benchmarks/_page.py"


def test_each_script_that_make_bench_runs_has_results(scripts):
    made = scripts("_page")
    assert {*made.scripts()} == {*made.found()}
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2]
    left_out = re.findall(r"\*/(\w+)\.py", recipe.partition("\n\n")[0])
    assert {*left_out} == made.NOT_IN_BENCH


def test_each_script_has_its_command_on_the_page(scripts):
    """The page shows some tables of each. The files have all of them."""
    page = PAGE.read_text()
    for name in scripts("_page").scripts():
        assert f"{name}.py`" in page or f"benchmarks/{name}.py " in page, name


def test_each_target_that_is_missed_is_on_the_page(scripts):
    made, table = scripts("_page"), scripts("_results").Table
    page = PAGE.read_text().partition("## Targets")[2]
    for script, result in made.found().items():
        for key, found in result["tables"].items():
            for target in table.of_json(found).targets:
                place = re.escape(f"| {script}, {key} | {target.target} | ")
                reached = re.escape(f"{target.row}: {made.in_short(target.reached)}")
                line = re.search(
                    rf"^{place}(.*; )?{reached}(;.*)? \|$", page, re.MULTILINE
                )
                assert bool(line) == (not target.met), target


# --- What a script writes ------------------------------------------------------------


def example(scripts):
    """Results of one table, with each kind of cell."""
    ratio = scripts("_times").Ratio(1.5, 1.25, 1.75)
    results = scripts("_results").Results("benchmarks/example.py")
    columns = {"bytes": ",", "time": ".3f", "k": "thousands"}
    table = results.table("sizes", "Sizes", "system", columns)
    table.add("plain", 1234567, ratio, 4321)
    table.add("other", "n/a (RuntimeError)", None, 0)
    table.aim("plain", "< 1", 2, met=False)
    table.aim("other", "< 3", ratio, met=True)
    return results


MARKDOWN = """\
| system | bytes | time | k |
|---|---:|---:|---:|
| plain | 1,234,567 | 1.500 (1.250 to 1.750) | 4 |
| other | n/a |  | 0 |"""


def test_a_table_is_the_same_after_it_was_written_and_read(scripts):
    table = example(scripts).tables["sizes"]
    read = type(table).of_json(json.loads(json.dumps(table.as_json())))
    assert read == table
    assert read.markdown() == MARKDOWN


def test_files_hold_numbers_by_row_and_column(scripts, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RESULTS", str(tmp_path))
    example(scripts).finish()
    found = json.loads((tmp_path / "example.json").read_text())
    rows = found["tables"]["sizes"]["rows"]
    assert rows["plain"]["bytes"] == 1234567
    assert rows["plain"]["time"] == {"median": 1.5, "low": 1.25, "high": 1.75}
    assert rows["other"] == {"bytes": "n/a (RuntimeError)", "time": None, "k": 0}
    assert {"cpu", "cores", "python", "torch"} < {*found["machine"]}
    printed = capsys.readouterr().out
    assert "MISSED sizes, plain: < 1; 2\n" in printed
    assert "other: < 3" not in printed


# --- Counts, which do not depend on the machine --------------------------------------


# A recompute around a call hands on what it computes, as that of JAX's remat3 does.
FEWER = {"remat(dots)"}


def test_remat_runs_what_the_table_beside_jax_says(scripts):
    script, golden = scripts("jax_counts"), importlib.import_module("support.golden")
    rows = scripts("_page").found()["jax_counts"]["tables"]["golden"]["rows"]
    assert {*rows} == {*golden.ROWS}
    for name, (_, fn, *_) in golden.ROWS.items():
        forward, backward = (script.about(n, name) for n in script.by_remat(fn))
        found = rows[name]
        assert forward == found["remat, forward"] == found["JAX, forward"], name
        assert backward == found["remat, backward"], name
        assert (backward == found["JAX, backward"]) == (name not in FEWER), name


def test_without_jax_the_counts_of_the_golden_table_are_shown(
    scripts, monkeypatch, tmp_path
):
    script, golden = scripts("jax_counts"), importlib.import_module("support.golden")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # no packages
    python.chmod(0o755)
    monkeypatch.setenv("JAX_PYTHON", str(python))
    version, rows = script.by_jax()
    assert version == "0.10.2, not run: as the golden table has it"
    assert {name: sum(both, start=type(both[0])()) for name, both in rows.items()} == {
        name: golden.golden(name) for name in golden.ROWS
    }


# --- make gpu ---


SCRIPT = ROOT / "benchmarks/gpu.py"


def small(scripts):
    return scripts("_model").Sizes(layers=2, batch=2, time=16, width=32)


def cells(made, column):
    """A column of a table, by its first one."""
    names, *columns = ([*c.cells] for c in made.columns)
    headings = [c.header for c in made.columns[1:]]
    found = columns[headings.index(column)]
    return dict(zip(names, found, strict=True))


# --- What is measured ----------------------------------------------------------------


def test_each_system_holds_and_computes_what_it_should(scripts):
    steps, systems = scripts("_gpu_steps"), scripts("_systems")
    made = steps.steps(small(scripts), "cpu", rounds=2)
    again = cells(made, "again")
    # Four products a block, of which the last is not read, and attention.
    assert again == {
        systems.PLAIN: "0",
        systems.BASELINE: "8",
        systems.SELECTIVE: "0",
        systems.DEFAULT: "8",
        systems.SAVING: "0",
    }
    assert all("to" in text for text in cells(made, f"of {systems.BASELINE}").values())


def test_bytes_are_those_of_the_model(scripts):
    steps, systems = scripts("_gpu_steps"), scripts("_systems")
    held = {
        name: scripts("_device").measured(
            steps.model(systems.SYSTEMS[name], small(scripts), "cpu").forward, "cpu"
        )
        for name in (systems.PLAIN, systems.DEFAULT)
    }
    plain, ours = held[systems.PLAIN], held[systems.DEFAULT]
    # The input of the second block, and the result.
    assert ours.alive == 2 * (2 * 16 * 32) * 4
    assert plain.alive > 10 * ours.alive
    assert ours.peak < plain.peak


def test_offloading_on_a_cpu_sends_nothing(scripts):
    made = scripts("_gpu_steps").offloading(small(scripts), "cpu", rounds=2)
    times = cells(made, "ms")
    assert times["of these, beside computation"].startswith("n/a")
    assert "copies of 0.0 MB alone" in times


@pytest.mark.parametrize(
    ("offloaded", "share"),
    [(10.0, "100%"), (14.0, "0%"), (11.0, "75%")],
    ids=["hidden", "not hidden", "partly"],
)
def test_what_copies_cost_beyond_saving_was_not_beside_computation(
    scripts, offloaded, share
):
    times = {"saved": [10.0], "offloaded": [offloaded], "alone": [4.0]}
    assert scripts("_gpu_steps").overlap(times, sent=1) == share


@pytest.mark.slow
@pytest.mark.parametrize("kind", [".backward()", "torch.func.grad"])
def test_compiled_systems_are_compared(scripts, kind):
    steps, systems = scripts("_gpu_steps"), scripts("_systems")
    made = steps.compiled_table(kind, small(scripts), "cpu", 2, "aot_eager")
    shares = cells(made, "peak, of plain")
    assert shares[f"compiled {systems.PLAIN}"] == "1.00"
    assert float(shares[f"eager {systems.DEFAULT}"]) < 1
    assert (f"compiled {systems.BASELINE}" in shares) == (kind == ".backward()")


def test_a_compiled_system_that_fails_is_a_cell(scripts):
    steps = scripts("_gpu_steps")
    times, peaks = {"b": [1.0]}, {"b": scripts("_device").Bytes(0, 10**6)}
    made = steps.compiled_cells("grad", ["a", "b"], {"a": "n/a (Error)"}, peaks, times)
    assert cells(made, "peak, MB") == {"a": "n/a (Error)", "b": "1.0"}
    assert cells(made, "peak, of plain") == {"a": "", "b": "n/a"}


def test_draws_are_timed_and_equal(scripts):
    draws = scripts("_gpu_draws")
    made = draws.times(1000, "cpu", rounds=2)
    assert [*cells(made, "native kernel")] == ["uniform", "normal"]
    assert set(draws.differences(1000, "cpu").values()) == {0.0}
    column = "differ from the CPU's"
    assert set(cells(draws.equality(1000, "cpu"), column).values()) == {"not at all"}


def test_kernels_are_those_of_the_torch_that_is_there(scripts):
    made = scripts("_gpu_draws").times(1000, "cpu", rounds=1)
    ops = torch.ops.aten
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    native = hasattr(ops, "_philox_uniform_") and has("aten::_philox_uniform_", "CPU")
    found = cells(made, "native kernel")
    assert found["uniform"] == ("yes" if native else "no")
    assert found["normal"] == "no", "on the CPU it is ours"


# --- Versions, and what cannot be run ------------------------------------------------


def test_results_of_a_torch_that_is_not_declared_are_marked(scripts):
    device = scripts("_device")
    assert device.declared() == "torch>=2.13"
    assert device.mark("2.13.0+cu130") == device.mark("2.14.1") == device.mark() == ""
    assert device.mark("2.11.0") == " (torch 2.11.0: NOT DECLARED, torch>=2.13 is)"


def test_all_tests_that_need_a_gpu_are_run(scripts):
    found = {path.name for path in scripts("gpu").gpu_tests()}
    assert {"test_gpu.py", "test_offload_streams.py"} <= found
    assert "test_memory.py" not in found


def run(*options, prelude=""):
    """Run the script in a process of its own, after some code."""
    code = f"{prelude}\nimport runpy, sys\nsys.argv = {['gpu.py', *options]}\n"
    code += f"sys.path.insert(0, {str(SCRIPT.parent)!r})\n"
    code += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


NO_GPU = "import torch; torch.cuda.is_available = lambda: False"


def test_without_a_gpu_it_says_so_and_succeeds():
    done = run(prelude=NO_GPU)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("skipped: torch ")
    assert done.stdout.endswith("finds no CUDA device here\n")


def test_a_torch_that_lacks_private_api_is_a_line_and_no_traceback():
    lacking = "import torch; del torch._C._current_graph_task_id"
    done = run("--device", "cpu", prelude=lacking)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("not run: remat: torch 2.1")
    assert "lacks private API that remat needs" in done.stdout


@pytest.mark.slow
def test_a_part_that_is_not_known_is_refused():
    done = run("--device", "cpu", "stepz")
    assert done.returncode == 2
    assert "no such part: stepz" in done.stderr


@pytest.mark.slow
def test_a_part_that_fails_is_a_line_and_the_others_run():
    broken = "import remat, torch; del torch.randn"
    options = "--device", "cpu", "--small", "--rounds", "1", "steps", "draws"
    done = run(*options, prelude=broken)
    assert (done.returncode, done.stderr) == (1, "")
    assert "steps: not run: AttributeError: module 'torch' has no" in done.stdout


@pytest.mark.slow
def test_parts_print_their_tables():
    options = "--device", "cpu", "--small", "--rounds", "1", "offloading", "draws"
    done = run(*options)
    assert (done.returncode, done.stderr) == (0, "")
    first, *_ = done.stdout.splitlines()
    assert first.startswith(f"torch {torch.__version__}, ")
    for title in "Offloading", "0.01 million float32", "A key's numbers":
        assert title in done.stdout
