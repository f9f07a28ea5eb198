"""What the shims of `distributed` expect of torch.

Invariant: a check fails where a name of it is missing or does something else.
Rejected: a group of processes. A check may run at import, in any program.
"""

import torch
from support.shims import expects
from torch.fx.experimental.proxy_tensor import make_fx

from remat._torch import distributed


@expects("finished", "wait_for")
def test_a_work_can_be_done():
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


@expects("CollectivesInGraph")
def test_what_nobody_reads_is_dropped():
    if not torch.distributed.is_available():
        return
    ops = torch.ops._c10d_functional

    def step(x):
        collectives = distributed.CollectivesInGraph()
        read, unread = (ops.wait_tensor(ops.all_reduce(x, "sum", "0")) for _ in "ab")
        unread.sin()
        collectives.drop_unread([read])
        return read

    graph = make_fx(step, tracing_mode="fake")(torch.ones(2)).graph
    names = [n.target for n in graph.nodes if n.op == "call_function"]
    assert names == [ops.all_reduce.default, ops.wait_tensor.default]
