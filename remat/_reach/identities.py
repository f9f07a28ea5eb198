"""What code asks of a value that is another thing under torch.func: its `id`, its node.

In come values in holders, and the identities of what has a stand-in there or comes out
of a level as another tensor. Out comes an error, where one is held as a number: a table
by identity would have no entry for the tensor. `RefuseMarks` is for the graph of what a
tensor stands in for: it has another one, and that answers for itself.

Invariant: nothing is looked at where no code that is reached asks.
Rejected: other numbers in their places. Code may ask, and keep the number for itself.
Nodes of the same names: they lead to other nodes.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from remat._base.code import MARKS
from remat._base.errors import CaptureError


def refuse_of_container(kind: type) -> None:
    """Refuse a container that was passed and is made again around stand-ins."""
    raise CaptureError(_CONTAINER.format(kind=kind.__qualname__))


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


_CONTAINER = (
    "remat: a {kind} that was passed holds a tensor that is differentiated. Under "
    "torch.func the function gets another one around another tensor, and it may ask "
    "for the identity of that (`id`). Pass the tensors themselves, or look up by "
    "something else."
)
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
