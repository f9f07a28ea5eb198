"""Inputs of calls, away from the device until their recomputes.

With full recomputation the inputs of the blocks are what is left: one for each. The one
of a block goes out when it is called, and comes back before its recompute; meanwhile
that of the block before is copied. Hooks of the call do that (`InputsAway`), and where
its graph is one node at each level, that node's (`Offloading`).

Invariant: a tensor has one copy, however many calls are given it. Where it is still
there it is used itself, which is for the call to see (`SavedInputs`).
Rejected: to ask, when a call ends, who else holds an input. Its caller does, until it
goes on. To save other tensors in a node: they would not have the edges of the inputs.
"""

import functools
import threading
import weakref
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._base.errors import MutationError
from remat._base.tensors import taken_apart, version_of
from remat._base.types import TENSORS
from remat._base.warned import warn
from remat._offload.offload import Away, Fetched, in_file, in_host_memory
from remat._torch.autograd import (
    current_task,
    dual_level_active,
    held_by,
    pack_saved,
    when_done,
)
from remat._torch.batches import Wrapping, unwrapped
from remat._torch.levels import SingleLevelFunction, below_all_levels, is_of_torch_func
from remat._torch.modes import undisturbed
from remat._torch.tensors import EMPTY


SMALL = 2**12  # bytes: what is smaller stays


class _Here(NamedTuple):
    """A tensor that stays, and how often it had been changed."""

    tensor: Tensor
    version: int | None


class _Known(threading.local):
    """What is away, by the tensor's memory, and the last call that sent something."""

    def __init__(self) -> None:
        self.aways: dict[Any, tuple[weakref.ref[Away], Any]] = {}
        self.last: Callable[[], InputsAway | None] = lambda: None


_KNOWN = _Known()


class InputsAway:
    """The inputs of one call that are away, and the hooks that put them there."""

    def __init__(self, label: str, *, to_disk: bool) -> None:
        self.label = label
        self._move = in_file if to_disk else in_host_memory
        self._to_disk = to_disk
        self._aways: list[Away] = []
        self._numbers: dict[Away, int] = {}
        # Of each the user's own, with its version and storage, if it is still there.
        self._users: list[tuple[Any, int | None, Any]] = []
        self._fetched: Fetched | None = None
        self._before, _KNOWN.last = _KNOWN.last, weakref.ref(self)

    def pack(self, tensor: Tensor) -> Any:
        """Send an input out; return its number here, or what stays in its place."""
        number = self.sent(tensor)
        if number is None:
            return _Here(tensor.detach(), version_of(tensor))
        return number

    def sent(self, tensor: Tensor, *, again: bool = False) -> int | None:
        """Send an input out and return its number, or None if it stays.

        `again`: only if there is a copy of it.
        """
        inner, _ = taken_apart(tensor.detach())
        if not _may_go(inner):
            return None
        if inner.is_cpu and not self._to_disk:
            warn_of_inputs(self.label, "they are in host memory: pass 'disk'")
            return None
        key = self._key(tensor, inner)
        refs = _KNOWN.aways.get(key)
        found = None if refs is None else refs[0]()
        if found is None:
            if again:
                return None
            found = Away(tensor.detach(), self._move)
            _note(key, found, inner)
        number = self._numbers.setdefault(found, len(self._aways))
        if number == len(self._aways):
            self._aways.append(found)
            storage = weakref.ref(inner.untyped_storage())
            self._users.append((weakref.ref(tensor), version_of(tensor), storage))
        return number

    def _key(self, tensor: Tensor, inner: Tensor) -> Any:
        """Return what tells a copy: another call may have made it already."""
        layout = inner.storage_offset(), inner.shape, inner.stride(), inner.dtype
        number = id(inner.untyped_storage())
        return number, version_of(inner), *layout, type(tensor), self._to_disk

    def fetched(self, number: int) -> Tensor:
        """Bring an input back, which may be sent again and has its copy."""
        value = self.unpack(number)
        inner, _ = taken_apart(value)
        _note(self._key(value, inner), self._aways[number], inner)
        return value

    def unpack(self, packed: Any) -> Tensor:
        """Bring an input back."""
        if type(packed) is _Here:
            if version_of(packed.tensor) != packed.version:
                raise MutationError(_CHANGED.format(label=self.label))
            return packed.tensor
        there = self._still_there(packed)
        if there is not None:
            return there
        if self._fetched is None:
            self.fetch()
        assert self._fetched is not None
        away = self._aways[packed]
        value = away.wrap(self._fetched.take(packed))
        if packed == len(self._aways) - 1:
            self._fetched = None
            before = self._before()
            if before is not None:
                before.fetch()
        return value

    def _still_there(self, k: int) -> Tensor | None:
        """Return an input without its graph, if somebody holds it as it was."""
        ref, version, storage = self._users[k]
        tensor = ref()
        if tensor is None or version_of(tensor) != version:
            return None
        now = taken_apart(tensor.detach())[0].untyped_storage()
        return tensor.detach() if now is storage() else None

    def fetch(self) -> None:
        """Begin to bring the inputs back."""
        each = range(len(self._aways))
        if self._fetched is None and any(self._still_there(k) is None for k in each):
            self._fetched = Fetched.of(self._aways)
            if current_task() >= 0:
                when_done(functools.partial(_let_go, weakref.ref(self)))


