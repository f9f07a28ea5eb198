"""docs/benchmarks.md is what the benchmarks wrote, and no more."""

import importlib
import json
import re
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/benchmarks.md"
RESULTS = ROOT / "benchmarks/results"
# Another page has these, and a test of its own.
ELSEWHERE = {"thousand_gpus"}


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


def test_each_table_is_on_the_page(scripts):
    page, results = PAGE.read_text(), scripts("_page").found()
    table = scripts("_results").Table
    for name, result in results.items():
        for key, found in result["tables"].items():
            if name not in ELSEWHERE and not key.endswith(", all"):
                assert table.of_json(found).markdown() in page, (name, key)


def test_each_target_that_is_missed_is_on_the_page(scripts):
    page, results = PAGE.read_text(), scripts("_page").found()
    module = scripts("_results")
    for result in results.values():
        for found in result["tables"].values():
            for target in module.Table.of_json(found).targets:
                reached = module.reached(target.reached)
                line = f"{target.row} | {target.target} | {reached} |"
                assert (line in page) == (not target.met), target


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
| --- | ---: | ---: | ---: |
| plain | 1,234,567 | 1.500 (1.250 to 1.750) | 4 |
| other | n/a |  | 0 |"""


def test_a_table_is_the_same_after_it_was_written_and_read(scripts):
    table = example(scripts).tables["sizes"]
    read = type(table).of_json(json.loads(json.dumps(table.as_json())))
    assert read == table
    assert read.markdown() == MARKDOWN


def test_a_number_in_the_text_is_rounded(scripts):
    made, results = scripts("_page"), {"example": example(scripts).as_json()}
    places = ("bytes", "MB"), ("time", "tenths"), ("k", "count")
    of_plain = [made.number(results, "example", "sizes", "plain", *p) for p in places]
    assert of_plain == ["1", "1.5", "4,321"]


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


def test_without_a_folder_nothing_is_written(scripts, tmp_path, monkeypatch):
    monkeypatch.delenv("RESULTS", raising=False)
    monkeypatch.chdir(tmp_path)
    example(scripts).finish()
    assert not [*tmp_path.iterdir()]


# --- Counts, which do not depend on the machine --------------------------------------


def test_remat_runs_what_the_table_beside_jax_says(scripts):
    script, golden = scripts("jax_counts"), importlib.import_module("support.golden")
    rows = scripts("_page").found()["jax_counts"]["tables"]["golden"]["rows"]
    assert {*rows} == {*golden.ROWS}
    for name, (_, fn, *_) in golden.ROWS.items():
        forward, backward = (script.about(n, name) for n in script.by_remat(fn))
        found = rows[name]
        assert forward == found["remat, forward"] == found["JAX, forward"], name
        assert backward == found["remat, backward"] == found["JAX, backward"], name


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
