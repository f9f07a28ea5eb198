"""`checkpoint_name`: names for policies to find values by.

Invariant: naming a value changes nothing, and costs next to nothing where nobody
records. Rejected: an operation of its own, as in JAX. The value of the operation is not
the value named, so who forgets to go on with the former pays for both.
"""

from typing import TypeVar

import torch
from torch import Tensor

from remat._base import pytree
from remat._partial.naming import give_name


T = TypeVar("T")


def checkpoint_name(x: T, name: str) -> T:
    """Return `x` as it is, its tensors known to policies by a name.

    What is named is the result of the operation that made the tensor, or that made what
    it is a view of: whoever reads that reads the named value, so the result need not be
    used. One value can have several names, and one name belong to several values.

    Names are seen by the policies of the rematerialized functions that the call is in;
    elsewhere they do nothing.

    Args:
        x: a pytree. Its tensors are named, other leaves are not.
        name: the name.

    Returns:
        `x` itself.

    Raises:
        TypeError: the name is no string.

    Source: JAX's `jax.ad_checkpoint.checkpoint_name`.

    Example:
        >>> from remat import policies, remat, saved_residuals
        >>> def f(x):
        ...     y = checkpoint_name(x.sin(), "y")
        ...     return y.sin().sin()
        >>> policy = policies.save_only_these_names("y")
        >>> x = torch.ones(3)
        >>> [r.origin for r in saved_residuals(remat(f, policy=policy), x)]
        ['from the argument x', "named 'y'"]
    """
    if torch.compiler.is_compiling():
        return x
    if not isinstance(name, str):
        raise TypeError(_swapped(name) if isinstance(x, str) else _no_string(name))
    leaves = [x] if isinstance(x, Tensor) else pytree.flatten(x)[0]
    give_name([t for t in leaves if isinstance(t, Tensor)], name)
    return x


def _swapped(value: object) -> str:
    kind = type(value).__name__
    return f"remat: write checkpoint_name(x, name): the name is second; got a {kind}"


def _no_string(name: object) -> str:
    kind = type(name).__name__
    return f"remat: checkpoint_name takes a string; got {name!r}, a {kind}"
