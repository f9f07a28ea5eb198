"""Tables of test cases."""

from collections.abc import Collection, Mapping
from typing import Any

import pytest


def rows(
    names: str, table: Mapping[str, Any], *, fast: Collection[str] | None = None
) -> pytest.MarkDecorator:
    """Parametrize by the members of a table, which are named by its keys.

    Args:
        names: of the parameters.
        table: the members, which are tuples where there are several names.
        fast: keys of those that are not slow; by default all.
    """
    is_one = "," not in names

    def case(key: str, member: Any) -> Any:
        marks = () if fast is None or key in fast else pytest.mark.slow
        return pytest.param(*((member,) if is_one else member), id=key, marks=marks)

    return pytest.mark.parametrize(names, [case(*item) for item in table.items()])
