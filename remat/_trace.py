"""Records what one forward does: its operations, and what its graph saved.

Invariant: a record holds no tensor, and recording changes no value. It is only ever an
optimization: what it gets wrong shows in the replay (`_replay`), as an error or as an
operation that is not the one expected.
Rejected: saved-tensor hooks, to learn what autograd saves. torch.func refuses to run
under them, and they do not say for which outputs a value is saved.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from remat import _tree
from remat._capture import Search
from remat._code import CONSTANT, user_line
from remat._compat import (
    AccumulateGrad,
    LeanDispatchMode,
    OpOverload,
    StorageRef,
    base_tensor,
    eager_only,
    saved_by,
    storage_id,
    viewed,
)
from remat._op import Op, Value
from remat._plan import Passed, Record, Slot, Step
from remat._replay import IGNORED, Absent, tensors_of
from remat._streams import global_streams


_DRAWS = torch.Tag.nondeterministic_seeded
_READ_BY_PYTHON = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_OF_TORCH = {"aten", "prim", "prims", "profiler"}
_EXCHANGES_STORAGE = {"set_", "resize_", "_resize_output_", "resize_as_"}
# Of batch norms, written to without a word in the schema, and for nothing the second
# time: a recomputation updates copies.
_PLAIN = {Tensor, nn.Parameter, Absent}


class Recorder(LeanDispatchMode):
    """Records the operations of one forward.

    Args:
        leaves: what it runs on.
        policy: says of an operation whether its result may be kept; None for no.
    """

    supports_higher_order_operators = True

    def __init__(self, leaves: Sequence[Tensor], policy: Any) -> None:
        super().__init__()
        self._policy = policy
        self._numbers: dict[int, int] = {}
        # Held weakly, so that no address is used again; for good where that cannot be.
        self._held: list[Any] = []
        self._made: set[int] = set()
        self._steps: list[tuple[Any, ...]] = []
        self._names: dict[int, set[str]] = {}
        self._kept: dict[int, Tensor] = {}
        self._roots: list[set[int]] = []
        self.inputs = tuple(self.number(base_tensor(t)) for t in leaves)

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage, a new one if it has none yet."""
        key = key_of(tensor)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._numbers)
            self._held.append(_reference(tensor))
        return number

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func in IGNORED:
            return func(*args, **kwargs)
        moved = _Moved(func)
        result = func(*args, **kwargs)
        self._note(func, args, kwargs, result, moved.draws())
        return result

    def _note(
        self, func: Any, args: Any, kwargs: Any, result: Any, draws: bool
    ) -> None:
        inputs = tensors_of((args, kwargs))
        reads = tuple(map(self.number, inputs))
        writes = tuple(map(self.number, written_by(func, args, kwargs)))
        known = len(self._numbers)
        outputs: list[Tensor] = []
        form = _form(result, {id(t): k for k, t in enumerate(inputs)}, outputs)
        makes = tuple(map(self.number, outputs))
        runs = (
            _is_read_by_python(func)
            or not (outputs or writes)
            or not all(map(_is_plain, (*inputs, *outputs)))
            or any(map(_is_lazy, outputs))
            or not self._made.union(self.inputs).issuperset(writes)
        )
        self._made.update(range(known, len(self._numbers)))
        op = Op(
            func,
            tuple(map(_described, args)),
            tuple((name, _described(v)) for name, v in kwargs.items()),
            tuple(map(_value, outputs)),
            source=user_line(),
        )
        blind = _blind(func, len(outputs))
        self._steps.append((op, reads, makes, writes, draws, blind, runs, form))
        if not (runs or writes) and self._policy is not None and self._policy(op):
            for t, s in zip(outputs, makes, strict=True):
                self._hold(t, s)

    def _hold(self, tensor: Tensor, number: int) -> None:
        if number not in self._kept and _is_plain(tensor):
            self._kept[number] = tensor.detach()

    def end(self) -> None:
        """Do nothing: the record is made once the graph was asked."""

    @override
    def __enter__(self) -> Any:
        _RECORDERS.active.append(self)
        return super().__enter__()

    @override
    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        _RECORDERS.active.remove(self)
        super().__exit__(exc_type, exc_val, exc_tb)

    def name(self, tensor: Tensor, name: str) -> None:
        """Give the value of a tensor a name."""
        tensor = base_tensor(tensor)
        number = self._numbers.get(key_of(tensor))
        if number is not None:
            self._names.setdefault(number, set()).add(name)
            self._hold(tensor, number)

    # --- What the graph saved ---

    def ask(self, outs: Sequence[Any]) -> None:
        """Note for each output what the graph of it saved.

        To be called while there is a graph; of several levels, for each.
        """
        while len(self._roots) < len(outs):
            self._roots.append(set())
        found = [*zip(outs, self._roots, strict=True)]
        if len(outs) <= _MANY:
            for out, roots in found:
                roots.update(self._saved([out]))
        else:
            saved = self._saved(outs)
            for _, roots in found:
                roots.update(saved)

    def _saved(self, outs: Iterable[Any]) -> Iterator[int]:
        """Yield the storages that the backward of some outputs reads."""
        for node in _nodes(outs):
            kind = type(node).__name__
            if kind in _SILENT:
                yield from self._changed() if kind == "CopySlices" else self._made
                continue
            for t in _tensors_at(node):
                number = self._numbers.get(key_of(base_tensor(t)))
                if number is not None:
                    yield number

    def _changed(self) -> Iterator[int]:
        """Yield what is read by operations that change something in place."""
        for _, reads, makes, writes, *_ in self._steps:
            if writes:
                yield from (*reads, *makes)

    # --- The result ---

    def record(self, outs: Sequence[Any]) -> Record:
        """Return the record."""
        names = self._names
        steps: list[Step] = []
        named: set[int] = set()
        for op, reads, makes, *rest in self._steps:
            here = {s for s in makes if s in names and s not in (*reads, *named)}
            if here:
                named |= here
                called = frozenset().union(*(names[s] for s in here))
                op = Op(op.func, op.args, op.kwargs, op.outputs, called, op.source)
            steps.append(Step(op, reads, makes, *rest))
        roots = [frozenset(roots) for roots in self._roots]
        ends = [self._numbers.get(key_of(base_tensor(o))) for o in outs]
        return Record(tuple(steps), self.inputs, tuple(roots), tuple(ends))

    def residual(self, value: Value, number: int) -> Tensor:
        """Return what was made with a storage, of which some view was held."""
        held = self._kept[number]
        if _value(held) == value or type(held) is Absent:
            return held
        return viewed(held, value.shape, value.stride, value.offset)

    def has(self, numbers: Iterable[int]) -> bool:
        """Say whether these storages were held."""
        return self._kept.keys() >= {*numbers}


