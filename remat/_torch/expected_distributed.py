"""What the shims of `distributed` expect of torch.

Invariant: a check fails where a name of it is missing or does something else.
Rejected: a group of processes. A check may run at import, in any program.
"""

import torch

from remat._torch import distributed
from remat._torch.selftest import expects


@expects("finished", "wait_for")
def _a_work_can_be_done() -> None:
    assert distributed.finished(None) is None
    if not torch.distributed.is_available():
        return
    work = torch._C._distributed_c10d.FakeWork().boxed()
    done = distributed.finished(work)
    assert done is not work
    assert torch._C._distributed_c10d.Work.unbox(done).wait()
    x = torch.ones(2)
    assert distributed.wait_for(x) is None
    assert torch.ops._c10d_functional.wait_tensor(x) is x
