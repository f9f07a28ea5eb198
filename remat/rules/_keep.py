"""`keep`: a call that no recompute enters again.

    under base autograd   it runs outside of our hooks and modes, so its nodes are those
                          of plain code and save what they save. A recompute puts its
                          results in place, behind a node that only the function itself
                          may differentiate.
    under torch.func      its graph stays, and ends at leaves of its own (`_kept`).

Calls of modules and Functions that a policy saves by place are kept so, too.
Invariant: whatever the call changes besides its results is there in the recompute, or
the call is entered again, with a warning that names it.
Rejected: to save what it saves among the residuals of the call around. A node that is
not ours cannot be made again around saved tensors.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.calls import at_call
from remat._base.context import EnteredAgain, here
from remat._base.op import Op
from remat._base.operators import as_unit
from remat._base.pytree import Frame, tensors_and_frame
from remat._base.tensors import versions_of
from remat._partial.decide import warn_once
from remat._partial.names import note_found
from remat._partial.recorder import Recorder
from remat._reach.moment import WatchedCall
from remat._reach.reach import Reach, reach_of
from remat._torch.autograd import base_dual_level_active
from remat._torch.levels import current_layer
from remat._torch.modes import dispatch_modes
from remat._torch.process import answer_calls, read_settings
from remat._torch.tensors import EMPTY_LEAF
from remat._torch.tracing import must_inline
from remat._transform.call import Call
from remat._transform.function import evaluate_differentiably
from remat.policies import everything_saveable
from remat.policies._places import is_in, keeps_call
from remat.rules._kept import KeptCall
from remat.rules._places import (
    PlaceInCall,
    alone,
    is_in_region,
    is_noted,
    outside,
    place_of,
)


F = TypeVar("F", bound=Callable[..., Any])


def keep(fn: F) -> F:
    """Return `fn`, which recomputes do not enter again.

    Within a rematerialized call, what `fn` saved for its backward stays, and so do its
    results. It is for what cannot or should not run twice: a kernel that torch's
    dispatcher does not see, an `autograd.Function`, a collective, a call to another
    process. Elsewhere, and in compiled code, the result just calls `fn`.

    `fn` tells by its results what it did: pytrees of tensors and constants. If it
    changes something else that it reaches, an attribute or a list, or an argument in
    place, or if its result is changed in place later on, it is entered again, as other
    code is, and a warning says so. Under torch.func it is entered again for second
    derivatives, and for examples that share what is differentiated in them.

    Args:
        fn: the function, `Attention.apply` or a module, say. A module that is kept is
            no module: write `keep(self.attention)(x)` where it is called.

    Raises:
        TypeError: `fn` is not callable.

    Example:
        >>> from remat import keep, remat
        >>> @keep
        ... def kernel(x):
        ...     print("runs")
        ...     return x.sin()
        >>> x = torch.ones(3, requires_grad=True)
        >>> remat(lambda x: kernel(x.exp()).cos())(x).sum().backward()
        runs
    """
    if not callable(fn):
        raise TypeError(f"remat: keep takes a function, and not {fn!r}")
    kept: Any = functools.wraps(fn, updated=())(KeptFunction(fn))
    return kept


class KeptPlace(PlaceInCall):
    """What is kept of a call, besides its results."""

    # Puts its results in place, in a recompute; None where it is called as it is, or
    # was called outside of our hooks and modes and is again (`is_unseen`).
    how: Callable[..., Any] | None = None
    is_unseen = False

    def entered_again(self, why: str) -> None:
        """Note that recomputes enter the call, and why."""
        self.how = self.residuals = None
        for mode in dispatch_modes():
            if isinstance(mode, Recorder):
                self.note_unseen(mode)
        if why:
            self.warn(why)

    def note_unseen(self, recorder: Recorder) -> None:
        """Note that the call around cannot be recorded."""
        recorder.note_unseen()

    def warn(self, why: str) -> None:
        """Tell the user that recomputes enter the call, and why."""
        warn_once(_AGAIN.format(name=self.name, source=self.source, why=why))


class KeptFunction:
    """A callable whose calls are kept."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __repr__(self) -> str:
        return f"keep({self.fn!r})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fn = self.fn
        if must_inline() or not is_in_region():
            return fn(*args, **kwargs)
        name = f"keep({getattr(fn, '__name__', type(fn).__name__)})"
        return called(*place_of(KeptPlace, name), fn, args, kwargs)


