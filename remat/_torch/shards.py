"""Copies of replicas and of sharded models that send nothing, and what they hold.

Invariant: no communication, and no memory beside that of the copy's tensors. What
processes share (meshes, groups) stays the user's.
Rejected: a deep copy of a replica, which makes a reducer: buckets of real memory, and
collectives that other processes have to join. To shard the copy again: what was set
since, and hooks that were registered since, would be lost.
"""

import copy
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import (
    _disable_current_modes,
    is_traceable_wrapper_subclass_type,
)


T = TypeVar("T")


def replicas_in(modules: Iterable[nn.Module]) -> list[Any]:
    inside = (each for module in modules for each in module.modules())
    found = [m for m in inside if isinstance(m, DistributedDataParallel)]
    return [*dict.fromkeys(found)]


def copied_without_sending(
    value: T, replicas: Sequence[Any], shards: Sequence[Any] = ()
) -> T:
    """Return a deep copy of a value in which replicas call their modules alone."""
    memo = {id(each): object.__new__(type(each)) for each in replicas}
    finish = copies_of_shards(shards, memo)
    for each in replicas:
        state = {k: v for k, v in vars(each).items() if k not in _OF_PROCESSES}
        vars(memo[id(each)]).update(copy.deepcopy(state, memo), **_ALONE)
    finish()
    return copy.deepcopy(value, memo)


_OF_PROCESSES = {"logger", "process_group", "reducer", "device_mesh", "_device_mesh"}
# Deleted by: a public way to call a replica without its reducer, also with buffers.
_ALONE = {"_use_python_reducer": True, "logger": None, "reducer": None}


def in_buckets(replica: Any) -> list[Tensor]:
    """Return the parameters whose gradients a replica sends."""
    named = replica.module.named_parameters()
    left_out = replica.parameters_to_ignore
    return [p for name, p in named if p.requires_grad and name not in left_out]


def holds_gradients(replica: Any) -> bool:
    return replica.gradient_as_bucket_view


