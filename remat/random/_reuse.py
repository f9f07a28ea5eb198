"""Find keys that are consumed twice: in a block, or in the whole program.

`check_key_reuse` checks a block of one thread. `debug_key_reuse` checks all threads.
Consumption is counted by the bits of the key, so copies of a key count together.

Invariant: where nothing is checked, a draw looks at one empty list and does no more:
`_key.checks`. Who asks for a check imports this file.
Rejected: marking the key object as consumed. Equal keys draw equal numbers even if they
are different objects, and a batched key is a new object each time.
"""

import functools
import inspect
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from typing import Any, TypeVar

from torch import Tensor
from typing_extensions import override

from remat._base.context import is_recomputing
from remat._base.errors import KeyReuseError
from remat._base.source import user_line
from remat._torch.levels import base_tensor
from remat._torch.tracing import must_inline
from remat.random import _key


F = TypeVar("F", bound=Callable[..., Any])


class _Consumed:
    """The keys consumed so far: where each was first, and how often it may be again."""

    def __init__(self) -> None:
        self.lock = threading.Lock()  # threads of a program share a ledger
        self.used: dict[tuple[int, int], str] = {}
        self.allowed: Counter[tuple[int, int]] = Counter()


# Where a block counts, and where `debug_key_reuse` has all others count.
_of_block: ContextVar[_Consumed | None] = ContextVar("_of_block", default=None)
_of_program: _Consumed | None = None


def _check_program(ledger: _Consumed | None) -> None:
    """Count in a ledger from now on, or no more."""
    global _of_program
    if ledger is not None and _of_program is None:
        _key.checks.append(_count)
    if ledger is None and _of_program is not None:
        _key.checks.pop()
    _of_program = ledger


class _CheckedBlock(AbstractContextManager[None]):
    """A block that checks keys. It may be entered again inside itself."""

    def __init__(self) -> None:
        self._tokens: list[Token[_Consumed | None]] = []

    @override
    def __enter__(self) -> None:
        ledger = _of_block.get() or _of_program or _Consumed()
        self._tokens.append(_of_block.set(ledger))
        _key.checks.append(_count)

    @override
    def __exit__(self, *exception: object) -> None:
        _key.checks.pop()
        _of_block.reset(self._tokens.pop())

    def __call__(self, fn: F) -> F:
        return in_block(_CheckedBlock, fn, _RUNS_LATER, "__qualname__")


def in_block(block: Callable[[], Any], fn: F, refusal: str, name: str) -> F:
    """Return a function that runs in a new block in each call."""
    asks = (
        inspect.isgeneratorfunction,
        inspect.iscoroutinefunction,
        inspect.isasyncgenfunction,
    )
    if any(ask(f) for ask in asks for f in (fn, type(fn).__call__)):
        raise TypeError(refusal.format(name=getattr(fn, name, fn)))

    @functools.wraps(fn)
    def called(*args: Any, **kwargs: Any) -> Any:
        with block():
            return fn(*args, **kwargs)

    return called  # pyrefly: ignore[bad-return]


_RUNS_LATER = (
    "remat: {name} is a generator or coroutine function. Its body runs after its "
    "call, so it would not be checked. Write `with remat.random.check_key_reuse():` "
    "inside the function, around the draws."
)


