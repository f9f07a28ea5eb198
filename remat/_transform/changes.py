"""What changes inputs in place: found by running on copies, or by first bytes.

`saved` and `function` ask about a call, when they refuse it. `traced` asks about the
body of a node, once. Writes that torch does not count are seen by the first bytes of
tensors, in the first calls of an object or of some code.

Invariant: what it does to objects is undone. By bytes only the recompute is judged, so
a write that may be repeated, such as clamping, is no error.
Rejected: to watch every forward. That would cost each call a dispatch mode, or one that
reaches 1,000 parameters as much again.
"""

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Container, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from remat._ambient.ambient import Ambient
from remat._base.errors import MutationError
from remat._base.observer import Observer
from remat._base.source import user_line
from remat._base.tensors import taken_apart, version_of
from remat._base.types import TENSORS, Fn
from remat._partial.effects import written_by
from remat._reach.reach import Reach
from remat._torch import (
    base_tensor,
    faking,
    function_mode_count,
    has_no_memory,
    inputs_of_body,
    is_shared,
    no_torch_functions,
    run_body,
    storage_id,
)


def changes_of(
    origin: Reach,
    inputs: Sequence[Tensor],
    run: Callable[[Sequence[Tensor]], object],
) -> dict[int, str]:
    """Run a function once more, on copies; return what changes each input.

    By its index: the operation and the user's line, the first change first.
    """
    if not all(map(_can_be_copied, inputs)):
        return {}
    found: dict[int, str] = {}
    with contextlib.suppress(Exception), torch.no_grad():  # the error is another one
        copies = [t.detach().clone() for t in inputs]
        index = {storage_id(t): i for i, t in enumerate(copies)}
        ambient = Ambient(origin.streams, True)
        ambient.forward_done()
        with ambient.restored(), _NoteChanges(index, found):
            run(copies)
    return found


class Changes(NamedTuple):
    """What the body of a node changes in place."""

    inputs: Sequence[int] = ()
    is_shared: bool = False


def changed_by(body: Any) -> Changes:
    """Return what the body of a node changes, which is remembered with it."""
    known = body.meta.get(_CHANGES)
    if known is None:
        known = body.meta[_CHANGES] = _changes_of_body(body)
    return known


_CHANGES = "remat_changes"


def _changes_of_body(body: Any) -> Changes:
    examples = inputs_of_body(body)
    found: dict[int, str] = {}
    with faking(examples) as copies:
        if copies is None:
            return Changes()
        index = {_memory(c): i for i, c in enumerate(copies) if isinstance(c, Tensor)}
        with _NoteChanges(index, found):
            outs = run_body(body, *copies)
    inputs = sorted(found)
    changed = [_memory(examples[i]) for i in inputs]
    others = [e for i, e in enumerate(examples) if i not in found]
    others = {_memory(e) for e in others if isinstance(e, Tensor)}
    results = {_memory(o) for o in tree_leaves(outs) if isinstance(o, Tensor)}
    is_shared = len({*changed}) < len(changed) or not others.isdisjoint(changed)
    written = {_memory(copies[i]) for i in inputs}
    return Changes(inputs, is_shared or not results.isdisjoint(written))


def _memory(tensor: Tensor) -> int:
    """Return the number of the storage of a tensor, inside of all wrappers."""
    return storage_id(taken_apart(base_tensor(tensor))[0])


def _can_be_copied(tensor: Tensor) -> bool:
    """Say whether a tensor is strided and its memory is there. FSDP frees memory."""
    if tensor.layout is not torch.strided or type(tensor) not in TENSORS:
        return False
    storage = base_tensor(tensor).untyped_storage()
    return storage.nbytes() >= base_tensor(tensor).nbytes or tensor.is_meta


class _NoteChanges(Observer):
    """Notes the first operation that writes to each of some storages."""

    unseen = frozenset()

    def __init__(self, index: dict[int, int], found: dict[int, str]) -> None:
        super().__init__()
        self._index, self._found = index, found

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        # Before it runs: it may give a tensor other memory.
        for tensor in written_by(func, args, kwargs):
            i = self._index.get(_memory(tensor))
            if i is not None:
                self._found.setdefault(i, f"{func} at {user_line()}")
        return super().run(func, args, kwargs)


