"""Policies by the operation: operators, collectives, decisions, and sizes.

Invariant: of a collective the tensor is saved that it fills, and not what waits for it.
Sizes are in bytes, like memory.
Rejected: to save what `wait_tensor` returns. It returns its argument, and a recompute
would run the collective to have one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from remat._base.op import Op
from remat.policies._dots import batched_like
from remat.policies._functions import checked, family, is_collective, name
from remat.policies._policy import ACCEPTED, Policy, as_policy


@dataclass(frozen=True)
class Operators(Policy):
    """Saves the results of some operators. It holds them by name."""

    operators: frozenset[str]

    def decide(self, op: Op) -> bool:
        """Say whether the operation calls one of the operators."""
        return name(op.func) in self.operators or family(op.func) in self.operators

    def __repr__(self) -> str:
        return (
            f"save_ops({', '.join(f'torch.ops.{o}' for o in sorted(self.operators))})"
        )


def save_ops(*operators: Any) -> Policy:
    """Save the results of these operators.

    Args:
        *operators: each is an overload (`torch.ops.aten.mm.default`), a packet for all
            overloads (`torch.ops.aten.mm`), a higher-order operator
            (`torch.ops.higher_order.flex_attention`) or a function that
            `torch.library.custom_op` made. Policies see the operators that run below
            autograd: often `aten.addmm`, and never `aten.linear`.

    Returns:
        The policy. Without operators it saves nothing.

    Raises:
        TypeError: an argument is not an operator (such as a string, or `torch.mm`).

    Source: torch's selective checkpointing, which takes a list of overloads.

    Example:
        >>> import torch
        >>> policy = save_ops(torch.ops.aten.mm, torch.ops.aten.bmm.default)
        >>> policy(Op(torch.ops.aten.mm.default))
        <Decision.SAVE: 3>
        >>> policy
        save_ops(torch.ops.aten.bmm.default, torch.ops.aten.mm)
    """
    # Dynamo warns of functions that remember results.
    name_of = name.__wrapped__ if torch.compiler.is_compiling() else name
    return Operators(frozenset([name_of(checked(o, "save_ops")) for o in operators]))


def save_from_both_policies(policy_1: object, policy_2: object) -> Policy:
    """Save what either policy saves, in the nearer of the two places: `p | q`.

    Args:
        policy_1: a policy, or anything that `as_policy` accepts.
        policy_2: another one.

    Returns:
        The policy.

    Raises:
        TypeError: an argument is not a policy.

    Source: `jax.checkpoint_policies.save_from_both_policies`, which refuses policies
    that offload.

    Example:
        >>> from remat.policies import dots_saveable, save_only_these_names
        >>> save_from_both_policies(dots_saveable, save_only_these_names("a"))
        (dots_saveable | save_only_these_names('a'))
    """
    return as_policy(policy_1) | policy_2


ACCEPTED.append(((list, tuple, set, frozenset), lambda several: save_ops(*several)))


def register_cost(operator: Any, flops: Callable[[Op], float]) -> None:
    """Register what an operator costs, such as a GEMM of your own.

    Budgets, plans and reports count it, instead of torch's formula for FLOPs. A Triton
    kernel is an operator once `torch.library.triton_op` wraps it.

    Args:
        operator: the operator, as for `register_dot`.
        flops: returns the FLOPs of an operation. The last that is registered counts.

    Example:
        >>> import torch
        >>> @torch.library.custom_op("remat_doctest::scale", mutates_args=())
        ... def scale(a: torch.Tensor) -> torch.Tensor:
        ...     return a * 2
        >>> register_cost(scale, lambda op: op.outputs[0].nbytes / 4)
    """
    checked(operator, "register_cost")
    if not callable(flops):
        raise TypeError(f"remat: register_cost takes a function; got {flops!r}")
    COSTS[family(operator)] = flops


COSTS: dict[str, Callable[[Op], float]] = {}


@dataclass(frozen=True)
class Decisions(Policy):
    """Saves integers and booleans that are computed of floating numbers."""

    has_decisions = True

    @override
    def decide(self, op: Op) -> bool:
        """Say whether the operation decides something."""
        made = {v.dtype for v in op.outputs}
        is_of_floats = any(v.dtype.is_floating_point for v in op.inputs)
        if not is_of_floats or all(t.is_floating_point or t.is_complex for t in made):
            return False
        called = family(op.func)
        return batched_like(op.func) is None and not any(
            w in called for w in _NO_DECISION
        )

    def __repr__(self) -> str:
        return "decisions_saveable"


# What they return besides is for their own backward.
_NO_DECISION = "max_pool", "dropout", "batch_norm", "rnn", "lstm", "gru", "_thnn"
decisions_saveable = Decisions()
"""Saves what integers and booleans are computed to be of floating numbers.

