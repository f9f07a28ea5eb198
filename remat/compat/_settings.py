"""What a whole program asks of its checkpoints: `set_checkpoint_early_stop` and debug.

Invariant: the settings are torch's own. A call that is traced is torch's, and reads
those; `_checkpoint` reads them in each call.
Rejected: settings of a thread. torch's hold for the process, and data-parallel threads
rely on that.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch.utils import checkpoint as theirs


_F = TypeVar("_F", bound=Callable[..., Any])


def with_signature_of(original: Callable[..., Any]) -> Callable[[_F], _F]:
    """Let a function show the arguments that another has in the torch that runs.

    The types are its own: torch gives none for some.
    """

    def shown(fn: _F) -> _F:
        types = inspect.unwrap(fn).__annotations__
        signature = inspect.signature(original)
        typed = [
            parameter.replace(annotation=types.get(parameter.name, Any))
            for parameter in signature.parameters.values()
        ]
        vars(fn)["__signature__"] = signature.replace(
            parameters=typed, return_annotation=types["return"]
        )
        return fn

    return shown


_set_early_stop = theirs.set_checkpoint_early_stop
_set_debug = theirs.set_checkpoint_debug_enabled


@with_signature_of(_set_early_stop)
@contextmanager
def set_checkpoint_early_stop(enable: bool) -> Iterator[None]:
    """Set whether recomputes end with the last value that is read.

    A call keeps what is set at its forward. This wins over the argument `early_stop`.

    Args:
        enable: whether they do. If not, a recompute runs the function to its end.

    Example:
        >>> import torch
        >>> from remat import compat
        >>> from remat.testing import count_ops
        >>> x = torch.ones(3, requires_grad=True)
        >>> with compat.set_checkpoint_early_stop(False):
        ...     out = compat.checkpoint(lambda x: x.exp().sum() * 2, x)
        >>> with count_ops() as ops:
        ...     out.backward()
        >>> ops["exp"], ops["sum"]
        (1, 1)
    """
    with _set_early_stop(enable):
        yield


@with_signature_of(_set_debug)
@contextmanager
def set_checkpoint_debug_enabled(enabled: bool | None) -> Iterator[None]:
    """Set whether errors of a recompute show the operations of both runs.

    A call keeps what is set at its forward. This wins over the argument `debug`.

    Args:
        enabled: whether they do; None to let each call say.

    Example:
        >>> from remat import compat
        >>> with compat.set_checkpoint_debug_enabled(True):
        ...     pass  # train
    """
    with _set_debug(enabled):
        yield
