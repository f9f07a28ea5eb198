"""docs/chains.md: what transforms of a chain cost, and what its tables say."""

import io
import json
import re
from pathlib import Path

import pytest
import torch
from torch.func import grad, jvp, vmap

from remat import chain
from remat.chain import schedules
from remat.testing import count_ops, peak_bytes


ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/chains.md").read_text()
LENGTH, CHECKPOINTS = 100, 5
FORWARD, BACKWARD = schedules.Binomial(CHECKPOINTS).evaluations(LENGTH)


def loss(length=LENGTH):
    def body(_, x):
        return x + torch.sinh(-x) / 100

    def run(x):
        return chain.fori_loop(0, length, body, x, checkpoints=CHECKPOINTS).sum()

    return run


def second_order(length, x):
    leaf = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(loss(length)(leaf), leaf, create_graph=True)
    first.sum().backward()


def rows(x):
    return x.view(4, -1)


def backward(length, x):
    loss(length)(x.clone().requires_grad_()).backward()


DERIVATIVES = {
    "backward": backward,
    "grad": lambda n, x: grad(loss(n))(x),
    "jvp": lambda n, x: jvp(loss(n), (x,), (x,)),
    "vmap of grad": lambda n, x: vmap(grad(loss(n)))(rows(x)),
    "grad of vmap": lambda n, x: grad(lambda y: vmap(loss(n))(rows(y)).sum())(x),
    "second order": second_order,
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "least", "most"),
    [
        ("grad", FORWARD + BACKWARD, FORWARD + BACKWARD),
        ("jvp", FORWARD, FORWARD),
        # The forward that is run again needs not run its last steps.
        ("vmap of grad", FORWARD + BACKWARD + 0.9 * LENGTH, 2 * LENGTH + BACKWARD),
        ("grad of vmap", 3 * LENGTH, 3 * LENGTH),
        ("second order", 4 * LENGTH, 10 * LENGTH),
    ],
)
def test_steps_that_a_transform_runs(name, least, most):
    with count_ops() as ops:
        DERIVATIVES[name](LENGTH, torch.linspace(-1, 1, 8))
    assert least <= ops["sinh"] <= most


def carries(name, length):
    x = torch.linspace(-1, 1, 2**12)
    return peak_bytes(lambda: DERIVATIVES[name](length, x)) / x.nbytes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["backward", "grad", "vmap of grad"])
def test_a_peak_that_does_not_grow_with_the_steps(name):
    few, many = carries(name, 64), carries(name, 144)
    assert few == many < CHECKPOINTS + 8


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "each"), [("grad of vmap", 2), ("second order", 5)])
def test_a_peak_that_grows_with_the_root_of_the_steps(name, each):
    few, many = carries(name, 64), carries(name, 144)
    assert many - few == pytest.approx(each * (12 - 8), abs=0.01)


def test_the_peaks_in_the_text():
    text = re.search(r"For 1,600 steps .*? peaks are (.*?)\.\n", PAGE, re.DOTALL)[1]
    shown = [int(n) for n in re.findall(r"\b\d+\b", text)]
    names = ["backward", "vmap of grad", "grad of vmap", "second order"]
    grows = [0, 0, 2, 5]  # with the root of the steps, as tested above
    at_64 = [carries(name, 64) for name in names]
    found = [few + each * (40 - 8) for few, each in zip(at_64, grows, strict=True)]
    assert found == pytest.approx(shown, abs=0.05)


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ('`scan`, `"all"`', schedules.EveryStep()),
        ("`scan`, `None`", schedules.Sqrt()),
        ("`scan`, `Uniform(10)`", schedules.Uniform(10)),
        ("`scan`, 50", schedules.Binomial(50)),
        ("`scan`, 10", schedules.Binomial(10)),
        ("`scan`, 5", schedules.Binomial(5)),
        ("`while_loop`, 10", schedules.Online(10)),
    ],
)
def test_steps_in_the_table_are_those_predicted(name, schedule):
    row = re.search(rf"^\| {re.escape(name)} \|(.*)\|$", PAGE, re.MULTILINE)
    assert row, f"no row of {name}"
    steps = int(row[1].split("|")[2].replace(",", ""))
    assert steps == sum(schedule.evaluations(1000))


def test_the_table_has_what_the_benchmark_wrote():
    path = ROOT / "benchmarks/results/chain.json"
    stored = json.loads(path.read_text())["tables"]["steps"]["rows"]
    table = PAGE.partition("| system | peak, carries |")[2].partition("\n\n")[0]
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    assert len(lines) == 11
    for name, *shown in lines:
        row = stored[re.sub(" step$| at a time$|`", "", name)]
        ran, time = row["forward"] + row["backward"], row["time, of plain"]["median"]
        peaks = f"{row['peak, carries']:,.0f}", f"{row['in files']:.0f}"
        assert shown == [*peaks, f"{ran:,}", f"{time:.1f}"], name


def test_a_bar_that_adds_what_it_gets_is_too_far():
    """So the page passes `lambda done: bar.update()` for a bar of tqdm."""
    tqdm = pytest.importorskip("tqdm").tqdm
    x = torch.ones(3, requires_grad=True)
    cases = [(lambda bar: lambda _: bar.update(), 10), (lambda bar: bar.update, 55)]
    for update_of, count in cases:
        with tqdm(total=10, disable=False, file=io.StringIO()) as bar:
            step, progress = lambda _, x: x.sin(), update_of(bar)
            chain.fori_loop(0, 10, step, x, progress=progress).sum().backward()
            assert bar.n == count
