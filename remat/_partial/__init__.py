"""What a recompute leaves out, and what the policy saves: record, plan, replay.

In: a policy, `prune=` and a forward. Out: a plan for its backward, and its replay.

    options                     what the user asked for
    recorder                    records a forward, with the help of:
      storages, values          numbers of storages; tensors and arguments as data
      effects, classify         what an operation does besides returning values
      exposures                 that Python takes the memory of a tensor
      roots                     what the graph saved
      candidates                what the policy says, and the tensors that it may save
      assemble                  what is known only at the end: names, hidden writes
    plan, cost                  what becomes of each operation, and what it costs
    budget, budgeted, measured  what a number of bytes is best spent on
    plans, schedule             the plans of one record; a plan laid out to be run
    decide                      whether a call is recorded, follows a plan, or neither
    collect, replay, check      a forward that saves residuals; a recompute along a
                                plan; a full recompute, compared with the record
    match                       whether an operation is the one recorded
    cache                       what calls of one signature share
    planned_call                what one call records, saves and replays
    naming, names               `checkpoint_name`
    tape, barrier, sketch       in a graph: what is kept, and read after the cotangents
    order                       in a graph: what may be read before them

Called by `_transform` if there is a policy or pruning, and by `_scope` and `_report`.
"""
