"""Identities (`id`) that code asks for, of what is another thing under torch.func.

In come values in holders, and the identities of what has a stand-in there or comes out
of a level as another tensor. Out comes an error, where one is held as a number: a table
by identity would have no entry for the tensor.

Invariant: nothing is looked at where no code that is reached asks for an identity.
Rejected: other numbers in their places. Code may ask, and keep the number for itself.
"""

from collections.abc import Container, Iterable
from typing import Any

from remat._base.errors import CaptureError


def refuse_of_container(kind: type) -> None:
    """Refuse a container that was passed and is made again around stand-ins."""
    raise CaptureError(_CONTAINER.format(kind=kind.__qualname__))


def refuse_of_tensors(held: Iterable[Any], ids: Container[int]) -> None:
    """Refuse numbers that are identities of tensors."""
    if any(type(value) is int and value in ids for value in held):
        raise CaptureError(_TENSOR)


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
