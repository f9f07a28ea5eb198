"""What reports say of a call: `explain`, `compare`, `saved_residuals`, `check_replay`.

In: a function and arguments. Out: values that print as tables and draw themselves.

    inputs, storages    the user's tensors, put back afterwards; where bytes come from
    examine, outcome    a call run once, and what becomes of it under its options
    explain, reasons    each operation of it, and why
    residuals           what stays alive for the backward, to the byte
    compare, check_replay
                        whether a recompute does what the forward did
    reporting, reports, render
                        names of things; the values that are returned; tables and plots

Called by users and by `testing`.
"""
