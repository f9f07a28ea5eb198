"""Graphs of dispatched operations, as AOTAutograd and make_fx make them; collectives.

Invariant: nothing here imports inductor, which takes seconds, nor `torch.distributed`.
Where that was not imported, there is no collective.
Rejected: to have AOTAutograd functionalize draws. It does so for the graph of a
partitioner, after it took equal draws for one.
"""

import importlib
import operator
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch import autograd_function, eager_transforms
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    track_tensor_tree,
)
from torch.utils import _python_dispatch, _pytree
from typing_extensions import override

from remat._torch.levels import JVP, base_tensor, kinds_here


# Deleted by: a public way to ask what traces.
def is_below_tracer() -> bool:
    """Say whether tensors here are fake, functional, or stand for nodes of a graph."""
    # On a path taken by each call: a loop costs three times as much.
    return _count() > 0 and not (
        _mode(_PROXY) is _mode(_FUNCTIONAL) is _mode(_FAKE) is None
    )


_count = torch._C._len_torch_dispatch_stack  # with those of the three kinds
_mode: Any = torch._C._get_dispatch_mode
_keys: Any = torch._C._TorchDispatchModeKey
_FUNCTIONAL, _FAKE, _PROXY = _keys.FUNCTIONAL, _keys.FAKE, _keys.PROXY


# Deleted by: Dynamo entering levels of torch.func as torch.func itself does.
def counted_levels() -> AbstractContextManager[None]:
    """Have torch.func and forward_ad count the levels of forward mode that there are.

    A graph of Dynamo enters them past these counts, so that a level inside would take
    itself for the outermost.
    """
    depth = kinds_here().count(JVP)
    return _ALL_COUNTED if depth <= _transforms.JVP_NESTING else _counted(depth)


_ALL_COUNTED = nullcontext()


@contextmanager
def _counted(depth: int) -> Iterator[None]:
    before = _transforms.JVP_NESTING, _dual._current_level
    _transforms.JVP_NESTING, _dual._current_level = depth, 0
    try:
        yield
    finally:
        _transforms.JVP_NESTING, _dual._current_level = before


_transforms: Any = eager_transforms
_dual: Any = forward_ad


# Deleted by: `autograd_function_apply` saving tensors on its context. It holds them in
# a variable of its backward: a result that is saved leads to its node, and back.
def forget_saved_by_traced(node: Any) -> None:
    """Let a Function that Dynamo traced forget what it saved, if a node is of one."""
    backward: Any = getattr(getattr(node, "_forward_cls", None), "backward", None)
    if getattr(backward, "__module__", None) == autograd_function.__name__:
        for name, cell in zip(
            backward.__code__.co_freevars, backward.__closure__, strict=True
        ):
            if name == "saved_values":
                cell.cell_contents = None


def is_under_jvp() -> bool:
    """Say whether some level of torch.func differentiates forward."""
    return JVP in kinds_here()


# Deleted by: a public context outside of all levels of torch.func.
def unlevelled() -> Any:
    """Return a context that is outside of all levels of torch.func."""
    return torch._C._DisableFuncTorch()


