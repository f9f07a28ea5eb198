"""Programs: a call as a flat function of tensors.

`Primal` is a user's call: the function, the pytree of its arguments, what it refers to, and the ambient state. The transform
derives other programs from it. Each runs any number of times on the tensors given to it and holds none of its own.

Invariant: the first run is the forward. It fixes the structure of the outputs and the state that later runs, the
recomputations, restore and are checked against.
Rejected: keeping the tensors here, which would hide them from torch's saved tensors (freed after a backward, offloadable).
"""

import contextlib
import inspect
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from remat import _tree
from remat._ambient import Ambient
from remat._capture import Search, build, pass_on, refers_to_nothing
from remat._checks import Escape, Foreign, Watch, reached_leaves
from remat._compat import (
    base_tensor,
    detach_dual,
    dual_level_active,
    is_shared,
    on_backward,
    set_grad_enabled,
    snapshot,
)
from remat._errors import CaptureError, MutationError, RecomputeError, RematError
from remat._types import Fn, Leaf, Outputs


class Facts:
    """What is known of a call of a program, at whichever level it is looked at.

    Attributes:
        needs: which leaves require grad, at any level.
        exact: whether evaluating it must tell which outputs require grad.
        used: the leaves that some output may depend on differentiably.
        differentiable: which outputs do.
        kept: the leaves that the forward updated in place; their values from before follow the outputs.
        views: the outputs that are views of a leaf, and of which.
        batched: whether a vmap lies between here and the base.
    """

    __slots__ = ("batched", "differentiable", "exact", "kept", "needs", "used", "views")

    def __init__(self, needs: list[bool], *, exact: bool) -> None:
        self.needs = needs
        self.exact = exact
        self.used: Sequence[int] = range(len(needs))
        self.differentiable: list[bool] = []
        self.kept: list[int] = []
        self.views: dict[int, int] = {}
        self.batched = False


class Program:
    """A flat function of tensors."""

    __slots__ = ("facts",)
    facts: Facts

    def run(self, *leaves: Tensor) -> Outputs:
        """Evaluate in the ambient modes: recorded exactly if the caller records."""
        raise NotImplementedError

    def evaluate(self, leaves: Sequence[Tensor]) -> list[Any]:
        """Evaluate at the base level, note which outputs are differentiable, and drop the graph."""
        facts = self.facts
        if not facts.exact:
            outs = list(self.run(*leaves))
            facts.differentiable = [has_derivatives(o) for o in outs]
            return outs
        set_grad_enabled(True)
        outs = list(self.run(*detached(leaves, facts.needs)))
        facts.differentiable = [o is not None and o.requires_grad for o in outs]
        set_grad_enabled(False)
        return [None if o is None else o.detach() for o in outs]


def has_derivatives(tensor: Tensor | None) -> bool:
    """Say whether a tensor is of a dtype that has derivatives."""
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def detached(leaves: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor]:
    """Return fresh autograd leaves for those that `needs` marks, the others as they are."""
    fresh = detach_dual if dual_level_active() else Tensor.detach
    return [
        fresh(t).requires_grad_() if need else t
        for t, need in zip(leaves, needs, strict=True)
    ]


def _flatten(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[Leaf], _tree.Treedef | None]:
    """Flatten the arguments; `None` in place of a treedef stands for positional leaves, the common case."""
    if not kwargs:
        for value in args:
            if type(value) is not Tensor:
                break
        else:
            return list(args), None
    return _tree.flatten((args, kwargs))


