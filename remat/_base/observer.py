"""The observer of operations: of records, reports, `remat.scope`, budgets and guards.

A subclass says what it does before and after an operation, in `run`; or only after it,
in `seen`.

Invariant: operations run as without an observer, whatever it notes.
Rejected: only to be told afterwards. Some observers look at what an operation is about
to change, or count what it frees.
"""

from collections.abc import Set as AbstractSet
from typing import Any

from typing_extensions import override

from remat._base.absent import IGNORED
from remat._torch import (
    DEVICE_OF,
    LeanDispatchMode,
    call_kernel,
    eager_only,
    fake_device,
    is_fake,
)


class Observer(LeanDispatchMode):
    """A dispatch mode that sees each operation below autograd, and runs it."""

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
