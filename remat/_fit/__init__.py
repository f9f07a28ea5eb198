"""What a training step saves, so that it stays under a budget.

In: a model or a function, its arguments, a budget. Out: a plan, which a model follows.

    api             `fit`
    planning        a plan for a whole step
    step_plan       that plan, and how it is followed
    choose          which results are saved: least work whose peak fits
    program         the same as a mixed-integer program, under some limits
    walk            the peak for any set of saved results
    record          a step: its operations, storages, and when these are freed
    fitting         a plan by blocks
    plan            that plan: which blocks are recomputed, and what that costs
    search          measures options, has them distributed, simulates what may be best
    distribute      distributes memory over blocks: rotor's recursion, on numbers
    options         what a block may keep
    simulate        runs a step on fake tensors
    training_step   a step as data
    meter           counts bytes and work while a step runs
    workspace       bytes that operations hold while they run

Called by users.
"""