_CALLS = 3  # in which they are looked for
_BYTES = 64  # of each tensor that are read
# How many calls there were of an object, or of a function's code; with a reference.
_COUNTED: dict[int, tuple[Any, int]] = {}


class FirstBytes:
    """The first bytes of tensors in the first calls of an object, or of some code.

    Torch does not count writes through `.data` and `.numpy()`. A function that does so
    usually does it in its first call, and to a whole tensor.
    """

    key = 0  # the identity of what is called

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._then = _first_bytes(tensors)

    def look_again(self) -> None:
        """Watch the next calls, too."""
        if known := _COUNTED.get(self.key):
            _COUNTED[self.key] = known[0], 0

    def changed(
        self, tensors: Sequence[Tensor], known: Container[int] = ()
    ) -> list[int]:
        """Return which hold other bytes now, in the same memory and version."""
        pairs = enumerate(zip(self._then, _first_bytes(tensors), strict=True))
        found = [i for i, (then, now) in pairs if _differ(then, now)]
        return [i for i in found if i not in known]


def run_watched(
    reach: Any, at: Sequence[int], tensors: Sequence[Tensor], run: Fn, *args: Any
) -> Any:
    """Run a call again; refuse a write that changes what the forward wrote.

    Args:
        reach: of the call.
        at: the inputs to which the forward wrote and torch did not count it.
        tensors: the inputs of the run.
        run: runs it, given `args`.
        *args: what that is given.
    """
    written = [tensors[i] for i in at]
    noted = FirstBytes(written)
    try:
        return run(*args)
    finally:  # also where it stops early
        for k in noted.changed(written):
            text = _UNCOUNTED.format(name=reach.name_of(at[k]), label=reach.label)
            raise MutationError(text)


_UNCOUNTED = (
    "remat: `{name}` was changed inside {label} by a write that torch does not count, "
    "as through `.data`, `.numpy()` or a pointer, and the recompute did it again. Its "
    "values and these gradients are not those of plain code: do it outside, or in "
    "place on a tensor that needs no gradient (`with torch.no_grad()`)."
)


def first_bytes(owner: Any, tensors: Sequence[Tensor]) -> FirstBytes | None:
    """Note them if this is one of the first calls of an object or a function."""
    if type(owner) is FunctionType:
        owner = owner.__code__  # functions are often made anew for a call
    known = _COUNTED.get(key := id(owner))
    if known is None:
        if not type(owner).__weakrefoffset__:
            return None
        known = weakref.ref(owner, lambda _: _COUNTED.pop(key, None)), 0
    elif known[1] == _CALLS:
        return None
    _COUNTED[key] = known[0], known[1] + 1
    noted = FirstBytes(tensors)
    noted.key = key
    return noted


def _first_bytes(tensors: Sequence[Tensor]) -> list[Any]:
    if function_mode_count():
        with no_torch_functions():  # a mode may note who reads memory
            return _first_bytes_of(tensors)
    return _first_bytes_of(tensors)


def _first_bytes_of(tensors: Sequence[Tensor]) -> list[Any]:
    return [_held(t) if _is_readable(t) else None for t in tensors]


def _is_readable(t: Tensor) -> bool:
    """Say whether memory of a tensor can be read, and without a write to it."""
    is_plain = type(t) in TENSORS and t.is_cpu and t.layout is torch.strided
    try:
        if not is_plain or not t.numel() or has_no_memory(t) or is_shared(t):
            return False
        # FSDP frees the memory of what it gathers.
        return t.untyped_storage().nbytes() >= t.nbytes
    except RuntimeError:
        return False  # of a vmap that has ended


def _held(t: Tensor) -> tuple[tuple[int, int | None], bytes]:
    count = min(_BYTES, t.nbytes) if t.is_contiguous() else t.element_size()
    address = t.data_ptr()
    return (address, version_of(t)), ctypes.string_at(address, count)


def _differ(then: Any, now: Any) -> bool:
    if then is None or now is None or then[0] != now[0]:
        return False
    return then[1] != now[1]
