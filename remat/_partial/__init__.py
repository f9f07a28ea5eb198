"""What a recompute leaves out, and what the policy saves: record, plan, replay.

In: a policy, `prune=` and a forward. Out: a plan for its backward, and its replay.

    options                what the user asked for
    decide                 whether a call is recorded, and why; what calls share
    planned_call           what one call records, saves and replays
    recorder               records a forward, with the help of:
      values, effects      tensors and storages as data; what operations do, and cost
      candidates           what the policy says, and the tensors that it may save
    plan                   what becomes of each operation
    budget, solver         what a number of bytes is best spent on; who chooses it
    runnable               a plan laid out to be run, and what is compared then
    follow                 the modes of later forwards, and of recomputes in full
    replay                 the mode of a recompute along a plan
    names                  `checkpoint_name`
    tape, barrier          in a graph: what is kept, and read after the cotangents

Called by users to name values, by `_transform` if there is a policy or pruning, by
`_scope` and `_report`, and for options, costs, caches or records by `_fit`, `chain`,
`nn`, `compat` and `rules`.
"""
