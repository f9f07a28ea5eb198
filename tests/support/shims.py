"""Tests of torch's shims: each holds for torch, and fails if a shim does nothing."""

import pkgutil
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch
from torch import Tensor

from remat import _torch


class Wrong:
    """Can be used as a function, context, class or value, and does nothing."""

    def __call__(self, *_, **__):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


# By a class of torch itself, of which the shim is only the name.
NAMES_ALONE = {"no_torch_function": Tensor.__torch_function__}
FILES = [
    import_module(f"remat._torch.{file.name}")
    for file in pkgutil.iter_modules(_torch.__path__)
]


def expects(*shims):
    """Make a test of what these names of `remat._torch` expect of torch.

    It runs with the shims as they are, and has to fail with each replaced.
    """

    def decorated(check):
        @pytest.mark.parametrize("without", [None, *shims])
        def test(without, monkeypatch):
            if without is None:
                check()
                return
            files = [file for file in FILES if hasattr(file, without)]
            assert files
            for file in files:
                wrong = NAMES_ALONE.get(without, Wrong())
                monkeypatch.setattr(file, without, wrong)
            assert fails(check)

        return test

    return decorated


def fails(check):
    try:
        check()
    except Exception:  # noqa: BLE001
        return True
    return False


def leaf():
    return torch.tensor([1.0, 2.0], requires_grad=True)


def same(a, b):
    return isinstance(a, Tensor) and torch.equal(a, b)


@contextmanager
def replaced(scope, name, value):
    """Run the body with another value under a name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(scope, name, value)
        yield
