"""What a call reaches, and how it runs again on the user's own objects.

In: a function and its arguments. Out: a context in which all that they reach holds what
it held at the call.

    reach       all of this for one call
    running     one run of it again, and what that is called under
    lifted      other tensors in place of the user's
    attributes  what is set on tensors
    restored    what all that roots reach holds in one run: what it held at the call
    exchange    what each value is in one run: itself, written in place, or made again
    left        what a function leaves in holders
    copies      copies of buffers in holders, which other threads may find
    roots       one root of a call, and the numbers of its tensors
    arguments   the function and the arguments, put aside
    parts       what holders hold one by one: put aside, found, written for a run
    identities  identities that code asks for: what is held, and what is refused
    moment      what all holds at one moment of a forward, compared with another
    before      what holders held before a forward, and what that changed of it
    layout      which holders a root reaches, and where each one is
    walk        the walk over what a root reaches: how each value is treated
    names       where tensors are, as the author of a function writes it
    result_walk a result taken apart, and put together around other tensors
    results     where the tensors of a result are

Kinds of values, how each is told apart, read and written:

    objects         kinds of objects, and what they hold
    holders         how cells, globals, classes, slots and containers are read, written
    watched         what is no holder: buffers of numbers, iterators, large containers
    stream_search   random streams in what is not walked, and what code does

Called by `_transform`, for all calls, and by `chain`, for what steps hold. `_report`
looks at what a call reaches, `rules` at what it changes, and the handles of `_graph`
name it. `compat` asks for facts of classes.
"""
