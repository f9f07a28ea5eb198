"""What the shims of `distributed` expect of torch.

Invariant: a check fails where a name of it is missing or does something else.
Rejected: a group of processes. A check may run at import, in any program.
"""

from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

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


@expects("CollectivesInGraph", at_import=False)
def _what_nobody_reads_is_dropped() -> None:
    if not torch.distributed.is_available():
        return
    ops: Any = torch.ops._c10d_functional

    def step(x: Tensor) -> Tensor:
        collectives = distributed.CollectivesInGraph()
        read, unread = (ops.wait_tensor(ops.all_reduce(x, "sum", "0")) for _ in "ab")
        unread.sin()
        collectives.drop_unread([read])
        return read

    graph: Any = make_fx(step, tracing_mode="fake")(torch.ones(2)).graph
    names = [n.target for n in graph.nodes if n.op == "call_function"]
    assert names == [ops.all_reduce.default, ops.wait_tensor.default]
