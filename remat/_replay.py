"""Runs a function again under a plan: what is kept is handed in, what is dead left out.

`Keep` runs in the forward and collects what the plan keeps, `Replay` in the backward.
An operation that is dead returns an `Absent`: a tensor of the right shape that has no
value, and that nobody can read.

Invariant: what a replay gives was computed, or kept by this very call. A plan that does
not fit the call at hand shows: as another operation, or as a read of what is absent.
Rejected: a buffer of NaN to stand for what is absent. It costs memory and as much time,
and who reads it gets a number.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat._code import user_line
from remat._compat import (
    LeanDispatchMode,
    base_tensor,
    eager_only,
    is_view_op,
    kernel_of,
    no_torch_function,
    refuse_data_ptr,
    storage_id,
    tensor_without_data,
)
from remat._errors import RecomputeError
from remat._op import Op, Value
from remat._plan import Fate, Passed, Plan, Record, Slot, Step


# Autograd detaches what it saves of a result: not an operation of the function.
DETACH = torch.ops.aten.detach.default
# Nor is what fake tensors are asked for.
IGNORED = frozenset(
    {DETACH, torch.ops.prim.device.default, torch.ops.prim.layout.default}
)


class MissingError(RuntimeError):
    """Something read a value that was left out.

    Attributes:
        shared: what stands for the storage read.
    """

    def __init__(self, shared: "Shared", reader: Any) -> None:
        super().__init__(_READ.format(reader=reader))
        self.shared = shared
        # The user's code may catch it.
        shared.trouble.missed.append(shared.number)


_READ = (
    "remat: {reader} reads a value that the recomputation left out, since no "
    "operation recorded in the forward reads it. Pass prune=False to recompute all."
)


class MismatchError(RuntimeError):
    """A replay came by another operation than was recorded."""


class Trouble:
    """What a replay came by that the plan did not expect.

    Attributes:
        missed: the storages that were read and are not there.
        differs: how the operations differ.
    """

    __slots__ = ("differs", "missed")

    def __init__(self) -> None:
        self.missed: list[int] = []
        self.differs = ""

    def __bool__(self) -> bool:
        return bool(self.missed or self.differs)


class Shared:
    """Stands for a storage that is not there; whoever shares it has the same."""

    __slots__ = ("number", "trouble")

    def __init__(self, number: int, trouble: Trouble) -> None:
        self.number, self.trouble = number, trouble


_NOWHERE = Shared(-1, Trouble())


class Absent(Tensor):
    """A tensor without a value.

    Attributes:
        storage_of: what stands for its storage.
    """

    storage_of: "Shared"
    __torch_function__ = no_torch_function

    @classmethod
    @override
    @eager_only
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        absent = [t for t in tensors_of((args, kwargs)) if type(t) is Absent]
        if func is DETACH:
            return like(absent[0])
        raise MissingError(absent[0].storage_of, func)


def _refuse(tensor: Absent, *_: Any, **__: Any) -> Any:
    raise MissingError(tensor.storage_of, "Python")


# They read memory without an operation, and would find none.
for _name in ("data_ptr", "numpy", "storage", "tolist", "untyped_storage"):
    setattr(Absent, _name, _refuse)
for _name in ("__array__", "__deepcopy__", "__dlpack__", "__reduce_ex__"):
    setattr(Absent, _name, _refuse)


def absent(value: Value, shared: Shared) -> Absent:
    """Return a tensor of the metadata given, without a value."""
    new: Absent = tensor_without_data(
        Absent,
        value.shape,
        value.stride,
        value.offset,
        None,
        value.dtype,
        torch.strided,
        value.device,
    )
    new.storage_of = shared
    refuse_data_ptr(new)
    return new


def like(tensor: Tensor, shared: Shared | None = None) -> Absent:
    """Return an absent tensor like one that is there or is not."""
    meta = (tuple(tensor.shape), tensor.dtype, tensor.device)
    value = Value(*meta, tuple(tensor.stride()), int(tensor.storage_offset()))
    return absent(value, shared or getattr(tensor, "storage_of", _NOWHERE))


def tensors_of(tree: Any) -> list[Tensor]:
    """Return the tensors among an operation's arguments or results, in order."""
    found: list[Tensor] = []
    _collect((tree,), found)
    return found


