"""Tests that are programs: each runs as it is and with remat, and is compared.

    @compared(evaluations=2)
    def test_a_closure_without_arguments(wrap, counting):
        body = counting(torch.sin)
        return grad(lambda x: wrap(lambda: body(x).sum())())(points(3))

The program takes `wrap`, which is remat or does nothing, and `counting`, which makes a
function that counts its evaluations. It returns a pytree of values and derivatives.
"""

import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from support.zoo import Evaluations, assert_not_vanishing, plainly
from torch import Tensor

from remat import remat
from remat.testing import assert_same, count_ops


Program = Callable[..., Any]


def points(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers that differ, none of which is zero."""
    size = torch.Size(shape).numel()
    return torch.linspace(0.2, 1.3, size, dtype=dtype).reshape(shape)


def leaf(*shape: int) -> Tensor:
    return points(*shape).requires_grad_()


def compared(evaluations: int | None = None, **expected: Any) -> Callable[..., Any]:
    """Make a test of a program; the arguments are those of `assert_compared`."""

    def test_of(program: Program) -> Callable[..., None]:
        def test(**given: Any) -> None:
            assert_compared(program, evaluations, given=given, **expected)

        # pytest reads the parameters of the test from its signature.
        signature = inspect.signature(program)
        given = [*signature.parameters.values()][2:]
        test.__signature__ = signature.replace(parameters=given)
        test.__name__, test.__doc__ = program.__name__, program.__doc__
        test.__module__ = program.__module__
        return test

    return test_of


def assert_compared(
    program: Program,
    evaluations: int | None = None,
    *,
    plain: int = 1,
    reassociated: bool = False,
    wrap: Callable[..., Any] = remat,
    given: dict[str, Any] | None = None,
    **ops: int,
) -> None:
    """`program` gives with `wrap` what it gives without.

    Args:
        program: takes `wrap` and `counting`.
        evaluations: how often counted functions are evaluated, with `wrap`.
        plain: how often without it.
        reassociated: whether sums may be added up in another order.
        wrap: the transform under test.
        given: other arguments of the program.
        **ops: how often each operation runs in the whole program, with `wrap`.
    """
    expected, once, _ = _run(program, plainly, given or {}, counts=False)
    actual, count, ran = _run(program, wrap, given or {}, counts=bool(ops))
    assert_same(actual, expected, reassociated=reassociated)
    assert_not_vanishing(expected)
    if evaluations is not None:
        found = f"{once} evaluations plain and {count} with remat"
        assert (once, count) == (plain, evaluations), found
    assert {name: ran[name] for name in ops} == ops, f"ran: {ran}"


def _run(
    program: Program, wrap: Callable[..., Any], given: dict[str, Any], *, counts: bool
) -> tuple[Any, int, Counter[str]]:
    """Return the result, the evaluations of counted functions, and what ran."""
    calls = Evaluations()
    torch.manual_seed(0)
    with count_ops() if counts else nullcontext(Counter()) as ops:
        result = program(wrap, lambda fn: _counting(fn, calls.note), **given)
    return result, len(calls), ops


def _counting(
    fn: Callable[..., Any], note: Callable[[Any], None]
) -> Callable[..., Any]:
    def evaluated(*args: Any, **kwargs: Any) -> Any:
        note(None)
        return fn(*args, **kwargs)

    return evaluated
