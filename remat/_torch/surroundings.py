"""What a call is inside of, besides modes and levels: autocast, caches, checkpoints.

Invariant: to ask changes nothing. Rejected: to note who enters what. For that, remat
would have to patch torch.
"""

import inspect
import sys
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch.nn.utils import parametrize
from torch.utils import checkpoint
from torch.utils.module_tracker import ModuleTracker


# Deleted by: a public way to ask whether any device type autocasts.
is_autocast_active = torch._C._is_any_autocast_enabled


# Deleted by: a public way to ask how many autocast contexts there are around. When the
# outermost ends, the cache of casts is emptied.
def autocast_depth() -> int:
    """Return how many contexts of autocast are open, on or off."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


# Deleted by: a cache of parametrizations that is not global.
def swap_parametrization_cache(
    state: tuple[dict[Any, Any], int],
) -> tuple[dict[Any, Any], int]:
    """Exchange what `parametrize.cached()` keeps, and how often it is entered."""
    before = parametrize._cache, parametrize._cache_enabled
    parametrize._cache, parametrize._cache_enabled = state
    return before


def parametrization_cache() -> dict[Any, Any] | None:
    """Return what `parametrize.cached()` keeps; None if it is not active."""
    return parametrize._cache if parametrize._cache_enabled > 0 else None


# Deleted by: a public way to ask whether torch's checkpoint is running a function.
# Torch 2.14 has a second entry beside the first: `checkpoint(use_reentrant=False)(fn)`.
_checkpoint: Any = getattr(checkpoint, "_checkpoint_impl", checkpoint.checkpoint)
_CHECKPOINT: CodeType = inspect.unwrap(_checkpoint).__code__


# Deleted by: a public way to read what torch.utils.checkpoint's `set_` functions set.
def checkpoint_settings() -> tuple[bool | None, bool | None]:
    """Return whether checkpoints stop early and debug; None where nothing is set."""
    early_stop = checkpoint._enable_checkpoint_early_stop
    return early_stop, checkpoint._checkpoint_debug_enabled


# Deleted by: contexts of selective checkpointing that tell their policy.
def selective_policy(context: object) -> Any:
    """Return the policy of the forward's context of selective checkpointing."""
    if type(context) is not checkpoint._CachingTorchDispatchMode:
        return None
    policy = context.policy_fn
    if getattr(policy, "__code__", None) is not _CODE_OF_LIST:
        return policy
    return inspect.getclosurevars(policy).nonlocals[_LIST]


_LIST = "policy_fn_or_list"
_CODE_OF_LIST = next(
    (
        code
        for code in checkpoint.create_selective_checkpoint_contexts.__code__.co_consts
        if isinstance(code, CodeType) and _LIST in code.co_freevars
    ),
    None,
)


def is_of_checkpoint(hook: Any) -> bool:
    """Say whether a hook for saved tensors is that of torch's checkpoint."""
    return getattr(hook, "__module__", None) == checkpoint.__name__


def checkpoint_depth() -> int:
    """Return how many calls of torch.utils.checkpoint this is within, by the stack."""
    depth = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        depth += frame.f_code is _CHECKPOINT
        frame = frame.f_back
    return depth


# Deleted by: a public way to ask for the hooks on all modules.
_modules: Any = torch.nn.modules.module


def has_hooks_on_all_modules() -> bool:
    """Say whether the forward of every module calls hooks."""
    return bool(_modules._global_forward_pre_hooks or _modules._global_forward_hooks)


Tracked: TypeAlias = Sequence[tuple[list[Any], int]]


# Deleted by: a ModuleTracker that holds no graph by the hooks that it sets on it. A
# FLOP counter has such a tracker.
def hooks_of_trackers() -> Tracked:
    """Return the hooks on graphs of each ModuleTracker, and how many there are now."""
    hooks = _modules._global_forward_pre_hooks
    if not hooks:
        return ()
    owners = [getattr(hook, "__self__", None) for hook in hooks.values()]
    found = [owner._hooks for owner in owners if isinstance(owner, ModuleTracker)]
    return [(hooks, len(hooks)) for hooks in found]


def remove_hooks_since(then: Tracked) -> None:
    """Remove the hooks that were set on graphs since `hooks_of_trackers`."""
    for hooks, count in then:
        for hook in hooks[count:]:
            hook.remove()
        del hooks[count:]
