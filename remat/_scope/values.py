"""The values of a block, as data: what made each one, down to what the block was given.

Invariant: references lead from results to what they were made of, never back. So a
value that no handle and no later value needs is freed by reference counts.
Rejected: a tape of the operations in their order. It holds what nobody needs any more,
and has to be run from the start.
"""

import functools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from remat._base.errors import MutationError
from remat._base.tensors import describe, version_of
from remat._base.types import TENSORS
from remat._partial.values import shared_value, value_of
from remat._torch.levels import is_of_torch_func
from remat._torch.modes import below_autograd, detached, flat_view, viewed
from remat._torch.tensors import is_fake


if TYPE_CHECKING:
    import weakref

    from remat._base.op import Op, Value
    from remat._graph.handles import Offloaded


class Block:
    """One `with` block; `away` is where what it was given goes, if it goes anywhere."""

    def __init__(self, policy: Any, away: Any = None) -> None:
        self.policy, self.away, self.is_open = policy, away, True
        # What the policy was asked about, to tell of keys that match nothing.
        has_keys = policy is not None and policy.keys
        self.asked: list[Any] | None = [] if has_keys else None
        self._part = BlockPart(self)

    def part(self) -> "BlockPart":
        """Return what values that are made now belong to."""
        if self._part.is_used_up:
            self._part = BlockPart(self)
        return self._part


class BlockPart:
    """What a block makes until a backward frees a graph that reads it."""

    def __init__(self, block: Block) -> None:
        self.block, self.is_used_up = block, False


# Why no backward was planned to read a value: nothing needs it once its block is over;
# it is needed only for what is recomputed, or was not planned.
PASSING, BETWEEN = 1, 2

_new: Any = tuple.__new__  # costs a third of what calling a NamedTuple does


