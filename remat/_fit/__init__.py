"""What a training step saves, so that it stays under a budget.

In: a model or a function, its arguments, a budget. Out: a plan, which a model follows.

    api         `fit`, which makes a plan for a whole step
    blocks      a plan by blocks, for modules around blocks too
    unit_plan   the same from one record, for blocks alone: tried first
    units       blocks as units of the walk, and the policy that a block follows
    step_plan   the first as a value, and how a model follows it
    block_plan  the second
    choose      which results of a step are saved: least work whose peak fits
    walk        the peak for any set of saved results
    record      a step: its operations, storages, and when these are freed
    simulate    a step as data, and what a copy of it does
    distribute  distributes memory over blocks: rotor's recursion, on numbers
    meter       the observer that counts bytes and work while a step runs
    quiet       leaves out of stdout what a solver writes
    workspace   bytes that operations hold while they run

Called by users. `chain` uses the meter.
"""
