"""Rules of rematerialization: calls that say themselves what a recompute is given.

In: a function of the user's, perhaps with rules for its derivative and its recompute.
Out: a function that is called by them within rematerialized calls.

    _custom_vjp   `custom_vjp`: a function, its rules, and what is wrong with them
    _ruled        a call by rules, as a program with a vjp of its own
    _keep         `keep`, and places of a policy: calls that no recompute enters again
    _kept         such a call under torch.func, as a program whose graph stays
    _places       what a forward keeps of such a call, and where a recompute finds it

Called by users, by the names `remat.custom_vjp` and `remat.keep`. What a private room
makes is not searched for tensors, and these hold functions of the user's.
"""