class Out:
    """The structure of a function's outputs.

    Attributes:
        treedef: how the leaves make up the value returned; `None` for a lone tensor.
        slots: for each leaf the index of an output, `~index` of an input returned as it is, or `None`.
        statics: the leaves that are no tensors, by position.
        metas: shape, dtype and device of each output.
    """

    __slots__ = ("metas", "slots", "statics", "treedef")

    def __init__(
        self,
        treedef: _tree.Treedef | None,
        slots: list[int | None],
        statics: dict[int, Leaf],
        metas: list[tuple[Any, ...]],
    ) -> None:
        self.treedef, self.slots = treedef, slots
        self.statics, self.metas = statics, metas

    @classmethod
    def split(cls, value: Any, inputs: Sequence[Tensor]) -> tuple[Outputs, "Out"]:
        """Take a returned value apart into the tensors computed and the structure around them."""
        known = {id(t): ~i for i, t in enumerate(inputs)}
        if type(value) is Tensor and id(value) not in known:
            meta = (value.shape, value.dtype, value.device)
            return (value,), cls(None, [0], {}, [meta])
        flat, treedef = _tree.flatten(value)
        outs: list[Tensor] = []
        slots: list[int | None] = []
        statics = {}
        for k, leaf in enumerate(flat):
            slot = None
            if not isinstance(leaf, Tensor):
                statics[k] = leaf
            elif (slot := known.get(id(leaf))) is None:
                slot = known[id(leaf)] = len(outs)
                outs.append(leaf)
            slots.append(slot)
        metas = [(t.shape, t.dtype, t.device) for t in outs]
        return tuple(outs), cls(treedef, slots, statics, metas)

    def join(self, outs: Sequence[Any], inputs: Sequence[Tensor]) -> Any:
        """Rebuild the value returned."""
        if self.treedef is None:
            return outs[0]
        flat = [
            self.statics[k] if s is None else outs[s] if s >= 0 else inputs[~s]
            for k, s in enumerate(self.slots)
        ]
        return _tree.unflatten(self.treedef, flat)

    def difference(self, other: "Out") -> str | None:
        """Say how the outputs of a recomputation differ from these, if they do."""
        if self.metas != other.metas or self.slots != other.slots:
            return f"tensors {other.metas} where the forward returned {self.metas}"
        if self.treedef != other.treedef:
            return f"{other.treedef} where the forward returned {self.treedef}"
        return None


def _views(outs: Sequence[Tensor], leaves: Sequence[Tensor]) -> dict[int, int]:
    """Return which outputs are views of which leaves."""
    views = {}
    for j, o in enumerate(outs):
        if o._is_view():
            for i, leaf in enumerate(leaves):
                if o._base is leaf:
                    views[j] = i
    return views


