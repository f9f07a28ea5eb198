"""Estimates the peak of a backward, from what one call did.

Called by `explain` and `compare`. A backward is at its peak when it has recomputed the
largest call: then all that was saved is alive, and all that this recompute holds.

Invariant: nothing runs here.
Rejected: a walk through the backward, which frees what it has read. Blocks are alike in
most models, so the first one that the backward recomputes is at the peak.
"""

from remat._report.examine import Examined


def bytes_recomputed(found: Examined, kept: frozenset[int], own: frozenset[int]) -> int:
    """Return the bytes that the largest recompute holds besides what was saved.

    Args:
        found: what the call did.
        kept: the storages that are saved.
        own: the storages that a recompute of the whole call holds; none if the function
            is called without `remat` around it.
    """
    # The recompute of a call within holds those of the calls around it, too.
    held = {-1: own - kept}
    for i, call in enumerate(found.calls):
        held[i] = held[call.around] | (call.holds - kept)
    return max(sum(found.sizes[s] for s in storages) for storages in held.values())
