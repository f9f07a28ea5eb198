"""What an operation does besides returning values: writes, draws, reads by Python.

Invariant: by the schema and the tags of an operation, or by what it was seen to do; an
operator that nobody knows is taken to do whatever it may.
Rejected: a list of all operations. torch has thousands, and users add to them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from remat._absent import LIKE, tensors_of
from remat._compat import OpOverload
from remat._streams import global_streams


DRAWS = torch.Tag.nondeterministic_seeded
_READ_BY_PYTHON = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.inplace_view,
}
_OF_TORCH = {"aten", "prim", "prims", "profiler"}
_EXCHANGES_STORAGE = {"set_", "resize_", "_resize_output_", "resize_as_"}


def written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    declared = declared_writes(func, args, kwargs)
    return [*declared, *updated_statistics(func, args, kwargs)]


def declared_writes(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the tensors that an operation writes to, by its schema."""
    if not isinstance(func, OpOverload) or not func._schema.is_mutable:
        return []
    found: list[Tensor] = []
    for k, argument in enumerate(func._schema.arguments):
        info = argument.alias_info
        if info is not None and info.is_write:
            found += tensors_of(_argument(func, k, args, kwargs))
    return found


def updated_statistics(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any]
) -> list[Tensor]:
    """Return the running statistics that a batch norm updates, unsaid in its schema."""
    if not isinstance(func, OpOverload) or func.overloadpacket not in _BATCH_NORMS:
        return []
    names = [argument.name for argument in func._schema.arguments]

    def given(name: str) -> Any:
        return _argument(func, names.index(name), args, kwargs)

    updates = "training" not in names or given("training")
    return tensors_of([*map(given, _STATISTICS)]) if updates else []


_STATISTICS = ("running_mean", "running_var")
_BATCH_NORMS = {
    getattr(torch.ops.aten, name)
    for name in (
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("batch_norm_update_stats", "batch_norm_gather_stats"),
        "batch_norm_gather_stats_with_counts",
    )
}


def _argument(func: Any, k: int, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return argument `k` of an operation; None if it was left out."""
    return args[k] if k < len(args) else kwargs.get(func._schema.arguments[k].name)


_DRAWS_IN_PLACE = {
    *("bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_"),
    *("normal_", "random_", "uniform_"),
}


def blind_outputs(func: Any, count: int) -> tuple[int, ...]:
    """Return the outputs of an operation that do not depend on its arguments' values.

    How often it draws does not either.
    """
    name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
    if not isinstance(func, OpOverload) or func.namespace != "aten":
        return ()
    if name in LIKE:
        return (*range(count),)
    if name in _DRAWS_IN_PLACE and func._overloadname != "Tensor":
        return (*range(count),)
    if name == "native_dropout":
        return (1,)
    return (0,) if func is torch.ops.aten.bernoulli.p else ()


def is_read_by_python(func: Any) -> bool:
    """Say whether Python sees what an operation gives, or nobody knows what it does."""
    if not isinstance(func, OpOverload):
        return True
    exchanged = func.overloadpacket.__name__ in _EXCHANGES_STORAGE
    return exchanged or not _READ_BY_PYTHON.isdisjoint(func.tags)


def is_of_others(func: Any) -> bool:
    """Say whether an operation is not of torch, so that its tags may not tell all."""
    return not (isinstance(func, OpOverload) and func.namespace in _OF_TORCH)


class Moved:
    """Notices a draw: by the tag, or from a stream on the CPU where there is none."""

    __slots__ = ("_before", "_tagged")

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        tagged = DRAWS in getattr(func, "tags", ())
        self._tagged = tagged and _dropout(func, args, kwargs) != 0.0
        unknown = not self._tagged and is_of_others(func)
        self._before = global_streams().read() if unknown else None

    def draws(self) -> bool:
        """Say whether the operation drew."""
        moved = self._before is not None and self._before != global_streams().read()
        return self._tagged or moved


def _dropout(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return how much an operation of attention drops; None if it is none."""
    for k, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = _argument(func, k, args, kwargs)
            return argument.default_value if given is None else given
    return None
