"""What a recompute leaves out, and what is kept for it: record, plan, replay.

In: a policy, `prune=` and a forward. Out: a plan for its backward, and its replay.

    options                     what was asked for
    decide, cost                whether a call is recorded, and what operations cost
    recorder, values, effects   a record of what a forward did
    plan, schedule              what is recomputed, kept or left out; laid out to be run
    collect, replay, check      what is kept in a forward; the function again along a
                                schedule, or as it is, compared with its record
    match                       whether an operation is the one recorded
    cache, forward_plan         what calls of one signature share; what one forward does
    following, recomputation    what a call keeps and replays: at base, under torch.func
    naming, names               `checkpoint_name`

Called by `_transform` where a policy or pruning asks for it, and by `_report`.
"""
