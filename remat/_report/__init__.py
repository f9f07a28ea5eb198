"""Reports on a call: `explain`, `compare`, `saved_residuals`, `check_replay`.

In: a function and arguments. Out: values that print as tables and draw themselves.

    inputs, ledger      the user's tensors, put back afterwards; where bytes come from
    examine, noting     a call, run once and recorded
    outcome             what a call does under its options
    explain, reasons    each operation of a call, and why
    compare, blocks     what policies save, against what they recompute
    peak                an estimate of the most bytes that are alive
    step, watching      a forward and its backward, and what holds the peak
    holders, advice     what holds a peak, and what to do about it
    residuals           what stays alive for the backward, to the byte
    timeline            the bytes that are alive during a call
    bitwise, check_replay
                        whether a recompute gives the bits of its forward
    labels              names of functions, streams and graph nodes
    reports             the values that are returned
    render, plots       how they show: tables and plots

Called by users and by `testing`.
"""
