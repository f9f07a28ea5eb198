"""Tells whether modules and objects hold what they held.

Called by `trees`, in each call and each recompute of what is remembered.

Invariant: a fingerprint holds no tensor, module or object, and never says "the same" of
what differs. It refuses what it could not tell about.
Rejected: comparing attribute by attribute. All identities are compared at once, as one
string of bytes.
"""

import enum
import itertools
import operator
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

from remat._base.types import INERT
from remat._capture.modules import TEMPLATE, aside_of
from remat._capture.objects import identities


# Containers whose items are compared, and those among them that have keys.
CONTAINERS = frozenset((list, tuple, set, frozenset, dict, OrderedDict))
_INDEXED = frozenset((list, tuple, dict, OrderedDict))
# Values that no search walks, and that hold no state.
_FIXED = (type, enum.Enum, types.BuiltinFunctionType)


class NotRememberedError(Exception):
    """A module cannot be remembered."""


class Fingerprint:
    """Tells whether modules and objects hold what they held.

    All identities are compared at once. An identity tells a value only while the value
    is alive. So constants are held here, and the others are watched by weak references.

    Args:
        modules: the modules.
        others: the other objects, which have a `__dict__`.
        walked: the identities of all that the search walked.

    Attributes:
        classes: the classes among what they hold.
    """

    __slots__ = (
        *("_alive", "_constants", "_count", "_dicts", "_getters", "_gone", "_keys"),
        *("_refs", "_then", "_used", "_vacant", "classes"),
    )

    def __init__(
        self, modules: Sequence[nn.Module], others: Sequence[Any], walked: Any
    ) -> None:
        self._count = len(modules)
        self._refs = [*map(weakref.ref, (*modules, *others))]
        self._getters = [*map(_getter_of, (*modules, *others))]
        self._keys = [*_container_keys([*map(vars, (*modules, *others))])]
        # A dict that is empty has no items to compare, only to stay empty.
        self._used = [*map(bool, flatten(map(aside_of, map(vars, modules))))]
        self._vacant = [*map(operator.not_, self._used)]
        containers = self._containers_in([*map(vars, (*modules, *others))])
        kinds = enumerate(map(type, containers))
        self._dicts = [i for i, kind in kinds if issubclass(kind, dict)]
        held, _, self._then = self._now()
        self._constants = [*filter(_is_constant, held)]
        rest = [v for v in held if type(v) not in INERT and type(v) not in CONTAINERS]
        if not all(isinstance(v, _FIXED) or id(v) in walked for v in rest):
            raise NotRememberedError
        self.classes = [v for v in rest if isinstance(v, type)]
        self._gone: list[Any] = []  # told by weak references, when a value is freed
        self._alive = [weakref.ref(value, self._gone.append) for value in rest]

    def holds(self) -> bool:
        """Say whether they hold the same now."""
        return self.containers() is not None

    def containers(self) -> list[Any] | None:
        """Return the containers among what they hold; None if that is not the same."""
        try:
            _, containers, now = self._now()
        except (TypeError, LookupError):  # one is gone, or holds something else
            return None
        return containers if now == self._then and not self._gone else None

    def tells_of(self, tensors: Iterable[Tensor]) -> bool:
        """Say whether it would notice that one of these tensors was exchanged."""
        return {*map(id, tensors)} <= {id(ref()) for ref in self._alive}

    def _now(self) -> tuple[tuple[Any, ...], list[Any], Any]:
        """Return all that they hold, the containers, and what tells it from others."""
        values = [*map(operator.call, self._refs)]
        dicts: list[Any] = [*map(vars, values)]
        aside = [*flatten(map(aside_of, dicts[: self._count]))]
        if any(compress(aside, self._vacant)):
            raise LookupError
        containers = self._containers_in(dicts)
        filled = [*compress(aside, self._used)]
        filled += map(containers.__getitem__, self._dicts)
        held = (
            *flatten(map(operator.call, self._getters, dicts)),
            *flatten(containers),
            *flatten(filled),
            *flatten(map(dict.values, filled)),
        )
        sizes = [*map(len, (*dicts, *containers, *filled))]
        return held, containers, (identities(held), sizes, [*map(type, values)])

    def _containers_in(self, dicts: Sequence[dict[str, Any]]) -> list[Any]:
        containers: list[Any] = []
        for where, key in self._keys:
            container = (dicts[where] if where >= 0 else containers[~where])[key]
            containers.append(container)
        return containers


def _getter_of(value: Any) -> Callable[[dict[str, Any]], tuple[Any, ...]]:
    """Return what gets the attributes of an object from its `__dict__`."""
    names = vars(value).keys()
    if isinstance(value, nn.Module):
        names = [name for name in names if name not in TEMPLATE]
        names.append("training")
    if not names:
        return tuple
    # One name twice, for with a single one no tuple is returned.
    return operator.itemgetter(*names, *names if len(names) == 1 else ())


compress = itertools.compress
flatten = itertools.chain.from_iterable


def _is_constant(value: Any) -> bool:
    """Say whether a value is the same as long as it is alive."""
    kind = type(value)
    is_tuple = kind is tuple or kind is frozenset
    return kind in INERT or (is_tuple and INERT.issuperset(map(type, value)))


def _container_keys(dicts: list[dict[str, Any]]) -> Iterable[tuple[int, Any]]:
    """Yield where each container is: the number of what holds it, and its key there.

    Dicts are numbered from 0 up, containers that hold others from -1 down.
    """
    todo = [(i, name, v) for i, d in enumerate(dicts) for name, v in d.items()]
    todo = [(i, name, v) for i, name, v in todo if name not in TEMPLATE]
    count = 0
    for where, key, value in todo:  # which grow
        kind = type(value)
        if kind not in CONTAINERS or _is_constant(value):
            continue
        yield where, key
        is_dict = issubclass(kind, dict)
        items = value.items() if is_dict else enumerate(value)
        inside = [(~count, k, v) for k, v in items if type(v) in CONTAINERS]
        if inside and kind not in _INDEXED:
            raise NotRememberedError
        todo += inside
        count += 1
