"""`fit`: what a step saves, so that it stays under a budget.

It makes data of the step (`simulate`), and `planning` a plan for it.

Invariant: the model, its gradients, its buffers and random streams stay as they are.
Rejected: to apply the plan at once. It is made for models that do not exist yet.
"""

import inspect
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from remat import nn as remat_nn
from remat._base import pytree
from remat._base.sizes import amount_in
from remat._base.types import Fn
from remat._fit.plan import Over, Plan
from remat._fit.planning import Planning
from remat._fit.simulate import TrainingStep, isolated, refuse_optimizer, resident
from remat._report.inputs import refuse_transforms
from remat._torch.shards import is_flat, shards_in
from remat.nn._applied import refuse_others
from remat.nn._followed import can_follow, has_sharded_parts
from remat.nn._select import as_selectors, refuse_no_name, selected


def fit(
    fn: Fn,
    /,
    *args: Any,
    budget: int | str,
    over: Over | None = None,
    select: Any = None,
    loss: Callable[[Any], Any] | None = None,
    device: torch.device | str | None = None,
    accumulates: bool | int = False,
    optimizer: Any = None,
    **kwargs: Any,
) -> Plan:
    """Choose which results a training step saves, so that its peak stays in a budget.

    A step is the forward, the loss and the backward. Its peak is the most bytes that
    are alive at any one time: parameters, buffers and arguments, gradients that exist
    or are made, and all that the step computes; with an optimizer its states, and what
    its step holds. What is not saved is recomputed when the backward reads it,
    operation by operation. Of the choices whose peak is at most the budget, the plan
    recomputes least.

    The step runs on fake tensors: nothing is computed or allocated, and the model may
    be on the meta device or fake. If a model that is there asks for values, or has an
    operation that refuses fake tensors, a copy runs on real tensors. The peak is that
    of the allocator, without memory that kernels of an accelerator take for themselves,
    and without fragmentation.

    Args:
        fn: the model; or a function that is passed the model, or tensors, and returns
            the loss or what the loss is made of.
        *args: its arguments, of the shapes of a step.
        budget: bytes, or a text such as "8GB" (8e9) or "8GiB".
        over: "step" for the whole step, "blocks" for a policy for each block of the
            model, "functional" for whole blocks under `torch.func.grad`. By default the
            step, but blocks for compiled and sharded models, which cannot follow a
            plan for a step.
        select: of a plan by blocks: which modules are blocks, as of `remat.nn.apply`.
            None for the repeated blocks: see `remat.nn.blocks`.
        loss: a function of the result of `fn` that returns the loss. By default the
            loss is the result itself, or its attribute `loss`. Of a result that is
            not a scalar, it is the sum.
        device: where tensors will be that are on the meta device now. By default, where
            the others are.
        accumulates: whether all parameters have gradients before the step, to which it
            adds, as with `zero_grad(set_to_none=False)`; or how many micro-batches an
            optimizer steps after. By default those have gradients that have them now.
        optimizer: a class such as `torch.optim.AdamW`, a function of parameters that
            returns an optimizer, or the optimizer. Its states are there from the first
            step on.
        **kwargs: its keyword arguments.

    Returns:
        The plan. `plan.apply(model)` has the model follow it. `print` and notebooks
        show a table.

    Raises:
        BudgetError: no plan stays under the budget. The message, and `error.least`, say
            which budget would do.
        CaptureError: the step reads values, and the model has none.
        ValueError: by blocks no model is passed, or it has no blocks; or something in
            the model is recomputed already, or sharded by FSDP1.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> import remat
        >>> def layer():
        ...     return nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
        >>> with torch.device("meta"):
        ...     model = nn.Sequential(*[layer() for _ in range(4)])
        >>> plan = remat.fit(model, torch.ones(256, 8), budget="350kB")
        >>> plan.peak <= 350_000 < plan.plain_peak
        True
        >>> plan.recomputed > 0
        True
    """
    refuse_transforms("fit", "the model")
    _refuse_arguments(fn, args, kwargs, loss)
    limit = amount_in(budget, "fit")
    step = TrainingStep(fn, args, kwargs, loss, _has_gradients(accumulates), optimizer)
    refuse_optimizer(optimizer, step)
    # Where a step runs whose model is on the meta device.
    devices = (t.device for t in resident(step) if not t.is_meta)
    where = next(devices, torch.device("cpu"))
    if device is not None:
        where = _available(device)
    if over not in (None, "step", "blocks", "functional"):
        raise ValueError(_OVER.format(over=over))
    model = step.model()
    if model is not None and has_sharded_parts(model):
        _refuse_shards(model, over)
    if over is None and model is not None and not can_follow(model):
        over = "blocks"
    if over in ("blocks", "functional"):
        blocks = _selected(model, select)
        _refuse_shards_inside(model, blocks)
    elif select is not None:
        raise ValueError(_SELECT)
    else:
        blocks = () if model is None else tuple(remat_nn.blocks(model))
    with _progress(type(model or fn).__name__) as tell, isolated():
        is_functional = over == "functional"
        made = Planning(step, where, limit, blocks, tell, is_functional=is_functional)
        if is_functional:
            return made.over_functional()
        return made.over_blocks() if over == "blocks" else made.over_step()


