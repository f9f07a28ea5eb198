"""Ways in which the same numbers are drawn."""

import pytest

from remat.random import _philox


@pytest.fixture(params=["integers", "tensors", "small chunks"])
def way(request, monkeypatch):
    """The three ways to the same blocks."""
    few, chunk = {
        "integers": (10**9, _philox.CHUNK),
        "tensors": (0, _philox.CHUNK),
        "small chunks": (0, (7, 13)),
    }[request.param]
    monkeypatch.setattr(_philox, "FEW", few)
    monkeypatch.setattr(_philox, "CHUNK", chunk)
