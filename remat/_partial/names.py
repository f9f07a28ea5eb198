"""`checkpoint_name`: gives a value a name, for policies to find it by.

Invariant: naming a value changes nothing, and costs next to nothing while nobody
listens. A listener hears the names that its own thread gives.
Rejected: an operation of its own, as in JAX: who goes on with the old value would pay
for both. To write names on tensors: a view or an alias would not have them.
"""

import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from remat._base import pytree
from remat._base.context import here
from remat._base.op import Op
from remat._base.operators import LIBRARY, named
from remat._base.warned import warn, warn_at
from remat._torch.tracing import makes_graph, must_inline
from remat.policies import Policy
from remat.policies._places import unmatched


_NAMES: set[str] = set()
BY_RULE = "remat: kept by a rule"  # in compiled code, whatever the policy says


@contextmanager
def told_of_names(listener: Any) -> Iterator[None]:
    """Tell a listener of the names that this thread gives in the body."""
    listeners = here().listeners
    listeners.append(listener)
    try:
        yield
    finally:
        listeners.remove(listener)


def give_name(tensors: Iterable[Tensor], name: str) -> None:
    """Tell the listeners of this thread of a name: their method `name` is called."""
    _NAMES.add(name)
    for listener in here().listeners:
        for t in tensors:
            listener.name(t, name)


# An operation gives the name where code is compiled for no graph of AOTAutograd.
@torch.library.impl(LIBRARY, "named", "CompositeExplicitAutograd")
def _named(x: Tensor, name: str) -> None:
    give_name([x], name)


class PolicyKeys:
    """The keys of a policy that matched nothing in one call, until the user is told."""

    def __init__(
        self, policy: Policy, ops: Iterable[Op], label: str, paths: Iterable[str] = ()
    ) -> None:
        self._near, self._label = unmatched(policy, ops, paths), label
        _FOUND.update(policy.keys - self._near.keys())
        _UNTOLD.add(self)

    def tell(self) -> None:
        """Warn, once, of keys that no call of the program has matched by now."""
        _UNTOLD.discard(self)
        place = _PLACE.search(self._label)
        for part, key in sorted(self._near, key=itemgetter(1)):
            if (part, key) not in _FOUND and key not in _NAMES:
                _FOUND.add((part, key))
                message = f"remat: the {told_of_key(key, self._near[part, key])}"
                if place is None:
                    warn(message)
                else:
                    file, line = place.groups()
                    warn_at(message, file, int(line))


def note_found(policy: Policy, ops: Iterable[Op]) -> None:
    """Note which keys of a policy match something."""
    _FOUND.update({*policy.keys}.difference(unmatched(policy, ops)))


def told_of_key(key: str, near: str) -> str:
    """Return what is told of a key that nothing matches, and of what is near."""
    return _UNMATCHED.format(key=key) + (f" Do you mean {near!r}?" if near else "")


def tell_of_keys() -> None:
    """Tell of the keys of all policies that were asked."""
    for keys in [*_UNTOLD]:
        keys.tell()


_UNTOLD: weakref.WeakSet[PolicyKeys] = weakref.WeakSet()
_FOUND = set[tuple[Policy, str]]()  # or told
_PLACE = re.compile(r"\((?:rematerialized|called) at (.*):(\d+)\)$")
_UNMATCHED = (
    "policy has the key {key!r}, but no value, module, class or operator of that name "
    "was there; torch.compile tells of no Functions. Nothing is decided by it."
)


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
        leaves = tree_leaves(x) if makes_graph() else ()
        for leaf in leaves:  # by an operation, which the tape of a call hears
            if isinstance(leaf, Tensor):
                named(leaf, name)
        return x
    if not isinstance(name, str):
        message = _SWAPPED if isinstance(x, str) else _NO_STRING
        raise TypeError(message.format(name=name, kind=type(name).__name__))
    leaves = [x] if isinstance(x, Tensor) else pytree.flatten(x)[0]
    give_name([t for t in leaves if isinstance(t, Tensor)], name)
    return x


_SWAPPED = "remat: write checkpoint_name(x, name): the name is second; got a {kind}"
_NO_STRING = "remat: checkpoint_name takes a string; got {name!r}, a {kind}"