class TensorLayout(NamedTuple):
    """How a tensor lies in its storage."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        """Return that of a tensor."""
        parts = (
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.dtype,
            tensor.device,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        return _new(cls, parts)

    def value(self) -> "Value":
        """Return what is known of such a tensor."""
        where = self.stride, self.offset
        return shared_value(self.shape, self.dtype, self.device, *where)

    def view_of(self, tensor: Tensor) -> Tensor:
        """Return the tensor of this layout in the storage of another tensor."""
        if TensorLayout.of(tensor) == self:
            return tensor
        if tensor.dtype != self.dtype or tensor.is_conj() or tensor.is_neg():
            tensor = flat_view(tensor, self.dtype)
        view = viewed(tensor, self.shape, self.stride, self.offset)
        if self.is_conj:
            view = torch._conj(view)
        return torch._neg_view(view) if self.is_neg else view


def has_layout(tensor: Tensor) -> bool:
    """Say whether a tensor is a strided view of one storage, and nothing more."""
    return (
        (type(tensor) in TENSORS or is_fake(tensor))
        and not is_of_torch_func(tensor)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_nested)
    )


def stays(tensor: Tensor) -> bool:
    """Say whether somebody else has a tensor: a parameter, a buffer, or a batch."""
    return (tensor if tensor._base is None else tensor._base).is_leaf


class GivenTensor:
    """A tensor that no block made, which operations of a block read."""

    __slots__ = (
        *("__weakref__", "_back", "_nbytes", "_tensor", "_version", "layout", "part"),
    )
    operation, unread = None, 0  # as of what an operation made, and a policy stored

    def __init__(
        self, tensor: Tensor, layout: TensorLayout | None, part: Any = None
    ) -> None:
        self.part: BlockPart = part  # of the block that was given it, if that sends it
        self._tensor, self._version = detached(tensor), version_of(tensor)
        self._nbytes = 0 if layout is None else tensor.untyped_storage().nbytes()
        self.layout = layout
        self._back: Callable[[], Tensor] | None = None  # brings it back, if it is away

    @property
    def is_away(self) -> bool:
        """Whether it is not held here."""
        return self._back is not None

    def send(self, away: Any, user: Tensor | None) -> None:
        """Stop holding it; `user` may hold it still."""
        tensor, layout = self._tensor, self.layout
        if layout is None or layout.offset or layout.is_conj or layout.is_neg:
            return
        if tensor.nbytes != self._nbytes or version_of(tensor) != self._version:
            return
        packed = away.pack(tensor if user is None else user)
        if type(packed) is int:
            self._back = functools.partial(away.unpack, packed)
            self._tensor = tensor.new_empty(0)

    def keep(self) -> None:
        """Copy the memory, which is about to be written to."""
        tensor, layout = self._tensor, self.layout
        if self._back is not None:
            return
        if layout is not None and version_of(tensor) == self._version:
            with below_autograd():
                storage = flat_view(tensor, tensor.dtype).clone()
                self._tensor = layout.view_of(storage)
            self._version = version_of(self._tensor)

    def tensor(self, reader: Any = None, where: str = "") -> Tensor:
        """Return it, or raise a MutationError; `reader` is what reads it, and where."""
        if self._back is not None:
            return self._back()
        tensor, why = self._tensor, ""
        if self._version is not None and tensor._version != self._version:
            why = _CHANGED
        elif self._nbytes and tensor.untyped_storage().nbytes() < self._nbytes:
            why = _FREED
        if why:
            reads = _RECOMPUTES.format(op=reader, where=where) if reader else "reads it"
            raise MutationError(why.format(what=describe(tensor), reads=reads))
        return tensor

    def value(self) -> "Value":
        """Return what is known of it."""
        return value_of(self._tensor)


class Made:
    """What an operation of a block left in a storage."""

    __slots__ = (
        *("__weakref__", "is_blank", "layout", "op", "operation", "part"),
        *("stored", "unread"),
    )

    def __init__(
        self, part: BlockPart, layout: TensorLayout, operation: "BlockOperation"
    ) -> None:
        # The layout of the tensor that it returned there, or wrote to.
        self.part, self.layout = part, layout
        self.op: Op | None = None  # the operation as a policy sees it, if there is one
        # Whether no operation has written to the memory. A kernel that torch does not
        # know may have.
        self.is_blank = makes_blank(operation.func)
        self.unread = 0  # or why no backward was planned to read it
        # Either what computes the value again, or the value itself, here or offloaded.
        self.operation: BlockOperation | None = operation
        self.stored: GivenTensor | Offloaded | None = None


@functools.lru_cache(maxsize=4096)
def makes_blank(func: Any) -> bool:
    """Say whether an operation returns memory that it has not written to."""
    return func.overloadpacket.__name__ in _BLANK


_BLANK = {
    *("empty", "empty_like", "empty_permuted", "empty_strided"),
    *("new_empty", "new_empty_strided"),
}


class Operand(NamedTuple):
    """What an operation was applied to, in place of a tensor."""

    of: GivenTensor | Made
    layout: TensorLayout | None  # None for the tensor of the value itself

    @classmethod
    def of_layout(cls, of: GivenTensor | Made, layout: TensorLayout) -> Self:
        """Return what stands for the tensor of a layout in a value."""
        return _new(cls, (of, None if layout == of.layout else layout))

    def value(self) -> "Value":
        """Return what is known of the tensor."""
        layout = self.layout or self.of.layout
        if layout is None:
            assert isinstance(self.of, GivenTensor)
            return self.of.value()
        return layout.value()

    def tensor_in(self, base: Tensor) -> Tensor:
        """Return the tensor, given that of the value."""
        return base if self.layout is None else self.layout.view_of(base)


class BlockOperation:
    """One operation of a block, with an `Operand` for each tensor argument."""

    __slots__ = (
        *("args", "func", "grad_mode", "kwargs", "line", "made", "operands"),
        *("reads", "settings", "streams", "written"),
    )

    def __init__(self, func: Any, args: Any, kwargs: Any, operand_of: Any) -> None:
        self.func = func
        self.args = mapped(args, Tensor, operand_of)
        self.kwargs = mapped(kwargs, Tensor, operand_of) if kwargs else {}
        self.operands: Sequence[Operand] = operand_of.found
        found = [o.of for o in self.operands if type(o.of) is Made]
        self.reads: Sequence[Made] = [*dict.fromkeys(found)]
        self.written: frozenset[int] = frozenset()  # operands that it writes to
        # The random streams that it moved, and their states before.
        self.streams: Sequence[tuple[Any, Any]] = ()
        self.settings: tuple[Any, ...] = ()  # of the process
        self.grad_mode = True  # some kernels keep a workspace if it is on
        self.line = ""  # of the user's code
        # The number of a result, or of an operand that it wrote to; which of the two;
        # and the value.
        self.made: list[tuple[int, bool, weakref.ref[Made]]] = []

    def needs(self) -> Sequence[Any]:
        """Return the values that it reads, and what has to be brought back for it."""
        given = {o.of for o in self.operands if isinstance(o.of, GivenTensor)}
        return [*self.reads, *(of for of in given if of.is_away)]


def needed_for(
    targets: Sequence[Made], known: Container[Made]
) -> Iterator[BlockOperation]:
    """Return the operations that some values need, each once, where some are known."""
    seen: set[Any] = set()
    stack = [*targets]
    while stack:
        made = stack.pop()
        operation = None if made in known else made.operation
        if operation is not None and operation not in seen:
            seen.add(operation)
            yield operation
            stack += operation.reads


def results_of(result: Any) -> list[Tensor | None]:
    """Return what an operation returned, in order; None where that is no tensor."""
    if isinstance(result, (list, tuple)):
        return [part for each in result for part in results_of(each)]
    return [result if isinstance(result, Tensor) else None]


def mapped(tree: Any, kind: type, fn: Callable[[Any], Any]) -> Any:
    """Return the arguments of an operation with each part of a class replaced.

    Example:
        >>> mapped([1, (2.5, None)], float, int)
        [1, (2, None)]
    """
    if type(tree) is dict:
        return dict(zip(tree, mapped([*tree.values()], kind, fn), strict=True))
    parts = [
        fn(part)
        if isinstance(part, kind)
        else (mapped(part, kind, fn) if type(part) in _CONTAINERS else part)
        for part in tree
    ]
    return parts if type(tree) is list else tuple(parts)


_CONTAINERS = {list, tuple, dict}


_CHANGED = (
    "remat: {what} was changed in place between a `remat.scope` block and the backward "
    "that {reads}. Change a copy, or change it after the backward."
)
_FREED = (
    "remat: the memory of {what} was freed between a `remat.scope` block and the "
    "backward that {reads}. FSDP frees the parameters that it gathers, once the "
    "forward of a module ends. There rematerialize the modules, which have them "
    "gathered again, and open no block: `remat.nn.apply(model, Block)` or "
    "`remat(block)`."
)
_RECOMPUTES = "recomputes what the block made of it, with {op} at {where}"
