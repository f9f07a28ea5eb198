"""`remat.scope`: what is computed in a `with` block is stored for no backward.

In: the operations of a block. Out: handles, which a graph holds in place of their
results.

Called by users, and by `nn`.
"""
