"""Settings of the process that choose kernels or dtypes.

Invariant: a reading is a list of plain values, equal to another exactly if the settings
are. Settings that this torch does not have are left out.
Rejected: reading all of `torch.backends`. What is here changes what a function
computes, and is read on every call.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from remat._compat import FLAGS


Settings = list[Any]
_GETTERS: list[Callable[[], Any]] = [get for get, _ in FLAGS]


def read() -> Settings:
    """Return the settings as they are."""
    return [get() for get in _GETTERS]


@contextmanager
def settings(then: Settings) -> Iterator[None]:
    """Run the body under the settings that `read` returned."""
    now = read()
    _write(now, then)
    try:
        yield
    finally:
        _write(read(), now)


def _write(now: Settings, then: Settings) -> None:
    for (_, put), before, value in zip(FLAGS, now, then, strict=True):
        if before != value:
            put(value)