def called(place: KeptPlace, is_again: bool, fn: Any, args: Any, kwargs: Any) -> Any:
    """Call a function that is kept, for the first time or in a recompute."""
    if not is_again:
        return _called(place, fn, args, kwargs)
    if place.how is not None:
        found = place.how(fn, args, kwargs)
        if found is not None:
            place.skip()
            return found[0]
        place.entered_again(_RESULT)
    with outside() if place.is_unseen else nullcontext(), alone(place.policy):
        return fn(*args, **kwargs)


def _called(place: KeptPlace, fn: Any, args: Any, kwargs: Any) -> Any:
    """Call the function for the first time, and keep what may be kept."""
    reach = reach_of(fn, place.name, args, kwargs)
    if reach is None or base_dual_level_active():
        with alone(place.policy):
            return fn(*args, **kwargs)
    tensors, place.streams = reach.take_tensors(), reach.streams
    watched, before = WatchedCall(reach, tensors), _beside(tensors)
    try:
        needs = True in [t.requires_grad for t in tensors]
        if current_layer() is not None or (place.is_in_function and needs):
            result, place.how = _with_graph(place, fn, args, kwargs)
        else:
            place.is_unseen = True
            with outside():
                result = place.run(fn, *args, **kwargs)
            place.how = _put_in_place(place, args, kwargs, result)
        why = watched.changed() or (_BESIDE if _beside(tensors) != before else "")
    finally:
        watched.done()
    if why or (place.is_unseen and place.how is None):
        place.entered_again(why or _OPAQUE)
    return result


def _beside(tensors: Sequence[Tensor]) -> Any:
    """Return what a call may change besides what it reaches."""
    grads = [t.grad for t in tensors if t.is_leaf and t.requires_grad]
    there = [g for g in grads if g is not None]
    return read_settings(), [*map(id, grads)], versions_of(there)


# --- Under base autograd ---


def _put_in_place(place: KeptPlace, args: Any, kwargs: Any, result: Any) -> Any:
    """Keep the results; return what puts them in place, None if nothing can."""
    given = {id(t): k for k, t in enumerate(tensors_and_frame((args, kwargs))[0])}
    outs, frame = tensors_and_frame(result)
    if not frame.is_constant:
        return None
    found = [given.get(id(t)) for t in outs]  # an argument is that argument again
    new = [t for t, k in zip(outs, found, strict=True) if k is None]
    needs = [t.requires_grad for t in new]
    place.keep([t.detach() for t in new])
    as_unit(lambda: [t.detach() for t in new], (), place.name)
    return functools.partial(_in_place, place, frame, found, needs)


def _in_place(
    place: KeptPlace,
    frame: Frame,
    found: Sequence[int | None],
    needs: Sequence[bool],
    _: Any,
    args: Any,
    kwargs: Any,
) -> tuple[Any] | None:
    """Return what the forward returned; None if that was changed in place since."""
    if not all(each.is_as_it_was for each in place.residuals or ()):
        return None
    given = tensors_and_frame((args, kwargs))[0]
    values = as_unit(place.values, (), place.name)
    if len(place.stored()) < len(values):
        # What hooks gave back may be changed in place in this recompute.
        values = [v.clone() for v in values]
    if torch.is_grad_enabled() and True in needs:
        # A leaf, so that there is a node if only what it closed over requires grad.
        values = InPlace.apply((place, needs, values), EMPTY_LEAF, *given)
    each = iter(values)
    return (frame.filled([next(each) if k is None else given[k] for k in found]),)


class InPlace(torch.autograd.Function):
    """The node of a kept call in a recompute. Only the function itself may reach it."""

    @staticmethod
    @override
    def forward(ctx: Any, kept: Any, *_: Any) -> Any:  # pyrefly: ignore[bad-override]
        ctx.place, needs, values = kept
        outs = tuple(v.detach() for v in values)
        others = [o for o, need in zip(outs, needs, strict=True) if not need]
        ctx.mark_non_differentiable(*others)
        return outs

    @staticmethod
    @override
    def backward(ctx: Any, *_: Any) -> Any:
        ctx.place.entered_again("")
        raise EnteredAgain


# --- Under torch.func ---


