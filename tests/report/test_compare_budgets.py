"""What budgets reach, in `compare`: rows, and a line below the points of policies."""

import pytest
import torch
from support.zoo import make
from torch.nn import functional as F  # noqa: N812

from remat import compare, explain, remat
from remat._partial import budget
from remat.policies import within
from remat.policies._within import NO_SCIPY


SIZE = 64
W, V = make(SIZE, 4 * SIZE, seed=1), make(4 * SIZE, SIZE, seed=2)
X = make(8 * SIZE, SIZE, seed=3)


def layers(w, v, x):
    for _ in range(3):
        x = x + F.gelu(F.layer_norm(x, (SIZE,)) @ w) @ v
    return x


@pytest.fixture(scope="module")
def compared():
    return compare(layers, W, V, X)


def test_the_front_goes_from_nothing_to_everything(compared):
    sizes = [row.saved_bytes for row in compared.front]
    assert sizes == sorted(sizes)
    named = {row.name: row for row in compared.rows}
    assert sizes[0] == named["nothing_saveable"].saved_bytes
    assert compared.front[0].recomputed_flops == max(
        row.recomputed_flops for row in compared.rows
    )
    assert compared.front[-1].recomputed_flops == 0
    assert compared.front[-1].saved_bytes <= named["everything_saveable"].saved_bytes


def test_no_policy_is_below_the_front(compared):
    for row in compared.rows:
        for reached in compared.front:
            fewer = row.saved_bytes <= reached.saved_bytes
            assert not (fewer and row.recomputed_flops < reached.recomputed_flops)


def test_the_front_is_what_explain_says(compared):
    for row in compared.front:
        nbytes = int(row.name.removeprefix("within(").removesuffix(")"))
        found = explain(layers, W, V, X, policy=within(nbytes))
        assert row.saved_bytes == found.saved_bytes
        assert row.recomputed_flops == found.recomputed_flops
        assert found.budget.nbytes <= nbytes
        assert found.saved_bytes <= nbytes + sum(row.nbytes for row in found.inputs)


def test_the_table_has_the_rows_of_the_front_that_no_policy_has(compared):
    shown = str(compared)
    for row in compared.front[1:-1]:
        assert f"{row.saved_bytes:,}" in shown
    assert compared.front[1].name in shown
    assert compared.front[0].name not in shown  # as nothing_saveable
    assert shown.count("within(") <= len(compared.front) - 1


def test_the_plot_has_a_line_for_it(compared):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = compared.plot(pyplot.figure().add_subplot())
    (line,) = [each for each in axes.lines if each.get_linestyle() == "--"]
    points = [*zip(*line.get_data(), strict=True)]
    reached = {(r.saved_bytes / 2**20, r.recomputed_flops) for r in compared.front}
    assert {*points} <= reached
    assert points[-1][1] == 0
    assert line.get_label() == "policies.within(...)"
    pyplot.close("all")


def test_a_function_with_blocks_has_no_front():
    block = remat(layers)
    found = compare(lambda w, v, x: block(w, v, block(w, v, x)), W, V, X)
    assert (found.front, found.no_front) == ((), "")


def test_without_scipy_the_front_is_left_out_and_that_is_said(monkeypatch, compared):
    def no_scipy():
        raise ImportError(NO_SCIPY)

    monkeypatch.setattr(budget, "_scipy", no_scipy)
    budget._solved.cache_clear()
    found = compare(layers, W, V, X)
    assert found.rows == compared.rows
    assert found.front == ()
    assert "without what policies.within reaches. remat: a budget" in str(found)
    assert "pip install scipy" in " ".join(str(found).split())  # lines are wrapped


def test_each_row_is_planned_on_one_run():
    calls = []

    def f(x):
        calls.append(None)
        return torch.tanh(torch.tanh(x))

    compare(f, X)
    assert len(calls) == 1
