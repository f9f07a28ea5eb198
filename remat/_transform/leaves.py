"""The user's own tensors: a recompute runs on them, and leaves nothing on them.

Invariant: after a recompute a leaf has the hooks, the attributes and the memory that it
had before, no gradient is gone, and what was written in place holds what it held.
Rejected: stand-ins for all leaves, as for other inputs. What the function keeps by the
identity of a leaf would not be found. And in a module that several threads use, the
gradients of the other threads would be lost.
"""

import ctypes
import operator
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from remat._base.code import has_marks
from remat._base.tensors import version_of
from remat._base.types import TENSORS
from remat._torch.levels import below_all_levels
from remat._torch.modes import function_mode_count, no_torch_functions, unseen
from remat._torch.noted import Renorm, renorms_taken_back
from remat._torch.tensors import is_shared, preserved_version


class LeafChanges(NamedTuple):
    """What a forward changed of the user's leaves. A recompute may do the same."""

    accumulates: bool  # it changed a gradient, as by `backward()`
    moves: bool  # it gave a leaf other memory, as by assigning to `.data`
    marks: bool  # it may have set hooks or attributes


NO_CHANGES = LeafChanges(accumulates=False, moves=False, marks=False)
# Taken for those of a forward that still runs: a recompute then runs on the leaves
# themselves, and on stand-ins for other inputs.
ONLY_MARKS = LeafChanges(accumulates=False, moves=False, marks=True)


SMALL = 2**14  # elements of the largest inputs that are copied, or noted by their bytes
_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_hooks_of = operator.attrgetter(*_HOOKS)
grad_of = operator.attrgetter("grad")
_address = Tensor.data_ptr
_attributes_of = operator.attrgetter("__dict__")
_NONE = None, None


class WatchedLeaves:
    """What a forward may change of leaves, noted before it."""

    __slots__ = ("_are_plain", "_grads", "_leaves", "_next_hook", "_then", "addresses")
    addresses: list[int] | None  # after it; None if that cannot be asked

    def __init__(self, leaves: Sequence[Tensor], others: int) -> None:
        # All but so many, which come first, are parameters.
        self._are_plain = TENSORS.issuperset(map(type, leaves[:others]))
        self._leaves, self._grads = leaves, _gradients_of(leaves)
        self._then = addresses_now(leaves) if self._are_plain else None
        self._next_hook = RemovableHandle.next_id

    def changes(self, inputs: Sequence[Tensor], attributes: Any = ()) -> LeafChanges:
        """Return what the forward changed of the leaves.

        Of `attributes` that inputs had at the call it may have taken some off.
        """
        leaves = self._leaves
        self.addresses = now = addresses_now(leaves) if self._are_plain else None
        accumulates, moves = _gradients_of(leaves) != self._grads, now != self._then
        marks = RemovableHandle.next_id != self._next_hook or any(
            map(_attributes_of, inputs)
        )
        if accumulates or moves or marks or attributes:
            return LeafChanges(accumulates, moves, marks or bool(attributes))
        return NO_CHANGES

    def moved(self) -> int | None:
        """Return a leaf that has other memory now; None if that cannot be asked."""
        then, now = self._then, addresses_of(self._leaves)
        if then is None or now is None:
            return None
        return next(i for i, (a, b) in enumerate(zip(then, now, strict=True)) if a != b)


_NO_GRADIENT = frozenset({type(None)})


def _gradients_of(leaves: Sequence[Tensor]) -> list[Any] | None:
    """Return what changes when a gradient is set or added to; None without any."""
    if _NO_GRADIENT.issuperset(map(type, map(grad_of, leaves))):
        return None
    return [g if g is None else (id(g), version_of(g)) for g in map(grad_of, leaves)]


