"""The line of the user's code that reports and errors name."""

import subprocess
import sys
import textwrap
import types

import pytest
import torch
from torch import nn

from remat import explain, remat
from remat._base.source import short


SHELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell, store_history=True).raise_error()
"""


def shown_by_cells(*cells):
    """Return what the cells of a notebook print."""
    code = SHELL.format(cells=[textwrap.dedent(cell).strip() for cell in cells])
    run = [sys.executable, "-c", code]
    result = subprocess.run(run, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.split("\n")


@pytest.mark.slow
def test_a_line_of_a_notebook_is_named_by_its_cell():
    pytest.importorskip("IPython")
    define = """
        import torch
        from remat import explain, remat
        @remat
        def f(x):
            return x.sin().exp()
    """
    show = """
        report = explain(f, torch.ones(3))
        print(*[op.source for op in report.ops], sep="\\n")
        print(f._label)
    """
    sin, exp, label, *_ = shown_by_cells(define, show)
    assert sin == exp == "Cell In[1]:5, in f"
    assert label == "`f` (rematerialized at Cell In[1]:3)"


LIBRARY = """
from torch import nn

class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.act = nn.Linear(4, 4), nn.Tanh()

    def forward(self, x):
        return self.act(self.up(x)).sin()
"""


@pytest.fixture
def mlp(monkeypatch):
    """A module that an installed package defines."""
    file = nn.__file__.replace("/torch/nn/", "/somebody/")
    library = types.ModuleType("somebody")
    library.__file__ = file
    monkeypatch.setitem(sys.modules, "somebody", library)
    exec(compile(LIBRARY, file, "exec"), vars(library))
    return library.Mlp


def lines_of(fn, *args):
    return {op.name: short(op.source) for op in explain(fn, *args).ops}


@pytest.mark.parametrize("wrap", [remat, lambda fn: fn], ids=["remat", "plain"])
def test_a_line_of_a_package_says_which_module_runs_it(mlp, wrap):
    model = nn.Sequential(nn.Identity(), mlp())
    lines = lines_of(wrap(lambda x: model(x)), torch.ones(2, 4))
    assert lines["addmm"] == "__init__.py:10 (1.up)"
    assert lines["tanh"] == "__init__.py:10 (1.act)"
    assert lines["sin"] == "__init__.py:10 (1)"


def test_a_line_of_a_package_outside_a_module_names_none(mlp):
    block = mlp()
    lines = lines_of(lambda x: block.forward(x), torch.ones(2, 4))
    assert lines["sin"] == "__init__.py:10"


def test_a_line_of_the_users_own_module_names_none():
    class Own(nn.Module):
        def forward(self, x):
            return x.sin()

    model = nn.Sequential(Own())
    where = f"test_sources.py:{Own.forward.__code__.co_firstlineno + 1}"
    assert lines_of(lambda x: model(x), torch.ones(2)) == {"sin": where}
