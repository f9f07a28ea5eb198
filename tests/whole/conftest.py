"""What tests of scripts share."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def scripts(monkeypatch):
    """Imports a file of benchmarks/."""
    pytest.importorskip("rich", reason="needs the extra `viz`")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module