def bottoms(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return the tensors below all levels of torch.func, detached."""
    with unlevelled():
        bases = map(base_tensor, tensors)
        # A graph has one node for each that is detached.
        return tuple(t.detach() if t.requires_grad else t for t in bases)


# Deleted by: AOTAutograd counting the changes of a tensor that autograd saved. It makes
# functions of operations in place, and each detached tensor counts for itself.
class FunctionalValue:
    """The value that a tensor has in the graph of AOTAutograd, if it is in one."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = weakref.ref(tensor)
        self._value = _value_of(tensor)

    def has_changed(self) -> bool:
        """Say whether the tensor was changed in place since."""
        tensor = self._tensor()
        return tensor is not None and _value_of(tensor) is not self._value


def _value_of(tensor: Any) -> Any:
    if not isinstance(tensor, FunctionalTensor):
        return None
    torch._sync(tensor)
    return torch._from_functional_tensor(tensor.elem)


# --- Draws: the state of the stream is a value of the graph ---

draw_and_keep_state: Any = run_and_save_rng_state
draw_again: Any = run_with_rng_state


# Deleted by: torch giving `run_and_save_rng_state` these rules. That for fake tensors
# returns a real state, which make_fx keeps as a constant: each call draws one mask. And
# two draws of the same arguments are taken for one.
def let_graphs_draw() -> None:
    """Have graphs hold the state of a stream as a value that each run reads."""
    rand_ops = importlib.import_module("torch._functorch.compile_utils").rand_ops
    if draw_and_keep_state in rand_ops:
        return
    rand_ops.append(draw_and_keep_state)
    before: Any = registered_hop_fake_fns[draw_and_keep_state]
    rest = before[1:] if isinstance(before, tuple) else ()
    rules: Any = registered_hop_fake_fns
    rules[draw_and_keep_state] = (_draw_of_fakes, *rest) if rest else _draw_of_fakes
    draw_and_keep_state.python_key_table[ProxyTorchDispatchMode] = _draw_of_proxies
    if torch._C.DispatchKey.Functionalize not in draw_and_keep_state.py_kernels:
        draw_and_keep_state.py_functionalize_impl(_draw_of_functionals)


def _draw_of_functionals(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = ctx.unwrap_tensors(args), ctx.unwrap_tensors(kwargs)
    with ctx.redispatch_to_next():
        return ctx.wrap_tensors(draw_and_keep_state(op, *args, **kwargs))


def _draw_of_fakes(op: Any, *args: Any, **kwargs: Any) -> Any:
    leaves = _pytree.tree_leaves((args, kwargs))
    tensors = [t for t in leaves if isinstance(t, Tensor)]
    device = tensors[0].device if tensors else torch.device(kwargs.get("device", "cpu"))
    size = torch.get_rng_state().numel() if device.type == "cpu" else _GPU_STATE
    return torch.empty(size, dtype=torch.uint8), op(*args, **kwargs)


_GPU_STATE = 16


def _draw_of_proxies(mode: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    with disable_proxy_modes_tracing():
        out = draw_and_keep_state(op, *args, **kwargs)
    unwrap = mode.tracer.unwrap_proxy
    args, kwargs = _pytree.tree_map(unwrap, ((op, *args), kwargs))
    node = mode.tracer.create_proxy("call_function", draw_and_keep_state, args, kwargs)
    return track_tensor_tree(out, node, constant=None, tracer=mode.tracer)


# --- Modes ---


# Deleted by: a public dispatch mode that a tracer runs under.
class TracedMode(_python_dispatch.TorchDispatchMode):
    """A dispatch mode below functorch, and above what makes a graph."""

    supports_higher_order_operators = True

    @classmethod
    @override
    def ignore_compile_internals(cls) -> bool:
        return True


# --- Inductor ---


# Deleted by: a public way to lower an operator to an alias of its input.
def lower_to_alias(operator: Any, aliasing: Any) -> None:
    """Have inductor run `aliasing` for `operator`, if inductor is there.

    The schema of `aliasing` says that its result shares the memory of its input. So
    the scheduler keeps the order and the storage, and copies nothing. What leaves the
    graph is copied: a result must not be an input's alias.
    """
    if "torch._inductor.compile_fx" not in sys.modules:
        return
    lowering = sys.modules["torch._inductor.lowering"]
    if operator in lowering.lowerings:
        return
    ir = sys.modules["torch._inductor.ir"]
    virtualized = sys.modules["torch._inductor.virtualized"]

    def lower(x: Any, after: Any) -> Any:
        leaves = _leaves_graph(virtualized.V.graph.current_node)
        chosen = operator if leaves else aliasing
        made = ir.FallbackKernel.create(chosen, x, after)
        return _pytree.tree_map(ir.TensorBox.create, made)

    lowering.register_lowering(operator, type_promotion_kind=None)(lower)


def _leaves_graph(node: Any) -> bool:
    return any(_is_end(user) for user in node.users)


def _is_end(user: Any) -> bool:
    if user.op != "call_function":
        return bool(user.op == "output")
    is_view = getattr(user.target, "is_view", False)
    is_view = is_view or user.target is torch.ops.aten.detach.default
    return is_view and _leaves_graph(user)


# --- Collectives: those under way, what they return, those in a graph ---


_WORK = "__torch__.torch.classes.c10d.Work"


# Deleted by: a public way to tell a `Work`, and to make one that is done.
def finished(result: Any) -> Any:
    """Return a `Work` that is done and holds no tensor in place of a `Work`."""
    if not isinstance(result, torch.ScriptObject):
        return result
    kind: Any = result._type()
    if kind.qualified_name() != _WORK:
        return result
    return vars(torch._C)["_distributed_c10d"].FakeWork().boxed()


# Deleted by: a public function that waits for what functional collectives returned.
def wait_for(tensor: Tensor) -> None:
    """Wait for the collective that fills a tensor, if there is one."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.ops._c10d_functional.wait_tensor(tensor)


# Deleted by: fx not taking `wait_tensor` for an operation that has an effect.
# Deleted by: a public way to ask which node of a graph stands for a tensor.
class AddedNodes:
    """What operations from here on add to the graph that is made, up to an end.

    To be made where there is such a graph.
    """

    def __init__(self) -> None:
        mode: Any = get_proxy_mode()
        self._tracer = mode.tracer
        self._last = self._tracer.graph._root.prev
        self._ended: set[Any] = set()

    def end(self) -> None:
        self._ended = {*self._added()}

    def lead_to(self, tensors: Iterable[Tensor]) -> bool:
        """Say whether one of these was computed from what they gave, by the end."""
        added, ended = {*self._added()}, self._ended
        todo = [self._node_of(t) for t in tensors]
        while todo:
            node = todo.pop()
            if node in ended:
                return True
            if node in added:  # what is older leads to none of them
                added.discard(node)
                todo += node.all_input_nodes
        return False

    def _added(self) -> Iterator[Any]:
        node = self._tracer.graph._root.prev
        while node is not self._last:
            yield node
            node = node.prev

    def _node_of(self, tensor: Any) -> Any:
        value = _value_of(tensor)
        tensor = tensor if value is None else value
        slot: Any = get_proxy_slot(tensor, self._tracer, None)
        return None if slot is None else slot.proxy.node


class CollectivesInGraph(AddedNodes):
    """The collectives among them."""

    def drop_unread(self, results: Iterable[Tensor]) -> None:
        """Take those out of the graph that none of these results needs.

        What was computed from them alone goes as well. A size that was read stays.
        """
        kept = {self._node_of(t) for t in results}
        added = [*self._added()]
        behind: set[Any] = set()  # collectives, and what was computed from them
        for node in reversed(added):
            if _is_collective(node) or not behind.isdisjoint(_read(node)):
                behind.add(node)
        for node in added:  # from the last to the first
            if node in behind and node not in kept and not node.users:
                self._tracer.graph.erase_node(node)


def _read(node: Any) -> Sequence[Any]:
    """Return the nodes that an operation reads; none if it gives more than tensors."""
    is_pure = isinstance(node.meta.get("val"), _TENSORS) and not node.is_impure()
    return node.all_input_nodes if is_pure else ()


_TENSORS = Tensor, list, tuple


def _is_collective(node: Any) -> bool:
    target = node.target
    if target is operator.getitem:
        return _is_collective(node.args[0])
    is_functional = getattr(target, "namespace", None) == "_c10d_functional"
    return is_functional and target._schema.name.partition("::")[2] in _PURE


# Their results are all that they give to a rank. In place, and to one other rank, it is
# something else.
_PURE = frozenset(
    (
        *("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "all_reduce"),
        *("all_reduce_coalesced", "all_to_all_single", "broadcast"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced", "wait_tensor"),
    )
)
