"""What someone probably meant who passed something that is no policy.

Invariant: nothing here decides anything; it only words the end of an error.
Rejected: doing what was probably meant. `policy="dots"` would have to mean the same in
every later version.
"""

from difflib import get_close_matches

from torch.utils.checkpoint import create_selective_checkpoint_contexts

from remat._operators import is_operator


PUBLIC = (
    *("nothing_saveable", "everything_saveable", "dots_saveable", "checkpoint_dots"),
    *("dots_with_no_batch_dims_saveable", "checkpoint_dots_with_no_batch_dims"),
    *("offload_dot_with_no_batch_dims", "save_only_these_names"),
    *("save_any_names_but_these", "save_anything_except_these_names"),
    *("save_and_offload_only_these_names", "save_from_both_policies"),
    *("save_names_matching", "save_ops", "save_larger_than", "save_smaller_than"),
)
_CONSTANTS = "nothing_saveable", "everything_saveable"


def advice(obj: object) -> str:
    """Return what to do about a likely mistake, or nothing."""
    if isinstance(obj, str):
        near = [p for p in PUBLIC if obj and obj.lower() in p]
        near = near or get_close_matches(obj.lower(), PUBLIC, 1, 0.5)
        return f"Do you mean remat.policies.{near[0]}? " if near else ""
    if isinstance(obj, bool):
        return f"Do you mean remat.policies.{_CONSTANTS[obj]}? "
    if is_operator(obj):
        return "Do you mean a list of it, [...]? "
    if isinstance(obj, type):
        return "It is a class: pass an instance. "
    if str(getattr(obj, "__module__", "")).startswith("remat."):
        made = getattr(obj, "__name__", "")
        return f"It makes policies: pass {made}(...). " if made in PUBLIC else ""
    if getattr(obj, "func", obj) is create_selective_checkpoint_contexts:
        return "Pass what it is called with: the function or the list. "
    return ""
