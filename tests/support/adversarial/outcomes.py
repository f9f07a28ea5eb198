"""Runs one program in one configuration, and says what became of it.

Invariant: a program that cannot be told from plain code is right, and no other.
Rejected: closeness. Every kernel runs on the same numbers, so all bits are equal.
"""

import functools
import gc
import random
import traceback
from typing import Any, NamedTuple

import numpy as np
import torch
from support.adversarial.configurations import CONFIGURATIONS, plain
from support.adversarial.contexts import CONTEXTS, in_a_chain
from support.adversarial.observed import observed
from support.adversarial.program import EVALUATIONS, PROGRAMS, Program

from remat import RematError
from remat._partial.decide import CACHES


class Outcome(NamedTuple):
    """What became of a program.

    Attributes:
        kind: "right", "refused" by an error of remat's own, "raised" by another error,
            "wrong", or "crashed"; "none" if the context does not apply to it.
        message: the error, or the first difference.
        evaluations: of the functions, more than plain's.
    """

    kind: str
    message: str = ""
    evaluations: int = 0


def outcome_of(name: str, configuration: str) -> Outcome:
    """Run a program plain and in a configuration."""
    program = PROGRAMS[name]
    context = CONTEXTS.get(configuration, plain)
    wrap = CONFIGURATIONS["default" if context is not plain else configuration]
    try:
        expected, fewer = _plain(name, context)
    except Exception as error:  # noqa: BLE001
        return Outcome("none", _text(error))
    try:
        actual, count = _run(program, lambda fn: context(wrap(fn)))
    except RematError as error:
        return Outcome("refused", _text(error))
    except Exception as error:  # noqa: BLE001
        return Outcome("raised", _text(error))
    is_close = context is in_a_chain or (context is not plain and program.is_close)
    difference = _difference(actual, expected, is_close=is_close)
    if difference is not None:
        return Outcome("wrong", difference, count - fewer)
    return Outcome("right", "", count - fewer)


@functools.cache
def _plain(name: str, context: Any) -> tuple[Any, int]:
    return _run(PROGRAMS[name], context)


def _run(program: Program, wrap: Any) -> tuple[Any, int]:
    CACHES.clear()
    gc.freeze()  # what a program collects is what it left itself, and soon found
    _seed()
    while not EVALUATIONS.empty():
        EVALUATIONS.get()
    seen = observed(program.run(wrap))
    count = EVALUATIONS.qsize()
    return (seen, _streams()), count


def _seed() -> None:
    torch.manual_seed(7)
    random.seed(3)
    np.random.seed(4)


def _streams() -> Any:
    numpy = np.random.get_state(legacy=False)
    torchs = torch.get_rng_state().numpy().tobytes()
    return repr(random.getstate()), repr(numpy), torchs


def _text(error: BaseException) -> str:
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
    return f"{type(error).__name__} at {where}: {error}"


def _difference(
    actual: Any, expected: Any, path: str = "", *, is_close: bool
) -> str | None:
    """Say where two observations differ; numbers may be close if `is_close`."""
    same_type = type(actual) is type(expected)
    if same_type and isinstance(actual, (tuple, list)) and len(actual) == len(expected):
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            difference = _difference(a, e, f"{path}[{i}]", is_close=is_close)
            if difference is not None:
                return difference
        return None
    if actual == expected or (is_close and same_type and _are_close(actual, expected)):
        return None
    return f"{path}: {actual!r:.80} for {expected!r:.80}"


def _are_close(actual: Any, expected: Any) -> bool:
    """Say whether texts of numbers are those of numbers that are close."""
    try:
        return np.allclose(np.array(eval(actual)), np.array(eval(expected)))
    except Exception:  # noqa: BLE001 -- they are of something else
        return False


def is_clean() -> bool:
    """Say whether a program left the process as it was."""
    modes = torch._C._len_torch_dispatch_stack() + torch._C._len_torch_function_stack()
    settings = torch.is_autocast_enabled("cpu"), not torch.is_grad_enabled()
    return not (modes or any(settings))
