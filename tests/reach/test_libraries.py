"""Libraries are recognized wherever they are installed; all else is the user's.

What is walked is counted: the functions of a package whose code a call looked into.
"""

import importlib
import json
import os
import sys

import pytest
import torch
from support.runs import leaf
from torch import nn

from remat import MutationError, remat
from remat._base import code
from remat.testing import count_ops


SOURCE = """
from torch import nn

SCALE = [2.0]


def scaled(x):
    return x * SCALE[0]


def block(x):
    return scaled(x.exp()).exp()


class Layer(nn.Module):
    def forward(self, x):
        return block(x)
"""
NAMES = (f"far_package_{n}" for n in range(1000))  # one for each test: Python caches


@pytest.fixture
def name(monkeypatch):
    """That of a package; what is put on the path and imported is undone."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    name = next(NAMES)
    yield name
    sys.modules.pop(name, None)
    importlib.invalidate_caches()


def written(name, folder):
    """Write the package into a folder."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(SOURCE)
    return folder


def imported(name, folder):
    sys.path.append(str(folder))
    return importlib.import_module(name)


def walked(package):
    """Return how many functions of a package calls have looked into."""
    files = [known.code.co_filename for known in code._KNOWN.values()]
    return sum(file == package.__file__ for file in files)


@pytest.mark.parametrize("folder", ["site-packages", "usr/lib/python3/dist-packages"])
def test_a_library_is_not_walked(name, folder, tmp_path):
    package = imported(name, written(name, tmp_path / folder))
    layer = package.Layer()
    with count_ops() as ops:
        remat(lambda x: layer(package.block(x)))(leaf(3)).sum().backward()
    assert ops["exp"] == 8  # the call and its recompute
    assert walked(package) == 0


@pytest.mark.parametrize("linked", [False, True])
def test_code_of_the_user_is_walked_and_its_globals_are_put_back(
    name, linked, tmp_path
):
    folder = written(name, tmp_path / "project")
    if linked:  # as editable packages may be
        (tmp_path / "site-packages").mkdir()
        os.symlink(folder / name, tmp_path / "site-packages" / name)
        folder = tmp_path / "site-packages"
    package = imported(name, folder)
    layer, x = package.Layer(), leaf(3)
    y = x.detach().clone().requires_grad_()
    layer(y).sum().backward()
    with count_ops() as ops:
        out = remat(lambda x: layer(x))(x)
        package.SCALE[0] = 5.0
        out.sum().backward()
    assert ops["exp"] == 4
    assert torch.equal(x.grad, y.grad)
    assert walked(package) == 3  # forward, block, scaled


# --- What is not a folder of packages ---


@pytest.mark.parametrize(
    "file", ["/home/me/my-site-packages/a.py", "/home/me/site-packages.py", "a.py", ""]
)
def test_a_name_that_is_only_similar_is_no_site_directory(file):
    assert not code.is_installed(file)


def test_python_torch_and_remat_are_no_code_of_the_user():
    for module in (json, os, torch, torch.nn, code, pytest):
        assert code.is_library(vars(module)), module
    assert not code.is_library(globals())


# --- Embeddings that scale their weight in each forward ------------------------------

# Other layers of torch are in the theme `built` of `support.adversarial`.


def weight_of(rows=50):
    """Rows that are longer than one, and stay so now and then by rounding."""
    return (3 * torch.randn(rows, 4)).requires_grad_()


def embedded(x, weight, indices):
    y = nn.functional.embedding(indices, weight, max_norm=1.0)
    return (y * x).sin().exp()


def test_other_changes_of_such_a_weight_are_refused():
    def fn(x, weight, indices):
        y = embedded(x, weight, indices)
        with torch.no_grad():
            weight.mul_(0.5)
        return y

    args = leaf(4), weight_of(), torch.tensor([0, 1])
    with pytest.raises(MutationError, match="`weight` was changed in place inside"):
        remat(fn)(*args)
