"""`checkpoint_sequential`; and `patch`, which puts ours in place of torch's.

Invariant: what `patch` puts there is an object of its own, which nobody has who
imported `remat.compat`. So what is taken out again is exactly what was put there, and
what was bound from there.
Rejected: to replace the code of torch's functions. Whoever holds one would call ours,
but so would `remat` where it means torch's, and Dynamo knows those functions.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as theirs

from remat._base.types import Fn
from remat._torch.tracing import eager_only
from remat.compat import _checkpoint
from remat.compat._checkpoint import Asked


@eager_only
def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Fn],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    *,
    preserve_rng_state: bool = True,
    **kwargs: Any,
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
        **kwargs: not accepted.

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
    if kwargs:
        names = ", ".join(kwargs)
        raise ValueError(f"remat: checkpoint_sequential has no argument {names}")
    is_module = isinstance(functions, nn.Sequential)
    chain = tuple(functions.children() if is_module else functions)
    count = len(chain)
    if not 0 < segments <= max(count, 1):
        message = f"remat: {segments} segments of {count} functions: use 1 to {count}"
        raise ValueError(message)
    size = count // segments
    last = size * (segments - 1)
    for start in range(0, last, size or 1):
        segment = _joined(chain[start : start + size])
        if torch.compiler.is_compiling():
            input = _checkpoint.checkpoint(segment, input)
        else:
            name = f"functions[{start}:{start + size}]"
            input = _checkpoint.call_checkpointed(
                segment, (input,), {}, Asked(), sys._getframe(1), name
            )
    return _joined(chain[last:])(input)


def _joined(functions: Sequence[Fn]) -> Fn:
    """Return a function that calls functions one after another.

    It refers to these only: a call searches all that its function refers to.
    """
    if len(functions) == 1:
        return functions[0]

    def segment(value: Any) -> Any:
        for function in functions:
            value = function(value)
        return value

    return segment


# --- In code that is written for torch's ---


@contextmanager
def patch() -> Iterator[None]:
    """Put the functions of `remat.compat` in place of torch's, inside a `with` block.

    That is: `checkpoint` and `checkpoint_sequential`, in `torch.utils.checkpoint` and
    in each module that has imported them from there, such as those of transformers,
    timm and diffusers. At the end they are taken out again, also where they were
    imported meanwhile. It holds for the process, and may be nested.

    It does not reach what holds torch's function elsewhere: a default argument, an
    attribute of an object or a class, a `functools.partial` that was made before. Such
    an object that is made inside the block keeps ours after it. So enable a library's
    checkpoints inside: `model.activation_checkpointing_enable()`.

    Example:
        >>> import torch
        >>> from remat import compat
        >>> theirs = torch.utils.checkpoint.checkpoint
        >>> with compat.patch():
        ...     torch.utils.checkpoint.checkpoint is theirs
        False
        >>> torch.utils.checkpoint.checkpoint is theirs
        True
    """
    who = object()
    _put(who)
    try:
        yield
    finally:
        _take_out(who)


def install() -> None:
    """Do what `patch` does, until `uninstall`. To call it again changes nothing.

    Example:
        >>> from remat import compat
        >>> compat.install()
        >>> compat.uninstall()
    """
    with _LOCK:
        if install not in _ASKING:
            _put(install)


def uninstall() -> None:
    """Undo `install`. Without it, this changes nothing.

    Example:
        >>> import torch
        >>> from remat import compat
        >>> theirs = torch.utils.checkpoint.checkpoint
        >>> compat.install()
        >>> compat.uninstall()
        >>> torch.utils.checkpoint.checkpoint is theirs
        True
    """
    with _LOCK:
        if install in _ASKING:
            _take_out(install)


# --- What is exchanged ---


def _copy(fn: Any) -> FunctionType:
    """Return another function that does the same."""
    copy = FunctionType(
        fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__, copy.__doc__ = fn.__kwdefaults__, fn.__doc__
    copy.__annotations__ = fn.__annotations__
    # By this name a pickle finds it.
    copy.__module__, copy.__qualname__ = __name__, f"_put_in_{fn.__name__}"
    vars(copy).update(vars(fn))
    globals()[copy.__qualname__] = copy
    return copy


_OURS: Mapping[Callable[..., Any], FunctionType] = {
    theirs.checkpoint: _copy(_checkpoint.checkpoint),
    theirs.checkpoint_sequential: _copy(checkpoint_sequential),
}
_FORTH = {id(old): new for old, new in _OURS.items()}
_BACK = {id(new): old for old, new in _OURS.items()}

# They compile torch's checkpoint, which they know, or mean it.
_LEFT_ALONE = "torch._dynamo.", "torch._functorch.", "remat."


def _exchange(new: Mapping[int, Any]) -> None:
    """Rebind names in all modules: `new` has by its id what replaces an object."""
    for module_name, module in [*sys.modules.items()]:
        if f"{module_name}.".startswith(_LEFT_ALONE):
            continue
        names = getattr(module, "__dict__", None)
        if type(names) is dict:
            bound = [*names.items()]  # another thread may add to them
            names.update((k, new[id(value)]) for k, value in bound if id(value) in new)


_LOCK = threading.RLock()
_ASKING: list[object] = []  # whoever asks for ours to be there, as `install` does


def _put(who: object) -> None:
    """Put ours there, for who asks."""
    with _LOCK:
        _ASKING.append(who)
        _exchange(_FORTH)


def _take_out(who: object) -> None:
    """Take ours out once nobody asks for them any more."""
    with _LOCK:
        _ASKING.remove(who)
        _exchange(_FORTH if _ASKING else _BACK)