Those are the results of topk, argmax, sort, multinomial, comparisons and casts, a few
bytes each. A recompute then takes the branches, and has the shapes, of the forward,
even where a device computes the floating numbers a little differently each time: a
router sends each token where it went. If such a call reads them, to choose what runs,
each one is recorded anew.

Example:
    >>> import torch
    >>> from remat.policies import Op, Value, decisions_saveable
    >>> x, found = (Value((4,), t, "cpu") for t in (torch.float32, torch.int64))
    >>> decisions_saveable(Op(torch.ops.aten.argmax.default, (x,), outputs=(found,)))
    <Decision.SAVE: 3>
"""


@dataclass(frozen=True)
class Collectives(Policy):
    """Saves what collectives return."""

    @override
    def decide(self, op: Op) -> bool:
        """Say whether the operation is a collective."""
        return is_collective(op.func)

    def __repr__(self) -> str:
        return "save_collectives"


save_collectives = Collectives()
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


@dataclass(frozen=True)
class Size(Policy):
    """Saves results by the total bytes of an operation's outputs.

    Ranks may have other sizes. A collective that one of them left out of its recompute
    would have the others wait forever, so none is saved for its size.
    """

    larger: bool
    than: float

    def decide(self, op: Op) -> bool:
        """Compare the bytes."""
        if is_collective(op.func):
            return False
        return op.nbytes > self.than if self.larger else op.nbytes < self.than

    def __repr__(self) -> str:
        return f"save_{'larg' if self.larger else 'small'}er_than({self.than!r})"


def save_larger_than(nbytes: float) -> Policy:
    """Save the results of operations whose outputs have more than `nbytes` bytes.

    Args:
        nbytes: the total bytes of all outputs of one operation.

    Returns:
        The policy.

    Raises:
        TypeError: `nbytes` is not a number.
        ValueError: `nbytes` is negative.

    Source: Keras' `RematScope(mode="larger_than")`, which counts elements.

    Example:
        >>> import torch
        >>> from remat.policies import Value
        >>> out = Value((256,), torch.float32, torch.device("cpu"))
        >>> save_larger_than(1000)(Op(torch.ops.aten.sin.default, outputs=(out,)))
        <Decision.SAVE: 3>
    """
    return Size(True, _checked_bytes(nbytes, "save_larger_than"))


def save_smaller_than(nbytes: float) -> Policy:
    """Save the results of operations whose outputs have fewer than `nbytes` bytes.

    Args:
        nbytes: the total bytes of all outputs of one operation.

    Returns:
        The policy.

    Raises:
        TypeError: `nbytes` is not a number.
        ValueError: `nbytes` is negative.

    Example:
        >>> from remat.policies import dots_saveable
        >>> dots_saveable & save_smaller_than(2**20)
        (dots_saveable & save_smaller_than(1048576))
    """
    return Size(False, _checked_bytes(nbytes, "save_smaller_than"))


def _checked_bytes(nbytes: object, taker: str) -> float:
    if isinstance(nbytes, bool) or not isinstance(nbytes, int | float):
        raise TypeError(
            f"remat: {taker} takes a number of bytes; got {nbytes!r}, a "
            f"{type(nbytes).__name__}"
        )
    if not nbytes >= 0:
        raise ValueError(
            f"remat: {taker} takes a number of bytes, at least 0; got {nbytes!r}"
        )
    return nbytes