def _note(key: Any, away: Away, inner: Tensor) -> None:
    """Note that there is a copy of a tensor."""
    aways, storage = _KNOWN.aways, inner.untyped_storage()

    def forget(_: Any) -> None:
        aways.pop(key, None)

    # Another storage may get its number.
    aways[key] = weakref.ref(away, forget), weakref.ref(storage, forget)


def check_where(where: Any) -> None:
    """Check the option `offload_inputs=`."""
    if where not in (False, True, "disk"):
        text = f"remat: offload_inputs={where!r}: use True, False or 'disk'"
        raise ValueError(text)


def away_hooks(where: Any, label: str) -> Any:
    """Return hooks for the inputs of a call."""
    away = InputsAway(label, to_disk=where == "disk")
    return away.pack, away.unpack


def away_of(hooks: Any) -> InputsAway | None:
    """Return whose hooks these are, if they are for the inputs of a call."""
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    return owner if isinstance(owner, InputsAway) else None


def warn_of_inputs(label: str, why: str) -> None:
    """Warn, once, that no input is offloaded."""
    if (label, why) not in _TOLD:
        _TOLD.add((label, why))
        text = f"remat: offload_inputs= moves no input of {label}, for {why}."
        warn(text)


# --- In nodes, as under torch.func ---


class Offloading:
    """Sends away what the nodes of a call save, one at each level, and only they hold.

    A backward is a call again, whose nodes save what came back.
    """

    __slots__ = ("_away", "_end", "_is_again", "_label", "_stay", "_where", "gone")

    def __init__(self, label: str, where: Any, *, is_again: bool = False) -> None:
        self._label, self._where, self._is_again = label, where, is_again
        self._end: int | None = None  # from there on all are parameters
        self._stay: Container[int] = ()  # those that modules hold
        self.gone: set[int] = set()  # the inputs that went
        self._away: Callable[[], InputsAway | None] = lambda: None  # its nodes hold it

    @classmethod
    def of(cls, reach: Any, where: Any) -> "Offloading":
        """Return it for the nodes of a call."""
        new, buffers = cls(reach.label, where), reach.buffers.items()
        new._end, new._stay = reach.first_parameter, [i for i, of in buffers if of]
        return new

    def again(self) -> "Offloading":
        """Return it for nodes of a backward, from which only goes what has a copy."""
        return Offloading(self._label, self._where, is_again=True)

    def send(self, inputs: Sequence[Tensor], outs: Sequence[Any]) -> None:
        """Send away inputs that a node saved, given what it has just computed."""
        made = [o for o in outs if o is not None and o.requires_grad]
        if not made:
            return
        if dual_level_active():
            warn_of_inputs(self._label, f"forward mode is on{HINT}")
            return
        each = [(i, t) for i, t in enumerate(inputs[: self._end]) if not _is_owned(t)]
        may_go = {id(t): i for i, t in each if i not in self._stay}
        away = self._away() or InputsAway(self._label, to_disk=self._where == "disk")
        self._away = weakref.ref(away)
        pack_saved(made[0].grad_fn, functools.partial(self._pack, away, may_go))

    def _pack(self, away: InputsAway, may_go: Mapping[int, int], saved: Any) -> Any:
        if id(saved) not in may_go:
            return None
        packed = _packed(away, self._is_again, saved)
        if packed is not None:
            self.gone.add(may_go[id(saved)])
        return packed

    def read(self, node: Any, values: Sequence[Any]) -> Sequence[Tensor]:
        """Return what a node saved. What is of a level that has ended has no edges."""
        if not all(isinstance(value, Tensor) for value in values):
            # One that stayed was changed, and so torch gave what is held.
            raise MutationError(_CHANGED.format(label=self._label))
        return [
            p.below() if type(p) is _OfLevel and p.wrapping.is_dead else value
            for value, p in zip(values, held_by(node), strict=True)
        ]


