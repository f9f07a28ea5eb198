"""`remat.scope`: what is computed in a `with` block is stored for no backward.

In: the operations of a block. Out: handles, which a graph holds in place of their
results. To follow a value, read the files in this order.

    api         the context manager: blocks begin and end
    recording   the observer of a block's operations, and what a policy says of them;
                results that are saved once it shows what reads them
    following   policies by place, which follow a plan for a whole step, or for blocks
    values      what made each result, as data
    table       which storages hold results, and for how long
    hooks       what a graph saves is a handle, if it is a result or a view of one; the
                backward computes what handles stand for

Called by users, by `nn`, and by `_fit`.
"""
