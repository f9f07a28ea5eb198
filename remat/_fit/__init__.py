"""What a training step saves, so that it stays under a budget.

In: a model or a function, its arguments, a budget. Out: a plan, which a model follows.

    api         `fit`
    planning    makes a plan: chooses, and runs the step as planned
    plan        a plan as a value, and how a model follows it
    files       plans as files
    units       blocks as units of the walk; under torch.func, too
    choose      which results of a step are saved: least work whose peak fits
    rewritten   what calls make again, as operations and storages of a record
    walk        the peak for any set of saved results
    record      a step: its operations, storages, and when these are freed
    simulate    a step as data, and the peak of a copy of it, and of its optimizer
    meter       the observer that counts bytes while a step runs
    workspace   bytes that operations hold while they run

Called by users. `chain` uses the meter.
"""
