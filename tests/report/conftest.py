"""Tables are written in full, however narrow the terminal is."""

import pytest


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
