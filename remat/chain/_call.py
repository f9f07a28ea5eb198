"""Calls a chain: as one node, as the plain loop, or in a graph.

Invariant: the plain loop checks carries like the chain does. Code that works without
gradients works with them.
Rejected: a node for each step in the plain loop, for what a body may differentiate.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from remat._base import pytree
from remat._base.errors import hide_frames, label_of
from remat._partial.decide import warn_once
from remat._partial.options import DEFAULT
from remat._torch.tracing import constant_in_traces, makes_graph, must_inline
from remat._transform.api import PolicyLike, caller, remat
from remat._transform.function import evaluate_differentiably
from remat._transform.lowering import Lowering, lowering_of
from remat.chain import _steps
from remat.chain._actions import Schedule
from remat.chain._budget import LoopBudget, budget_of, schedule_within
from remat.chain._chain import Chain
from remat.chain._forward import Progress, call_of
from remat.chain._schedules import (
    Binomial,
    EveryStep,
    Online,
    Segments,
    Sqrt,
    ranges_of,
)
from remat.chain._steps import Columns, Live, Steps


Checkpoints: TypeAlias = int | Literal["all"] | Schedule | None
# What is stored, or how many bytes there may be.
Strategy: TypeAlias = Schedule | LoopBudget


def call_chain(
    fn: Any, args: tuple[Any, ...], steps: Steps, asked: Strategy, progress: Progress
) -> tuple[Any, Any]:
    """Run all steps; return the last carry and what was collected."""
    schedule = Sqrt() if isinstance(asked, LoopBudget) else asked
    if must_inline():
        # Of a trace by make_fx or the like, only if a graph is made for recomputes.
        is_in_graph = makes_graph() and steps.length is not None
        if torch.compiler.is_compiling() or is_in_graph:
            return _inlined(fn, args, steps, asked, progress)
    elif torch.is_grad_enabled():
        try:
            call = call_of(fn, args, steps, schedule, progress)
            if call is None:
                return _plain(fn, args, steps, progress)
            inputs, needs = call.take_inputs()
            if not call.reach.is_lazy:
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


def _plain(
    fn: Any, args: tuple[Any, ...], steps: Steps, progress: Progress
) -> tuple[Any, Any]:
    """Run all steps where nothing is differentiated."""
    carry, k = args[0], 0
    columns = Columns(steps)
    first = _steps.form_of(_live_of(carry))
    while k != steps.length and (steps.goes_on is None or steps.goes_on(fn, carry)):
        carry, y = steps.apply(fn, args, k, carry, steps.place(k))
        if steps.is_repeated:
            _steps.refuse_other_form(_live_of(carry), first, k, steps.label)
        columns.add(_live_of(y))
        k += 1
        if progress is not None:
            progress(k)
    return carry, columns.stacked().tree


def _live_of(tree: Any) -> Live:
    tensors, frame = _steps.tensors_and_frame(tree)
    return Live(tensors, frame, [False] * len(tensors))


def _inlined(
    fn: Any, args: tuple[Any, ...], steps: Steps, asked: Strategy, progress: Progress
) -> tuple[Any, Any]:
    """Run all steps in a graph, where segments are recomputed."""
    length = steps.length
    if length is None:
        raise NotImplementedError(_UNKNOWN.format(label=steps.label))
    if progress is not None:
        _warn(steps.label, "which runs without Python: progress= is not called")
    if steps.on_disk:
        _warn(steps.label, "which stores carries in memory: disk=True is not followed")
    if not isinstance(asked, Segments):  # a graph cannot follow others
        what = f"which cannot follow {type(asked).__name__} checkpoints"
        if isinstance(asked, LoopBudget):
            what = "where its budget is not kept"
        if lowering_of(DEFAULT) is Lowering.TRACED:
            _warn(steps.label, what + _SEGMENTS)
        asked = Sqrt()
    carry = args[0]
    rows: list[Any] = []
    for numbers in ranges_of(asked, length):
        segment = functools.partial(
            _steps.through, steps, fn, numbers=numbers, offset=0
        )
        carry, ys = remat(segment)(args, carry)
        rows += ys
    if steps.is_reversed:
        rows.reverse()
    return carry, tree_map(_stack, *rows)


@constant_in_traces
def _warn(label: str, what: str) -> None:
    warn_once(_IN_GRAPH.format(label=label, what=what))


def _stack(*leaves: Any) -> Any:
    return None if leaves[0] is None else torch.stack(leaves)


_UNKNOWN = (
    "remat: {label} cannot be compiled: how many steps there are depends on values. "
    "Leave it out of the compiled function (`torch.compiler.disable`)."
)
_IN_GRAPH = (
    "remat: {label} is a part of a graph, {what}. For that, leave it out of the graph "
    "(`torch.compiler.disable`)."
)
_SEGMENTS = (
    ": about sqrt(n) segments are recomputed. To choose how many, pass "
    "checkpoints=schedules.Uniform(k)"
)


# --- What users pass ---


def policed(f: Any, policy: PolicyLike) -> Any:
    """Return the function of a step, which saves what a policy says."""
    return f if policy is None else remat(f, policy=policy)


def label_for(kind: str, f: Any = None) -> str:
    """Return what errors call a chain: its kind, its function, the user's line."""
    if must_inline():
        return kind
    if f is not None:
        kind = f"{kind} of {getattr(f, '__qualname__', type(f).__qualname__)}"
    return label_of(kind, caller(3), "called")