def _refuse_arguments(fn: Any, args: Any, kwargs: Any, loss: Any) -> None:
    """Refuse what is no model, no batch, or no loss of one result."""
    if not callable(fn):
        raise TypeError(_NO_FUNCTION.format(kind=type(fn).__name__))
    for leaf in pytree.flatten((args, kwargs))[0]:
        if isinstance(leaf, Iterator):
            raise TypeError(_ITERATOR.format(kind=type(leaf).__name__))
    if loss is None:
        return
    called = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        inspect.signature(called).bind(None)
    except TypeError as error:
        raise TypeError(_LOSS.format(kind=type(loss).__name__, error=error)) from None
    except ValueError:  # it has no signature
        return


def _has_gradients(accumulates: Any) -> bool:
    """Say whether a step begins with gradients, after its first micro-batch."""
    is_number = isinstance(accumulates, int)
    if not is_number or (accumulates < 1 and accumulates is not False):
        raise ValueError(_ACCUMULATES.format(got=accumulates))
    return accumulates is True or accumulates > 1


def _refuse_shards(model: nn.Module, over: Over | None) -> None:
    label = type(model).__name__
    if is_flat(model):
        raise ValueError(_FLAT.format(label=label))
    if over in ("step", "functional"):
        raise ValueError(_SHARDED.format(label=label, over=over))


def _refuse_shards_inside(model: Any, blocks: Sequence[str]) -> None:
    """Refuse blocks whose recompute would gather: it would differ from the forward."""
    for name in blocks:
        block = model.get_submodule(name)
        if any(shard is not block for shard in shards_in([block])):
            raise ValueError(_INSIDE.format(name=name))


def _selected(model: nn.Module | None, select: Any) -> Sequence[str]:
    """Return the blocks that a plan covers."""
    if model is None:
        raise ValueError(_NO_MODEL)
    refuse_others(model, "remat.fit")
    if select is not None:
        refuse_no_name("remat.fit", select)
        found = selected(model, as_selectors(select))
        return tuple(name for name, _, _ in found)
    blocks = remat_nn.blocks(model)
    if not blocks:
        raise ValueError(_NO_BLOCKS.format(model=type(model).__name__))
    return tuple(blocks)


_NO_FUNCTION = (
    "remat.fit: {kind} is no model and no function. Write fit(model, batch, "
    "budget=...)."
)
_ITERATOR = (
    "remat.fit: an argument is an iterator, a {kind}, which can be read only once. "
    "Pass the batch of one step, such as next(iter(loader))."
)
_LOSS = (
    "remat.fit: loss is a function of the result alone, got {kind}: {error}. Write "
    "loss=lambda result: criterion(result, target)."
)
_ACCUMULATES = (
    "remat.fit: accumulates is True, False, or how many micro-batches there are for a "
    "step of the optimizer, at least 1; got {got!r}."
)
_OVER = (
    'remat.fit: over is "step", "blocks", "functional" (for torch.func.grad) or None, '
    "got {over!r}"
)
_SHARDED = (
    "remat.fit: {label} has sharded parameters, and is planned by blocks: leave out "
    "over={over!r}."
)
_FLAT = (
    "remat.fit: {label} is sharded by FSDP1, which puts other parameters in place in "
    "each call. Plan for the model before it is wrapped, with over='blocks', or shard "
    "it with fully_shard."
)
_INSIDE = (
    "remat.fit: {name} has layers that are shards by themselves, and its recompute "
    "would gather them. Shard blocks as a whole, or select= modules without those."
)
_NO_MODEL = (
    "remat.fit: no model is passed. Pass the model itself, or a function and, among "
    "its arguments, the model: fit(step, model, batch, budget=...). A function without "
    "blocks has a plan for its step: leave out over='blocks'."
)
_NO_BLOCKS = (
    "remat.fit: this {model} has no repeated blocks. Say which modules may be "
    "recomputed: select='layers.*', a class, or a function of a module. Or plan the "
    "whole step, without over='blocks'."
)
_SELECT = (
    "remat.fit: select= says which modules are blocks, and a plan for a whole step "
    "knows no blocks. Leave it out, or pass over='blocks'."
)


def _available(asked: torch.device | str) -> torch.device:
    """Return a device; refuse one that torch cannot stand in for here."""
    try:
        device = torch.device(asked)
    except RuntimeError:
        message = f"remat.fit: device is a device of torch, got {asked!r}"
        raise ValueError(message) from None
    if device.type == "cpu":
        return device
    is_real = device.type != "meta"
    if is_real and torch.get_device_module(device.type).is_available():
        return device
    raise ValueError(_NO_DEVICE.format(device=device))


_NO_DEVICE = (
    "remat.fit: torch finds no {device} here, and autograd needs one also for tensors "
    "without memory. Leave out device=, or pass device='cpu': storages are as large "
    "there, but attention and convolutions may take other kernels."
)


# --- What is done, while it takes long ---


_AFTER, _EVERY = 2.0, 0.5  # seconds
_CLEAR = "\r\x1b[K"


@contextmanager
def _progress(label: str) -> Iterator[Callable[[str], None]]:
    """Yield what is told what is done, and shows it in a terminal if it takes long.

    Nothing is written in the first two seconds. What was written is gone at the end. A
    thread writes: a single step of planning may take a minute.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    to, begun, over = sys.stderr, time.monotonic(), threading.Event()
    said = ["recording"]

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
