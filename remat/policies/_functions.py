"""Functions as policies: which kind a function is, and advice on likely mistakes.

Called by `as_policy`.

Invariant: the returned function can be hashed, and called with one operation.
Rejected: guessing the policy that the user meant. `policy="dots"` would have to mean
the same in every later version.
"""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, TypeAlias, TypeVar

from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from remat._base.op import Op
from remat._torch import is_operator
from remat.policies._decision import Answer
from remat.policies._selective import Selective


Ask: TypeAlias = Callable[[Op], Answer]
_F = TypeVar("_F", bound=Callable[..., Any])


def asked(fn: object) -> Ask:
    """Return a policy function of ours or of torch's kind as a function of an `Op`.

    Raises:
        TypeError: `fn` has neither signature, or cannot be hashed.
    """
    hint = advice(fn)
    if hint or not callable(fn):
        raise TypeError(
            f"remat: not a policy: {fn!r}, a {type(fn).__name__}. {hint}A policy "
            "is one of remat.policies, None, a list of operators, a function "
            "(op) -> bool or Decision, or a function of torch's kind, "
            "(ctx, op, *args, **kwargs) -> CheckpointPolicy."
        )
    checked_hash(fn)
    if _takes(fn, 1):
        return fn
    if _takes(fn, 3):
        return Selective(fn)
    raise TypeError(
        f"remat: policy {fn!r} can be called neither as policy(op) nor as "
        "policy(ctx, op, *args, **kwargs), as in torch's selective checkpointing"
    )


def checked_hash(fn: _F) -> _F:
    """Return a policy function that can be hashed.

    Raises:
        TypeError: it cannot be hashed.
    """
    try:
        hash(fn)
    except TypeError:
        raise TypeError(
            f"remat: policy {fn!r} is not hashable, but remat compares policies. Make "
            "its class a frozen dataclass, or remove __eq__ from it."
        ) from None
    return fn


def _takes(fn: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(fn).bind(*range(count))
    except (TypeError, ValueError):  # ValueError: a builtin that has no signature
        return False
    return True


def printed(ask: Ask) -> str:
    """Return the name of a function as its author wrote it."""
    fn = ask.fn if isinstance(ask, Selective) else ask
    return getattr(fn, "__qualname__", repr(fn))


# --- Advice on likely mistakes ------------------------------------------------------


PUBLIC = (
    *("nothing_saveable", "everything_saveable", "dots_saveable", "checkpoint_dots"),
    *("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims"),
    *("offload_dot_with_no_batch_dims", "save_only_these_names"),
    *("save_any_names_but_these", "save_anything_except_these_names"),
    *("save_and_offload_only_these_names", "save_from_both_policies"),
    *("save_names_matching", "save_ops", "save_larger_than", "save_smaller_than"),
    "save_collectives",
)
_MAKERS = *PUBLIC, "within"
_CONSTANTS = "nothing_saveable", "everything_saveable"


def advice(obj: object) -> str:
    """Return what to do about a likely mistake; "" for none."""
    if isinstance(obj, str):
        near = [p for p in PUBLIC if obj and obj.lower() in p]
        near = near or get_close_matches(obj.lower(), PUBLIC, 1, 0.5)
        return f"Do you mean remat.policies.{near[0]}? " if near else ""
    if isinstance(obj, bool):
        return f"Do you mean remat.policies.{_CONSTANTS[obj]}? "
    if is_operator(obj):
        return "Do you mean a list with this operator, [...]? "
    if isinstance(obj, type):
        return "It is a class: pass an instance. "
    if isinstance(obj, nn.Module):
        return "It is a module, to which remat itself is applied: remat(module). "
    if str(getattr(obj, "__module__", "")).startswith("remat."):
        made = getattr(obj, "__name__", "")
        return f"It makes policies: pass {made}(...). " if made in _MAKERS else ""
    if getattr(obj, "func", obj) is create_selective_checkpoint_contexts:
        return "Pass its argument instead: the function or the list. "
    return ""
