"""How a call is run again: what it refers to, as it was.

Values of the user's by their kinds: how each is found, read and written. Results are
taken apart, and put together again around other tensors.

    search                  finds what a call refers to: what is done at which kind
    walk                    a walk over values, each once; the tensors and code found
    paths                   where values are found
    objects                 kinds of values; what objects hold
    nodes, containers, modules
                            each kind of value, and how it is made again
    holders                 how cells, globals, classes, slots are read and written
    container_kinds         how lists, dicts and sets are
    compared                iterators and large containers, which are not copied
    stream_search           random streams in what is not made again
    snapshot                a call as it is, for the names of its tensors
    result_walk, results    a result taken apart, and put together around others

Called by `_transform` and `_live` for each call, by `_report`, `_graph` and `compat`.
"""