def _with_graph(
    place: KeptPlace, fn: Any, args: Any, kwargs: Any
) -> tuple[Any, Callable[..., Any] | None]:
    """Call the function as a program whose graph stays; also return what reads it."""
    with alone():
        call = Call(Reach(fn, place.name, args, kwargs), fn, args, kwargs)
    inputs, needs = call.take_inputs()
    program = KeptCall(call)
    outs = place.run(evaluate_differentiably, program, inputs, needs)
    if outs is None:
        with alone():
            return fn(*args, **kwargs), None
    result = call.join(outs, inputs)
    tensors, frame = tensors_and_frame(result)
    if not frame.is_constant:
        place.entered_again(_OPAQUE)
        return result, None
    index = {id(t): k for k, t in enumerate([*inputs, *outs])}
    place.outs = [] if program.graph is None else program.graph[1]
    return result, functools.partial(
        _by_graph, place, program, frame, [index[id(t)] for t in tensors]
    )


def _by_graph(
    place: KeptPlace,
    program: KeptCall,
    frame: Frame,
    index: Sequence[int],
    fn: Any,
    args: Any,
    kwargs: Any,
) -> tuple[Any] | None:
    """Return what the forward returned, behind a node that leads to its graph."""
    if program.is_changed():
        place.warn(_RESULT)
    reach = Reach(fn, place.name, args, kwargs)
    inputs, needs = Call(reach, fn, args, kwargs).take_inputs()
    with alone():
        outs = evaluate_differentiably(program, inputs, needs)
    reach.forward_done()
    if outs is None:
        return None
    each = [*inputs, *outs]
    return (frame.filled([each[k] for k in index]),)


# --- Places of a policy with the value "save" ---
# A module or Function that is saved with all that it may run is kept as a call: else
# what the dispatcher does not see would run again. One that changes what it reaches is
# not, from its next call on: its operations are saved, as by any policy.


class PlaceOfPolicy(KeptPlace):
    """What is kept of a call that a policy keeps: of a module, or of a Function."""

    owner: weakref.ref[Any]

    @override
    def warn(self, why: str) -> None:
        owner = self.owner()
        if owner is not None:
            _CHANGING.add(owner)

    @override
    def note_unseen(self, recorder: Recorder) -> None:
        recorder.begins_anew = True


# Modules and Functions that change what they reach.
_CHANGING: weakref.WeakSet[Any] = weakref.WeakSet()


def ask_at_calls() -> None:
    """Have calls of modules and Functions ask, from now on, whether they are kept."""
    answer_calls(_call, _call)


def _call(plain: Callable[..., Any], owner: Any, args: Any, kwargs: Any) -> Any:
    context = here()
    policy, calls = context.policy, context.calls
    if policy is None or calls is None or not (context.regions and policy.keeps_calls):
        return plain(owner, *args, **kwargs)
    if must_inline() or not is_in_region():
        return plain(owner, *args, **kwargs)
    is_module = not isinstance(owner, type)
    if is_module and any(is_function for *_, is_function in context.regions):
        return plain(owner, *args, **kwargs)
    where, modules = calls.where_of(owner)
    name = f"{type(owner).__name__ if is_module else owner.__name__} at {where[0]!r}"
    is_kept = is_noted(name)
    if is_kept is None:
        op, every = _op_at(*where), [_op_at(*each) for each in modules]
        is_kept = owner not in _CHANGING and keeps_call(policy, op, every)
        if is_kept:
            note_found(policy, [op, *[m for m in every if is_in(m.module, op.module)]])
    if not is_kept:
        return plain(owner, *args, **kwargs)
    place, is_again = place_of(PlaceOfPolicy, name)
    place.policy = everything_saveable
    place.owner = weakref.ref(owner)
    with at_call(owner):
        fn = owner if is_module else getattr(owner, "apply")  # noqa: B009 - of Any
        return called(place, is_again, fn, args, kwargs)


def _op_at(path: str, classes: tuple[str, ...]) -> Op:
    return Op(None, module=path, classes=classes)


_AGAIN = (
    "remat: {name}, called at {source}, is entered again in recomputes: it "
    "changes {why}. Return it instead."
)
_BESIDE = "gradients, or a setting of torch"
_OPAQUE = "an object that it returns, which is no tensor, constant or pytree of these"
_RESULT = "its result, or that is changed in place later on"
