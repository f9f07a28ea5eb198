"""What the graph of a call holds, and how a graph is read.

In: a graph, or a tensor that one saves. Out: its nodes and what they saved; handles.

    handles     what stands for a tensor that a graph saved
    residual    what a policy keeps of a call, on the device or elsewhere
    graph       the nodes of a graph, and what they saved
    edges       how one tensor was computed from another; what a call's graph reaches

Called by `_transform` and `_scope`, which make handles, by `_partial`, `_report`,
`chain` and `rules`.
"""
