"""What the shims of `operators`, `tensors`, and of collectives, expect of torch."""

from types import SimpleNamespace

import torch
from support.shims import expects, same
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from remat._torch import graphs, operators, tensors


@expects(
    *("HigherOrderOperator", "OpOverload", "OpOverloadPacket", "is_operator"),
    *("is_view_op", "kernel_of", "overload_of"),
)
def test_operators_are_told_apart():
    packet, x = torch.ops.aten.sin, torch.ones(2)
    assert type(packet) is operators.OpOverloadPacket
    assert type(packet.default) is operators.OpOverload
    assert isinstance(torch.ops.higher_order.cond, operators.HigherOrderOperator)
    assert [*map(operators.is_operator, (packet, torch.sin))] == [True, False]
    assert operators.is_view_op(packet.default) is False
    assert operators.is_view_op(torch.ops.aten.view.default) is True
    assert operators.kernel_of(packet.default) is not packet.default
    assert same(operators.kernel_of(packet.default)(x), x.sin())
    assert operators.overload_of(packet.default) is packet.default
    methods = [m for m in vars(operators.CustomOpDef).values() if callable(m)]
    assert any("_opoverload" in m.__code__.co_names for m in methods)


@expects("native_random")
def test_keyed_draws_have_kernels():
    module = operators.native_random("cpu")
    names = () if module is None else ("split", "uniform_", "normal_")
    assert all(callable(getattr(module, name)) for name in names)
    # Where there are kernels, whoever imported what: torch imports no such module.
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    assert (module is not None) == has("aten::_philox_uniform_", "CPU")
    # Not "meta", whose kernels torch's compiler registers when it is imported.
    assert operators.native_random("hpu") is None


class _Empty(Tensor):
    __torch_function__ = tensors.no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise AssertionError(func)


@expects("tensor_without_data", "refuse_data_ptr")
def test_tensors_are_made_without_data():
    empty = tensors.tensor_without_data(_Empty, (2, 3), dtype=torch.float32)
    assert (type(empty), empty.shape) == (_Empty, (2, 3))
    tensors.refuse_data_ptr(empty)
    try:
        empty.data_ptr()
    except RuntimeError:
        return
    raise AssertionError("the address of nothing was given")


@expects("is_lazy")
def test_lazy_bits_are_seen():
    x = torch.ones(2, dtype=torch.complex64)
    zero = torch._efficientzerotensor(2)
    assert [*map(tensors.is_lazy, (x, x.conj(), zero))] == [False, True, True]


@expects("as_fake")
def test_fake_tensors_are_made():
    x, key = torch.ones(2), tensors._FAKE

    def from_tensor(tensor):
        return tensor, "fake"

    mode = SimpleNamespace(from_tensor=from_tensor, _mode_key=key)
    assert tensors.as_fake(x) is x
    torch._C._set_dispatch_mode(mode)
    try:
        assert tensors.as_fake(x) == (x, "fake")
    finally:
        torch._C._unset_dispatch_mode(key)


@expects("NO_VALUES")
def test_fakes_have_no_values():
    with tensors.fake_mode():
        for read in (Tensor.item, Tensor.nonzero):
            try:
                read(torch.ones(()))
            except tensors.NO_VALUES:
                continue
            raise AssertionError("a value was given")


@expects("empty_in")
def test_a_fake_is_like_a_tensor():
    x = torch.ones(2, 3).t()
    made = tensors.empty_in(tensors.fake_mode(), x)
    assert tensors.is_fake(made)
    assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), x.dtype)


@expects("copied_as_fake", "fake_mode", "is_fake")
def test_copies_are_fake():
    mode, cpu = tensors.fake_mode(), torch.device("cpu")
    w = nn.Parameter(torch.ones(2, 3))
    meta = nn.Parameter(torch.ones(2, 3, device="meta"), requires_grad=False)
    found = tensors.copied_as_fake([w, w, w.detach()[0], meta], mode, cpu)
    assert found[0] is found[1]
    _is_copy(found[0], w)
    _is_copy(found[3], meta)
    assert found[2].untyped_storage()._cdata == found[0].untyped_storage()._cdata
    again = tensors.copied_as_fake(found[0], tensors.fake_mode(), cpu)
    _is_copy(again, found[0])
    with mode:
        made = found[0] @ torch.ones(3, 1) + w[:, :1]
    assert tensors.is_fake(made)
    assert made.untyped_storage().nbytes() == 8


def _is_copy(copy, tensor):
    assert tensors.is_fake(copy)
    assert not tensors.is_fake(torch.ones(2))
    assert isinstance(copy, nn.Parameter)
    assert copy.requires_grad == tensor.requires_grad
    assert (copy.device.type, copy.shape) == ("cpu", tensor.shape)


@expects("finished", "wait_for")
def test_a_work_can_be_done():
    assert graphs.finished(None) is None
    if not torch.distributed.is_available():
        return
    work = torch._C._distributed_c10d.FakeWork().boxed()
    done = graphs.finished(work)
    assert done is not work
    assert torch._C._distributed_c10d.Work.unbox(done).wait()
    x = torch.ones(2)
    assert graphs.wait_for(x) is None
    assert torch.ops._c10d_functional.wait_tensor(x) is x


@expects("CollectivesInGraph")
def test_what_nobody_reads_is_dropped():
    if not torch.distributed.is_available():
        return
    ops = torch.ops._c10d_functional

    def step(x):
        collectives = graphs.CollectivesInGraph()
        read, unread = (ops.wait_tensor(ops.all_reduce(x, "sum", "0")) for _ in "ab")
        unread.sin()
        collectives.drop_unread([read])
        return read

    graph = make_fx(step, tracing_mode="fake")(torch.ones(2)).graph
    names = [n.target for n in graph.nodes if n.op == "call_function"]
    assert names == [ops.all_reduce.default, ops.wait_tensor.default]
