"""Calls a chain: as one node, as the plain loop, or in a graph.

Invariant: the plain loop checks carries like the chain does. Code that works without
gradients works with them.
Rejected: a node for each step in the plain loop, for what a body may differentiate.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map

from remat._base import pytree
from remat._base.labels import label_of
from remat._base.tracebacks import hide_frames
from remat._partial.decide import warn_once
from remat._partial.options import DEFAULT
from remat._torch import constant_in_traces, makes_graph, must_inline
from remat._transform.api import PolicyLike, caller, remat
from remat._transform.function import evaluate_differentiably
from remat._transform.lowering import Lowering, lowering_of
from remat.chain._actions import Schedule
from remat.chain._budget import LoopBudget
from remat.chain._chain import Chain
from remat.chain._forward import ChainCall, Progress
from remat.chain._segments import Segments, Sqrt, ranges_of
from remat.chain._steps import (
    Live,
    Steps,
    refuse_other_form,
    taken_apart,
    through,
)
from remat.chain._stored import Columns
from remat.chain._within import schedule_within


# What is stored, or how many bytes there may be.
Asked: TypeAlias = Schedule | LoopBudget


def call_chain(
    fn: Any, args: tuple[Any, ...], steps: Steps, asked: Asked, progress: Progress
) -> tuple[Any, Any]:
    """Run all steps; return the last carry and what was collected."""
    schedule = Sqrt() if isinstance(asked, LoopBudget) else asked
    if must_inline():
        if _is_in_graph(steps):
            return _inlined(fn, args, steps, asked, progress)
    elif torch.is_grad_enabled():
        try:
            call = ChainCall(fn, args, steps, schedule, progress)
            inputs, needs = call.take_inputs()
            if not call.is_lazy:
                warning = ""
                if isinstance(asked, LoopBudget) and True in needs:
                    found = schedule_within(asked, call, (fn, args), inputs, needs)
                    call.schedule, warning = found
                outs = evaluate_differentiably(Chain(call), inputs, needs)
                if warning:
                    warn_once(warning)
                if outs is not None:
                    return call.join(outs, inputs)
        except Exception as error:
            hide_frames(error)
            raise
    return _plain(fn, args, steps, progress)


def _is_in_graph(steps: Steps) -> bool:
    """Say whether a graph is made that is to hold recomputes."""
    if torch.compiler.is_compiling():
        return True
    return makes_graph() and steps.length is not None


def _plain(
    fn: Any, args: tuple[Any, ...], steps: Steps, progress: Progress
) -> tuple[Any, Any]:
    """Run all steps where nothing is differentiated."""
    carry, k = args[0], 0
    columns = Columns(steps)
    first = _form_of(carry)
    while k != steps.length and (steps.goes_on is None or steps.goes_on(fn, carry)):
        carry, y = steps.apply(fn, args, k, carry, steps.place(k))
        if steps.is_repeated:
            refuse_other_form(_form_of(carry), first, k, steps.label)
        columns.add(_form_of(y))
        k += 1
        if progress is not None:
            progress(k)
    return carry, columns.stacked().tree


def _form_of(tree: Any) -> Live:
    tensors, frame = taken_apart(tree)
    return Live(tensors, frame, [False] * len(tensors))


def _inlined(
    fn: Any, args: tuple[Any, ...], steps: Steps, asked: Asked, progress: Progress
) -> tuple[Any, Any]:
    """Run all steps in a graph, where segments are recomputed."""
    length = steps.length
    if length is None:
        raise NotImplementedError(_UNKNOWN.format(label=steps.label))
    if progress is not None:
        _warn(_PROGRESS.format(label=steps.label))
    carry = args[0]
    rows: list[Any] = []
    for numbers in ranges_of(_segments_for(asked, steps.label), length):
        segment = functools.partial(through, steps, fn, numbers=numbers, offset=0)
        carry, ys = remat(segment)(args, carry)
        rows += ys
    if steps.is_reversed:
        rows.reverse()
    return carry, tree_map(_stack, *rows)


def _segments_for(asked: Asked, label: str) -> Segments:
    """Return the segments of a graph, which cannot follow other schedules."""
    if isinstance(asked, Segments):
        return asked
    if lowering_of(DEFAULT) is Lowering.TRACED:
        kind = type(asked).__name__
        why, what = f"which cannot follow {kind} checkpoints", "follow them"
        if isinstance(asked, LoopBudget):
            why, what = "where no step is measured: its budget is not kept", _KEEP
        _warn(_SEGMENTS.format(label=label, why=why, what=what))
    return Sqrt()


@constant_in_traces
def _warn(message: str) -> str:
    warn_once(message)
    return message


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


def check_callable(kind: str, fns: Sequence[object], progress: object) -> None:
    """Refuse functions of a loop, and a `progress`, that cannot be called."""
    for f in fns:
        if not callable(f):
            got = type(f).__qualname__
            raise TypeError(
                f"remat: {kind} takes a function; got an object of type {got}"
            )
    if progress is not None and not callable(progress):
        raise TypeError(_NO_PROGRESS.format(got=progress))


_NO_PROGRESS = (
    "remat: progress= takes a function of the number of steps done; got {got!r}."
)
_UNKNOWN = (
    "remat: {label} cannot be compiled: how many steps there are depends on values. "
    "Leave it out of the compiled function (`torch.compiler.disable`)."
)
_KEEP = "keep the budget"
_SEGMENTS = (
    "remat: {label} is a part of a graph, {why}. About sqrt(n) segments are recomputed "
    "instead. To choose how many, pass checkpoints=schedules.Uniform(k); to {what}, "
    "leave it out of the graph (`torch.compiler.disable`)."
)
_PROGRESS = (
    "remat: {label} is a part of a graph, which runs without Python: progress= is not "
    "called. Leave it out of the graph to see it (`torch.compiler.disable`)."
)
