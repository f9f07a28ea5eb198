"""`torch.utils.checkpoint`, on top of remat: the same names, signatures and results.

    _checkpoint   checkpoint, and the function that it calls under a user's contexts
    _patch        checkpoint_sequential; patch, install and uninstall

In: calls written for torch's checkpoint. Out: the results of the function, with a graph
that recomputes as remat's does. The other names are torch's own.

Called by users, and by libraries once `patch` has replaced torch's checkpoint.
"""

from torch.utils.checkpoint import (
    SAC_IGNORED_OPS as SAC_IGNORED_OPS,
    CheckpointError as CheckpointError,
    CheckpointFunction as CheckpointFunction,
    CheckpointPolicy as CheckpointPolicy,
    DefaultDeviceType as DefaultDeviceType,
    GraphExecGroup as GraphExecGroup,
    SelectiveCheckpointContext as SelectiveCheckpointContext,
    check_backward_validity as check_backward_validity,
    create_selective_checkpoint_contexts as create_selective_checkpoint_contexts,
    detach_variable as detach_variable,
    get_device_states as get_device_states,
    noop_context_fn as noop_context_fn,
    set_checkpoint_debug_enabled as set_checkpoint_debug_enabled,
    set_checkpoint_early_stop as set_checkpoint_early_stop,
    set_device_states as set_device_states,
)

from remat._base.package import advise as _advise
from remat._partial.names import checkpoint_name as _checkpoint_name
from remat.compat._checkpoint import checkpoint as checkpoint
from remat.compat._patch import (
    checkpoint_sequential as checkpoint_sequential,
    install as install,
    patch as patch,
    uninstall as uninstall,
)


name = _checkpoint_name
"""`remat.checkpoint_name`, as is proposed for torch: `name(tensor, "n")`."""

_advise(__name__)
