"""Reports on a call: `explain`, `compare`, `saved_residuals`, `check_replay`.

In: a function and arguments. Out: values that print as tables and draw themselves.

    inputs      the user's tensors, put back afterwards; names, and origins of bytes
    examine     the record of a call, which explain and compare show
    fates       what a call does under its options, and why
    explain, compare
                each operation of a call; what policies save and recompute
    step, peak  the record of a step: what holds its peak, and what to do about it
    residuals   what stays alive for the backward, to the byte
    timeline    the bytes that are alive during a call
    check_replay
                whether a recompute gives the bits of its forward
    reports, render
                the values that are returned, and how they show

Called by users and by `testing`. `_fit` and `chain` count bytes and show results by it,
and `compat` compares runs by it.
"""
