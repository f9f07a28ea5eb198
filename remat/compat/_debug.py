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

from remat._base.observer import Observer
from remat._base.source import user_line
from remat._report.bitwise import RunOperation, around, same_statics, statics_of


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


class _Operations(Observer):
    """Notes each operation of a run, and the user's line."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[RunOperation] = []

    @override
    def __enter__(self) -> Any:
        self.steps.clear()  # a retained graph is recomputed again
        return super().__enter__()

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Noted first: an operation may raise.
        self.steps.append(RunOperation(func, statics_of((args, kwargs)), user_line()))
        return super().run(func, args, kwargs)


def _differ(then: RunOperation | None, now: RunOperation | None) -> bool:
    if then is None or now is None or then.func is not now.func:
        return True
    return not same_statics(now.statics, then.statics)
