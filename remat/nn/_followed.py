"""Modules whose calls follow a plan for a whole step, perhaps made in the first call.

A `remat.scope` around each call follows the plan. A scope can do nothing in compiled
code and with FSDP. There, blocks follow policies that were chosen for the same budget:
their calls have the option `unless_followed`. Gradients of torch.func are refused.

Invariant: the module stays what it is, with two hooks more. A call that a backward may
follow either follows a plan or is refused: no model is trained plain by mistake.
Rejected: a class of its own for the module, as its blocks get. Hooks of the module
would run outside of the plan, and what they compute is part of the call.
"""

import sys
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import distributed, nn
from typing_extensions import override

from remat._base.context import here
from remat._base.errors import RematError
from remat._base.package import from_above
from remat._partial.decide import warn_once
from remat._partial.options import Options
from remat._scope.api import awaits_backward, scope
from remat._scope.following import ByPlace, Course, say_once
from remat._torch.levels import GRAD, current_layer, kinds_here
from remat._torch.tracing import constant_in_traces
from remat._transform.module import recompute_in_place
from remat.nn import _applied
from remat.nn._applied import Applied, Claiming, Refusing
from remat.policies import Policy


class FollowedScope:
    """A context in which a plan is followed, if a scope can."""

    def __init__(
        self, label: str, courses: Sequence[Course], model: Any = None, over: int = 0
    ) -> None:
        self._is_refused = GRAD in kinds_here() and torch.is_grad_enabled()
        why = ""
        if torch.is_grad_enabled():
            if model is not None and has_sharded_parts(model):
                why = "with sharded parameters"
            if current_layer() is not None:  # a vmap, or forward mode
                why = "under a transform of torch.func"
        if why and not self._is_refused:
            _warn(label, why, over)
        self._label, self._courses = label, courses
        self._policy = ByPlace(label, courses)
        self._scope = None if why else scope(self._policy)
        self._model = model

    def __enter__(self) -> None:
        if self._is_refused:
            raise RematError(_FUNCTIONAL.format(label=self._label))
        if self._scope is not None:
            if torch.is_grad_enabled() and awaits_backward(ByPlace):
                say_once(self._courses, _TWO_GRAPHS, self._label)
            here().step_plans += 1
            self._scope.__enter__()
            self._policy.calls.__enter__()
            if self._model is not None:  # its call has begun
                self._policy.calls.enter(self._model)

    def __exit__(self, *raised: Any) -> None:
        if self._scope is not None:
            here().step_plans -= 1
            self._policy.calls.__exit__()
            self._scope.__exit__(*raised)
            if not any(raised):
                self._policy.end()


class _Open(threading.local):
    """The scopes in which a thread follows plans, the innermost last."""

    def __init__(self) -> None:
        self.scopes: list[FollowedScope] = []


_OPEN = _Open()


def begin_scope(scope: FollowedScope) -> None:
    """Begin to follow a plan."""
    scope.__enter__()
    _OPEN.scopes.append(scope)


def end_scope(*raised: Any) -> None:
    """End what began last in this thread."""
    _OPEN.scopes.pop().__exit__(*raised)


def can_follow(model: nn.Module) -> bool:
    """Say whether a plan for a whole step can be followed by a model as it is."""
    compiled = any(m._compiled_call_impl is not None for m in model.modules())
    is_compiled = compiled or hasattr(model, "_orig_mod")
    return not (is_compiled or has_sharded_parts(model))


