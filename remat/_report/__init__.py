"""Reports on a call: `explain`, `compare`, `saved_residuals`, `check_replay`.

In: a function and arguments. Out: values that print as tables and draw themselves.

    inputs      the user's tensors, put back afterwards, and where bytes come from
    examine     the record of a call, which explain and compare show
    fates       what a call does under its options, and why
    explain, compare
                each operation of a call; what policies save and recompute
    suggest     the policy to write, as code
    step, peak  the record of a step: what holds its peak, and what to do about it
    residuals   what stays alive for the backward, to the byte
    alive       counts the storages that are alive
    timeline    the bytes that are alive during a call
    check_replay
                whether a recompute gives the bits of its forward
    labels      names of functions, streams and graph nodes
    reports, render, plots
                the values that are returned, and how they show

Called by users and by `testing`. `_fit` and `chain` count bytes and show results by it,
and `compat` compares runs by it.
"""