def _collect(trees: Any, found: list[Tensor]) -> None:
    for part in trees:
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, (list, tuple)):
            _collect(part, found)
        elif isinstance(part, dict):
            _collect(part.values(), found)


class Script:
    """A plan laid out for running, one entry for each operation.

    Args:
        record: of a forward.
        plan: made of it.
        order: of the residuals that there are, if there are more than the plan keeps.

    Attributes:
        funcs: the operations.
        kernels: what each calls.
        fates: what becomes of each.
        expected: of those left out, what is compared.
        places: of those kept, which residual stands for which output.
    """

    __slots__ = ("expected", "fates", "funcs", "kernels", "places", "plan", "record")

    def __init__(
        self, record: Record, plan: Plan, order: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.record, self.plan = record, plan
        self.funcs = [step.op.func for step in record.steps]
        self.kernels = [*map(kernel_of, self.funcs)]
        self.fates = [*plan.fates]
        self.expected = {
            i: Expected(record.steps[i].op)
            for i, fate in enumerate(plan.fates)
            if fate is Fate.DEAD
        }
        self.places: dict[int, dict[int, int]] = {}
        needed = {*plan.residuals}
        for place, (i, k) in enumerate(order or plan.residuals):
            if (i, k) in needed:
                self.places.setdefault(i, {})[k] = place


class _Follow(LeanDispatchMode):
    """Follows a script from operation to operation."""

    supports_higher_order_operators = True

    def __init__(self, script: Script) -> None:
        super().__init__()
        self.script = script
        self._funcs, self._kernels = script.funcs, script.kernels
        self._next = 0

    def ask(self, outs: Sequence[Any]) -> None:
        """Do nothing: what the graph saved is known."""

    def end(self) -> None:
        """Check that every operation recorded has come by.

        Raises:
            MismatchError: it has not.
        """
        if self._next < len(self._funcs):
            self._next += 1
            raise self._differs(None)

    def _differs(self, func: Any) -> Exception:
        """Return the error that another operation came by than was recorded."""
        return MismatchError(described(self.script.record.steps, self._next - 1, func))


class Keep(_Follow):
    """Collects, in a forward, the results that a plan keeps.

    Attributes:
        fits: whether the plan is of this forward.
        constants: of the operations whose results are kept.
    """

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        self._places = script.places
        self._kept: list[tuple[Tensor, int]] = []
        self.constants: dict[int, Any] = {}
        self.fits = True

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        follows = i < len(self._funcs) and self._funcs[i] is func and self.fits
        run = self._kernels[i] if follows else func
        result = run(*args, **kwargs) if kwargs else run(*args)
        if not follows:
            self.fits = self.fits and func in IGNORED
            return result
        self._next = i + 1
        if i in self._places:
            step = self.script.record.steps[i]
            if step.may_draw:
                self.fits = _same_constants(step.op, args, kwargs, _same)
            self.constants[i] = _constants(args, kwargs)
            outputs = tensors_of(result)
            for k in self._places[i]:
                # Itself, not an alias: below autograd that would count its own changes.
                self._kept.append((outputs[k], outputs[k]._version))
        return result

    @override
    def end(self) -> None:
        """Do nothing: the forward may be another, see `residuals`."""

    def residuals(self) -> list[Tensor] | None:
        """Return what was kept; None if the plan is not of this forward."""
        unchanged = all(t._version == version for t, version in self._kept)
        complete = self._next == len(self._funcs)
        if not (self.fits and complete and unchanged):
            return None
        return [t.detach() for t, _ in self._kept]


class Verify(Keep):
    """Checks besides that what goes into each operation comes from where it did.

    Before inputs are dropped: afterwards nothing else could be computed.
    """

    def __init__(self, script: Script, leaves: Sequence[Tensor], key: Any) -> None:
        super().__init__(script)
        self._key = key
        numbers = script.record.inputs
        self._numbers = {key(t): s for t, s in zip(leaves, numbers, strict=True)}

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        i = self._next
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.fits and self._next > i:
            step, numbers, key = self.script.record.steps[i], self._numbers, self._key
            inputs, outputs = tensors_of((args, kwargs or {})), tensors_of(result)
            counts = len(inputs), len(outputs)
            if counts != (len(step.reads), len(step.makes)):
                self.fits = False
                return result
            reads = zip(inputs, step.reads, strict=True)
            self.fits = all(numbers.get(key(t), s) == s for t, s in reads)
            if self.script.fates[i] is Fate.DEAD and self.fits:
                expected = self.script.expected[i]
                self.fits = fits_metadata(expected, args, kwargs, inputs)
            numbers.update(zip(map(key, outputs), step.makes, strict=True))
        return result


class Replay(_Follow):
    """Runs a function again, without what is dead and with what was kept.

    Args:
        script: to follow.
        residuals: what was kept, or stands for it elsewhere.
        take: gives one of them back, by its place.
        constants: that the operations had whose results were kept.
    """

    def __init__(
        self, script: Script, residuals: Sequence[Tensor], take: Any, constants: Any
    ) -> None:
        super().__init__(script)
        self._constants = constants
        self._fates, self._residuals, self._take = script.fates, residuals, take
        self._absent: dict[int, Shared] = {}
        self._known: dict[int, int] = {}
        self.trouble = Trouble()

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is DETACH:
            return func(*args)
        i = self._next
        self._next = i + 1
        if i >= len(self._funcs) or self._funcs[i] is not func:
            return self._unexpected(i, func, args, kwargs or {})
        fate = self._fates[i]
        if fate is Fate.RUN:
            kernel = self._kernels[i]
            return kernel(*args, **kwargs) if kwargs else kernel(*args)
        step = self.script.record.steps[i]
        if fate is Fate.KEEP:
            self._check_wiring(i, step, args, kwargs)
            return self._result(step, step.result, (), self.script.places[i])
        if fate is Fate.BLIND:
            return self._on_no_values(step, args, kwargs or {})
        return self._left_out(i, step, args, kwargs)

    def _unexpected(self, i: int, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation that was not recorded, if it may be."""
        if func in IGNORED:
            self._next = i
            return func(*args)
        # After a view was changed in place, autograd makes it again of its base: of a
        # subclass by the operation that made it, of others by one that is not seen.
        written = 0 < i <= len(self._funcs) and self.script.record.steps[i - 1].writes
        if not (written and is_view_op(func) and args and type(args[0]) is Absent):
            raise self._differs(func)
        self._next = i
        base = args[0]
        meta = torch.empty_strided(
            base.shape, base.stride(), dtype=base.dtype, device="meta"
        )
        view = func(meta, *args[1:], **kwargs)
        value = Value(view.shape, view.dtype, base.device, view.stride())
        return absent(value, base.storage_of)

    def _on_no_values(self, step: Step, args: Any, kwargs: Any) -> Any:
        """Run an operation for what does not depend on values, a draw say."""
        result = step.op.func(*_present(args), **_present(kwargs))
        outputs = tensors_of(result)
        for k, s in enumerate(step.makes):
            if k not in step.blind or s in step.reads:
                outputs[k] = absent(step.op.outputs[k], self._shared(s))
        inputs = tensors_of((args, kwargs))
        return _filled(step.result, outputs, inputs)

    def _left_out(self, i: int, step: Step, args: Any, kwargs: Any) -> Any:
        """Return what stands for the result of an operation that does not run."""
        inputs = tensors_of((args, kwargs or {}))
        if not fits_metadata(self.script.expected[i], args, kwargs, inputs):
            raise self._differs(step.op.func)
        if step.writes:
            numbers = zip(step.reads, inputs, strict=True)
            targets = [t for s, t in numbers if s in step.writes]
            if not all(type(t) is Absent for t in targets):
                raise self._differs(step.op.func)
        return self._result(step, step.result, inputs, {})

    def _result(
        self, step: Step, form: Any, inputs: Sequence[Tensor], places: dict[int, int]
    ) -> Any:
        if form.__class__ is Slot and not places:  # most of them
            return absent(step.op.outputs[0], self._shared(step.makes[0]))
        outputs = [
            DETACH(self._take(places[k]))
            if k in places
            else absent(step.op.outputs[k], self._shared(s))
            for k, s in enumerate(step.makes)
        ]
        return _filled(form, outputs, inputs)

    def _check_wiring(self, i: int, step: Step, args: Any, kwargs: Any) -> None:
        """Check that what goes into an operation is what did.

        As far as that is known: constants, leaves, and what was kept or is absent.
        """
        if self._constants.get(i) not in (None, _constants(args, kwargs)):
            raise self._differs(step.op.func)
        for t, s in zip(tensors_of((args, kwargs or {})), step.reads, strict=False):
            if type(t) is Absent:
                shared = t.storage_of
                now = shared.number if shared.trouble is self.trouble else s
            else:
                now = self._known.get(storage_id(t), s) if _has_storage(t) else s
            if now != s:
                raise self._differs(step.op.func)

    @override
    def _differs(self, func: Any) -> Exception:
        error = super()._differs(func)
        self.trouble.differs = str(error)
        return error

    def start(self, leaves: Sequence[Tensor]) -> None:
        """Note which tensors are there from the start."""
        steps = self.script.record.steps
        numbers = self.script.record.inputs
        if not self._residuals:
            return
        for t, s in zip(map(base_tensor, leaves), numbers, strict=True):
            if _has_storage(t):
                self._known[storage_id(t)] = s
        for i, places in self.script.places.items():
            for k, place in places.items():
                t = base_tensor(self._residuals[place])
                if _has_storage(t):
                    self._known[storage_id(t)] = steps[i].makes[k]

    def _shared(self, number: int) -> Shared:
        shared = self._absent.get(number)
        if shared is None:
            shared = self._absent[number] = Shared(number, self.trouble)
        return shared

    def note_escaped(self) -> None:
        """Note what is absent and outlives the replay: somebody may yet read it."""
        for shared in self._absent.values():
            if sys.getrefcount(shared) > _REFERENCES:
                self.trouble.missed.append(shared.number)

    def absent_leaf(self, i: int, leaf: Tensor) -> Absent:
        """Return what stands for a leaf whose value is not needed."""
        return like(leaf, self._shared(self.script.record.inputs[i]))


def _has_storage(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter)
    return plain and tensor.layout is torch.strided


_REFERENCES = 3  # to what stands for a storage, if no tensor holds it


class Check(_Follow):
    """Runs a function again as it is, which must do what it did in the forward.

    Views are not compared: hooks on modules make some, as torch's FLOP counter does.
    """

    def __init__(self, script: Script) -> None:
        super().__init__(script)
        steps = script.record.steps
        self._steps = [step for step in steps if not is_view_op(step.op.func)]
        self._funcs = [step.op.func for step in self._steps]

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func not in IGNORED and not is_view_op(func):
            i = self._next
            self._next = i + 1
            if i >= len(self._funcs) or self._funcs[i] is not func:
                raise self._differs(func)
        return func(*args, **kwargs) if kwargs else func(*args)

    @override
    def _differs(self, func: Any) -> Exception:
        return RecomputeError(_DIFFERENT + described(self._steps, self._next - 1, func))


_DIFFERENT = (
    "remat: the recomputation ran other operations than the forward did. The function "
    "must compute the same thing twice: if it depends on outside state that changed, "
    "pass that state as an argument.\n"
)


def _filled(form: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
    """Return what an operation returns, by its form."""
    if isinstance(form, Slot):
        return outputs[form]
    if isinstance(form, Passed):
        return inputs[form]
    if isinstance(form, (list, tuple)):
        return type(form)(_filled(part, outputs, inputs) for part in form)
    return form


def _present(tree: Any) -> Any:
    """Put tensors of any values in place of those that are absent."""
    if type(tree) is Absent:
        meta = tree.shape, tree.stride()
        return torch.empty_strided(*meta, dtype=tree.dtype, device=tree.device)
    if isinstance(tree, (list, tuple)):
        return type(tree)(map(_present, tree))
    if isinstance(tree, dict):
        return {name: _present(part) for name, part in tree.items()}
    return tree


def fits_metadata(
    step: "Expected", args: Any, kwargs: Any, inputs: Sequence[Tensor]
) -> bool:
    """Say whether the metadata of the results is as recorded, by the arguments."""
    op, then = step.op, step.inputs
    if len(then) != len(inputs) or not all(map(_has_metadata, inputs, then)):
        return False
    return not step.has_constants or _same_constants(op, args, kwargs, step.same)


def _constants(args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that are no tensors."""
    given = [*args, *(kwargs or {}).values()]
    return [repr(arg) for arg in given if not tensors_of(arg)]


class Expected:
    """What is compared of an operation that is left out."""

    __slots__ = ("has_constants", "inputs", "op", "same")

    def __init__(self, op: Op) -> None:
        self.op, self.inputs = op, op.inputs
        alone = all(isinstance(arg, Value) for arg in op.args)
        self.has_constants = bool(op.kwargs) or not alone
        pointwise = torch.Tag.pointwise in op.func.tags
        self.same = _same_type if pointwise else _same


def _has_metadata(tensor: Tensor, value: Value) -> bool:
    return (
        tensor.shape == value.shape
        and tensor.dtype == value.dtype
        and (tensor.stride() == value.stride or not value.stride)
        and tensor.device == value.device
    )


def _same_constants(op: Op, args: Sequence[Any], kwargs: Any, same: Any) -> bool:
    """Say whether the arguments that are no tensors are as recorded."""
    if len(args) != len(op.args) or len(kwargs or ()) != len(op.kwargs):
        return False
    pairs = zip(args, op.args, strict=True)
    if not all(same(now, then) for now, then in pairs):
        return False
    if not kwargs:
        return True
    return all(name in kwargs and same(kwargs[name], v) for name, v in op.kwargs)


def _same_type(now: Any, then: Any) -> bool:
    """Compare arguments of an operation on single elements, such as a factor."""
    return type(now) is type(then) or _same(now, then)


def _same(now: Any, then: Any) -> bool:
    if isinstance(then, Value):
        return isinstance(now, Tensor)
    if isinstance(then, tuple) and isinstance(now, (list, tuple)):
        return len(now) == len(then) and all(map(_same, now, then))
    if isinstance(then, type):
        return type(now) is then
    return type(now) is type(then) and (now == then or now != now)


def described(steps: Sequence[Step], i: int, func: Any) -> str:
    """Describe the first operation that is not as recorded, with those before."""
    before = [_line(step.op) for step in steps[max(0, i - 2) : i]]
    then = [_line(step.op) for step in steps[i : i + 3]] or ["nothing more"]
    now = f"{func}  # {user_line()}" if func is not None else "nothing more"
    return "\n".join(
        [
            "  forward:",
            *(f"    {line}" for line in (*before, *then)),
            "  recomputation:",
            *(f"    {line}" for line in (*before, now)),
        ]
    )


def _line(op: Op) -> str:
    return f"{op.func}" + (f"  # {op.source}" if op.source else "")