def check_key_reuse() -> _CheckedBlock:
    """Raise an error when a key is consumed twice: the numbers would be the same.

    Samplers and :func:`split` consume a key. Each key of an array counts by itself.
    :func:`fold_in` does not consume its key. But two keys that it makes from the same
    key and number are equal, and count as one key. A :func:`clone` may be consumed in
    addition to the original. A recompute by :func:`remat.remat`, or of a dropout mask,
    is not a reuse. A recompute by ``torch.utils.checkpoint`` is.

    The check reads the values of keys. On an accelerator this waits for the device, so
    use it in tests and for debugging. It sees the keys that this thread consumes. It
    does not see keys that ``torch.compile`` or ``make_fx`` trace, nor draws of compiled
    code. Nested blocks count together. :func:`debug_key_reuse` checks a whole program.

    The result is a context manager, and a decorator of functions other than generator
    and coroutine functions.

    Raises:
        KeyReuseError: in the block, on the second consumption. The message names both
            source lines.
        TypeError: the decorated function is a generator or coroutine function.

    Example:
        >>> from remat import random
        >>> key = random.key(42)
        >>> with random.check_key_reuse():  # doctest: +ELLIPSIS
        ...     x = random.normal(key, (3,))
        ...     y = random.uniform(key, (3,))
        Traceback (most recent call last):
        remat.KeyReuseError: remat: a key was consumed twice, ...
    """
    return _CheckedBlock()


class debug_key_reuse(AbstractContextManager[None]):  # noqa: N801
    """Check the whole program for keys that are consumed twice, or stop checking it.

    A call switches the check on or off at once, for all threads. It may be a statement,
    as a first line of a program, or the head of a ``with`` block. Then the check is as
    before at the end of the block. It is off by default, and costs nothing then.

    What counts as a reuse is as in :func:`check_key_reuse`. The check remembers each
    key that is consumed, about 200 bytes each, until it is switched off. A
    :func:`check_key_reuse` block inside counts together with the program.

    Args:
        enabled: whether to check. If the program is checked already, True goes on with
            the keys consumed so far.

    Raises:
        TypeError: ``enabled`` is not a bool.
        KeyReuseError: from then on, on the second consumption of a key. The message
            names both source lines.

    Source: JAX's ``jax_debug_key_reuse`` and ``jax.debug_key_reuse``.

    Example:
        >>> from remat import random
        >>> key = random.key(42)
        >>> with random.debug_key_reuse(True):  # doctest: +ELLIPSIS
        ...     x = random.normal(key, (3,))
        ...     y = random.uniform(key, (3,))
        Traceback (most recent call last):
        remat.KeyReuseError: remat: a key was consumed twice, ...
    """

    def __init__(self, enabled: bool) -> None:
        if not isinstance(enabled, bool):
            raise TypeError(_NO_BOOL.format(got=enabled))
        self._before = _of_program
        _check_program((self._before or _Consumed()) if enabled else None)

    @override
    def __exit__(self, *exception: object) -> None:
        _check_program(self._before)


_NO_BOOL = "remat: debug_key_reuse({got!r}): pass True to check keys, or False to stop."


def _count(data: Tensor, *, is_cloned: bool = False) -> None:
    """Count each key of `data` as consumed, or allow it to be consumed once more."""
    if must_inline() or is_recomputing():
        return
    ledger = _of_block.get() or _of_program
    if ledger is None:
        return
    rows = _rows(data)
    here = user_line() if rows else ""
    with ledger.lock:
        if is_cloned:
            ledger.allowed.update(rows)
            return
        for row in rows:
            if row not in ledger.used:
                ledger.used[row] = here
            elif ledger.allowed[row]:
                ledger.allowed[row] -= 1
            else:
                first = ledger.used[row]
                raise KeyReuseError(_REUSED.format(row=row, first=first, here=here))


def _rows(data: Tensor) -> list[tuple[int, int]]:
    """Return seed and offset of each key, without wrappers; none if without values."""
    # Split first: under the wrappers of vmap the last dimension may be another one.
    seed, offset = (base_tensor(data[..., i]).detach() for i in range(2))
    if type(seed) is not Tensor or seed.is_meta:
        return []
    return list(
        zip(seed.reshape(-1).tolist(), offset.reshape(-1).tolist(), strict=True)
    )


_REUSED = (
    "remat: a key was consumed twice, so both draws read the same random bits: "
    "(seed, offset) = {row}\n  first: {first}\n  again: {here}\n"
    "Draw from keys that remat.random.split(key) returns, or from fold_in(key, n) with "
    "distinct n. To reuse a key on purpose, consume remat.random.clone(key) the second "
    "time."
)
