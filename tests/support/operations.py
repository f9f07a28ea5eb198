"""What the tests of policies share: operations as a record has them, and policies."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from remat.policies import Decision, Op, Value


aten = torch.ops.aten
SAVE, OFFLOAD = Decision.SAVE, Decision.OFFLOAD
DISK, RECOMPUTE = Decision.OFFLOAD_TO_DISK, Decision.RECOMPUTE
MM, SIN = aten.mm.default, aten.sin.default


def value(*shape, dtype=torch.float32, device="cpu"):
    return Value(shape, dtype, torch.device(device))


def op(func=SIN, *shapes, names=(), out=None, rest=()):
    """An operation on tensors of these shapes, and on other arguments."""
    outputs = () if out is None else (value(*out),)
    args = (*(value(*shape) for shape in shapes), *rest)
    return Op(func, args, (), outputs, frozenset(names), "model.py:7, in f")


def saves(op):
    """A user's policy."""
    return op.packet is aten.sin


def torch_saves(ctx, op, *args, **kwargs):
    """A policy of torch's selective checkpointing."""
    return op is MM


OPS = [
    op(),
    op(MM, (2, 3), (3, 4), out=(2, 4)),
    op(aten.bmm.default, (5, 2, 3), (5, 3, 4), out=(5, 2, 4)),
    op(names={"a"}, out=(64,)),
    op(names={"b"}),
    op(MM, (2, 3), (3, 4), names={"a", "b"}),
    op(aten.convolution.default, (1, 2, 8), (4, 2, 3), rest=(None, (1,))),
]


def custom(name):
    """A new operator, which takes two tensors."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a @ b

    return torch.library.custom_op(f"remat_tests::{name}", product, mutates_args=())


class Recorder(TorchDispatchMode):
    """Makes an `Op` of each operation, as a record would."""

    def __init__(self):
        super().__init__()
        self.ops, self.calls = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        call = described(args), described(tuple(kwargs.items()))
        self.ops.append(Op(func, *call, described(tuple(tree_leaves(out)))))
        self.calls.append((args, kwargs))
        return out


def described(arg):
    """An argument with values for tensors and tuples for lists."""
    if isinstance(arg, list | tuple):
        return tuple(map(described, arg))
    if not isinstance(arg, torch.Tensor):
        return arg
    shape, stride, offset = tuple(arg.shape), arg.stride(), arg.storage_offset()
    return Value(shape, arg.dtype, arg.device, stride, offset)


def recorded(fn, *args):
    with Recorder() as mode:
        fn(*args)
    return mode.ops
