"""The tensors of a run: what it is given, and where each storage that it meets is from.

Also the names of functions, streams and graph nodes, and where a report can be made.

Invariant: no graph that was there before is added to or changed, and what was there is
as it was afterwards: tensors, gradients, random streams. A ledger keeps no storage
alive. A thing has the same name in every report.
Rejected: copies of the arguments. A model that only just fits in memory leaves no room
for them. Rejected: a report under a transform. A function has several graphs there, and
no argument says which is meant.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from typing_extensions import override

from remat._ambient.streams import device_streams, global_streams
from remat._base import pytree
from remat._base.absent import Absent
from remat._base.context import here
from remat._base.errors import CaptureError, Label, label_of, name_in, note
from remat._base.operators import Observer
from remat._base.program import Program
from remat._base.source import user_line
from remat._base.tensors import parts
from remat._base.types import Fn
from remat._graph.handles import PackedOutside, stored_by
from remat._partial.effects import written_by
from remat._partial.options import Options
from remat._reach.names import CallNames
from remat._reach.reach import Reach
from remat._torch.autograd import dual_level_active
from remat._torch.levels import base_tensor, current_layer
from remat._torch.tensors import StorageRef, preserved_version, storage_id
from remat._transform.function import Primal
from remat._transform.levels import Below
from remat._transform.module import recomputed_by
from remat._transform.saved import Saved


CONSTANT, ARGUMENT, CAPTURED, MADE = range(4)


@dataclass(slots=True)
class StorageNote:
    """What is known of a storage, without keeping it alive."""

    ref: StorageRef
    dtype: torch.dtype
    shape: tuple[int, ...]
    device: torch.device
    is_parameter: bool
    rank: int
    origin: str
    source: str = ""
    place: str = ""
    readers: dict[str, None] = field(default_factory=dict)
    names: tuple[str, ...] = ()


class Ledger(Observer):
    """Notes each storage that a run meets, and how to undo what is written to it."""

    unseen = frozenset()

    is_of_call = False

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        # By address, in the order in which they were met.
        self.entries: dict[int, StorageNote] = {}
        self._stack = stack
        self._preserved: set[int] = set()

    def know(
        self, tensor: Tensor, rank: int, origin: str, source: str = ""
    ) -> list[StorageNote]:
        """Return the entries of a tensor's storages, new ones if there are none."""
        found = []
        for part in parts(tensor):
            entry = self.entries.get(storage_id(part))
            if entry is None:
                meta = part.dtype, tuple(part.shape), part.device
                ref, is_given = StorageRef(part.untyped_storage()), rank != MADE
                known = is_given and is_parameter(tensor), rank, origin, source
                entry = self.entries[ref.address] = StorageNote(ref, *meta, *known)
            found.append(entry)
        return found

    @override
    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        for t in tensors_in((args, kwargs)):
            self.know(t, CONSTANT, "from a constant")
        written = written_by(func, args, kwargs)
        for t in written:
            self._preserve(t)
        result = self.call(func, args, kwargs)
        origin, source = origin_text(func), user_line()
        for t in tensors_in(result):
            self.know(t, MADE, origin, source)
        for t in written:
            for entry in self.know(t, MADE, origin, source):
                if entry.rank == MADE:  # its names are of the value that was there
                    entry.origin, entry.source, entry.names = origin, source, ()
        return result

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation."""
        return super().run(func, args, kwargs)

    def name(self, tensor: Tensor, name: str) -> None:
        """Give a name to what an operation made."""
        for part in parts(base_tensor(tensor)):
            # A recorder around would take `untyped_storage` for the user's reading it.
            entry = self.entries.get(storage_id(part))
            if entry is not None and entry.rank == MADE and name not in entry.names:
                entry.names = (*entry.names, name)
                entry.origin = origin_text(None, entry.names)
                entry.source = user_line()

    def _preserve(self, tensor: Tensor) -> None:
        """Have a tensor that is older than the run put back as it is now."""
        for part in parts(tensor):
            number = storage_id(part)
            if self.entries[number].rank == MADE or number in self._preserved:
                continue
            self._preserved.add(number)
            if not part.is_inference():
                self._stack.enter_context(preserved_version(part))
            storage = part.untyped_storage()  # a fake tensor's is on another device
            if storage.device.type != "meta":
                self._stack.callback(_put_back, storage, storage.clone())


def _put_back(storage: torch.UntypedStorage, before: torch.UntypedStorage) -> None:
    if storage.nbytes() != before.nbytes():
        storage.resize_(before.nbytes())
    storage.copy_(before)


L = TypeVar("L", bound=Ledger)
T = TypeVar("T")


def tried(
    run: Callable[["Inputs", Ledger], tuple[T, bool]], fn: Fn, args: Any, kwargs: Any
) -> T:
    """Return what a run finds. If it says that this is not all, there is another.

    In that one all arguments are differentiated.
    """
    with undoing(fn, args, kwargs) as (inputs, ledger):
        found, is_all = run(inputs, ledger)
    if is_all or not inputs.has_others:
        return found
    with undoing(fn, args, kwargs, every=True) as given:
        more, is_all = run(*given)
    return more if is_all else found


@contextmanager
def undoing(
    fn: Fn,
    args: Any,
    kwargs: Any,
    mode: Callable[[ExitStack], L] = Ledger,
    *,
    every: bool = False,
) -> Iterator[tuple["Inputs", L]]:
    """Yield what to run on, and a mode; put back what a run under the mode changes."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        inputs = Inputs(fn, args, kwargs, every=every)
        stack.enter_context(inputs.restored())
        torch.clear_autocast_cache()  # casts in it may be of another graph
        stack.callback(torch.clear_autocast_cache)
        yield inputs, mode(stack)


