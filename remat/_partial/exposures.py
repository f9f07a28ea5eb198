"""Notices that Python takes the memory of a tensor, or assigns to its `.data`.

Called by `recorder`, and by the blocks of `remat.scope`.

Invariant: it is told before Python has the memory. Rejected: to compare the values
afterwards, which costs a copy of each.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override


class Exposures(TorchFunctionMode):
    """Tells of tensors whose memory Python takes, other than by operations.

    Args:
        expose: is told of each.
        assign: is told of each tensor to whose `.data` another is assigned, and which.
    """

    is_remats_check = True

    def __init__(
        self,
        expose: Callable[[Tensor], None],
        assign: Callable[[Tensor, Tensor], None] | None = None,
    ) -> None:
        super().__init__()
        self._expose, self._assign = expose, assign

    @override
    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        # One look-up, for this is asked of everything that Python calls.
        if func in _NOTICED:
            self._notice(func, args)
        return func(*args, **(kwargs or {}))

    def _notice(self, func: Any, args: Any) -> None:
        if func == _ASSIGNS:
            if self._assign is not None:
                self._assign(*args)
        elif args and isinstance(args[0], Tensor):
            self._expose(args[0])


_TENSOR: Any = Tensor
_ASSIGNS = _TENSOR.data.__set__
_NOTICED = {
    _ASSIGNS,
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr),
    *(Tensor.storage, Tensor.untyped_storage, Tensor.tolist),
}
