"""What the graph of a call holds, and how a graph is read.

In: a graph, or a tensor that one saves. Out: its nodes and what they saved; handles.

    handles     what stands for a tensor that a graph saved; what a policy keeps
    graph       nodes and edges of a graph, and what the nodes saved

Called by `_transform` and `_scope`, which make handles, by `_partial`, `_report`,
`chain` and `rules`.
"""