def has_sharded_parts(model: nn.Module) -> bool:
    """Say whether a module has DTensors, or FSDP frees its parameters in a step."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    sharded = _classes("torch.distributed.tensor", "DTensor")
    fsdp = "FSDPModule", "FullyShardedDataParallel"
    wrapped = _classes("torch.distributed.fsdp", *fsdp)
    if wrapped and any(isinstance(module, wrapped) for module in model.modules()):
        return True
    learned = model.parameters() if sharded else ()
    return any(isinstance(parameter, sharded) for parameter in learned)


def _classes(module: str, *names: str) -> tuple[Any, ...]:
    """Return classes of a module of torch; none where nobody has imported it."""
    found = sys.modules.get(module)
    return () if found is None else tuple(getattr(found, name) for name in names)


class _Entering(Claiming):
    """The hook before a call of a module: begins to follow a plan."""

    def __init__(
        self, label: str, courses: Sequence[Course], where: str, over: int
    ) -> None:
        self.label, self.courses, self.where = label, tuple(courses), where
        self.over = over  # the bytes that blocks take more than the budget

    @override
    def claim(self, module: nn.Module) -> Applied:
        return Applied(_applied.PLAN, where=self.where)

    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():
            _warn(self.label, "in compiled code", self.over)
        else:
            # Ended by the hook after the call, also where it cannot begin.
            scope = FollowedScope(self.label, self.courses, module, self.over)
            _OPEN.scopes.append(scope)
            scope.__enter__()


class _Leaving:
    """The hook after a call of a module, also after one that raises an error."""

    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            # After an error there is no result.
            end_scope(Exception if result is None else None, None, None)


def follow(
    model: nn.Module,
    label: str,
    courses: Sequence[Course],
    blocks: Sequence[tuple[str, Policy | None]],
    where: str,
    over: int = 0,
) -> None:
    """Have each call of a module follow a plan; blocks do where no scope can act."""
    _applied.refuse_others(model, "plan.apply")
    modules = dict(_planned_part(model, label, courses).named_modules())
    found: list[tuple[nn.Module, Options]] = []
    for path, policy in blocks:
        name = path
        while name not in modules and "." in name:  # in a wrapper of what was planned
            name = name.partition(".")[2]
        found.append((modules[name], Options(policy=policy, unless_followed=True)))
    for module, options in found:
        recompute_in_place(module, where, options, _applied.PLAN)
    _applied.refuse_later(model, _applied.PLAN, where)
    # Last, so that it runs first: what begins here ends also after an error of a hook.
    entering = _Entering(label, courses, where, over)
    model.register_forward_pre_hook(entering, prepend=True)
    model.register_forward_hook(_Leaving(), always_call=True)


def _planned_part(model: nn.Module, label: str, courses: Sequence[Course]) -> nn.Module:
    """Return the module that a plan is for: the model, or what it wraps."""
    places = [each.place for course in courses for each in course.placed]
    if not places:
        return model
    roots = {root for root, *_ in places}
    for module in model.modules():
        if roots.intersection(kind.__name__ for kind in type(module).__mro__):
            names = {name for name, _ in module.named_modules()}
            planned = {path for _, _, path, _ in places if "/" not in path}
            if 2 * len(planned & names) >= len(planned):
                return module
    raise ValueError(_OTHER_MODEL.format(label=label, kind=type(model).__name__))


def unfollow(module: nn.Module) -> None:
    """Take out of a module the hooks that are there because of us."""
    for hooks in module._forward_pre_hooks, module._forward_hooks:
        for key, hook in [*hooks.items()]:
            if isinstance(hook, (Claiming, Refusing, _Leaving)):
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


@constant_in_traces
def _warn(label: str, why: str, over: int) -> None:
    more = _MORE.format(over=over) if over > 0 else ""
    warn_once(_BY_BLOCKS.format(label=label, why=why, more=more))


_OTHER_MODEL = (
    "remat: the plan for {label} was made for other modules than those of this {kind}. "
    "Pass the model that it was made for, a copy of it, or a wrapper around it."
)
_TWO_GRAPHS = (
    "remat: a forward follows the plan for %s while the graph of an earlier one is "
    "alive. The budget holds for one graph: both take more. Run the backward of one "
    "before the forward of the next, or plan for a function that runs both."
)
_FUNCTIONAL = (
    "remat: the plan for {label} is for `backward()`. `torch.func.grad` keeps its "
    "graph, and takes more: pass over='functional' to remat.fit, and apply that plan."
)
_MORE = " They take up to {over:,} bytes more than that."
_BY_BLOCKS = (
    "remat: the plan for {label} is for a whole step, which cannot be followed {why}. "
    "Its blocks follow what was planned for them in the same budget, each recomputed "
    "at once.{more} To plan for that alone, call remat.fit(..., over='blocks')."
)


# --- A plan that is made in the first call ---


M = TypeVar("M", bound=nn.Module)


def plan_at_first_call(model: M, budget: str, where: str) -> M:
    """Have the first call that a backward may follow plan for a budget."""
    _applied.refuse_later(model, _applied.PLAN, where)
    hook = _AtFirstCall(budget, where)
    model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    return model


class _AtFirstCall(Claiming):
    """The hook before calls that makes the plan, and takes itself out."""

    def __init__(self, budget: str, where: str) -> None:
        self.budget, self.where = budget, where
        self.is_planning = False  # also in the copy of the model that is planned

    @override
    def claim(self, module: nn.Module) -> Applied | None:
        return None if self.is_planning else Applied(_applied.PLAN, where=self.where)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_planning or not torch.is_grad_enabled():
            return
        is_compiled = torch.compiler.is_compiling()
        if is_compiled or current_layer() is not None:
            how = "under a transform of torch.func"
            if is_compiled:
                how = "in compiled code"
            known = {"kind": type(module).__name__, "where": self.where}
            raise ValueError(_NO_PLAN.format(how=how, **known))
        self.is_planning = True
        try:
            plan = from_above("fit")(module, *args, budget=self.budget, **kwargs)
        finally:
            self.is_planning = False
        unfollow(module)
        plan.apply(module)
        for hook in [*module._forward_pre_hooks.values()]:
            if isinstance(hook, _Entering):  # not called: this call has begun
                hook(module, None)


_NO_PLAN = (
    "remat.nn.apply: the first call of this {kind} plans a step in a budget, since "
    "{where}, and that cannot be {how}. Call the model once before, or make the plan "
    "yourself: remat.fit(model, batch, budget=...).apply(model)."
)