def _is_owned(tensor: Tensor) -> bool:
    """Say whether a tensor is a parameter, or what some level differentiates by."""
    while True:
        if type(tensor) is nn.Parameter or (tensor.requires_grad and tensor.is_leaf):
            return True
        if not is_of_torch_func(tensor):
            return False
        tensor = unwrapped(tensor)


class _OfLevel(NamedTuple):
    """What brings a tensor of a level back."""

    below: Callable[[], Tensor]  # brings back what it wraps
    wrapping: Wrapping

    def __call__(self) -> Tensor:
        is_dead = self.wrapping.is_dead  # then `read` asks what is below
        return EMPTY if is_dead else self.wrapping.wrap(self.below())


class _Carrier(SingleLevelFunction):
    """Saves a tensor with its edge."""

    @staticmethod
    @override
    def forward(  # pyrefly: ignore[bad-override]
        ctx: Any, tensor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(tensor)
        return EMPTY.detach()


def _packed(away: InputsAway, again: bool, tensor: Tensor) -> Any:
    """Send a tensor away; return what brings it back, or None if it stays."""
    if not is_of_torch_func(tensor):
        number = below_all_levels(functools.partial(away.sent, again=again), tensor)
        back = functools.partial(below_all_levels, away.fetched, number)
        return None if number is None else back
    inner, pack = unwrapped(tensor), functools.partial(_packed, away, again)
    if inner.requires_grad:
        with undisturbed(), torch.enable_grad():
            carrier: Any = below_all_levels(_Carrier.apply, inner)
        is_away = pack_saved(carrier.grad_fn, pack)
        below = (lambda: carrier.grad_fn.saved_tensors[0]) if is_away else None
    else:
        below = pack(inner)
    return None if below is None else _OfLevel(below, Wrapping.of(tensor))


HINT = ". Name them, and have the policy of a call around offload these names"
_TOLD = set[tuple[str, str]]()


def _let_go(ref: Callable[[], InputsAway | None]) -> None:
    away = ref()
    if away is not None:
        away._fetched = None


def _may_go(tensor: Tensor) -> bool:
    """Say whether a tensor is one that can be moved, and worth it."""
    is_plain = type(tensor) in TENSORS and tensor.layout is torch.strided
    if not is_plain or tensor.is_quantized or tensor.is_meta:
        return False
    return SMALL <= tensor.nbytes <= tensor.untyped_storage().nbytes() or (
        tensor.nbytes >= SMALL and 0 in tensor.stride()
    )


_CHANGED = (
    "remat: an input of {label} was changed in place between the forward and the "
    "backward. A recompute would start from the changed value: change a copy "
    "(`x = x + y` in place of `x += y`)."
)
