"""A plan for a whole step that is made in the first call, for what it is passed.

A trainer makes the batches, so its user has none to give to `remat.fit`.

Invariant: a call that a backward may follow either follows a plan or is refused: no
model is trained plain by mistake. Rejected: to import `_fit` here, which imports this
room. It is asked by its public name.
"""

from typing import Any, TypeVar

import torch
from torch import nn
from typing_extensions import override

from remat._base.later import from_above
from remat._torch import current_layer
from remat.nn._applied import (
    PLAN,
    Applied,
    Claiming,
    mark,
    refuse_later,
)
from remat.nn._followed import begin_plan, unfollow


M = TypeVar("M", bound=nn.Module)


def plan_at_first_call(model: M, budget: int, where: str) -> M:
    """Have the first call that a backward may follow plan for a budget."""
    refuse_later(model, PLAN, where)
    hook = _AtFirstCall(budget, where)
    model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    mark(model)
    return model


class _AtFirstCall(Claiming):
    """The hook before calls that makes the plan, and takes itself out."""

    def __init__(self, budget: int, where: str) -> None:
        self.budget, self.where = budget, where
        self.is_planning = False  # also in the copy of the model that is planned

    @override
    def claim(self, module: nn.Module) -> Applied | None:
        return None if self.is_planning else Applied(PLAN, where=self.where)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.is_planning or not torch.is_grad_enabled():
            return
        _refuse_elsewhere(type(module).__name__, self.where)
        self.is_planning = True
        try:
            plan = from_above("fit")(module, *args, budget=self.budget, **kwargs)
        finally:
            self.is_planning = False
        unfollow(module)
        plan.apply(module)
        begin_plan(module)  # the hooks before this call are those from before


def _refuse_elsewhere(kind: str, where: str) -> None:
    is_compiled = torch.compiler.is_compiling()
    if is_compiled or current_layer() is not None:
        how = "in compiled code" if is_compiled else "under a transform of torch.func"
        raise ValueError(_NO_PLAN.format(kind=kind, where=where, how=how))


_NO_PLAN = (
    "remat.nn.apply: the first call of this {kind} plans a step in a budget, since "
    "{where}, and that cannot be {how}. Call the model once before, or make the plan "
    "yourself: remat.fit(model, batch, budget=...).apply(model)."
)