@contextmanager
def reporting(reporter: Any) -> Iterator[None]:
    """Have the calls in a run tell somebody of themselves."""
    context = here()
    before, context.reporter = context.reporter, reporter
    try:
        yield
    finally:
        context.reporter = before


# --- Tensors ---


def is_parameter(tensor: Tensor) -> bool:
    """Say whether a tensor is a leaf to differentiate for, which is alive anyway."""
    is_wanted = tensor.requires_grad or isinstance(tensor, nn.Parameter)
    return tensor.is_leaf and is_wanted


def has_values(tensor: Tensor) -> bool:
    """Say whether a tensor has values, and not only metadata."""
    return not (tensor.is_meta or hasattr(tensor, "fake_mode"))


def inputs_kept(call: Saved) -> Iterator[Tensor]:
    """Yield the tensors that a call keeps of its inputs, some as other hooks have."""
    for value in call.inputs.values:
        if type(value) is PackedOutside:
            yield from stored_by(value)
        elif type(value) is not Absent:
            yield value


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a pytree."""
    return [t for t in pytree.flatten(tree)[0] if isinstance(t, Tensor)]


def origin_text(func: Any, names: Sequence[str] = ()) -> str:
    """Return, in JAX's words, the origin of what an operation made."""
    if names:
        return f"named {', '.join(map(repr, names))}"
    if isinstance(func, str):
        return f"kept of {func}"
    packet = getattr(func, "overloadpacket", func)
    return f"output of {getattr(packet, '__name__', func)}"


