"""A recomputation happens under the settings and TorchFunctionModes of its forward."""

import contextlib
import functools

import pytest
import torch
from support.zoo import Evaluations
from torch import nn
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat import remat
from remat._torch import read_settings
from remat.testing import assert_same, count_ops


def leaf(n=64):
    return torch.randn(n, requires_grad=True)


# --- Settings ----------------------------------------------------------------------


@contextlib.contextmanager
def changed(read, write, value):
    """Set a setting, and put it back."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


def default_dtype(dtype):
    return changed(torch.get_default_dtype, torch.set_default_dtype, dtype)


def deterministic(on, *, warn_only=False):
    def write(values):
        torch._C._set_deterministic_algorithms(values[0], warn_only=values[1])

    return changed(lambda: (False, False), write, (on, warn_only))


def matmul_precision(precision):
    read, write = torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    return changed(read, write, precision)


def filled(on):
    read = torch._C._get_deterministic_fill_uninitialized_memory
    return changed(read, torch._C._set_deterministic_fill_uninitialized_memory, on)


def mkldnn(on):
    return changed(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, on)


def autocast_dtype(dtype):
    read = functools.partial(torch.get_autocast_dtype, "cpu")
    return changed(read, functools.partial(torch.set_autocast_dtype, "cpu"), dtype)


SETTINGS = {
    "dtype of autocast that is off": (
        lambda: autocast_dtype(torch.float16),
        lambda: torch.get_autocast_dtype("cpu"),
    ),
    "default dtype": (
        lambda: default_dtype(torch.float64),
        torch.get_default_dtype,
    ),
    "deterministic algorithms": (
        lambda: deterministic(True),
        torch.are_deterministic_algorithms_enabled,
    ),
    "only warnings": (
        lambda: deterministic(True, warn_only=True),
        torch.is_deterministic_algorithms_warn_only_enabled,
    ),
    "filled memory": (
        lambda: filled(False),
        lambda: torch.utils.deterministic.fill_uninitialized_memory,
    ),
    "matmul precision": (
        lambda: matmul_precision("high"),
        torch.get_float32_matmul_precision,
    ),
    "attention kernels": (
        lambda: sdpa_kernel(SDPBackend.MATH),
        torch.backends.cuda.flash_sdp_enabled,
    ),
    "mkldnn": (
        lambda: mkldnn(False),
        lambda: torch.backends.mkldnn.enabled,
    ),
}
settings = pytest.mark.parametrize(
    ("change", "read"), SETTINGS.values(), ids=SETTINGS.keys()
)


@settings
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_setting_is_that_of_the_forward(change, read, when):
    x = leaf()
    seen = Evaluations()

    def fn(x):
        seen.note(read())
        return x.sin().exp()

    ordinary = read()
    with change() if when == "forward" else contextlib.nullcontext():
        at_forward = read()
        y = remat(fn)(x)
    before = read_settings()
    with change() if when == "backward" else contextlib.nullcontext():
        at_backward = read()
        y.sum().backward()
        assert read() == at_backward
    assert at_forward != at_backward
    assert [*seen] == [at_forward, at_forward]
    assert read() == ordinary
    assert read_settings() == before


@settings
def test_a_setting_is_that_of_the_forward_under_grad(change, read):
    x = torch.randn(64)
    seen = Evaluations()

    def fn(x):
        seen.note(read())
        return x.sin().sum()

    def loss(x):
        with change():
            return remat(fn)(x)

    grad(loss)(x)
    with change():
        assert [*seen] == [read()] * 2


@settings
def test_a_failed_recomputation_leaves_the_setting_alone(change, read):
    x = leaf()
    calls = Evaluations()

    def fn(x):
        calls.note(None)
        if len(calls) == 2:
            raise ValueError("the second time")
        return x.sin().exp()

    with change():
        y = remat(fn)(x)
    ordinary = read_settings()
    with pytest.raises(ValueError, match="the second time"):
        y.sum().backward()
    assert read_settings() == ordinary
    del read


def test_the_default_dtype_decides_the_same_mask():
    x = leaf()

    def fn(x):
        return (x * torch.rand(64)).sin().exp()

    def gradient(wrap):
        torch.manual_seed(0)
        with default_dtype(torch.float64):
            y = wrap(fn)(x).sum()
        return torch.autograd.grad(y, x)

    want = gradient(lambda f: f)
    with count_ops() as ops:
        got = gradient(remat)
    assert_same(got, want)
    assert ops["sin"] == 2


def test_attention_runs_the_same_kernel_again():
    q = torch.randn(2, 4, 8, 16, requires_grad=True)

    def fn(q):
        return nn.functional.scaled_dot_product_attention(q, q, q)

    def gradient(wrap):
        with sdpa_kernel(SDPBackend.MATH):
            y = wrap(fn)(q).sum()
        return torch.autograd.grad(y, q)

    with count_ops() as plain:
        want = gradient(lambda f: f)
    with count_ops() as ops:
        got = gradient(remat)
    assert_same(got, want)
    assert ops["bmm"] > plain["bmm"] > 0
    assert not [op for op in ops if "flash" in op]


@pytest.mark.skipif(
    not hasattr(torch._C, "_set_fp32_precision_setter"), reason="added in torch 2.9"
)
def test_matmul_precision_may_be_set_for_each_backend():
    x = leaf()
    seen = Evaluations()

    def fn(x):
        seen.note(torch.backends.mkldnn.matmul.fp32_precision)
        return x.sin().exp()

    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
            torch.get_float32_matmul_precision()
        y = remat(fn)(x)
        torch.backends.mkldnn.matmul.fp32_precision = "ieee"
        y.sum().backward()
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
        torch.set_float32_matmul_precision("highest")
    assert [*seen] == ["bf16", "bf16"]


def test_a_setting_that_the_function_sets_is_put_back_after_the_backward():
    x = leaf()

    def fn(x):
        torch.set_default_dtype(torch.float64)
        return x.sin().exp()

    before = torch.get_default_dtype()
    try:
        y = remat(fn)(x)
        assert torch.get_default_dtype() == torch.float64
        torch.set_default_dtype(before)
        with count_ops() as ops:
            y.sum().backward()
        assert torch.get_default_dtype() == before
    finally:
        torch.set_default_dtype(before)
    assert ops["sin"] == 1


# --- TorchFunctionModes --------------------------------------------------------------


class CosForSin(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        func = {torch.Tensor.sin: torch.Tensor.cos}.get(func, func)
        return func(*args, **(kwargs or {}))


class Scaled(TorchFunctionMode):
    """Multiplies sines by a tensor of its own, and counts them."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.Tensor.sin:
            self.count += 1
            return out * (self.scale * self.count)
        return out