# Deleted by: a public way to copy a model that FSDP2 has sharded.
def shards_in(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the modules that FSDP2 has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", ())
    inside = (each for module in modules for each in module.modules())
    return [*dict.fromkeys(m for m in inside if isinstance(m, kind))]


def is_flat(model: nn.Module) -> bool:
    """Say whether a model has parameters that FSDP1 has made one of."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FullyShardedDataParallel", ())
    return any(isinstance(module, kind) for module in model.modules())


def copies_of_shards(shards: Sequence[Any], memo: dict[int, Any]) -> Callable[[], None]:
    """Have a deep copy with a memo copy shards; return what is done after it."""
    if not shards:
        return lambda: None
    made = {id(each): object.__new__(type(each)) for each in shards}
    memo.update(made)
    states = [*dict.fromkeys(each._get_fsdp_state() for each in shards)]
    for state in states:
        _keep(memo, state)

    def finish() -> None:
        for each in shards:
            vars(made[id(each)]).update(copy.deepcopy(vars(each), memo))
        for state in states:
            _registered(state, memo[id(state)], memo)

    return finish


def _keep(memo: dict[int, Any], state: Any) -> None:
    """Have a deep copy keep what processes share, and handles of devices."""
    groups = state._fsdp_param_groups
    parameters = [p for group in groups for p in group.fsdp_params]
    contexts = state._state_ctx, state._comm_ctx
    for owner in (state, *contexts, *groups, *parameters):
        for value in vars(owner).values():
            names = {kind.__name__ for kind in type(value).__mro__}
            if not isinstance(value, _COPIED) and names.isdisjoint(_STATES):
                memo[id(value)] = value


_COPIED = (Tensor, nn.Module, list, dict, set, tuple)
_STATES = {
    *("FSDPState", "FSDPStateContext", "FSDPCommContext", "FSDPParamGroup"),
    *("FSDPParam", "ParamModuleInfo", "ExtensionsData"),
}


def _registered(state: Any, twin: Any, memo: dict[int, Any]) -> None:
    """Have FSDP2 find the state of copied modules, and take their parameters."""
    from torch.distributed import _composable_state  # noqa: PLC0415

    for module in twin._modules:
        _composable_state._insert_module_state(module, twin)
        for hooks in module._forward_pre_hooks, module._forward_hooks:
            for key, hook in hooks.items():
                is_torchs = hook.__module__ == type(state).__module__
                if is_torchs and isinstance(hook, FunctionType):
                    hooks[key] = _closed_over(hook, memo)
    for group in state._fsdp_param_groups:
        memo[id(group)]._reset_sharded_params = True  # it would compare addresses
        for each in group.fsdp_params:
            copied = memo[id(each)]
            info = copied._module_info
            copied.sharded_param = getattr(info.module, info.param_name)
            if group.is_sharded:  # copies of one model would share what they gather
                copied.all_gather_outputs.clear()
                copied._unsharded_inner_tensors.clear()
                vars(copied).pop("_unsharded_param", None)


def _closed_over(value: Any, memo: dict[int, Any]) -> Any:
    """Copy what a closure holds, which a deep copy leaves as it is."""
    if not isinstance(value, FunctionType):
        return copy.deepcopy(value, memo)
    if not value.__closure__:
        return value
    cells = (CellType(_closed_over(c.cell_contents, memo)) for c in value.__closure__)
    kind = value.__code__, value.__globals__, value.__name__, value.__defaults__
    return FunctionType(*kind, tuple(cells))


# --- What is sent, and memory that changes its size ---


def is_wrapper(kind: type) -> bool:
    """Say whether tensors of a class run other operations on tensors that they wrap."""
    return is_traceable_wrapper_subclass_type(kind)


def is_sending(func: Any) -> bool:
    """Say whether an operation sends something to other processes, in place."""
    return getattr(func, "namespace", "") == "c10d"


def sent_to_nobody(func: Any, args: Sequence[Any]) -> Any:
    """Return what an operation returns that sends something."""
    from torch._C._distributed_c10d import FakeWork  # noqa: PLC0415

    returned: list[Any] = [
        FakeWork().boxed() if "Work" in str(each.type) else args[0]
        for each in func._schema.returns
    ]
    if not returned:
        return None
    return returned[0] if len(returned) == 1 else tuple(returned)


# Deleted by: an event when a storage is resized; and metadata of DTensors that is found
# outside of dispatch modes.
@contextmanager
def telling_of_resized(tell: Callable[[Any], None]) -> Iterator[None]:
    """Tell of each storage that Python resizes, as FSDP does, after that.

    What a DTensor computes to find a layout is seen by no mode meanwhile.
    """
    with _LOCK:
        _TOLD.append(tell)
        if len(_TOLD) == 1:
            _install()
    try:
        yield
    finally:
        with _LOCK:
            _TOLD.remove(tell)
            if not _TOLD:
                _UNDONE.pop_all().close()


_LOCK = threading.Lock()
_TOLD: list[Callable[[Any], None]] = []  # of all threads: backwards have their own
_UNDONE = ExitStack()
_LAYOUT_OF = "propagate_op_sharding_non_cached"
_resize: Any = torch.UntypedStorage.resize_


def _install() -> None:
    _instead(torch.UntypedStorage, "resize_", _resized)
    layouts = sys.modules.get("torch.distributed.tensor._sharding_prop")
    if layouts is not None:
        kind = layouts.ShardingPropagator
        layout_of = vars(kind)[_LAYOUT_OF]

        def unseen(*args: Any) -> Any:
            with _disable_current_modes():
                return layout_of(*args)

        _instead(kind, _LAYOUT_OF, unseen)


def _resized(storage: Any, size: int) -> Any:
    found = _resize(storage, size)
    for tell in [*_TOLD]:
        tell(storage)
    return found


def _instead(owner: Any, name: str, other: Any) -> None:
    """Give a class another attribute, until that is undone."""
    own = vars(owner).get(name)
    setattr(owner, name, other)
    if own is None:  # it is inherited
        _UNDONE.callback(delattr, owner, name)
    else:
        _UNDONE.callback(setattr, owner, name, own)
