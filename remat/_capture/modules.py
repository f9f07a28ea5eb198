"""What `nn.Module` sets itself: registries, hooks, and all else.

Invariant: a name that torch adds or takes away is found here. Rejected: names by hand.
"""

from torch import nn


REGISTRIES = ("_parameters", "_buffers", "_modules")
TEMPLATE = vars(nn.Module())
# Hooks that run in a forward, or that change its graph.
HOOKS = tuple(
    name
    for name in TEMPLATE
    if name.startswith(("_forward_", "_backward_")) and "hook" in name
)
