"""Places of a policy with the value "save": calls of modules and Functions, kept.

A module or a custom Function whose nearest key is saved, with all that it may run, is
called as by `keep`. One that changes what it reaches is not, from its next call on: its
operations are saved one by one, as by any policy.

Invariant: a recompute keeps the calls that the forward kept.
Rejected: to save the operations alone. A kernel that the dispatcher does not see would
be launched again, and code that is no operation would run again.
"""

import weakref
from collections.abc import Callable
from typing import Any

from typing_extensions import override

from remat._base.calls import at_call
from remat._base.context import here
from remat._base.op import Op
from remat._partial.names import note_found
from remat._partial.recorder import Recorder
from remat._torch import answer_calls, must_inline
from remat.policies import everything_saveable
from remat.policies._places import is_in, keeps_call
from remat.rules._keep import KeptPlace, called
from remat.rules._places import is_in_region, is_noted, place_of


class PlaceOfPolicy(KeptPlace):
    """What is kept of a call that a policy keeps."""

    owner: Callable[[], Any] = staticmethod(lambda: None)

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
