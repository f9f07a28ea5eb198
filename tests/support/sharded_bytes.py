"""Bytes of a step of a sharded model, counted by an observer that shares no code.

It asks after each operation which storages are there, and how large they are: FSDP
resizes those of parameters that it gathers. What processes send are copies, for threads
of gloo let go of tensors when they like.
"""

import torch
from torch._C._distributed_c10d import Work
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only


class Held(TorchDispatchMode):
    """Finds the most bytes of all storages that operations read or make."""

    def __init__(self, tensors):
        super().__init__()
        self.storages, self.most = {}, 0
        self.hold(tensors)

    def hold(self, value):
        for tensor in tree_flatten(value)[0]:
            if hasattr(tensor, "__tensor_flatten__"):
                names, _ = tensor.__tensor_flatten__()
                self.hold([getattr(tensor, name) for name in names])
            elif isinstance(tensor, torch.Tensor) and not is_pretended(tensor):
                ref = StorageWeakRef(tensor.untyped_storage())
                self.storages[ref.cdata] = ref
        self.most = max(self.most, self.live())

    def live(self):
        found = {k: torch.UntypedStorage._new_with_weak_ptr(k) for k in self.storages}
        there = {k: storage for k, storage in found.items() if storage is not None}
        self.storages = {k: self.storages[k] for k in there}
        return sum(storage.nbytes() for storage in there.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        self.hold(args)
        namespace = func.namespace
        if namespace == "c10d":
            result = sent(func, args, kwargs or {})
        elif namespace == "_c10d_functional" and "wait" not in func.name():
            result = sent_as_a_function(func, args, kwargs or {})
        else:
            result = func(*args, **(kwargs or {}))
        self.hold((args, result))
        return result


def is_pretended(tensor):
    """DTensors ask fake tensors for shapes."""
    return isinstance(tensor, FakeTensor) or tensor.is_meta


def sent(func, args, kwargs):
    copies = tree_map_only(torch.Tensor, torch.clone, args)
    *_, work = func(*copies, **kwargs)
    Work.unbox(work).wait()
    for to, copy in zip(tree_flatten(args)[0], tree_flatten(copies)[0], strict=True):
        if isinstance(to, torch.Tensor):
            to.copy_(copy)
    return args[0], work


def sent_as_a_function(func, args, kwargs):
    result = func(*tree_map_only(torch.Tensor, torch.clone, args), **kwargs)
    return torch.ops._c10d_functional.wait_tensor(result)


def most_held(model, run, *args):
    """Return the most bytes of a model, its arguments, and what a run makes."""
    there = [*model.parameters(), *model.buffers(), *args]
    there += [p.grad for p in model.parameters() if p.grad is not None]
    with Held(there) as held:
        run()
    return held.most
