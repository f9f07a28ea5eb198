"""The errors that a user of remat may want to catch.

All are `RematError`, which is a `RuntimeError`.

Rejected: an error of its own for `remat.compat`. Code that catches torch's
`CheckpointError` would have to know which of the two recomputes.
"""

from torch.utils.checkpoint import CheckpointError
from typing_extensions import override


class RematError(RuntimeError):
    """Base class of the errors that remat raises itself."""


class RecomputeError(RematError, CheckpointError):
    """The recompute did something other than the forward did.

    It is a `torch.utils.checkpoint.CheckpointError`, too.
    """


class MutationError(RematError):
    """A tensor or an array that the recompute reads was changed in place."""


class CaptureError(RematError):
    """The function uses outside state that cannot be made an input of the call."""


class BudgetError(RematError):
    """No plan stays under a budget.

    Attributes:
        least: the least number of bytes for which a plan was found.
    """

    def __init__(self, message: str, least: int) -> None:
        super().__init__(message, least)
        self.least = least

    @override
    def __str__(self) -> str:
        return str(self.args[0])


class OffloadError(RematError):
    """A residual could not be offloaded: there is no room, or no way."""


class RandomnessError(RematError):
    """A draw was refused: from a global stream, where only keys may be drawn from."""


class KeyReuseError(RandomnessError):
    """A key was consumed twice, so that two draws are the same."""


# Tracebacks name them as users import them.
for _error in (RematError, *RematError.__subclasses__(), KeyReuseError):
    _error.__module__ = "remat"


def missing(package: str) -> str:
    """Say that a package is not installed, and what to run.

    >>> missing("scipy")
    'scipy is not installed (pip install scipy)'
    """
    return f"{package} is not installed (pip install {package})"