class Primal(Program):
    """One call of a user's function.

    Attributes:
        out: the structure of its outputs, once the forward has run.
    """

    __slots__ = (
        "_ambient", "_buffers", "_fn", "_generators", "_label", "_leaves", "_nodes", "_origins", "_positions", "_rng",
        "_treedef", "_values", "_versions", "out",
    )  # fmt: skip

    def __init__(
        self,
        fn: Fn,
        label: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng: str = "replay",
    ) -> None:
        self.out: Out | None = None
        self._fn, self._label, self._rng = fn, label, rng
        values, self._treedef = _flatten(args, kwargs)
        search = Search()
        # Where each tensor goes, and how to rebuild what holds others; the function itself is at -1.
        self._positions: list[tuple[int, int]] = []
        self._nodes = {}
        opaque: list[tuple[int, Any]] = []
        for k, value in enumerate(values):
            if isinstance(value, Tensor):
                self._positions.append((k, search.tensor(value, k)))
                values[k] = None
            else:
                opaque.append((k, value))
        if not refers_to_nothing(fn):
            opaque.append((-1, fn))
        for k, value in opaque:
            node = search.visit(value, k if k >= 0 else None)
            if node is not None:
                self._nodes[k] = node
        self._values = values
        found = search.found
        self._leaves, self._origins = found.tensors, found.origins
        self._generators, self._buffers = found.generators, found.buffers

    def take_leaves(self) -> list[Tensor]:
        """Return the tensors of the call, and forget them."""
        leaves, self._leaves = self._leaves, []
        return leaves

    def join(self, outs: Sequence[Any], leaves: Sequence[Tensor]) -> Any:
        """Rebuild the value that the function returned."""
        assert self.out is not None
        return self.out.join(outs, leaves)

    def run(self, *leaves: Tensor) -> Outputs:
        """Recompute, in the state of the forward; the first time, be the forward."""
        if self.out is None:
            outs, self.out = self._call(leaves, self._generators, first=True)
            return outs
        try:
            with self._as_before(leaves):
                outs, out = self._call_again(leaves)
            difference = self.out.difference(out)
            if difference is not None:
                raise RecomputeError(_DIFFERENT.format(difference=difference))
        except Exception as error:
            error.add_note(f"remat: raised while recomputing {self._label}.")
            raise
        return outs

    def _call_again(self, leaves: Sequence[Tensor]) -> tuple[Outputs, Out]:
        if self.facts.kept:
            fresh = list(leaves)
            for i in self.facts.kept:
                fresh[i] = leaves[i].clone()
            leaves = fresh
        private = self._ambient.private(self._generators) if self._generators else ()
        return self._call(leaves, private, first=False)

    def _call(
        self, leaves: Sequence[Tensor], generators: Sequence[torch.Generator], *, first: bool
    ) -> tuple[Outputs, Out]:
        values = list(self._values)
        for k, i in self._positions:
            values[k] = leaves[i]
        if not self._nodes:
            return Out.split(self._apply(self._fn, values), leaves)
        built, run = build(self._nodes, leaves, generators)
        fn = built.pop(-1, self._fn)
        for k, value in built.items():
            values[k] = value
        result = Out.split(self._apply(fn, values), leaves)
        if first:
            pass_on(run)
        return result

    def _apply(self, fn: Fn, values: list[Leaf]) -> Any:
        if self._treedef is None:
            return fn(*values)
        args, kwargs = _tree.unflatten(self._treedef, values)
        return fn(*args, **kwargs)

    # --- The forward ---

    def evaluate(self, leaves: Sequence[Tensor]) -> list[Any]:
        """Be the forward."""
        return self.forward(self, leaves)

    def forward(self, program: Program, leaves: Sequence[Tensor]) -> list[Any]:
        """Evaluate for the first time, as `program`: this one, or this one under vmap."""
        facts = self.facts
        self._ambient = Ambient(self._generators)
        escape = Escape(self._label)
        inner = detached(leaves, facts.needs)
        for t in inner:
            if t.requires_grad:
                on_backward(t, escape)
        self._versions = [t._version for t in leaves]
        copies = self._copy_buffers(inner)
        set_grad_enabled(True)
        outs = self._first_run(program, inner)
        escape.armed = True
        self._ambient.forward_done()
        if self._rng == "error" and self._ambient.drew_globally:
            devices = ", ".join(self._ambient.drew_globally)
            raise RematError(_DREW.format(label=self._label, devices=devices))
        kept = self._update_buffers(leaves, copies) if copies else []
        self._check_inputs(leaves, inner)
        try:
            facts.used = reached_leaves(outs, inner)
        except CaptureError as error:
            raise CaptureError(f"remat: in {self._label}, {error}") from None
        facts.differentiable = [o.requires_grad for o in outs] + [False] * len(kept)
        facts.views = _views(outs, inner)
        set_grad_enabled(False)
        return [*[o.detach() for o in outs], *kept]

    def _first_run(self, program: Program, inner: list[Tensor]) -> Outputs:
        try:
            if self.facts.exact or not _is_new(self._fn):
                return program.run(*inner)
            with Foreign():
                return program.run(*inner)
        except CaptureError as error:
            raise CaptureError(f"remat: in {self._label}, {error}") from None
        except RuntimeError as error:
            if "a leaf Variable that requires grad" not in str(error):
                raise
            self.out = None
            changed = self._find_changed(program, inner)
            raise MutationError(_IN_PLACE.format(name=changed, label=self._label)) from error

    def _find_changed(self, program: Program, inner: list[Tensor]) -> str:
        """Name the input that torch refused to change in place, by letting it happen to copies."""
        copies = [t.detach().clone() for t in inner]
        with contextlib.suppress(Exception), torch.no_grad(), torch.random.fork_rng():
            program.run(*copies)
        names = [self.name_of(i) for i, t in enumerate(copies) if t._version]
        return names[0] if names else "an input"

    def _copy_buffers(self, inner: list[Tensor]) -> dict[int, Tensor]:
        """Put copies in place of what may be updated, so that the values from before remain."""
        copies = {}
        for i, t in enumerate(inner):
            if self.facts.needs[i]:
                continue
            registered = self._buffers.get(i, False)
            # Batch norm updates its running statistics without counting it as a change: vectors, passed or captured.
            if i in self._buffers or t.dim() == 1:
                copy = snapshot(t)
                if copy is not None or registered:
                    inner[i] = copies[i] = t.clone() if copy is None else copy
        return copies

    def _update_buffers(
        self, leaves: Sequence[Tensor], copies: dict[int, Tensor]
    ) -> list[Tensor]:
        """Write what the forward made of the buffers back; return their values from before."""
        kept = []
        replaced = []
        for i, copy in copies.items():
            if is_shared(copy) or torch.equal(copy, leaves[i]):
                continue
            if i not in self._buffers:
                raise MutationError(
                    _IN_PLACE.format(name=self.name_of(i), label=self._label)
                )
            with torch.no_grad():
                kept.append(leaves[i].clone())
                leaves[i].copy_(copy)
            replaced.append(i)
            self._versions[i] = kept[-1]._version
        self.facts.kept = replaced
        return kept

    def _check_inputs(self, leaves: Sequence[Tensor], inner: Sequence[Tensor]) -> None:
        needs, kept = self.facts.needs, self.facts.kept
        changed = self._versions != [t._version for t in leaves]
        if not changed and needs == [t.requires_grad for t in inner]:
            return
        for i, t in enumerate(leaves):
            if t._version != self._versions[i] and i not in kept:
                message = _IN_PLACE
            elif not needs[i] and inner[i].requires_grad:
                message = _REQUIRES_GRAD
            else:
                continue
            raise MutationError(
                message.format(name=self.name_of(i), label=self._label)
            )

    # --- Recomputation ---

    def _as_before(self, leaves: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Restore the ambient state, and refuse to read leaves that changed since the forward."""
        state = self._ambient.restored(self._generators)
        bases = [base_tensor(t) for t in leaves]
        if [t._version for t in bases] == self._versions:
            return state
        both = contextlib.ExitStack()
        both.enter_context(state)
        changed = [i for i, t in enumerate(bases) if t._version != self._versions[i]]
        names = {bases[i].untyped_storage()._cdata: self.name_of(i) for i in changed}
        both.enter_context(Watch(names))
        return both

    def name_of(self, index: int) -> str:
        """Write where an input comes from, as the function's author would."""
        root, text = self._origins[index], ""
        while isinstance(root, tuple):
            root, part = root
            text = part + text
        if root is None:
            return text.lstrip(".")
        if self._treedef is None:
            return argument_name(self._fn, f"[0][{root}]") + text
        return argument_name(self._fn, _tree.paths(self._treedef)[root]) + text


# Functions that ran once under torch.func without using what is not theirs, oldest first.
_PROVEN: dict[int, Any] = {}


def _is_new(fn: Fn) -> bool:
    """Say whether code like this has not been evaluated below torch.func before."""
    key = getattr(fn, "__code__", None) or type(fn)
    if id(key) in _PROVEN:
        return False
    if len(_PROVEN) >= 4096:
        del _PROVEN[next(iter(_PROVEN))]
    _PROVEN[id(key)] = key
    return True


def argument_name(fn: Fn, path: str) -> str:
    """Turn a path into `(args, kwargs)` into the name of a parameter and a path into that."""
    which, first, *rest = re.findall(r"\[[^\]]*\]|\.\w+", path)
    tail = "".join(rest)
    if which == "[1]":
        return first[2:-2] + tail
    position = int(first[1:-1])
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return f"args{first}{tail}"
    for k, parameter in enumerate(parameters):
        if parameter.kind is parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{position - k}]{tail}"
        if k == position:
            return parameter.name + tail
    return f"args{first}{tail}"


_DIFFERENT = (
    "remat: the recomputation gave {difference}. The function must compute the same thing twice: if it depends on outside "
    "state that changed, pass that state as an argument."
)
_DREW = (
    "remat: {label} drew from the global random stream of: {devices}, which rng='error' refuses. "
    "Pass a torch.Generator and draw from it."
)
_IN_PLACE = (
    "remat: `{name}` was changed in place inside {label}. A recomputation would start from the changed value: "
    "work on a copy (`{name}.clone()`) and return it."
)
_REQUIRES_GRAD = (
    "remat: `{name}` was made to require grad inside {label}, where its gradient would be lost. "
    "Call requires_grad_() before the call, or on a detached copy inside."
)
