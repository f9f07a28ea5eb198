"""Modules whose forwards follow a plan for a whole step.

`remat.fit`'s plans call `follow`; `remat.nn.remove` calls `unfollow`.

Invariant: the module stays what it is, with two hooks more.
Rejected: a class of its own for the module, as `apply` makes. Other hooks of the module
would run outside of the plan, and what they compute is part of the forward.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from remat._scope.api import scope
from remat._scope.following import Course, Following
from remat._transform.module import RematModule


class _Entering:
    """The hook before a forward. It begins to follow the plan.

    Args:
        label: what messages call the plan.
        courses: which results are saved.
    """

    def __init__(self, label: str, courses: Sequence[Course]) -> None:
        self.label, self.courses = label, tuple(courses)
        self.open: list[scope] = []

    def __call__(self, *_: Any) -> None:
        """Be the hook."""
        entered = scope(Following(self.label, self.courses))
        entered.__enter__()
        self.open.append(entered)

    def __getstate__(self) -> Any:
        return {**vars(self), "open": []}


class _Leaving:
    """The hook after a forward, also after one that raises an error."""

    def __init__(self, entering: _Entering) -> None:
        self._entering = entering

    def __call__(self, *_: Any) -> None:
        """Be the hook."""
        if self._entering.open:
            self._entering.open.pop().__exit__(None, None, None)


def follow(model: nn.Module, label: str, courses: Sequence[Course]) -> None:
    """Have each forward of a module follow a plan.

    Raises:
        ValueError: the module, or one in it, is recomputed or follows a plan.
    """
    for name, module in model.named_modules():
        if is_followed(module) or isinstance(module, RematModule):
            raise ValueError(_TWICE.format(name=name or "the model"))
    entering = _Entering(label, courses)
    model.register_forward_pre_hook(entering, prepend=True)
    model.register_forward_hook(_Leaving(entering), always_call=True)


def is_followed(module: nn.Module) -> bool:
    """Say whether the forwards of a module follow a plan."""
    hooks = module._forward_pre_hooks.values()
    return any(isinstance(hook, _Entering) for hook in hooks)


def unfollow(module: nn.Module) -> None:
    """Have a module follow no plan any more."""
    for hooks in module._forward_pre_hooks, module._forward_hooks:
        for key, hook in [*hooks.items()]:
            if isinstance(hook, (_Entering, _Leaving)):
                del hooks[key]
                module._forward_hooks_always_called.pop(key, None)


_TWICE = (
    "remat: {name} is recomputed, or follows a plan, already. Call "
    "remat.nn.remove(model) first."
)
