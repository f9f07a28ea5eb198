"""The operators of remat that graphs and records hold.

    barrier     the identity, which also reads other tensors
    same        what inductor runs for it: without a copy
    named       a name of a value
    unit        several operations as one, for the modes that record or replay

And the mode by which records, reports, `remat.scope`, budgets and guards see
operations. They run as without it: it is asked before them, since some look at what an
operation is about to change.

Invariant: those that graphs hold compute nothing. They say what a graph must not
reorder or lose. The user's modes, autograd and transforms see what is in a unit, as
without us.
Rejected: marks in the metadata of nodes, which the tracers drop. A kernel that is
called as a unit: it runs below all of these.
"""

import threading
from collections.abc import Callable, Sequence, Set as AbstractSet
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from remat._base.context import here
from remat._torch.modes import LeanDispatchMode, as_one_operation, call_kernel
from remat._torch.tensors import DEVICE_OF, fake_device, is_fake
from remat._torch.tracing import eager_only


LIBRARY = torch.library.Library("remat", "FRAGMENT")
LIBRARY.define("barrier(Tensor x, Tensor[] after) -> Tensor")
# The mark of an alias in its schema is what inductor goes by.
LIBRARY.define("same(Tensor(a) x, Tensor[] after) -> Tensor(a)")
LIBRARY.define("named(Tensor x, str name) -> ()")

barrier: Any = torch.ops.remat.barrier.default
same: Any = torch.ops.remat.same.default
named: Any = torch.ops.remat.named.default


def _copied(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    del after
    return x.clone()


def _same(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    del after
    return x


def _like(x: Tensor, after: Sequence[Tensor]) -> Tensor:
    del after
    return torch.empty_like(x)


for _name, _kernel in (("barrier", _copied), ("same", _same)):
    LIBRARY.impl(_name, _kernel, "CompositeExplicitAutograd")
    # Not `register_fake`, which looks up the source of what it is given.
    LIBRARY.impl(_name, _like, "Meta")


def _nothing(x: Tensor, name: str) -> None:
    del x, name


def _batched(info: Any, in_dims: Any, x: Tensor, name: str) -> Any:
    del info, in_dims
    return named(x, name), None


LIBRARY.impl("named", _nothing, "Meta")
torch.library.register_vmap("remat::named", _batched, lib=LIBRARY)
LIBRARY.impl("named", torch.library.fallthrough_kernel, "Autograd")


# --- Several operations as one ---


LIBRARY.define("unit(Tensor[] inputs, str name) -> Tensor[]")
unit: Any = torch.ops.remat.unit.default


class _Entered(threading.local):
    def __init__(self) -> None:
        self.runs: list[Callable[..., Any]] = []


_ENTERED = _Entered()


@torch.library.impl(LIBRARY, "unit", "CompositeExplicitAutograd")
def _unit(inputs: Sequence[Tensor], name: str) -> list[Tensor]:
    del name
    return [*_ENTERED.runs[-1](*inputs)]


torch.library.register_fake("remat::unit", _unit, lib=LIBRARY)


def as_unit(
    fn: Callable[..., Sequence[Any]], inputs: Sequence[Tensor], name: str
) -> Any:
    """Run something as one operation, if remat's modes see the operations here."""
    if not (here().modes or here().reporter):
        return fn(*inputs)

    def call(inside: Callable[..., Any]) -> Any:
        _ENTERED.runs.append(inside)
        try:
            return unit([*inputs], name)
        finally:
            _ENTERED.runs.pop()

    return as_one_operation(call, fn)


# --- The observer of operations ---


# Autograd detaches the results that it saves. That is no operation of the function.
DETACH = torch.ops.aten.detach.default
# Neither are names, what is asked of fake tensors, and what forward mode asks of the
# layouts of a value and its tangent.
IGNORED = frozenset(
    {
        *(DETACH, named),
        *(torch.ops.prim.device.default, torch.ops.prim.layout.default),
        *(
            torch.ops.aten.is_same_size.default,
            torch.ops.aten._has_same_storage_numel.default,
        ),
    }
)


class Observer(LeanDispatchMode):
    """A dispatch mode that sees each operation below autograd, and runs it.

    A subclass says what it does around an operation in `run`, or after it in `seen`.
    """

    unseen: AbstractSet[Any] = IGNORED  # it does not look at these

    @override
    @eager_only
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        if func in self.unseen:
            if func is DEVICE_OF and is_fake(args[0]):
                return fake_device(args[0])
            return call_kernel(func, *args, **(kwargs or {}))
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run an operation, and look at it."""
        result = call_kernel(func, *args, **kwargs)
        self.seen(func, args, kwargs, result)
        return result

    def seen(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Be told of an operation that has run."""