_MANY = 16  # outputs, for each of which the graph is walked
# Nodes that do not tell what they saved: of in-place operations on views, and in C++.
_SILENT = {"CopySlices", "CppFunction"}


def key_of(tensor: Any) -> int:
    """Return what tells storages apart, among those that are held."""
    if type(tensor) is Absent:
        return id(tensor.storage_of)
    return id(tensor) if _has_no_storage(tensor) else storage_id(tensor)


def _reference(tensor: Any) -> Any:
    if type(tensor) is Absent:
        return tensor.storage_of
    if _has_no_storage(tensor):
        return tensor
    return StorageRef(tensor.untyped_storage())


def _is_plain(tensor: Tensor) -> bool:
    fake = hasattr(tensor, "fake_mode")
    plain = type(tensor) in _PLAIN or fake
    return plain and tensor.layout is torch.strided and not tensor.is_quantized


def _is_lazy(tensor: Tensor) -> bool:
    """Say whether operations on a tensor depend on more than its metadata."""
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def _has_no_storage(tensor: Tensor) -> bool:
    return not _is_plain(tensor)


def _value(tensor: Tensor) -> Value:
    meta = (tuple(tensor.shape), tensor.dtype, tensor.device)
    if not _is_plain(tensor) or type(tensor) is Absent:
        return Value(*meta)
    nbytes = tensor.untyped_storage().nbytes()
    return Value(*meta, tuple(tensor.stride()), int(tensor.storage_offset()), nbytes)


