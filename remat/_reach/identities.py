"""What code asks for the identity of: references to it, and what is refused.

A `Lease` refers to a value whose class has no weak references: a list, a dict, a tuple.
It is strong, and is let go of as soon as it alone holds its value. That is looked at
whenever a lease is made, and whenever Python's garbage collector runs. So a cycle
through a graph, as that of a passed list that the output is appended to, is freed no
later than a cycle of Python's own. A list that holds itself, and whose graph is kept
and never run backward, is not freed.

Under torch.func a tensor is another thing. A number that is the identity of one is
refused in holders: a table by identity would have no entry for it. `RefuseMarks`
refuses what a stand-in would answer otherwise, as its node.

Invariant: nothing is held or looked at where no code that is reached asks: by `id`, or,
of what is a key by its identity, by `hash` or in a cache of functools.
Rejected: leases of all that is passed. A list that is let go of would keep what it
holds until the next collection. To find a value by its identity among all that the
garbage collector knows: it takes tens of milliseconds. Other numbers in place of
identities: code may ask, and keep the number for itself.
"""

import gc
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from remat._base.code import MARKS
from remat._base.errors import CaptureError


def refuse_of_tensors(held: Iterable[Any], ids: Container[int]) -> None:
    """Refuse numbers that are identities of tensors."""
    if any(type(value) is int and value in ids for value in held):
        raise CaptureError(_TENSOR)


class ForwardCheck(TorchFunctionMode):
    """A mode of remat's own around what a forward calls."""

    is_remats_check = True

    def around(self, body: Callable[[], Any]) -> Any:
        """Call something under it."""
        with self:
            return body()


class RefuseMarks(ForwardCheck):
    """A mode that refuses to tell marks of a stand-in that differ from the user's."""

    def __init__(
        self, users: Mapping[int, Tensor], name_of: Callable[[Tensor], str | None]
    ) -> None:
        super().__init__()
        self._users, self._name_of = users, name_of

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        answer, asked = func(*args, **(kwargs or {})), id(args[0]) if args else 0
        name = getattr(getattr(func, "__self__", func), "__name__", "")
        if name in MARKS and asked in self._users:
            user = self._users[asked]
            theirs = func(user)
            is_constant = isinstance(theirs, int) and answer == theirs
            if not (is_constant or self._users.get(id(answer), answer) is theirs):
                where = self._name_of(user) or "an input"
                raise CaptureError(_MARK.format(mark=name, where=where))
        return answer


_TENSOR = (
    "remat: the function asks for the identity (`id`) of a tensor, and a table or a "
    "variable holds it. Under torch.func it gets another tensor in place of what it is "
    "passed, and what it computes is another one outside. Look up by something else, "
    "such as a name or a position."
)
_MARK = (
    "remat: the function asks for `{mark}` of `{where}`. Under torch.func, or with "
    "higher_order=True, it gets another tensor in place of that, with a graph of its "
    "own. Ask outside, and pass the answer."
)


class Lease:
    """A reference to a value; it is called to get the value, or None."""

    __slots__ = ("__weakref__", "_value")

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        """Return the value, if it was not let go of."""
        return self._value

    def count(self) -> int:
        """Return how many references there are, and one for the call."""
        return sys.getrefcount(self._value)

    def end(self) -> None:
        """Let go of the value."""
        self._value = None


_LEASES: "weakref.WeakValueDictionary[int, Lease]" = weakref.WeakValueDictionary()


def lease_of(value: Any) -> Lease:
    """Return the lease of a value: there is one for all calls."""
    lease = _LEASES.get(id(value))
    if lease is None or lease() is not value:
        lease = _LEASES[id(value)] = Lease(value)
    return lease


def is_told(value: Any, asks: Container[str]) -> bool:
    """Say whether code that asks by these may tell a value from another like it."""
    return "id" in asks or type(value).__hash__ is object.__hash__


def end_leases(*_: object) -> None:
    """End the leases of values that nobody else holds; once for each call."""
    if end_leases not in gc.callbacks:
        gc.callbacks.append(end_leases)
    for ref in _LEASES.valuerefs():
        lease = ref()
        if lease is not None and lease.count() <= _UNHELD:
            lease.end()


_UNHELD = Lease(object()).count()
