"""`checkpoint_sequential`: a sequence of functions, checkpointed in segments.

Invariant: a segment refers to its own functions only. A call searches all that its
function refers to, so that a list of all would be searched once for each segment.
Rejected: to checkpoint the last segment as well. Its recompute would come at once.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as theirs

from remat._base.types import Fn
from remat._torch import eager_only
from remat.compat._checkpoint import Asked, call, checkpoint, with_signature_of


@eager_only
@with_signature_of(theirs.checkpoint_sequential)
def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Fn],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
    **unknown: Any,
) -> Any:
    """Call functions one after another, and recompute all segments but the last.

    Args:
        functions: an `nn.Sequential`, or a list of functions or modules. Each takes
            what the one before returns.
        segments: how many segments of equal length to make. The last one is longer if
            the functions cannot be divided.
        input: of the first function.
        use_reentrant: not needed: see `checkpoint`.
        preserve_rng_state: without effect: see `checkpoint`.
        **unknown: not accepted.

    Returns:
        What the last function returns.

    Raises:
        ValueError: there are not so many functions, or other arguments.

    Source: `torch.utils.checkpoint`. Chen et al., "Training Deep Nets with Sublinear
    Memory Cost" (2016).

    Example:
        >>> import torch
        >>> from remat import compat
        >>> from remat.testing import count_ops
        >>> x = torch.ones(3, requires_grad=True)
        >>> with count_ops() as ops:
        ...     compat.checkpoint_sequential([torch.sin] * 6, 3, x).sum().backward()
        >>> ops["sin"], ops["cos"]
        (8, 6)
    """
    del use_reentrant, preserve_rng_state
    if unknown:
        names = ", ".join(unknown)
        message = f"remat: checkpoint_sequential has no argument {names}"
        raise ValueError(message)
    is_module = isinstance(functions, nn.Sequential)
    chain = tuple(functions.children() if is_module else functions)
    count = len(chain)
    if not 0 < segments <= max(count, 1):
        message = f"remat: {segments} segments of {count} functions: use 1 to {count}"
        raise ValueError(message)
    size, start = count // segments, 0
    for _ in range(segments - 1):
        segment = _joined(chain[start : start + size])
        if torch.compiler.is_compiling():
            input = checkpoint(segment, input)
        else:
            name = f"functions[{start}:{start + size}]"
            input = call(segment, (input,), {}, Asked(), sys._getframe(1), name)
        start += size
    return _joined(chain[start:])(input)


def _joined(functions: Sequence[Fn]) -> Fn:
    """Return a function that calls functions one after another."""
    if len(functions) == 1:
        return functions[0]

    def segment(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return segment
