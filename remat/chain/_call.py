"""Calls a chain: as one node, as the plain loop, or in a graph.

`_loops` and `_sequential` say what a step is, and call it.

Invariant: the plain loop checks carries like the chain does. Code that works without
gradients works with them.
Rejected: a node for each step in the plain loop, for what a body may differentiate.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from remat._base import pytree
from remat._base.labels import label_of
from remat._base.tracebacks import hide_frames
from remat._torch import must_inline
from remat._transform.api import PolicyLike, caller, remat
from remat._transform.function import evaluate_differentiably
from remat.chain._actions import Schedule
from remat.chain._chain import Chain
from remat.chain._columns import Collected, Columns
from remat.chain._forward import ChainCall, Progress
from remat.chain._steps import (
    Live,
    Steps,
    refuse_other_form,
    taken_apart,
    through,
)


def call_chain(
    fn: Any, args: tuple[Any, ...], steps: Steps, schedule: Schedule, progress: Progress
) -> tuple[Any, Any]:
    """Run all steps; return the last carry and what was collected."""
    if must_inline():
        return _inlined(fn, args, steps)
    if torch.is_grad_enabled():
        try:
            call = ChainCall(fn, args, steps, schedule, progress)
            inputs, needs = call.take_inputs()
            if not call.is_lazy:
                outs = evaluate_differentiably(Chain(call), inputs, needs)
                if outs is not None:
                    return call.join(outs, inputs)
        except Exception as error:
            hide_frames(error)
            raise
    return _plain(fn, args, steps, progress)


def _plain(
    fn: Any, args: tuple[Any, ...], steps: Steps, progress: Progress
) -> tuple[Any, Any]:
    """Run all steps where nothing is differentiated."""
    carry, k = args[steps.initial], 0
    columns = Columns(steps.length or 0, is_reversed=steps.is_reversed)
    first = _form_of(carry)
    while k != steps.length and (steps.goes_on is None or steps.goes_on(fn, carry)):
        carry, y = steps.apply(fn, args, k, carry, 0)
        if steps.is_repeated:
            refuse_other_form(_form_of(carry), first, k, steps.label)
        tensors, frame = taken_apart(y)
        columns.add(Collected(tensors, frame, [False] * len(tensors)))
        k += 1
        if progress is not None:
            progress(k)
    frame = columns.frame
    return carry, None if frame is None else frame.filled(columns.stacked())


def _form_of(carry: Any) -> Live:
    tensors, frame = taken_apart(carry)
    return Live(tensors, frame, ())


def _inlined(fn: Any, args: tuple[Any, ...], steps: Steps) -> tuple[Any, Any]:
    """Run all steps in a graph, where about sqrt(n) segments are recomputed."""
    length = steps.length
    if length is None:
        raise NotImplementedError(_UNKNOWN.format(label=steps.label))
    carry = args[steps.initial]
    rows: list[Any] = []
    width = math.isqrt(length - 1) + 1
    for start in range(0, length, width):
        numbers = range(start, min(start + width, length))
        segment = functools.partial(through, steps, fn, numbers=numbers, offset=0)
        carry, ys = remat(segment)(args, carry)
        rows += ys
    if steps.is_reversed:
        rows.reverse()
    return carry, tree_map(_stack, *rows)


def _unless_none(fn: Callable[[Any], Any], leaf: Any) -> Any:
    return None if leaf is None else fn(leaf)


def _stack(*leaves: Any) -> Any:
    return None if leaves[0] is None else torch.stack(leaves)


def policed(f: Any, policy: PolicyLike) -> Any:
    """Return the function of a step, which saves what a policy says."""
    return f if policy is None else remat(f, policy=policy)


def label_for(kind: str, f: Any = None) -> str:
    """Return what errors call a chain: its kind, its function, the user's line."""
    if must_inline():
        return kind
    if f is not None:
        kind = f"{kind} of {getattr(f, '__qualname__', type(f).__qualname__)}"
    return label_of(kind, caller(3))


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a pytree with another value in place of each leaf."""
    if must_inline():  # Dynamo traces no other pytrees
        return tree_map(functools.partial(_unless_none, fn), tree)
    return pytree.map_leaves(fn, tree)


def check_function(kind: str, f: object) -> None:
    """Refuse what cannot be called.

    Raises:
        TypeError: it is not callable.
    """
    if not callable(f):
        raise TypeError(f"remat: {kind} takes a function; got {f!r}")


_UNKNOWN = (
    "remat: {label} cannot be compiled: how many steps there are depends on values. "
    "Leave it out of the compiled function (`torch.compiler.disable`)."
)
