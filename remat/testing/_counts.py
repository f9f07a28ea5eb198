"""Counters of what a function costs: its kernels, and the bytes of its tensors.

Invariant: bytes are exact, and a kernel counts once, under any transform.
Rejected: estimates by the shapes of what is saved. Two tensors may share memory.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from remat._report.timeline import memory_timeline
from remat._torch import call_kernel


@contextmanager
def count_ops() -> Iterator[Counter[str]]:
    """Count the kernels that run inside the block, by name.

    Kernels are counted below ``torch.func``: a call under ``grad`` and ``vmap`` counts
    once, as the batched kernel that runs in the end. Operations that autograd
    dispatches for bookkeeping (``detach``, ``alias``, ``view``) are counted too.

    Yields:
        A counter from op name (``"mm"``, ``"add_"``, ``"mylib::op"`` outside ATen) to
        the number of calls so far. An op that did not run counts 0.

    Example:
        >>> import torch
        >>> x = torch.ones(3)
        >>> with count_ops() as ops:
        ...     _ = torch.func.grad(lambda x: x.sin().sin().sum())(x)
        >>> ops["sin"], ops["cos"], ops["mm"]
        (2, 2, 0)
    """
    counts: Counter[str] = Counter()
    with _CountingMode(counts):
        yield counts


class _CountingMode(TorchDispatchMode):
    """Adds each op that reaches the bottom of the dispatcher to ``counts``."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    @override
    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types  # every tensor is counted alike
        name = func.overloadpacket.__name__
        aten = func.namespace == "aten"
        self._counts[name if aten else f"{func.namespace}::{name}"] += 1
        return call_kernel(func, *args, **(kwargs or {}))


def peak_bytes(fn: Callable[[], object]) -> int:
    """Run ``fn`` and return the most bytes that its tensors held at any one time.

    Args:
        fn: Called once, without arguments, as in ``memory_timeline``.

    Returns:
        The highest point of ``memory_timeline(fn)``, or 0.

    Example:
        >>> import torch
        >>> x = torch.ones(1000)
        >>> peak_bytes(lambda: x.sin().cos().exp())
        8000
    """
    return memory_timeline(fn).peak


def live_bytes(fn: Callable[[], object]) -> int:
    """Run ``fn`` and return the bytes that are alive afterwards, with its result.

    For a forward, these are the residuals and the result.

    Args:
        fn: Called once, without arguments, as in ``memory_timeline``.

    Returns:
        The last point of ``memory_timeline(fn)``, or 0.

    Example:
        >>> import torch
        >>> x = torch.ones(1000, requires_grad=True)
        >>> live_bytes(lambda: x.sin().sin())  # the result and one residual
        8000
    """
    timeline = memory_timeline(fn).bytes
    return timeline[-1] if timeline else 0
