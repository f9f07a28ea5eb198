"""What a call becomes, by who differentiates it.

In: a call of `remat(fn)`. Out: the results of `fn`, with a graph that recomputes.
To follow a call, read the files in this order.

    api                 the decorator, and what it refuses
    rematerialized      what it returns: a callable
    module              what it returns for a module: a module
    lowering            the one file that chooses, and runs an eager call as chosen
    traced              runs a call while a graph is made

Under base autograd: plain's own graph, which holds handles.

    saved               the whole lowering, from the call to the end of a recompute
    inputs              what it saves of the inputs of a call
    stand_ins           what takes their place where they are gone
    leaves              what a recompute must leave as it was

Under torch.func: one Function, whose backward is again a program.

    call                a user's call, taken apart
    function            the call as a program, how it is evaluated at each level, the
                        forward, the node, and the vjp: read it from top to bottom
    levels              a program under vmap and under jvp, as programs
    checks              what a call must not do, and a recompute must do
    state               what a forward runs on and in, and what recomputes restore
    changes             writes to inputs: who makes them, those that torch does not
                        count, and what a recompute reads of large ones

Called by users, by `_report`, which runs calls to look at them, and by rooms that make
calls: `chain`, `nn`, `compat`, `_fit` and `rules`.
"""
