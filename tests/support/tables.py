"""Tables of test cases: some of them in each run, all where slow tests run."""

import functools
import inspect
import itertools
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
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


def crossed(
    names: str, *factors: Collection[Any], each: int = 1, whole: Collection[Any] = ()
) -> pytest.MarkDecorator:
    """Parametrize by all combinations of factors. Most of them are slow tests.

    The longest factor is gone through, and the others go round with it. So each value
    is in a test that is not slow.

    Args:
        names: of the parameters. A value that is a tuple is several of them.
        *factors: the values of each.
        each: how many values of another factor are fast with one of the longest.
        whole: values with which all are fast.
    """
    longest = max(range(len(factors)), key=lambda k: len(factors[k]))

    def case(*places: tuple[int, Any]) -> Any:
        first, values = places[longest][0], [value for _, value in places]
        others = [k for k in range(len(factors)) if k != longest]
        is_fast = any(value in whole for value in values) or all(
            (places[k][0] - first * each) % len(factors[k]) < each for k in others
        )
        spread = [v if isinstance(v, tuple) else (v,) for v in values]
        marks = () if is_fast else pytest.mark.slow
        return pytest.param(*itertools.chain(*spread), marks=marks)

    found = itertools.product(*map(enumerate, factors))
    cases = itertools.starmap(case, found)
    return pytest.mark.parametrize(names.split(", "), [*cases])


def checked(
    program: Callable[..., Any],
    check: Callable[..., object],
    *,
    given: int = 1,
    more: Collection[str] = (),
) -> Callable[..., None]:
    """Make a test of a program, whose other parameters are those of the test.

    Args:
        program: takes what `check` gives it first.
        check: is given the program.
        given: how many arguments `check` gives it.
        more: parameters of the test that `check` is given.
    """

    def test(**parameters: Any) -> None:
        options = {name: parameters.pop(name) for name in more}
        check(functools.partial(program, **parameters), **options)

    functools.update_wrapper(test, program)
    names = [*inspect.signature(program).parameters][given:]
    parameters = [
        inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in (*names, *more)
    ]
    test.__signature__ = inspect.Signature(parameters)  # what pytest reads
    return test


def sections_of(path: Path) -> dict[str, list[list[str]]]:
    """Return the tables in a file of text: `[name]`, and below it rows of parts."""
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("["):
            table = found.setdefault(line.strip("[]"), [])
        elif found:
            table.append(line)
    return {name: rows_of(lines) for name, lines in found.items()}


def rows_of(lines: list[str]) -> list[list[str]]:
    """Return rows of text as parts, which bars divide; what is indented goes on."""
    text = "\n".join(lines).replace("\n    ", " ")
    return [row.split(" | ") for row in text.splitlines() if row and row[0] != "#"]
