"""A recompute happens under the TorchFunctionModes of its forward."""

from contextlib import nullcontext

import pytest
import torch
from support.runs import assert_replayed, leaf, replayed
from support.tables import rows
from support.zoo import Evaluations, ops_of
from torch.func import grad, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from remat import RecomputeError, remat


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


def in_the_forward(fn, x):
    with CosForSin():
        y = fn(x).sum()
    return torch.autograd.grad(y, x)


def in_the_backward(fn, x):
    y = fn(x).sum()
    with CosForSin():
        return torch.autograd.grad(y, x)


def in_both(fn, x):
    with CosForSin():
        return torch.autograd.grad(fn(x).sum(), x)


# Two in the forward, two in the recompute; the derivative uses the other.
PLACES = {
    "forward": (in_the_forward, {"cos": 4, "sin": 2}),
    "backward": (in_the_backward, {"cos": 2, "sin": 4}),
    "both": (in_both, {"cos": 4, "sin": 2}),
}


@rows("step, counts", PLACES)
def test_a_function_mode_is_that_of_the_forward(step, counts):
    x = leaf()
    assert_replayed(lambda wrap: step(wrap(two_sines), x), **counts)


def test_modes_are_restored_in_their_order():
    x, seen = leaf(), Evaluations()

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


@pytest.mark.parametrize("outside", [True, False], ids=["backward outside", "inside"])
@replayed(sin=4)
def test_a_tensor_of_a_mode_is_an_input(wrap, outside):
    x = leaf()
    scale = torch.tensor(3.0, requires_grad=True)
    with Scaled(scale) as mode:
        y = wrap(two_sines)(x).sum()
        inside = None if outside else torch.autograd.grad(y, (x, scale))
    return inside or torch.autograd.grad(y, (x, scale)), mode.count


@replayed(sin=8)
def test_the_state_of_a_mode_is_that_of_its_call(wrap):
    x = leaf()
    with Scaled(torch.tensor(3.0)) as mode:
        first, second = wrap(two_sines)(x), wrap(two_sines)(x)
    assert mode.count == 4
    return [torch.autograd.grad(y.sum(), x) for y in (second, first)]


@replayed(sin=4)
def test_a_tensor_of_a_mode_may_be_batched_and_differentiated(wrap):
    xs, scales = torch.randn(3, 64), torch.tensor([1.0, 2.0, 3.0])

    def loss(x, scale):
        with Scaled(scale):
            return wrap(two_sines)(x).sum()

    return vmap(grad(loss, argnums=(0, 1)))(xs, scales)


def test_a_device_does_not_reach_the_surroundings_of_a_recomputation():
    x, devices = leaf(3), []

    def note_device(_):
        devices.append(torch.empty(()).device.type)

    with torch.device("meta"):
        y = remat(lambda x: x.sin().sin())(x * 1)
    y.register_hook(note_device)
    x.register_hook(note_device)
    ops = ops_of(lambda: y.sum().backward())
    assert devices == ["cpu", "cpu"]
    assert ops["sin"] == 1


class CosForAtenSin(TorchDispatchMode):
    def __init__(self, held=None):
        super().__init__()
        self.held = held

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_sin = func is torch.ops.aten.sin.default
        func = torch.ops.aten.cos.default if is_sin else func
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_that_holds_more_than_constants_is_not_entered_again():
    x = leaf()
    with CosForAtenSin([1]):
        y = remat(two_sines)(x).sum()
    with pytest.raises(RecomputeError, match="ran under `CosForAtenSin`"):
        y.backward()
    mode = CosForAtenSin([1])
    with mode:
        y = remat(two_sines)(x).sum()
    ops = ops_of(lambda: in_mode(mode, y.backward))
    assert ops["cos"] == 4  # two are of the derivative


def in_mode(mode, fn):
    with mode:
        return fn()


def test_a_dispatch_mode_that_changes_results_in_the_backward_alone_is_refused():
    x = leaf()
    y = remat(two_sines)(x).sum()
    with pytest.raises(RecomputeError, match="backward runs under `CosForAtenSin`"):
        in_mode(CosForAtenSin(), y.backward)
    assert ops_of(y.backward)["sin"] == 2


class Observing(TorchDispatchMode):
    """Counts, keeps, checks, and takes apart, as those that users write."""

    def __init__(self):
        super().__init__()
        self.seen, self.kept, self.total = [], [], torch.zeros(())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        with self:
            out = func.decompose(*args, **(kwargs or {}))
        if out is NotImplemented:
            out = func(*args, **(kwargs or {}))
        self.kept.append(out)
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            self.total.add_(out.detach().abs().max().float())
        return out


@pytest.mark.parametrize("where", ["forward", "backward", "both"])
def test_a_dispatch_mode_that_observes_may_be_around_any_of_it(where):
    layer = torch.nn.GRU(4, 4, batch_first=True)
    names = {"forward": 1, "backward": 1, "both": 2}
    mode, sines = Observing(), torch.ops.aten.sin.default

    def fn(x):
        parts = layer(x.sin())[0].split(2, -1)
        return torch.cat(parts, -1).softmax(-1).mul(2).add_(1) @ x.mT

    x = leaf(2, 3, 4)
    with mode if where != "backward" else nullcontext():
        y = remat(fn)(x)
    with mode if where != "forward" else nullcontext():
        (found,) = torch.autograd.grad(y.square().sum(), x)
    (expected,) = torch.autograd.grad(fn(x).square().sum(), x)
    assert torch.equal(found, expected)
    assert mode.seen.count(sines) == names[where]
