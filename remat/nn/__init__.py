"""Rematerialized modules: which submodules of a model are recomputed.

In: a model. Out: the same model, whose blocks are recomputed in a backward.

Called by users.
"""
