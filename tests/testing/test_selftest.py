"""`python -m remat.testing.selftest` finds what does not work."""

import pytest

import remat
from remat.testing import selftest


WAYS = [*selftest._WAYS]


def lines_of(capsys):
    code = selftest._main()
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert first.startswith(f"remat {remat.__version__}, torch ")
    return code, lines, last


def test_everything_works_here(capsys):
    code, lines, last = lines_of(capsys)
    assert (code, last) == (0, "All is well.")
    assert [line[:22].rstrip() for line in lines] == WAYS
    assert all("equal, and recomputes" in line for line in lines)


def doubled(fn):
    return lambda x: 2 * remat.checkpoint(fn)(x)


def broken(fn):
    def run(x):
        raise AttributeError("no such name")

    return run


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda fn: fn, "does not recompute: 4 products, and 4 in plain"),
        (doubled, "differs from plain"),
        (broken, "AttributeError: no such name"),
    ],
)
def test_what_does_not_work_is_said(monkeypatch, capsys, made, said):
    monkeypatch.setattr(selftest, "_WAYS", {".backward()": selftest._backward})
    monkeypatch.setattr(selftest, "remat", made)
    code, (line,), last = lines_of(capsys)
    assert (code, last) == (1, "Something does not work.")
    assert line == f"{'.backward()':<22}{said}"


@pytest.mark.parametrize("module", ["versions", "interpreter"])
def test_what_differs_is_said(monkeypatch, capsys, module):
    monkeypatch.setattr(selftest, "_WAYS", {})
    monkeypatch.setattr(getattr(selftest, module), "differences", lambda: ["a thing"])
    code, (line,), _ = lines_of(capsys)
    assert code == 1
    assert line.startswith("differs from what was tested: ")
    assert line.endswith(": a thing")
