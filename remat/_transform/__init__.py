"""What a call becomes, by who differentiates it.

In: a call of `remat(fn)`. Out: the results of `fn`, with a graph that recomputes.

    api, refused                the decorator, and what it refuses
    lowering                    the one file that chooses
    saved, held, packing, filling, leaves
                                base autograd: plain's own graph, which holds handles
    function, rules             torch.func: a recursive Function; its rules are programs
    call, primal, foreign       a user's call as such a program, and what it refuses
    buffers                     what a function updates in place, updated once

Called by users, and by `_report`, which runs calls to look at them.
"""
