"""The operations of a forward and of its recompute, for errors of `debug=True`.

`_checkpoint` runs the function under the two modes of a `Log`. If the recompute
differs, `describe` adds to the error what both ran around the first difference.

Invariant: a log holds no tensor. Rejected: to run the function twice more when an error
is raised (`check_replay`). It compares values, too, but the difference may not come
again.
"""

import itertools
from typing import Any

from typing_extensions import override

from remat._base.absent import IGNORED
from remat._base.source import user_line
from remat._report.bitwise import Operation, around, same_statics, statics_of
from remat._torch import LeanDispatchMode, call_kernel, eager_only


class Log:
    """The operations of both runs.

    Attributes:
        forward: the mode for the forward.
        recompute: the mode for a recompute.
    """

    def __init__(self) -> None:
        self.forward, self.recompute = _Operations(), _Operations()

    def describe(self) -> str:
        """Write the operations of both runs around the first that differs."""
        then, now = self.forward.steps, self.recompute.steps
        pairs = itertools.zip_longest(then, now)
        i = next((k for k, pair in enumerate(pairs) if _differ(*pair)), len(then))
        lines = [*around("forward", then, i), *around("recompute", now, i)]
        return "\n".join([_TITLE, *lines])


_TITLE = (
    "remat: the operations of the forward and of the recompute, around the first that "
    "differs. A recompute ends at the difference, or with the last value that is read."
)


class _Operations(LeanDispatchMode):
    """Notes each operation of a run, and the user's line."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Operation] = []

    @override
    def __enter__(self) -> Any:
        self.steps.clear()  # a retained graph is recomputed again
        return super().__enter__()

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func not in IGNORED:
            self.steps.append(Operation(func, statics_of((args, kwargs)), user_line()))
        return call_kernel(func, *args, **kwargs)


def _differ(then: Operation | None, now: Operation | None) -> bool:
    if then is None or now is None or then.func is not now.func:
        return True
    return not same_statics(now.statics, then.statics)
