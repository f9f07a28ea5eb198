"""The only room that uses private torch API: an upgrade of torch has one place to look.

    autograd        the engine, graphs and what they saved, hooks, dual numbers
    levels          the levels of torch.func
    batches         tensors below all levels, and at them again
    modes           function modes and dispatch modes
    tracing         Dynamo, torch.fx, TorchScript
    graphs          graphs that AOTAutograd and make_fx make; collectives
    nodes           nodes of Dynamo's graphs, and runs of their bodies
    operators       what `torch.ops` holds; keyed draws; classes of pytrees; operations
                    that compute something else where a mode is entered
    fakes           fake tensors, of operations that were done before
    tensors         tensors without data, fake tensors and copies; storages
    shards          copies of replicas and shards that send nothing; resized storages
    noted           what a run does to torch's state that torch tells nobody
    process         settings, global generators, autocast, torch's checkpoint
    versions        whether torch is one that is known

Called by all rooms, which import from the files.

Invariant: every name says which upstream change would delete it, and has a test in
`tests/torch`.
Rejected: private API where it is used. An upgrade would be read for in all files.
"""

# First, as it says which torch lacks what the others import.
from remat._torch import versions as versions  # isort: skip
