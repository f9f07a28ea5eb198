"""What the shims of `operators` and `tensors` expect of torch.

Invariant: a check fails where a name of it is missing or does something else.
Rejected: fake tensors of a real mode, which imports much.
"""

from types import SimpleNamespace

import torch
from support.shims import expects, same
from torch import Tensor

from remat._torch import operators, tensors


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
