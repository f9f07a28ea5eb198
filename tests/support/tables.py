"""Tables of test cases."""

from collections.abc import Mapping
from typing import Any

import pytest


def rows(names: str, table: Mapping[str, Any]) -> pytest.MarkDecorator:
    """Parametrize by the members of a table, which are named by its keys."""
    return pytest.mark.parametrize(names, table.values(), ids=table.keys())
