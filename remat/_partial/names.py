"""`checkpoint_name`: gives a value a name, for policies to find it by.

Called by users. `naming` tells a recorder or a report of the name.

Invariant: naming a value changes nothing, and costs next to nothing while nothing is
recorded. Rejected: an operation of its own, as in JAX. Its result would be another
value, and a user who goes on with the old one would pay for both.
"""

from typing import TypeVar

from torch import Tensor
from torch.utils._pytree import tree_leaves

from remat._base import pytree
from remat._base.operators import named
from remat._partial.naming import give_name
from remat._torch import makes_graph, must_inline


T = TypeVar("T")


def checkpoint_name(x: T, name: str) -> T:
    """Return `x` as it is, and give its tensors a name that policies see.

    The name belongs to the result of the operation that made the tensor, or that made
    what the tensor is a view of. So you may go on with the tensor that you passed. A
    value can have several names, and several values can have the same name.

    The policies of the rematerialized functions around this call see the name.
    Elsewhere it does nothing.

    Args:
        x: a pytree. Its tensors are named, other leaves are not.
        name: the name.

    Returns:
        `x` itself.

    Raises:
        TypeError: the name is not a string.

    Source: JAX's `jax.ad_checkpoint.checkpoint_name`.

    Example:
        >>> import torch
        >>> from remat import policies, remat, saved_residuals
        >>> def f(x):
        ...     y = checkpoint_name(x.sin(), "y")
        ...     return y.sin().sin()
        >>> policy = policies.save_only_these_names("y")
        >>> x = torch.ones(3)
        >>> [r.origin for r in saved_residuals(remat(f, policy=policy), x)]
        ['from the argument x', "named 'y'"]
    """
    if must_inline():
        return _named_in_graph(x, name) if makes_graph() else x
    if not isinstance(name, str):
        raise TypeError(_swapped(name) if isinstance(x, str) else _no_string(name))
    leaves = [x] if isinstance(x, Tensor) else pytree.flatten(x)[0]
    give_name([t for t in leaves if isinstance(t, Tensor)], name)
    return x


def _named_in_graph(x: T, name: str) -> T:
    """Name tensors by an operation, which the tape of a call hears."""
    leaves = [x] if isinstance(x, Tensor) else tree_leaves(x)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            named(leaf, name)
    return x


def _swapped(value: object) -> str:
    kind = type(value).__name__
    return f"remat: write checkpoint_name(x, name): the name is second; got a {kind}"


def _no_string(name: object) -> str:
    kind = type(name).__name__
    return f"remat: checkpoint_name takes a string; got {name!r}, a {kind}"