def map_tree(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a pytree with another value in place of each leaf."""

    def mapped(leaf: Any) -> Any:
        return None if leaf is None else fn(leaf)

    if must_inline():  # Dynamo traces no other pytrees
        return tree_map(mapped, tree)
    return pytree.map_leaves(fn, tree)


def asked_for(
    taker: str,
    fns: Sequence[object],
    progress: object,
    checkpoints: Checkpoints,
    unroll: int,
    budget: int | str | None,
    policy: PolicyLike,
    disk: bool,
) -> Strategy:
    """Return what a user asks for: a budget, or a schedule; refuse what is wrong."""
    for f in fns:
        if not callable(f):
            raise TypeError(_NO_FUNCTION.format(taker=taker, got=type(f).__qualname__))
    if progress is not None and not callable(progress):
        raise TypeError(_NO_PROGRESS.format(got=progress))
    if budget is not None:
        others = {"checkpoints": checkpoints, "disk": disk or None}
        others |= {"unroll": None if unroll == 1 else unroll}
        return budget_of(taker, budget, policy, others)
    schedule = schedule_for(checkpoints, unroll)
    if taker != "while_loop" or isinstance(schedule, (Online, EveryStep)):
        return schedule
    if isinstance(schedule, Binomial):
        return Online(schedule.checkpoints)
    raise TypeError(_ONLINE.format(got=checkpoints))


def schedule_for(checkpoints: Checkpoints, unroll: int) -> Schedule:
    """Return the schedule that a user asks for."""
    if isinstance(checkpoints, Schedule):
        if unroll != 1:
            raise ValueError(_UNROLL.format(unroll=unroll, checkpoints=checkpoints))
        return checkpoints
    if checkpoints is None and unroll == 1:
        return Sqrt()
    if checkpoints is None or checkpoints == "all":
        return EveryStep(unroll)
    if isinstance(checkpoints, int) and not isinstance(checkpoints, bool):
        return Binomial(checkpoints, unroll)
    raise TypeError(_CHECKPOINTS.format(got=checkpoints))


def length_of(xs: Any, length: int | None, label: str) -> int:
    """Return the number of steps."""
    known = None if length is None else operator.index(length)
    if must_inline():  # Dynamo traces no other pytrees
        leaves = [("", leaf) for leaf in tree_leaves(xs) if leaf is not None]
    else:
        flat, treedef = pytree.flatten(xs)
        leaves = [*zip(pytree.paths(treedef), flat, strict=True)]
    for path, leaf in leaves:
        if not isinstance(leaf, Tensor) or not leaf.dim():
            got = f"a {type(leaf).__name__}"
            if isinstance(leaf, Tensor):
                got = "a tensor without dimensions"
            raise TypeError(_SCANNED.format(label=label, path=path, got=got))
        if known is None:
            known = len(leaf)
        elif known != len(leaf):
            message = _LENGTHS.format(label=label, path=path, got=len(leaf), had=known)
            raise ValueError(message)
    if known is None:
        raise ValueError(_NO_LENGTH.format(label=label))
    if known < 0:
        raise ValueError(f"remat: {label} has length={known}; use 0 or more")
    return known


_NO_FUNCTION = "remat: {taker} takes a function; got an object of type {got}"
_NO_PROGRESS = (
    "remat: progress= takes a function of the number of steps done; got {got!r}."
)
_UNROLL = (
    "remat: unroll={unroll} needs checkpoints that are a number, 'all' or None; got "
    "checkpoints={checkpoints!r}."
)
_CHECKPOINTS = (
    "remat: checkpoints={got!r}: use a number, 'all', None, or one of "
    "remat.chain.schedules."
)
_ONLINE = (
    "remat: while_loop takes checkpoints that are a number, 'all' or "
    "schedules.Online, as its length is not known; got {got!r}. Pass checkpoints=10, "
    "or a budget of bytes: budget='64 MiB'."
)
_SCANNED = (
    "remat: {label} scans `xs{path}`, which is {got}. Scan tensors whose first "
    "dimension counts the steps."
)
_LENGTHS = (
    "remat: {label} scans `xs{path}` of length {got}, where `length` or others are "
    "{had}."
)
_NO_LENGTH = "remat: {label} scans nothing. Pass `xs`, or `length=`."