def two_sines(x):
    return x.sin().exp().sin().exp()


def in_mode(mode, fn, x):
    with mode:
        return fn(x)


MODES = {
    "forward": lambda mode, fn, x: in_mode(mode, fn, x).sum().backward(),
    "backward": lambda mode, fn, x: in_mode(mode, torch.Tensor.backward, fn(x).sum()),
    "both": lambda mode, fn, x: in_mode(mode, lambda x: fn(x).sum().backward(), x),
}


@pytest.mark.parametrize("step", MODES.values(), ids=MODES.keys())
def test_a_function_mode_is_that_of_the_forward(step):
    theirs, ours = leaf(), None
    ours = theirs.detach().clone().requires_grad_()
    step(CosForSin(), two_sines, theirs)
    with count_ops() as ops:
        step(CosForSin(), remat(two_sines), ours)
    assert_same(ours.grad, theirs.grad)
    # Two in the forward, two in the recomputation; the derivative uses the other.
    want = (2, 4) if step is MODES["backward"] else (4, 2)
    assert (ops["cos"], ops["sin"]) == want


def test_modes_are_restored_in_their_order():
    x = leaf()
    seen = Evaluations()

    class Named(TorchFunctionMode):
        def __init__(self, name):
            super().__init__()
            self.name = name

        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func is torch.Tensor.sin:
                seen.note(self.name)
            return func(*args, **(kwargs or {}))

    with Named("outer"), torch.device("cpu"), Named("inner"):
        y = remat(lambda x: x.sin().exp())(x)
    with Named("other"):
        y.sum().backward()
        x.sin()
    assert [*seen] == ["inner", "outer", "inner", "outer", "other"]


def test_a_mode_entered_inside_the_function_is_entered_again():
    x = leaf()

    def fn(x):
        with CosForSin():
            return two_sines(x)

    (want,) = torch.autograd.grad(fn(x).sum(), x)
    with count_ops() as ops, CosForSin():
        (got,) = torch.autograd.grad(remat(fn)(x).sum(), x)
    assert_same(got, want)
    assert ops["cos"] == 4


@pytest.mark.parametrize("outside", [True, False], ids=["backward outside", "inside"])
def test_a_tensor_of_a_mode_is_an_input(outside):
    x = leaf()

    def gradients(wrap):
        scale = torch.tensor(3.0, requires_grad=True)
        mode = Scaled(scale)
        with mode:
            y = wrap(two_sines)(x).sum()
            inside = None if outside else torch.autograd.grad(y, (x, scale))
        return inside or torch.autograd.grad(y, (x, scale)), mode.count

    want = gradients(lambda f: f)
    with count_ops() as ops:
        got = gradients(remat)
    assert_same(got[0], want[0])
    assert got[1] == want[1]
    assert ops["sin"] == 4


def test_the_state_of_a_mode_is_that_of_its_call():
    x = leaf()

    def gradients(wrap):
        with Scaled(torch.tensor(3.0)) as mode:
            first, second = wrap(two_sines)(x), wrap(two_sines)(x)
        assert mode.count == 4
        return [torch.autograd.grad(y.sum(), x) for y in (second, first)]

    want = gradients(lambda f: f)
    with count_ops() as ops:
        got = gradients(remat)
    assert_same(got, want)
    assert ops["sin"] == 8


def test_a_tensor_of_a_mode_may_be_batched_and_differentiated():
    xs, scales = torch.randn(3, 64), torch.tensor([1.0, 2.0, 3.0])

    def gradients(wrap):
        def loss(x, scale):
            with Scaled(scale):
                return wrap(two_sines)(x).sum()

        return vmap(grad(loss, argnums=(0, 1)))(xs, scales)

    want = gradients(lambda f: f)
    with count_ops() as ops:
        got = gradients(remat)
    assert_same(got, want)
    assert ops["sin"] == 4


def test_dispatch_modes_are_those_of_the_backward():
    """Such a mode observes what runs, and it is now that it runs."""
    x = leaf()
    seen = []

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    fn = remat(lambda x: x.sin().exp())
    with Log():
        y = fn(x)
    forward = seen.count("aten.sin.default")
    y.sum().backward()
    assert (forward, seen.count("aten.sin.default")) == (1, 1)
    y = fn(x)
    with Log():
        y.sum().backward()
    assert seen.count("aten.sin.default") == 2
