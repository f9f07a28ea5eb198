"""Shows what `fit` does, if it takes long and somebody looks.

Invariant: nothing is written unless stderr is a terminal, and nothing before two
seconds are over. What was written is gone at the end.
Rejected: to write where a step of planning begins. One alone may take a minute.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from typing_extensions import override


_AFTER, _EVERY = 2.0, 0.5  # seconds
_CLEAR = "\r\x1b[K"

Tell = Callable[[str], None]


@contextmanager
def progress(label: str) -> Iterator[Tell]:
    """Yield what is told what is being done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    line = _Line(label)
    line.start()
    try:
        yield line.tell
    finally:
        line.end()


class _Line(threading.Thread):
    """A line that a thread writes again and again."""

    def __init__(self, label: str) -> None:
        super().__init__(daemon=True)
        self._begun, self._label, self._what = time.monotonic(), label, "recording"
        self._over, self._is_shown = threading.Event(), False
        self._to: Any = sys.stderr

    def tell(self, what: str) -> None:
        self._what = what

    @override
    def run(self) -> None:
        wait = _AFTER
        while not self._over.wait(wait):
            took = time.monotonic() - self._begun
            said = f"remat.fit of {self._label}: {self._what}, {took:.0f} s"
            self._to.write(f"{_CLEAR}{said}")
            self._to.flush()
            wait, self._is_shown = _EVERY, True

    def end(self) -> None:
        """Remove the line."""
        self._over.set()
        self.join()
        if self._is_shown:
            self._to.write(_CLEAR)
            self._to.flush()
