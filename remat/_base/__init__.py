"""What every room uses: types, errors, pytrees, operations as data, a thread's context.

In: nothing of remat but `_torch`. Out: vocabulary.

    types             what flows between rooms
    errors            what a user may catch, and reads: names in messages, tracebacks
    pytree            the only importer of optree; `remat.register`
    context           which calls a thread is inside of, and for what
    interpreter       what holds for CPython alone: bytecode, and where objects lie
    code              what a function's code refers to, and whether that is the user's
    source            the line of the user that is running; where modules are in one
    warned            at which line a warning is shown, and that it is shown once
    sizes             numbers of bytes, as people write them
    op, program       an operation, and a call, as data
    operators         those that graphs and records hold; the mode that sees all
    package           names that are imported later, and what to write for wrong ones
    absent            a tensor without a value, for what a recompute leaves out
    tensors           how a tensor is described, how often it was changed, its parts

Called by all rooms.
"""
