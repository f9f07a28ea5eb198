"""`torch.utils.checkpoint`, on top of remat: the same names, signatures and results.

In: calls written for torch's checkpoint. Out: the results of the function, with a graph
that recomputes as remat's does.

Called by users.
"""
