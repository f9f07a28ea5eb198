"""Residuals in the host's memory or in a file, and back.

In: tensors. Out: a place for each, which gives it back on its device.

    offload     the host's pinned memory, and files without a name
    bytes       the bytes of a tensor, and a tensor of bytes

Called by `_graph` and `_partial`, for residuals that a policy offloads.
"""
