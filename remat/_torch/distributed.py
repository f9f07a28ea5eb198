"""Collectives that are under way, and what they return besides tensors.

Invariant: nothing here imports `torch.distributed`, which takes long. Where it was not
imported, there is no collective. Rejected: a class of our own in place of a `Work`.
torch's operators return theirs.
"""

from typing import Any

import torch
from torch import Tensor


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