def addresses_of(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return where tensors are in memory; None if that cannot be asked."""
    are_plain = TENSORS.issuperset(map(type, tensors))  # others may warn
    return addresses_now(tensors) if are_plain else None


# To torch, to ask for an address is a write: not for a copy that shares memory until
# it is written.
def addresses_now(tensors: Sequence[Tensor]) -> list[int] | None:
    """Return where plain tensors are in memory; None if some have none."""
    try:
        if not function_mode_count():
            return [*map(_address, tensors)]
        with no_torch_functions():  # a mode may note who reads memory
            return [*map(_address, tensors)]
    except RuntimeError:
        return None


def in_other_memory(then: Sequence[int] | None, now: Sequence[int] | None) -> list[int]:
    """Return which tensors were given other memory; none where that is not known.

    FSDP and DeepSpeed gather parameters for each forward and each backward, into other
    memory each time.
    """
    if then is None or now is None or now == then:
        return []
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return []
    return [k for k, (a, b) in enumerate(zip(then, now, strict=True)) if a != b]


# Those of which the bytes are the values, whatever the tensor is marked as.
_DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
}
Memory = tuple[int, bytes]  # an address, and what is there


def memories_of(tensors: Sequence[Tensor]) -> Sequence[Memory | None]:
    """Return where tensors are and what they hold; None if that cannot be read at once.

    To read one costs a tenth of making a copy and comparing it.
    """
    if tensors and function_mode_count():
        with no_torch_functions():  # a mode may note who reads memory
            return _memories_of(tensors)
    return _memories_of(tensors) if tensors else ()


def _memories_of(tensors: Sequence[Tensor]) -> Sequence[Memory | None]:
    """Read all at the speed of C, or each by itself if some cannot be read."""
    addresses = None
    if (
        _ONLY_TENSORS.issuperset(map(type, tensors))
        and all(map(_is_cpu, tensors))
        and _DTYPES.issuperset(map(_dtype, tensors))
        and all(map(Tensor.is_contiguous, tensors))
        and not any(map(Tensor.is_neg, tensors))
        and not any(map(is_shared, tensors))
    ):
        addresses = addresses_now(tensors)
    if addresses is not None:
        held = map(bytes_at, addresses, map(_nbytes, tensors))
        return [*zip(addresses, held, strict=True)]
    if len(tensors) == 1:
        return [None]
    return [memory for t in tensors for memory in _memories_of([t])]


_ONLY_TENSORS = frozenset({Tensor})
_is_cpu, _dtype = operator.attrgetter("is_cpu"), operator.attrgetter("dtype")
_nbytes = operator.attrgetter("nbytes")


def bytes_at(address: int, count: int) -> bytes:
    """Return what is in memory, in half the time of `ctypes.string_at`."""
    return _reader_of(count)(address).raw


@lru_cache(maxsize=64)
def _reader_of(count: int) -> Callable[[int], Any]:
    return (ctypes.c_char * count).from_address


def with_bytes(tensor: Tensor, held: bytes) -> Tensor:
    """Return a contiguous tensor like another one, which holds these bytes."""
    with unseen():
        copy = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        ctypes.memmove(copy.data_ptr(), held, len(held))
    return copy


def has_same_bytes(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors of the same shape hold the same bytes."""
    if type(a) is not Tensor or a.device.type == "meta":
        return not (a._version or b._version)
    if a.is_quantized:  # torch compares scale and bytes, and crashes on views as bytes
        return torch.equal(a, b)
    # No view as bytes can say that a tensor is conjugate.
    flat = [t.resolve_conj().contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return torch.equal(*flat)


def in_class(tensor: Tensor, kind: type) -> Tensor:
    """Return a plain tensor in the class that it had."""
    if type(tensor) is not Tensor or kind is Tensor or not issubclass(kind, Tensor):
        return tensor
    new = tensor.as_subclass(kind)
    new.__dict__.update(tensor.__dict__)
    return new


class PreserveGradients:
    """A context after which leaves that had a gradient have one.

    A gradient that was changed is not put back: another thread may have added to it.
    """

    __slots__ = ("_grads", "_leaves")

    def __init__(self, leaves: Sequence[Tensor]) -> None:
        if _NO_GRADIENT.issuperset(map(type, map(grad_of, leaves))):
            leaves = ()
        self._leaves, self._grads = leaves, [*map(grad_of, leaves)]

    def __enter__(self) -> None:
        """Do nothing yet."""

    def __exit__(self, *_: object) -> None:
        if all(map(operator.is_, self._grads, map(grad_of, self._leaves))):
            return
        for t, grad in zip(self._leaves, self._grads, strict=True):
            if grad is not None and t.grad is None:
                t.grad = grad


@contextmanager
def preserved_marks(
    leaves: Sequence[Tensor], next_hook: int, stand_ins: Sequence[Tensor] = ()
) -> Iterator[None]:
    """Give leaves the hooks that they had at a call, and no attributes, for the body.

    Those that were set by then are set again by what runs (`_reach/attributes.py`).
    Afterwards they have those of before. `next_hook` is the number that the next hook
    was to get at the call. On `stand_ins` no hooks stay that are set meanwhile: to a
    call around this one they may be the user's own.
    """
    first, hooks = RemovableHandle.next_id, _hooks(leaves)
    if hooks is not None:  # without hooks, nothing is done for each leaf
        _forget_since(next_hook, leaves)
    are_plain = TENSORS.issuperset(map(type, leaves))
    marked = leaves if are_plain else [t for t in leaves if has_marks(type(t))]
    dicts = [*map(_attributes_of, marked)]
    after = [*map(dict.copy, dicts)]
    deque(map(dict.clear, dicts), maxlen=0)
    try:
        yield
    finally:
        if RemovableHandle.next_id != first:
            for t in leaves:
                if t.requires_grad:
                    _forget_hooks_of_node(t, first)
            _forget_since(first, stand_ins)
        if hooks is not None or _hooks(leaves) is not None:
            for t, before in zip(leaves, hooks or [_NONE] * len(leaves), strict=True):
                for name, held in zip(_HOOKS, before, strict=True):
                    _put_back(t, name, held)
        dicts = [*map(_attributes_of, marked)]  # others, if these were assigned
        deque(map(dict.clear, dicts), maxlen=0)
        deque(map(dict.update, dicts, after), maxlen=0)


def hand_over_hooks(users: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Set on the user's tensors the hooks that were set on what stood in for these.

    They see all of a gradient, and not only what comes from the call. Whoever has a
    handle of one may remove it.
    """
    for user, tensor in zip(users, tensors, strict=True):
        hooks: Any = None if tensor is user else _hooks_of(tensor)[0]
        if hooks and user.requires_grad:
            for key in hooks:
                user.register_hook(partial(_call_hook, hooks, key))


def _call_hook(hooks: dict[int, Any], key: int, gradient: Any) -> Any:
    return hooks[key](gradient) if key in hooks else None


def _hooks(leaves: Sequence[Tensor]) -> list[Any] | None:
    """Return copies of the hooks of leaves; None where there are none."""
    hooks = [*map(_hooks_of, leaves)]
    if hooks.count(_NONE) == len(hooks):
        return None
    return [tuple(h if h is None else h.copy() for h in both) for both in hooks]


def _put_back(tensor: Tensor, name: str, before: Any) -> None:
    now = getattr(tensor, name)
    if now is None or before is None:
        if now is not before:
            if now:
                now.clear()  # which a node may refer to
            setattr(tensor, name, before)
    elif now != before:
        now.clear()
        now.update(before)


def _forget_since(first: int, tensors: Sequence[Tensor]) -> None:
    """Remove the hooks from a number on that were set on tensors."""
    for hooks in (held for t in tensors for held in _hooks_of(t) if held):
        for key in [key for key in hooks if key >= first]:
            del hooks[key]


def _forget_hooks_of_node(leaf: Tensor, first: int) -> None:
    """Remove the hooks from a number on that were set on what accumulates gradients."""
    node = below_all_levels(get_gradient_edge, leaf).node  # levels see no leaves
    for register in (node.register_prehook, node.register_hook):
        handle = register(_nothing)  # which has all that there are
        hooks: Any = handle.hooks_dict_ref()
        for key in [key for key in hooks if key >= first]:
            del hooks[key]


def _nothing(*_: Any) -> None: ...


@contextmanager
def preserved_memory(
    leaves: Sequence[Tensor], error: Callable[[int], Exception]
) -> Iterator[None]:
    """After the body, give leaves the memory that they had before it."""
    befores = [t.data for t in leaves]
    try:
        yield
    finally:
        for k, (t, before) in enumerate(zip(leaves, befores, strict=True)):
            addresses = addresses_now([t])  # None: it was assigned what was left out
            if addresses != addresses_now([before]):
                now, t.data = t.data, before
                with unseen():
                    is_same = now.shape == before.shape and torch.equal(now, before)
                if addresses is not None and not is_same:
                    raise error(k) from None


# --- What is written in place for a recompute; no version is counted ---


@contextmanager
def holding(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> Iterator[None]:
    """Have tensors hold other values for the body, in place."""

    def write(values: Sequence[Tensor]) -> None:
        with unseen():
            for tensor, value in zip(tensors, values, strict=True):
                if tensor.shape != value.shape:
                    tensor.resize_(value.shape)
                tensor.data.copy_(value)

    with preserved_version((*tensors,)):
        with unseen():
            before = [t.detach().clone() for t in tensors]
        write(values)
        try:
            yield
        finally:
            write(before)


@contextmanager
def holding_rows(pairs: Sequence[tuple[Tensor, Sequence[Renorm]]]) -> Iterator[None]:
    """Have weights of embeddings hold the rows of before a forward, for the body."""
    with renorms_taken_back(), preserved_version(tuple(t for t, _ in pairs)):
        with unseen(), torch.no_grad():
            now = [(t, r.rows, t.detach()[r.rows]) for t, found in pairs for r in found]
            for t, found in pairs:
                for renorm in reversed(found):  # the oldest last: it was there first
                    t.data[renorm.rows] = renorm.before
        try:
            yield
        finally:
            with unseen(), torch.no_grad():
                for t, rows, held in now:
                    t.data[rows] = held


MOVED = (
    "remat: `{name}` of {label} was given other memory between the forward and the "
    "backward, as by assigning to `.data`. Gradients are right only if it holds the "
    "same values."
)
