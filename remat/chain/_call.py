"""Calls a chain: as one node, as the plain loop, or in a graph.

Under a budget of bytes, some steps are measured first, which tells the schedule.

Invariant: the plain loop checks carries like the chain does. Code that works without
gradients works with them.
Invariant: steps that are alike are measured once. What cannot be measured runs without
a budget, and a warning says so, once the steps have run: an error in them is raised by
the chain. To tell what is alike, nothing of the user's is held: code and settings,
shapes, and a hash of the numbers that a step refers to.
Rejected: a node for each step in the plain loop, for what a body may differentiate.
Rejected: to measure each call. It takes as long as some sixty steps on fake tensors.
Rejected: the identity of objects. A closure is a new one in each call.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from remat import _torch
from remat._ambient.ambient import Ambient
from remat._base import pytree
from remat._base.errors import BudgetError, hide_frames, label_of
from remat._base.sizes import in_unit
from remat._partial.cache import metas_of
from remat._partial.decide import warn_once
from remat._partial.options import DEFAULT
from remat._transform.api import PolicyLike, caller, remat
from remat._transform.function import evaluate_differentiably
from remat._transform.lowering import Lowering, lowering_of
from remat.chain import _steps
from remat.chain._actions import Schedule
from remat.chain._budget import TOGETHER, LoopBudget, StepBytes, chosen, measured
from remat.chain._chain import Chain
from remat.chain._forward import ChainCall, Progress, call_of
from remat.chain._schedules import Online, Segments, Sqrt, ranges_of
from remat.chain._steps import Columns, Live, Steps
from remat.policies import Policy


# What is stored, or how many bytes there may be.
Strategy: TypeAlias = Schedule | LoopBudget


def call_chain(
    fn: Any, args: tuple[Any, ...], steps: Steps, asked: Strategy, progress: Progress
) -> tuple[Any, Any]:
    """Run all steps; return the last carry and what was collected."""
    schedule = Sqrt() if isinstance(asked, LoopBudget) else asked
    if _torch.must_inline():
        # Of a trace by make_fx or the like, only if a graph is made for recomputes.
        is_in_graph = _torch.makes_graph() and steps.length is not None
        if torch.compiler.is_compiling() or is_in_graph:
            return _inlined(fn, args, steps, asked, progress)
    elif torch.is_grad_enabled():
        try:
            call = call_of(fn, args, steps, schedule, progress)
            if call is None:
                return _plain(fn, args, steps, progress)
            inputs, needs = call.take_inputs()
            if not call.is_lazy:
                warning = ""
                if isinstance(asked, LoopBudget) and True in needs:
                    found = _schedule_within(asked, call, (fn, args), inputs, needs)
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
        _warn(_PROGRESS.format(label=steps.label))
    if steps.on_disk:
        _warn(_DISK.format(label=steps.label))
    carry = args[0]
    rows: list[Any] = []
    for numbers in ranges_of(_segments_for(asked, steps.label), length):
        segment = functools.partial(
            _steps.through, steps, fn, numbers=numbers, offset=0
        )
        carry, ys = remat(segment)(args, carry)
        rows += ys
    if steps.is_reversed:
        rows.reverse()
    return carry, tree_map(_stack, *rows)


def _segments_for(asked: Strategy, label: str) -> Segments:
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


@_torch.constant_in_traces
def _warn(message: str) -> str:
    warn_once(message)
    return message


def _stack(*leaves: Any) -> Any:
    return None if leaves[0] is None else torch.stack(leaves)


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
_DISK = (
    "remat: {label} is a part of a graph, which stores carries in memory: disk=True is "
    "not followed. Leave it out of the graph (`torch.compiler.disable`)."
)


# --- Under a budget ---


def _schedule_within(
    budget: LoopBudget,
    call: ChainCall,
    called: tuple[Any, tuple[Any, ...]],
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
) -> tuple[Schedule, str]:
    """Return the schedule with the least work that stays under a budget."""
    layer, steps = _torch.current_layer(), call.steps
    if layer is not None and _torch.kind_of(layer) == _torch.VMAP:
        return Sqrt(), _OUTSIDE.format(label=steps.label)
    batch = _torch.batch_size()
    inside = replace(budget, nbytes=budget.nbytes // batch)
    kind = _kind_of_chain(call, inputs, needs, inside)
    numbers = _known(*kind)
    if numbers is None:
        numbers = measured(*called, steps, inside.nbytes, is_batched=batch > 1)
        if isinstance(numbers, Exception):
            other = Sqrt() if steps.length is not None else Online(_ONLINE)
            return other, _UNMEASURED.format(label=steps.label, error=numbers)
        _remember(*kind, numbers)
    found, few = chosen(numbers, steps.length, inside.nbytes)
    if found is None:
        few *= batch
        sizes = {"budget": budget.nbytes, "least": few}
        shown = {name: in_unit(n, budget.unit) for name, n in sizes.items()}
        raise BudgetError(_TOO_SMALL.format(label=steps.label, **shown), few)
    return found, ""


_ONLINE = 10  # checkpoints of a loop that cannot be measured
_OUTSIDE = (
    "remat: {label} is differentiated outside of a vmap, where no checkpoints are "
    "stored: its budget is not kept. Its backward holds about sqrt(n) carries. "
    "Differentiate inside of the vmap: vmap(grad(f))."
)
_UNMEASURED = (
    "remat: the steps of {label} could not be measured, so the budget is not kept. "
    "Pass checkpoints= instead. ({error})"
)
_TOO_SMALL = (
    "remat: a budget of {budget} is too small for {label}. The least that works is "
    "{least}. It holds the carries that are stored, and the steps that run at a time. "
    "Pass more, or make a step smaller, for example by policy=."
)


# --- Chains that are alike ---


# What was measured, by kind, and for each by the numbers that its steps refer to.
_KNOWN: OrderedDict[Hashable, dict[int, StepBytes]] = OrderedDict()
_KINDS, _TIMES = 128, 4
_LOCK = threading.Lock()


def _known(kind: Hashable, numbers: int) -> StepBytes | None:
    """Return what was measured of a kind; None if nothing was.

    A step that counts refers to another number in each call. Once some measurements
    with other numbers were all the same, no more are made.
    """
    with _LOCK:
        found = _KNOWN.get(kind, {})
        costs = {*found.values()}
        if len(found) == _TIMES and len(costs) == 1:
            return costs.pop()
        return found.get(numbers)


def _remember(kind: Hashable, numbers: int, costs: StepBytes) -> None:
    """Remember what was measured; the oldest is forgotten first."""
    with _LOCK:
        found = _KNOWN.setdefault(kind, {})
        found[numbers] = costs
        if len(found) > _TIMES:
            del found[next(iter(found))]
        if len(_KNOWN) > _KINDS:
            _KNOWN.popitem(last=False)


def _kind_of_chain(
    call: ChainCall,
    inputs: Sequence[Tensor],
    needs: Sequence[bool],
    budget: LoopBudget,
) -> tuple[Hashable, int]:
    """Return what chains have in common whose steps are alike.

    That is the code, with shapes and settings, and the numbers that it leads to.
    """
    steps = call.steps
    # A trial runs at most so many steps: longer chains are alike.
    most = TOGETHER + len(call.initial) + 2
    is_long = (steps.length or 0) > most
    rows = {*call.scanned} if is_long else ()
    wholes = [t for i, t in enumerate(inputs) if i not in rows]
    shapes = metas_of(wholes), *((inputs[i].shape[1:], inputs[i].dtype) for i in rows)
    settings = Ambient().key, torch.get_default_dtype()
    length = None if is_long else steps.length
    code = call.reach.signature, shapes, tuple(needs), settings, length
    policy = budget.policy
    rules = policy.cache_key if isinstance(policy, Policy) else policy
    first = getattr(steps.apply, "args", ())  # of `fori_loop`: its first number
    numbers = call.reach.moment(inputs).numbers
    return (code, budget.nbytes, first), hash((rules, *numbers))


# --- What users pass ---


def policed(f: Any, policy: PolicyLike) -> Any:
    """Return the function of a step, which saves what a policy says."""
    return f if policy is None else remat(f, policy=policy)


def label_for(kind: str, f: Any = None) -> str:
    """Return what errors call a chain: its kind, its function, the user's line."""
    if _torch.must_inline():
        return kind
    if f is not None:
        kind = f"{kind} of {getattr(f, '__qualname__', type(f).__qualname__)}"
    return label_of(kind, caller(3), "called")


def map_tree(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Return a pytree with another value in place of each leaf."""
    if _torch.must_inline():  # Dynamo traces no other pytrees
        return tree_map(functools.partial(_unless_none, fn), tree)
    return pytree.map_leaves(fn, tree)


def _unless_none(fn: Callable[[Any], Any], leaf: Any) -> Any:
    return None if leaf is None else fn(leaf)


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
