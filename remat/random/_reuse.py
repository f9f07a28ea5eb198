"""Find keys that are consumed twice, while someone asks for it.

Consumption is counted by the bits of the key, so that copies count together.

Invariant: a draw outside `check_key_reuse` looks at one empty list, and no more.
Rejected: marking the key object as consumed. It would go by the object, where equal
keys draw equal numbers, and a key that is batched is another object each time.
"""

import functools
import inspect
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import ParamSpec, TypeVar

from torch import Tensor
from typing_extensions import override

from remat._base.context import is_recomputing
from remat._base.errors import KeyReuseError
from remat._base.source import user_line
from remat._torch import base_tensor, must_inline


P = ParamSpec("P")
T = TypeVar("T")


class _Ledger:
    """Which keys were consumed where.

    Attributes:
        used: the line that consumed each key last.
        allowed: how many more times each may be consumed.
    """

    def __init__(self) -> None:
        self.used: dict[tuple[int, int], str] = {}
        self.allowed: Counter[tuple[int, int]] = Counter()


# One entry for each block that is open, in any thread.
_open: list[None] = []
_ledger: ContextVar[_Ledger | None] = ContextVar("_ledger", default=None)


class _Block(AbstractContextManager[None]):
    """A block, or several inside one another, in which keys are checked."""

    def __init__(self) -> None:
        self._tokens: list[Token[_Ledger | None]] = []

    @override
    def __enter__(self) -> None:
        self._tokens.append(_ledger.set(_ledger.get() or _Ledger()))
        _open.append(None)

    @override
    def __exit__(self, *exception: object) -> None:
        _open.pop()
        _ledger.reset(self._tokens.pop())

    def __call__(self, fn: Callable[P, T]) -> Callable[P, T]:
        if any(is_stepwise(fn) for is_stepwise in _STEPWISE):
            raise TypeError(_RUNS_LATER.format(name=getattr(fn, "__qualname__", fn)))

        @functools.wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            with _Block():
                return fn(*args, **kwargs)

        return checked


_STEPWISE = (
    inspect.isgeneratorfunction,
    inspect.iscoroutinefunction,
    inspect.isasyncgenfunction,
)
_RUNS_LATER = (
    "remat: {name} is a generator or coroutine function, whose body runs after its "
    "call and so would not be checked. Write `with remat.random.check_key_reuse():` in "
    "it, around what draws."
)


def check_key_reuse() -> _Block:
    """Raise where a key is consumed a second time: the numbers would be the same.

    Samplers and :func:`split` consume a key; each key of an array is consumed by
    itself. :func:`fold_in` does not, though keys it makes from one key and one number
    are equal and count as one. A :func:`clone` may be consumed besides the original.
    A recompute by :func:`remat.remat`, or of a dropout mask, is no reuse.

    It sees keys with values, in this thread; not what ``torch.compile`` or ``make_fx``
    trace, nor what compiled code draws. It reads them, which on an accelerator waits
    for it: meant for tests and debugging. Blocks inside one another count together.
    Also a decorator, of functions that are no generators or coroutines.

    The recompute of ``torch.utils.checkpoint`` is a call like others, and so a reuse.

    Raises:
        KeyReuseError: in the block, naming both lines.
        TypeError: it decorates a function whose body runs later.

    Example:
        >>> from remat import random
        >>> key = random.key(42)
        >>> with random.check_key_reuse():  # doctest: +ELLIPSIS
        ...     x = random.normal(key, (3,))
        ...     y = random.uniform(key, (3,))
        Traceback (most recent call last):
        remat.KeyReuseError: remat: a key was consumed twice, ...
    """
    return _Block()


def consume(data: Tensor) -> None:
    """Note that each key of `data` is consumed."""
    if _open and not must_inline():
        _consume(data)


def allow(data: Tensor) -> None:
    """Let each key of `data` be consumed once more."""
    if not _open or must_inline() or is_recomputing():
        return
    if (ledger := _ledger.get()) is not None:
        ledger.allowed.update(_rows(data))


def _consume(data: Tensor) -> None:
    ledger = _ledger.get()
    if ledger is None or is_recomputing():
        return
    rows = _rows(data)
    here = user_line() if rows else ""
    for row in rows:
        if row not in ledger.used:
            ledger.used[row] = here
        elif ledger.allowed[row]:
            ledger.allowed[row] -= 1
        else:
            raise KeyReuseError(
                _REUSED.format(row=row, first=ledger.used[row], here=here)
            )


def _rows(data: Tensor) -> list[tuple[int, int]]:
    """Return the seed and offset of each key under all wrappers, if it has values."""
    # Taken apart first: a vmap may batch over the last dimension of what it is given.
    seed, offset = (base_tensor(data[..., i]).detach() for i in range(2))
    if type(seed) is not Tensor or seed.is_meta:
        return []
    return list(
        zip(seed.reshape(-1).tolist(), offset.reshape(-1).tolist(), strict=True)
    )


_REUSED = (
    "remat: a key was consumed twice, so both draws are of the same random bits: "
    "(seed, offset) = {row}\n  first: {first}\n  again: {here}\n"
    "Draw from keys that remat.random.split(key) returns, or from fold_in(key, n) with "
    "distinct n. If it is meant, consume remat.random.clone(key) the second time."
)
