"""Reports on a call: `explain`, `compare`, `saved_residuals`, `check_replay`.

In: a function and arguments. Out: values that print as tables and draw themselves.

    inputs      the user's tensors, put back afterwards, and where bytes come from
    examine     a call, run once and recorded
    fates       what a call does under its options, and why
    explain     each operation of a call
    compare     what policies save, against what they recompute
    step        a forward and its backward: what holds the peak
    peak        what holds a peak, and what to do about it
    residuals   what stays alive for the backward, to the byte
    timeline    the bytes that are alive during a call
    bitwise, check_replay
                whether a recompute gives the bits of its forward
    labels      names of functions, streams and graph nodes
    reports     the values that are returned
    render, plots
                how they show: tables and plots

Called by users and by `testing`. `_fit` and `chain` show results by it, and `compat`
compares runs by it.
"""
