"""What the tests of lifetimes share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def _no_collector() -> Iterator[None]:
    """Leave all to reference counts."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
