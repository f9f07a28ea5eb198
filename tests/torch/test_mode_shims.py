"""What the shims of `modes` expect of torch."""

import functools
from contextlib import contextmanager
from typing import Any

import torch
from support.shims import expects, same
from torch import Tensor, overrides
from torch.utils import _python_dispatch

from remat._torch import modes, tensors


class _Mode(overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return "seen"


class _Class(Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return "seen"


@expects(
    *("function_mode_count", "function_modes", "under_function_modes", "is_unwatched")
)
def test_function_modes_are_exchanged():
    x, negative = torch.ones(2), -torch.ones(2)
    assert modes.is_unwatched(x) is True
    assert modes.function_mode_count() == 0
    with _Mode() as mode:
        assert modes.function_modes() == [mode]
        assert modes.is_unwatched(x) is False
        plain = modes.under_function_modes([], torch.neg, x)
        assert torch.neg(x) == "seen"
    assert same(plain, negative)
    assert modes.under_function_modes([mode], torch.neg, x) == "seen"
    assert modes.function_mode_count() == 0


@expects("no_torch_function", "no_torch_functions", "torch_functions")
def test_torch_functions_are_switched():
    x = torch.ones(2).as_subclass(_Class)
    with modes.no_torch_functions():
        assert torch.neg(x) != "seen"
        with modes.torch_functions():
            assert torch.neg(x) == "seen"
    silent = type(
        "Silent", (Tensor,), {"__torch_function__": tensors.no_torch_function}
    )
    assert type(torch.neg(torch.ones(2).as_subclass(silent))) is Tensor


class _Seen(modes.LeanDispatchMode):
    def __init__(self):
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops.append(func)
        return func(*args, **(kwargs or {}))


@expects("SNAPSHOT")
def test_a_mode_sees_snapshots():
    with _Seen() as mode:
        tensors.snapshot(torch.ones(2))
    assert mode.ops[-1] is tensors.SNAPSHOT


@expects("compiled_outside_modes")
def test_what_torch_compiles_is_out_of_sight():
    utils = modes._higher_order
    names = utils._maybe_compile_and_run_fn.__code__.co_names
    assert utils._hop_compile_and_call.__name__ in names
    assert hasattr(utils._hop_compile_and_call, "__wrapped__")
    count = torch._C._len_torch_dispatch_stack
    depth = modes.compiled_outside_modes(count)
    with _Seen():
        assert (count(), depth()) == (1, 0)
        assert modes._read_flags(modes._dispatch)[0] is True
    assert count() == 0


@expects("call_kernel")
def test_kernels_resolve_lazy_bits():
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.Conjugate)
    with torch._C._ExcludeDispatchKeyGuard(keys):
        assert _is_conjugate_excluded()
        assert modes.call_kernel(_is_conjugate_excluded) is False
        assert _is_conjugate_excluded()


def _is_conjugate_excluded():
    key = torch._C.DispatchKey.Conjugate
    return torch._C._dispatch_tls_is_dispatch_key_excluded(key)


def _flags():
    return {k: v for k, v in vars(_python_dispatch).items() if type(v) is bool}


@contextmanager
def _with_flags_down():
    # Modes of two threads that overlap leave one of torch's flags set for good.
    before = _flags()
    vars(_python_dispatch).update(dict.fromkeys(before, False))
    try:
        yield
    finally:
        vars(_python_dispatch).update(before)


@expects(
    *("LeanDispatchMode", "alias", "undisturbed", "unseen", "viewed"),
    "without_dispatch_mode",
)
@_with_flags_down()
def test_dispatch_modes_are_entered_and_left():
    before = _flags()
    with _python_dispatch.TorchDispatchMode():
        inside = _flags()

    class Lean(modes.LeanDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.op = func
            return func(*args, **(kwargs or {}))

    class Ignoring(Lean):
        @classmethod
        def ignore_compile_internals(cls):
            return True

    x, mode = torch.ones(4), Lean()
    with Ignoring():
        assert not _python_dispatch.any_torch_dispatch_mode_on_stack()
        assert modes._read_flags(modes._dispatch)[-1] is before[modes._FLAGS[-1]]
    with mode:
        assert _flags() == inside != before
        x.sin()
        alone = functools.partial(modes.without_dispatch_mode, mode)
        for quiet in (modes.undisturbed, modes.unseen, alone):
            with quiet():  # some are at work as soon as they are made
                x.cos()
        view = modes.viewed(x, (2,), (2,), 1)
        other = modes.alias(x)
    assert mode.op is torch.ops.aten.sin.default
    assert (view.shape, view.storage_offset()) == ((2,), 1)
    assert other._base is x
    assert _flags() == before


@expects("outside_all_dispatch_modes", "outside_dispatch_mode")
def test_what_is_entered_inside_of_a_mode_is_left_with_it():
    class Noting(modes.LeanDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(self)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    x, around, mode, inner = torch.ones(2), Noting(), Noting(), Noting()
    with around, mode, inner:
        with modes.outside_dispatch_mode(mode):
            x.sin()
        assert seen == [around]
        x.sin()
        assert seen == [around, inner, mode, around]
        seen.clear()
        with modes.outside_all_dispatch_modes():
            x.sin()
            assert not any(_flags().values())
        assert not seen
        x.sin()
        assert seen == [inner, mode, around]


@expects("below_autograd", "detached")
def test_operations_run_below_autograd():
    x = torch.ones(2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16), modes.below_autograd():
        y = x.sin()
        product = torch.ones(2, 2) @ torch.ones(2, 2)
        without_graph = modes.detached(x)
        detached = x.detach()
    assert not y.requires_grad
    assert product.dtype is not torch.bfloat16
    with torch.no_grad():
        x.add_(1.0)
    assert without_graph._version == x._version == 1
    assert detached._version == 0, "the shim is not needed any more"


@expects("flat_view")
def test_storages_are_seen_as_another_dtype():
    x = torch.ones(3, 2, dtype=torch.complex64)[1:]
    flat = modes.flat_view(x, torch.float32)
    assert (flat.shape, flat.dtype) == ((12,), torch.float32)
    assert flat.data_ptr() == x.untyped_storage().data_ptr()


@expects("leave_dispatch_mode", "leave_function_mode")
@_with_flags_down()
def test_modes_are_left_in_another_order():
    class Lean(modes.LeanDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(self)
            return func(*args, **(kwargs or {}))

    seen: list[Any] = []
    mode, inner = Lean(), Lean()
    mode.__enter__()
    inner.__enter__()
    try:
        modes.leave_dispatch_mode(mode)
        torch.ones(2)
    finally:
        while torch._C._len_torch_dispatch_stack():
            _python_dispatch._pop_mode()
    assert seen == [inner]
    outer, function_mode = _Mode(), _Mode()
    overrides._push_mode(outer)
    overrides._push_mode(function_mode)
    try:
        modes.leave_function_mode(outer)
        assert modes.function_modes() == [function_mode]
    finally:
        while torch._C._len_torch_function_stack():
            overrides._pop_mode()
