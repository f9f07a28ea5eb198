"""Moves residuals to host memory or to a file, and back.

In: tensors. Out: a tensor for each in the other place, which gives it back (`offload`).
Called by `_graph` and `_partial`, for residuals that a policy offloads, by `chain`, for
carries, and by `_transform` and `_scope`, for what they are given (`inputs`).
"""
