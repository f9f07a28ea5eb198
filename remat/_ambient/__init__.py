"""What a function reads without being passed it: random streams, autocast, settings.

In: the streams that a search found. Out: `Ambient`, which notes their state at the call
and restores it around a recompute, and `without_draws` for `rng="error"`.

    streams     which random streams there are, and how each is read and set
    ambient     the state of a call, noted and restored
    modes       the user's modes for operations, those that change results
    draws       draws from global streams, refused by name and line

Called by `_transform` and `chain`. `_partial`, `_reach`, `_report`, `_scope`,
`random` and `rules` ask for streams and draws.
"""
