"""Leaves out of stdout what a solver writes there.

Invariant: what others write comes through, a little later.
Rejected: an option of the solver. HiGHS writes these lines whatever its options are.
"""

import ctypes
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_lines_of_highs() -> Iterator[None]:
    """Leave out of stdout what HiGHS writes there in C, whatever its options are.

    What others write meanwhile comes a little later.
    """
    if os.name != "posix":
        yield
        return
    flush = ctypes.CDLL(None).fflush
    sys.stdout.flush()
    flush(None)
    with tempfile.TemporaryFile() as written:
        stdout = os.dup(1)
        os.dup2(written.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(stdout, 1)
            written.seek(0)
            for line in written.readlines():
                if not line.startswith(b"HighsMipSolver"):
                    os.write(1, line)
            os.close(stdout)
