"""`make demo`: two runs that take turns, and end with the same parameters.

`check_clone.py` runs the command itself.
"""

import sys

import pytest
import torch


SIZES = {"layers": 3, "width": 32, "context": 16, "batch": 2, "steps": 2}
SMALL = [text for name, n in SIZES.items() for text in (f"--{name}", f"{n}")]


def test_each_run_goes_first_in_every_second_step(scripts):
    ran, losses = [], []

    def run(name):
        for step in range(3):
            ran.append(name)
            yield float(step)
        return f"{name} ended"

    ended = scripts("demo").in_turns(
        run("plain"), run("remat"), lambda run, loss: losses.append((run, loss))
    )
    assert ran == ["plain", "remat", "remat", "plain", "plain", "remat"]
    assert losses == [(0, 0), (1, 0), (1, 1), (0, 1), (0, 2), (1, 2)]
    assert ended == ("plain ended", "remat ended")


@pytest.fixture
def _two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.mark.usefixtures("_two_threads", "pyplot")
def test_steps_run_in_one_thread_and_are_equal(scripts, tmp_path, monkeypatch, capsys):
    """Also where torch would use two; and no step is more than one gradient."""
    demo = scripts("demo")
    threads, losses = [], ([], [])
    loss, in_turns = demo.loss_function, demo.in_turns

    def noting(*args, **kwargs):
        threads.append(torch.get_num_threads())
        return loss(*args, **kwargs)

    def compared(first, second, advance):
        ended = in_turns(first, second, lambda run, loss: losses[run].append(loss))
        assert sum(ended[1].ops.values()) > sum(ended[0].ops.values())  # recomputed
        assert demo.identical(*(run.params for run in ended))
        return ended

    monkeypatch.setattr(demo, "loss_function", noting)
    monkeypatch.setattr(demo, "in_turns", compared)
    monkeypatch.setattr(sys, "argv", ["demo", *SMALL, "--out", f"{tmp_path}"])
    with pytest.raises(SystemExit, match=r"^$"):  # nothing failed
        demo.main()
    assert threads == [1] * 9  # of each: two steps and two to look at; and a forward
    assert losses[0] == losses[1]
    rows = (line.split("│") for line in capsys.readouterr().out.splitlines())
    table = {cells[1].strip(): cells[2:5] for cells in rows if len(cells) > 4}
    plain, ours = (int(n.replace(",", "")) for n in table["peak bytes of a step"][:2])
    assert ours < plain
    assert table["parameters bit-identical"][1].strip() == "yes"
    assert int(table["forward ops recomputed"][1].split()[0]) > 0
    assert (tmp_path / "demo_memory.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("last", "peak", "found"),
    [(1.0, 2, None), (1.5, 2, "not bit-identical"), (1.0, 3, "peak is not lower")],
)
def test_a_promise_that_is_not_kept_is_a_failure(scripts, last, peak, found):
    run = scripts("demo").Run
    params = ({"w": [torch.tensor([0.0, end])]} for end in (1.0, last))
    peaks = (0, 3, 1), (0, peak, 1)
    plain, ours = (run(0.0, w, (), p, {}) for w, p in zip(params, peaks, strict=True))
    said = scripts("demo").failure(plain, ours)
    assert said is None if found is None else found in said
