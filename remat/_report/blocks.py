"""Which rematerialized functions a function calls, and what `compare` asks them to do.

Called by `compare`, and by a run that is examined. A *block* is a rematerialized
function in the function that is examined.

Invariant: a block whose policy is not given keeps its own, and all keep their other
options.
Rejected: to change the options of the blocks themselves. A function may make its blocks
in each call, and other threads may call them.
"""

import dataclasses
import types
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from remat._base.labels import name_in
from remat._partial.options import Options
from remat._transform.api import options_of
from remat._transform.lowering import Lowering
from remat._transform.module import module_of
from remat._transform.rematerialized import BoundMethod, Rematerialized
from remat.policies import Policy


class Blocks:
    """The blocks of one run.

    Args:
        policies: for blocks, by name or object. The first key of a block counts.
        plain: whether blocks are called without `remat`.

    Attributes:
        names: of the blocks that were called.
    """

    def __init__(
        self, policies: Mapping[Any, Any] | None = None, *, plain: bool = False
    ) -> None:
        each = (policies or {}).items()
        self._policies = {key: _checked(policy) for key, policy in each}
        self._plain, self._unused = plain, {*self._policies}
        self.names: dict[str, None] = {}

    def ask(
        self, block: Rematerialized, lowering: Lowering, args: tuple[Any, ...]
    ) -> tuple[Lowering, Options]:
        """Return how a block is called."""
        options = block._options
        if lowering is Lowering.PLAIN:  # there is nothing to differentiate
            return lowering, options
        self.names[name_in(block.__remat_label__)] = None
        if self._plain:
            return Lowering.PLAIN, options
        for key, policy in self._policies.items():
            if _is_of(key, block, args):
                self._unused.discard(key)
                return lowering, dataclasses.replace(options, policy=policy)
        return lowering, options

    def refuse_unused(self, label: str) -> None:
        """Check that each key was of a block.

        Raises:
            ValueError: a key was of none.
        """
        for key in self._policies:
            if key in self._unused:
                names = ", ".join(map(repr, self.names)) or "none"
                raise ValueError(_NO_BLOCK.format(key=key, label=label, names=names))


def _checked(policy: Any) -> Policy | None:
    return options_of(policy).policy


def _is_of(key: Any, block: Rematerialized, args: tuple[Any, ...]) -> bool:
    """Say whether a key is of a block: by name, or as one of its objects."""
    if isinstance(key, str):
        return fnmatchcase(name_in(block.__remat_label__), key)
    if isinstance(key, (types.MethodType, BoundMethod)):
        of_method = key.__func__ is block and bool(args) and args[0] is key.__self__
        return of_method or key == block.__wrapped__
    key = module_of(key)
    return any(key is part for part in _objects_of(block, args))


def _objects_of(block: Rematerialized, args: tuple[Any, ...]) -> Iterator[object]:
    """Yield the block, the function, and the object that it is a method of."""
    yield block
    yield block.__wrapped__
    yield getattr(block.__wrapped__, "__self__", block)
    yield from args[:1]


_NO_BLOCK = (
    "remat: compare has a policy for the block {key!r}, but {label} calls no such "
    "rematerialized function. It calls: {names}. Give the name of one of these, a "
    "pattern such as '*', or the function or module itself."
)
