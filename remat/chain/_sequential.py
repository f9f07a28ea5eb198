"""`sequential`: functions one after the other, each given the result of the one before.

Users call it, for `nn.Sequential` and lists of layers.

Invariant: the value is that of calling the functions in a loop.
Rejected: to merge small functions into one. Who wants larger segments says so.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from remat._base.errors import note
from remat._transform.api import PolicyLike
from remat.chain import _call
from remat.chain._forward import Progress
from remat.chain._loops import Checkpoints, schedule_for
from remat.chain._schedules import Uniform
from remat.chain._steps import Steps


def sequential(
    fns: Iterable[Callable[..., Any]],
    x: Any,
    *args: Any,
    segments: int | None = None,
    checkpoints: Checkpoints = None,
    budget: None = None,
    disk: bool = False,
    policy: PolicyLike = None,
    progress: Progress = None,
    **others: Any,
) -> Any:
    """Call functions one after the other, each with the result of the one before.

    The value is that of `for fn in fns: x = fn(x, *args)`. The forward stores only some
    of the values between the functions. The backward calls functions again, from these
    on, and reverses them one after the other. Gradients reach `x`, `args`, and the
    parameters of the functions.

    Args:
        fns: functions or modules, in a list, an `nn.Sequential` or an `nn.ModuleList`.
            A module may update its buffers, as batch normalization does.
        x: what the first function is given, a pytree. Values between functions may have
            other shapes.
        *args: what each function is given besides.
        segments: into how many equal segments to cut the list. The backward calls the
            functions of a segment again, and holds the residuals of all of them.
        checkpoints: as of `scan`; not together with `segments`. `None` with no
            `segments`: about sqrt(n) segments.
        budget: not taken: a model in a row with a budget is `remat.fit`.
        disk: as of `scan`.
        policy: as of `scan`.
        progress: as of `scan`.
        **others: not taken: an error says what to write for torch's names.

    Returns:
        The result of the last function.

    Raises:
        TypeError: `fns` holds something that cannot be called, there is a budget, or an
            argument of another name.
        ValueError: both `segments` and `checkpoints` are given, or `segments` is not a
            positive number.

    Source: Chen, Xu, Zhang and Guestrin, "Training deep nets with sublinear memory
    cost", arXiv 1604.06174, 2016.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from remat import chain
        >>> layers = nn.Sequential(*[nn.Linear(8, 8) for _ in range(16)])
        >>> y = chain.sequential(layers, torch.ones(2, 8), checkpoints=4)
        >>> y.sum().backward()
        >>> layers[0].weight.grad.shape
        torch.Size([8, 8])
    """
    if others:
        raise TypeError(_unexpected(*others, x=x))
    layers = (*fns,)
    for i, fn in enumerate(layers):
        if not callable(fn):
            raise TypeError(f"remat: fns[{i}] of sequential is not callable: {fn!r}")
    _call.check_callable("sequential", (), progress)
    if budget is not None:
        raise TypeError(_BUDGET.format(budget=budget))
    if segments is not None and checkpoints is not None:
        raise ValueError(_BOTH.format(segments=segments, checkpoints=checkpoints))
    chosen = checkpoints if segments is None else Uniform(segments)
    schedule = schedule_for(chosen, 1)
    if not layers:
        return x
    name = type(fns).__name__ if isinstance(fns, nn.Module) else "functions"
    label = _call.label_for(f"sequential of {len(layers)} {name}")
    steps = Steps(_apply_layer, label, len(layers), is_repeated=False, on_disk=disk)
    called = tuple(_call.policed(fn, policy) for fn in layers)
    try:
        return _call.call_chain(called, (x, args), steps, schedule, progress)[0]
    except (AttributeError, TypeError) as error:
        if type(x) is int and args:  # as checkpoint_sequential takes them
            note(error, _ORDER.format(segments=x))
        raise


def _unexpected(name: str, *_: str, x: Any) -> str:
    """Say what to write in place of an argument of `checkpoint_sequential`."""
    advice = _NOT_NEEDED if name in ("use_reentrant", "preserve_rng_state") else ""
    if name == "input":
        segments = x if type(x) is int else "n"
        advice = f" Write sequential(functions, input, segments={segments})."
    return f"remat: sequential() got an unexpected keyword argument {name!r}.{advice}"


def _apply_layer(
    layers: Sequence[Any], args: Sequence[Any], k: int, carry: Any, place: int
) -> tuple[Any, None]:
    del place
    return layers[k](carry, *args[1]), None


_NOT_NEEDED = " It is not needed: leave it out."
_ORDER = (
    "remat: the number of segments is no second argument here: write "
    "sequential(functions, input, segments={segments})."
)
_BOTH = (
    "remat: sequential got segments={segments} and checkpoints={checkpoints!r}: pass "
    "one of them."
)
_BUDGET = (
    "remat: sequential got budget={budget!r}. For a model in a row with a budget write "
    "remat.fit(model, batch, budget={budget!r}), or pass checkpoints= here."
)