def _described(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return _value(arg)
    if isinstance(arg, (list, tuple)):
        return tuple(map(_described, arg))
    # A generator is the user's, and not to be held.
    return arg if type(arg) in CONSTANT else type(arg)


def _form(result: Any, passed: dict[int, int], outputs: list[Tensor]) -> Any:
    """Return what an operation returned without its tensors, which go to `outputs`."""
    if isinstance(result, Tensor):
        outputs.append(result)
        k = passed.get(id(result))
        return Slot(len(outputs) - 1) if k is None else Passed(k)
    if isinstance(result, (list, tuple)):
        return type(result)(_form(part, passed, outputs) for part in result)
    return result


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for k, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            value = args[k] if k < len(args) else kwargs.get(argument.name)
            found += tensors_of(value)
    return found


_LIKE = {
    *("empty_like", "full_like", "ones_like", "zeros_like"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    *("rand_like", "randn_like", "randint_like"),
}
_DRAWS_IN_PLACE = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_"),
}


def _blind(func: Any, count: int) -> tuple[int, ...]:
    """Return the outputs of an operation that do not depend on its arguments' values.

    How often it draws does not either.
    """
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return ()
    if name in _LIKE:
        return (*range(count),)
    if name in _DRAWS_IN_PLACE and func._overloadname != "Tensor":
        return (*range(count),)
    if name == "native_dropout":
        return (1,)
    return (0,) if func is torch.ops.aten.bernoulli.p else ()


def _is_read_by_python(func: Any) -> bool:
    if not isinstance(func, OpOverload):
        return True
    exchanged = func.overloadpacket.__name__ in _EXCHANGES_STORAGE
    return exchanged or not _READ_BY_PYTHON.isdisjoint(func.tags)


class _Moved:
    """Notices a draw from a stream on the CPU, by an operation of the user's."""

    __slots__ = ("_before", "_func")

    def __init__(self, func: Any) -> None:
        self._func = func
        ours = isinstance(func, OpOverload) and func.namespace in _OF_TORCH
        self._before = None if ours else global_streams().read()

    def draws(self) -> bool:
        """Say whether the operation draws."""
        if self._before is None or _DRAWS in getattr(self._func, "tags", ()):
            return _DRAWS in self._func.tags
        return self._before != global_streams().read()


def _nodes(outs: Iterable[Any]) -> Iterator[Any]:
    """Yield the nodes of the graphs of outputs, and of what those saved."""
    roots = {o.grad_fn for o in outs if o is not None and o.requires_grad}
    todo = [node for node in roots if node is not None]
    seen = {*todo}
    while todo:
        here = todo.pop()
        if type(here) is AccumulateGrad:
            continue
        yield here
        # What was saved has a graph, which is another once it was changed in place.
        more = [t.grad_fn for t in _tensors_at(here) if t.requires_grad]
        for node in (*(node for node, _ in here.next_functions), *more):
            if node is not None and node not in seen:
                seen.add(node)
                todo.append(node)


def _tensors_at(node: Any) -> list[Tensor]:
    """Return the tensors that a node saved, or that its Function keeps on its ctx."""
    found = tensors_of(saved_by(node))
    if isinstance(node, torch.autograd.function.FunctionCtx):
        search = Search()
        for leaf in _tree.flatten([*vars(node).values()])[0]:
            search.visit(leaf, None)
        found += search.found.tensors
    return found


# --- Names ---


class Listener(Protocol):
    """Who wants to know what values are called."""

    def name(self, tensor: Tensor, name: str) -> None:
        """Be told that the value of a tensor has a name."""


class _Recorders(threading.local):
    """The recorders, and other listeners, that are at work in this thread."""

    def __init__(self) -> None:
        self.active: list[Listener] = []


_RECORDERS = _Recorders()
_NAMES: set[str] = set()


@contextmanager
def told_of_names(listener: Listener) -> Iterator[None]:
    """Tell a listener of the names given in the body, by this thread."""
    _RECORDERS.active.append(listener)
    try:
        yield
    finally:
        _RECORDERS.active.remove(listener)


def give_name(tensors: Iterable[Tensor], name: str) -> None:
    """Tell the listeners at work in this thread of a name."""
    _NAMES.add(name)
    for listener in _RECORDERS.active:
        for t in tensors:
            listener.name(t, name)


def names_given() -> frozenset[str]:
    """Return every name that was ever given to a value."""
    return frozenset(_NAMES)
