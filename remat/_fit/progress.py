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


_AFTER, _EVERY = 2.0, 0.5  # seconds
_CLEAR = "\r\x1b[K"

Tell = Callable[[str], None]


@contextmanager
def progress(label: str) -> Iterator[Tell]:
    """Yield what is told what is being done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    to, begun, said, over = (
        sys.stderr,
        time.monotonic(),
        ["recording"],
        threading.Event(),
    )

    def show() -> None:
        wait = _AFTER
        while not over.wait(wait):
            took = time.monotonic() - begun
            to.write(f"{_CLEAR}remat.fit of {label}: {said[-1]}, {took:.0f} s")
            to.flush()
            wait = _EVERY
        if wait == _EVERY:
            to.write(_CLEAR)
            to.flush()

    thread = threading.Thread(target=show, name="remat.fit", daemon=True)
    thread.start()
    try:
        yield said.append
    finally:
        over.set()
        thread.join()