class Inputs:
    """The arguments to run on, and the tensors and streams that a function reaches.

    `tensors` are passed or captured; `run_on` has each itself, or its stand-in. `args`
    and `kwargs` are what to run on. If no tensor requires grad, or `every` floating
    argument is to be differentiated, those are (`are_made_up`); `has_others` says that
    some are not. The first `passed` are arguments.
    """

    def __init__(
        self, fn: Any, args: Any, kwargs: dict[str, Any], *, every: bool = False
    ) -> None:
        while (found := recomputed_by(fn)) is not None:
            fn, _ = found  # whose parameters have the names that the user knows
        reach = Reach(fn, "", args, kwargs)
        if reach.is_lazy:
            raise CaptureError(_LAZY)
        self._names, self._streams = CallNames(fn, args, kwargs), reach.streams
        self.tensors = self._names.tensors
        leaves, treedef = pytree.flatten((args, kwargs))
        given = [t for t in leaves if isinstance(t, Tensor) and not t.is_inference()]
        floats = [t for t in given if t.is_floating_point() or t.is_complex()]
        every = every or not any(t.requires_grad for t in self.tensors)
        others = [t for t in floats if not t.requires_grad]
        self.has_others, self.are_made_up = bool(others) and not every, every
        graphs = [t for t in given if t.requires_grad and not t.is_leaf]
        stand_ins = _stand_ins([*others, *graphs] if every else graphs)
        self.run_on = [stand_ins.get(id(t), t) for t in self.tensors]
        self.passed = len({id(value) for value in leaves if isinstance(value, Tensor)})
        leaves = [stand_ins.get(id(value), value) for value in leaves]
        self.args, self.kwargs = pytree.unflatten(treedef, leaves)

    def described(self, index: int) -> tuple[int, str]:
        """Return the rank and the origin of a tensor."""
        name, is_passed = self._names.origin_of(index)
        if is_passed:
            return ARGUMENT, f"from the argument {name}"
        return CAPTURED, f"from the captured `{name}`"

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Leave streams and gradients as they are now."""
        grads = [(t, t.grad) for t in self.tensors if t.is_leaf]
        try:
            with streams_kept(self._streams):
                yield
        finally:
            for t, grad in grads:
                if t.grad is not grad:
                    t.grad = grad


@contextmanager
def streams_kept(others: Iterable[Any] = ()) -> Iterator[None]:
    """Leave the random streams of the process, and others, as they are now."""
    streams = [*global_streams().streams, *device_streams(), *others]
    states = [stream.read() for stream in streams]
    try:
        yield
    finally:
        for stream, state in zip(streams, states, strict=True):
            if stream.read() != state:
                stream.write(state)


def _stand_ins(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """Return tensors that require grad and are no leaves, which may be changed."""
    anchor = torch.zeros((), requires_grad=True)
    found: dict[int, Tensor] = {}
    for t in tensors:
        with preserved_version(t):
            found[id(t)] = _NonLeaf.apply(t.detach(), anchor)
    return found


_LAZY = (
    "remat: the function holds a lazy module, whose parameters are not initialized "
    "yet. A report would be on a call that makes them: call it once before."
)


class _NonLeaf(Function):
    """Returns a tensor that requires grad and is not a leaf: it may be changed."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor, _anchor: Tensor) -> Any:  # pyrefly: ignore[bad-override]
        ctx.mark_dirty(tensor)
        return tensor


# --- Names, and where a report can be made ---


def refuse_transforms(report: str, instead: str) -> None:
    """Raise a RuntimeError under a transform of torch.func or a trace."""
    where = _COMPILED if torch.compiler.is_compiling() else ""
    if current_layer() is not None or dual_level_active():
        where = _TRANSFORMED
    if where:
        told = f"remat: {report} was called {where}. Call it outside, on {instead}."
        raise RuntimeError(told)


_TRANSFORMED = (
    "under a transform of torch.func or forward-mode AD, where tensors have several "
    "graphs"
)
_COMPILED = "in a function that torch.compile traces"


@contextmanager
def one_by_one(report: str, args: Sequence[Any]) -> Iterator[None]:
    """Note on an error of the function that its arguments may be meant one by one."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        if len(args) == 1 and isinstance(args[0], (tuple, list)):
            kind = type(args[0]).__name__
            note(error, _ONE_BY_ONE.format(report=report, kind=kind))
        raise


_ONE_BY_ONE = (
    "remat: {report} was given one argument for the function, a {kind}. To pass what "
    "is in it, write {report}(fn, *args), not {report}(fn, args)."
)


def unwrapped(fn: Any) -> tuple[Any, str, Options]:
    """Return the function that is recomputed, its label, and the options."""
    found = recomputed_by(fn)
    if found is None:
        return fn, label_of_function(fn), Options()
    inner, call = found
    return inner, call.__remat_label__, call._options


def label_of_function(fn: Any) -> Label:
    """Return the label of a function that is not rematerialized."""
    return label_of(getattr(fn, "__qualname__", type(fn).__qualname__))


def reader_of(node: Any) -> str:
    """Return the name of the operation that a graph node is the backward of."""
    program = getattr(node, "program", None)
    if isinstance(program, Program):
        call = call_behind(program)
        return "remat" if call is None else f"remat({name_in(call.label)})"
    name = re.sub(r"Backward\d*$", "", type(node).__name__)
    if isinstance(node, torch.autograd.function.FunctionCtx):
        return name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def call_behind(program: Any) -> Primal | None:
    """Return the call that a program is, or evaluates; None if it is another rule."""
    while isinstance(program, Below):
        program = program.program
    return program if isinstance(program, Primal) else None
