"""Which operators are collectives, whose results cost time on the network.

Invariant: what is saved is the tensor that the collective fills, and not what waits for
it. By the time a backward reads it, the collective has ended.
Rejected: to save what `wait_tensor` returns. It returns its argument, and a recompute
would run the collective to have one.
"""

from dataclasses import dataclass

from typing_extensions import override

from remat._base.op import Op
from remat.policies._operators import family
from remat.policies._policy import Policy


_SPACES = frozenset({"_c10d_functional", "_c10d_functional_autograd", "c10d"})
# Of these spaces, what returns nothing that another process sent.
_OTHERS = {"wait_tensor", "_wrap_tensor_autograd", "isend", "send", "barrier"}


@dataclass(frozen=True)
class Collectives(Policy):
    """Saves what collectives return, which are the operators of some namespaces."""

    spaces: frozenset[str]

    @override
    def decide(self, op: Op) -> bool:
        """Say whether the operation is a collective."""
        space, _, base = family(op.func).partition(".")
        return space in self.spaces and base not in _OTHERS

    def __repr__(self) -> str:
        return "save_collectives"


save_collectives = Collectives(_SPACES)
"""Saves what collectives return, so that no backward repeats one.

Collectives are the operations of ``torch.distributed``: functional ones, those of a
DTensor that is redistributed, and those that write in place, such as ``all_reduce``.

Source: JAX has no such policy. There, names are given to what collectives return.

Example:
    >>> import torch
    >>> from remat.policies import Op, dots_saveable, save_collectives
    >>> save_collectives(Op(torch.ops._c10d_functional.all_reduce.default))
    <Decision.SAVE: 3>
    >>> save_collectives(Op(torch.ops._c10d_functional.wait_tensor.default))
    <Decision.RECOMPUTE: 0>
    >>> dots_saveable | save_collectives
    (dots_saveable | save_collectives)
"""
