"""What each block of a model keeps, so that a training step stays under a budget.

In: a model or a function, its arguments, a budget. Out: a plan, which is applied to the
model by `remat.nn.apply`.

    api             `fit`
    fitting         what is chosen for, and the plan of what was found
    plan            the plan: which blocks are recomputed, and what that costs
    search          measures options, has them distributed, simulates what may be best
    distribute      distributes memory over blocks: rotor's recursion, on numbers
    options         what a block may keep
    simulate        runs a step on fake tensors
    training_step   a step as data
    meter           counts bytes and work while a step runs
    workspace       bytes that operations hold while they run

Called by users.
"""
