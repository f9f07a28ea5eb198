"""Operations for which torch takes another algorithm where a mode is entered.

Where no graph is made, these compute no vectors in plain code. Under a mode they do,
and values differ in the last bits; so does what is made of them, such as `cond`.

Invariant: under a mode that is not remat's they run as without remat.
Rejected: to leave the mode for them. What they do would be in no record.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils import _python_dispatch

from remat._torch.autograd import dual_level_active
from remat._torch.modes import LeanDispatchMode, below_autograd


# Deleted by: torch choosing algorithms by whether a graph is made, and not by modes.
CHOOSING = "linalg_svdvals", "linalg_eigvalsh"


def _as_in_plain_code(
    func: Callable[..., Any], a: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run an operation as plain code does, as one for a mode of remat's."""
    mode = _python_dispatch._get_current_dispatch_mode()
    makes_graph = a.requires_grad or dual_level_active()
    is_plain = not (makes_graph or is_functorch_wrapped_tensor(a))
    below: Any = nullcontext()
    if is_plain and isinstance(mode, LeanDispatchMode):
        below = below_autograd()
    with torch._C._ExcludeDispatchKeyGuard(_SNAPSHOT), below:
        return func(a, *args, **kwargs)


_SNAPSHOT = torch._C.DispatchKeySet(torch._C.DispatchKey.PythonTLSSnapshot)
_kernels = torch.library.Library("aten", "IMPL")
for _name in CHOOSING:
    _func = getattr(torch.ops.aten, _name).default
    _kernel = functools.partial(_as_in_plain_code, _func)
    _kernels.impl(_name, _kernel, "PythonTLSSnapshot")
