"""The context in which a call under base autograd runs, forward or recompute.

`saved` and `refill` enter it. It tells the context of the thread which call this is
(`remat._base.context`), and pushes the call's hook for saved tensors.

Invariant: at the end all is as it was, also after an error.
Rejected: one context manager for each of these. Entering costs more than what they do.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from remat._base.context import Decisions, here
from remat._graph.handles import unpack
from remat._torch import (
    pop_hooks,
    push_hooks,
    resume_hooks,
    set_grad_enabled,
    suspend_hooks,
)
from remat._transform.saved_call import SavedCall


class InCall:
    """A context in which a call runs.

    Args:
        call: the call.
        pack: the hook that is given each tensor that a graph saves.
        again: whether the call is recomputed. Then the hooks and the grad mode around
            do not count.
    """

    __slots__ = (
        *("_again", "_before", "_call", "_context", "_grad_mode", "_inside", "_now"),
        *("_pack", "_suspended"),
    )

    def __init__(
        self,
        call: SavedCall,
        pack: Callable[[Tensor], Any],
        *,
        again: bool = False,
    ) -> None:
        self._call, self._pack, self._again = call, pack, again
        self._context = context = here()
        hooks = call.hooks
        only_ours = again or hooks is None or hooks[0] is context.scope_pack
        only_ours = only_ours or (context.only_our_hooks and call.is_nested)
        self._now = only_ours, call.policy, Decisions(call.inner, again=again)

    def __enter__(self) -> None:
        context = self._context
        self._before = context.only_our_hooks, context.policy, context.decisions
        context.only_our_hooks, context.policy, context.decisions = self._now
        if context.examining is not None:
            self._inside, context.inside = context.inside, (*context.inside, self._call)
        if self._again:
            self._suspended, self._grad_mode = suspend_hooks(), torch.is_grad_enabled()
            set_grad_enabled(True)
            context.recomputing = (*context.recomputing, self._call)
        push_hooks(self._pack, unpack)

    def __exit__(self, *_: object) -> None:
        context = self._context
        pop_hooks()
        context.only_our_hooks, context.policy, context.decisions = self._before
        if context.examining is not None:
            context.inside = self._inside
        if self._again:
            context.recomputing = context.recomputing[:-1]
            set_grad_enabled(self._grad_mode)
            resume_hooks(self._suspended)
