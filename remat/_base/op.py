"""Operations as data: what a record holds of each, and what a policy is asked about.

Invariant: no tensor is held, so a record outlives the call it was made of and can be
written by hand in a test. Lists are held as tuples, so that it hashes.
Rejected: torch.fx nodes, which hold a graph and the modules it was traced from.
Rejected: the tensors in one list and the constants in another. Where an argument may be
left out, None or a list of tensors, nobody can put the call together again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

import torch

from remat._torch.operators import is_operator


NO_NAMES = frozenset[str]()


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor without holding it.

    Example:
        >>> Value((2, 3), torch.float32, torch.device("cpu")).nbytes
        24
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] = ()
    offset: int = 0

    @property
    def nbytes(self) -> int:
        """The bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation of a recorded function.

    Attributes:
        func: the overload that ran, `torch.ops.aten.mm.default` say.
        args: its positional arguments, with a `Value` for each tensor and a tuple for
            each list.
        kwargs: its keyword arguments, likewise, as pairs of a name and an argument.
        outputs: the tensors that it returned, in order.
        names: what `checkpoint_name` calls its outputs.
        source: the user's line: `file.py:12, in block`.
        module: the path of the module that runs it, below what is rematerialized; ""
            where that itself does. It is told to policies that ask.
        classes: the full names of that module's class and its base classes, then of the
            modules around it, and of custom Functions. It is told likewise.
        nth: how many operations of the same operator the call has run before it.

    Example:
        >>> x = Value((2,), torch.float32, torch.device("cpu"))
        >>> op = Op(torch.ops.aten.stack.default, ((x, x),), outputs=(x,))
        >>> len(op.inputs), op.nbytes
        (2, 8)
    """

    func: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[Value, ...] = ()
    names: frozenset[str] = NO_NAMES
    source: str = ""
    module: str = ""
    classes: tuple[str, ...] = ()
    nth: int = 0

    def __eq__(self, other: object) -> bool:
        if type(other) is Op:
            return _fields(self) == _fields(other)
        if is_operator(other):
            raise TypeError(_OPERATOR.format(op=self.func, other=other))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(_fields(self))

    def __getattr__(self, name: str) -> Any:
        # `name` and `params` are of JAX's primitives.
        if name.startswith("__"):
            raise AttributeError(name)
        known = [f.name for f in fields(Op)]
        raise AttributeError(_NO_FIELD.format(name=name, known=", ".join(known)))

    @property
    def inputs(self) -> tuple[Value, ...]:
        """Its tensor arguments, in order."""
        return (*_values(self.args), *_values(self.kwargs))

    @property
    def packet(self) -> Any:
        """The operation without its overload, `torch.ops.aten.mm` say."""
        # An operator of higher order has none.
        return getattr(self.func, "overloadpacket", self.func)

    @property
    def nbytes(self) -> int:
        """The bytes of its outputs, which saving it would keep."""
        return sum(value.nbytes for value in self.outputs)


_fields = attrgetter(
    *("func", "args", "kwargs", "outputs", "names", "source"),
    *("module", "classes", "nth"),
)
_OPERATOR = (
    "remat: {op} is an operation, and {other} an operator: the two are never equal. "
    "Compare prim.packet with an operator, as in prim.packet == torch.ops.aten.mm, or "
    "prim.func with an overload. (JAX's primitives are compared themselves.)"
)
_NO_FIELD = (
    "remat: an operation has no {name!r}. A policy is asked policy(op), and op has "
    "{known}, inputs, packet and nbytes. For the name of JAX's primitive write "
    "str(op.packet), and for what its avals tell look at op.inputs."
)


def _values(arg: Any) -> Iterator[Value]:
    if isinstance(arg, Value):
        yield arg
    elif isinstance(arg, tuple):
        for part in arg:
            yield from _values(part)
