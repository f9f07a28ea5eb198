"""Bytes: what a remat call keeps after the forward, and the peak of what follows.

A unit is one tensor of 64 KB. The problem is eight blocks of eight sines, for each of
which plain autograd keeps one tensor.
"""

import functools
from collections import namedtuple

import pytest
import torch
from support.compositions import higher_order
from support.tables import rows
from support.transforms import TRANSFORMS
from support.zoo import counted, plainly as plain
from torch import nn
from torch.func import functional_call, grad, jvp, vjp, vmap

from remat import remat
from remat.testing import assert_same, live_bytes, peak_bytes


UNIT = 65_536
SCALARS = 64  # bytes: a loss, its gradient, a sum
BLOCKS = SINES = 8


def ramp():
    return torch.linspace(0.1, 1.0, UNIT // 4)


def sines(x):
    for _ in range(SINES):
        x = x.sin()
    return x


def chain(ckpt):
    def loss(x):
        for _ in range(BLOCKS):
            x = ckpt(sines)(x)
        return x.sum()

    return loss


def units(size):
    """Return how many units `size` bytes are, but for a few scalars."""
    count, rest = divmod(size, UNIT)
    assert rest <= SCALARS
    return count


# --- Peak ---


def in_rows():
    return ramp().view(4, -1)


def by_backward(f):
    x = ramp().requires_grad_()
    f(x).backward()
    return x.grad


def by_autograd_grad(f):
    x = ramp().requires_grad_()
    return torch.autograd.grad(f(x), x)


def by_double_backward(f):
    x = ramp().requires_grad_()
    (first,) = torch.autograd.grad(f(x), x, create_graph=True)
    return torch.autograd.grad(first.sum(), x)


def backward_of_vmap(f):
    x = in_rows().requires_grad_()
    vmap(f)(x).sum().backward()
    return x.grad


def backward_of_grad(f):
    x = ramp().requires_grad_()
    grad(f)(x).sum().backward()
    return x.grad


def grad_of_grad(f):
    return grad(lambda x: grad(f)(x).sum())


# Derivative: (units with remat at most, share of plain at most). Each makes its input.
PEAKS = {
    "backward": (by_backward, 17, 0.26),
    "autograd.grad": (by_autograd_grad, 17, 0.26),
    "backward(vmap)": (backward_of_vmap, 17, 0.26),
    "grad": (lambda f: grad(f)(ramp()), 24, 0.14),
    "vjp": (lambda f: TRANSFORMS["vjp"](f, ramp()), 18, 0.29),
    "grad(grad)": (lambda f: grad_of_grad(f)(ramp()), 53, 0.25),
    "vmap(grad)": (lambda f: vmap(grad(f))(in_rows()), 24, 0.25),
    "grad(vmap)": (lambda f: grad(lambda x: vmap(f)(x).sum())(in_rows()), 24, 0.25),
    "vmap(grad(grad))": (lambda f: vmap(grad_of_grad(f))(in_rows()), 53, 0.25),
    "backward(grad)": (backward_of_grad, 41, 0.25),
    "grad(jvp)": (lambda f: grad(lambda x: jvp(f, (x,), (x,))[1])(ramp()), 54, 0.25),
    "jvp(grad)": (lambda f: jvp(grad(f), (ramp(),), (ramp(),)), 50, 0.25),
}
SECOND_ORDER = {"grad(grad)", "vmap(grad(grad))", "backward(grad)", "grad(jvp)"}


def assert_peak(derivative, wrap, most, share, *, reassociated):
    want, got = [], []
    plain_peak = peak_bytes(lambda: want.append(derivative(chain(plain))))
    peak = peak_bytes(lambda: got.append(derivative(chain(wrap))))
    assert_same(got, want, reassociated=reassociated)
    assert units(peak) <= most
    assert peak <= share * plain_peak


# These are of the same parts as the others.
SLOW = "vmap(grad(grad))", "vmap(grad)", "grad(vmap)", "backward(grad)", "jvp(grad)"


@pytest.mark.parametrize(
    "how", [pytest.param(h, marks=[pytest.mark.slow] * (h in SLOW)) for h in PEAKS]
)
def test_the_peak_of_eight_blocks_of_eight_sines(how):
    # A second derivative sums contributions in another order (promise 1).
    derivative, most, share = PEAKS[how]
    reassociated = how in SECOND_ORDER
    assert_peak(derivative, remat, most, share, reassociated=reassociated)


@pytest.mark.parametrize(
    ("derivative", "most", "share", "reassociated"),
    [(by_backward, 18, 0.28, False), (by_double_backward, 43, 0.23, True)],
    ids=["backward", "twice"],
)
def test_the_peak_with_one_node_for_each_call(derivative, most, share, reassociated):
    assert_peak(derivative, higher_order, most, share, reassociated=reassociated)


def test_the_graph_of_a_derivative_is_that_of_plain_where_one_is_to_be_taken():
    want, got = [], []
    calls = []

    def wrap(fn):
        fn, evaluations = counted(fn)
        calls.append(evaluations)
        return remat(fn)

    plain_peak = peak_bytes(lambda: want.append(by_double_backward(chain(plain))))
    peak = peak_bytes(lambda: got.append(by_double_backward(chain(wrap))))
    assert_same(got, want)
    assert peak == plain_peak
    assert [*map(len, calls)] == [3] * BLOCKS, "once for each of both backwards"


def test_with_higher_order_the_graph_of_a_gradient_is_rematerialized_too():
    x = ramp().requires_grad_()

    def kept(ckpt):
        loss = chain(ckpt)
        return units(
            live_bytes(lambda: torch.autograd.grad(loss(x), x, create_graph=True))
        )

    # Plain keeps some of each sine. So does a call: the graph is that of plain.
    assert kept(plain) == kept(remat) > 2 * BLOCKS * SINES
    # The gradient, and the input and cotangent of each block.
    assert kept(higher_order) <= 1 + 2 * BLOCKS


def test_a_vjp_function_keeps_only_the_inputs_of_the_blocks():
    x = ramp()
    kept = [
        units(live_bytes(functools.partial(vjp, chain(ckpt), x)))
        for ckpt in (plain, remat)
    ]
    assert kept == [BLOCKS * SINES - 1, BLOCKS - 1]  # but for `x`, which exists already


# --- What stays alive ---

Pair = namedtuple("Pair", "left right")


def mix(x, y):
    return (x.sin() * y.cos()).exp().sin()


SCALE = torch.linspace(1.0, 2.0, UNIT // 4)
ROOT = SCALE.clone().requires_grad_()


def closure_of(scale):
    return lambda x: mix(x, scale)


def global_tensor(x):
    return mix(x, SCALE)


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(SCALE.clone())
        self.register_buffer("shift", SCALE.clone())

    def forward(self, x):
        return mix(x, self.scale) + mix(self.shift, self.scale)

    def method(self, x):
        return self.forward(x)


MODULE = Mixer()

# Each takes a checkpoint and returns a call; what it is called on exists already.
SIGNATURES = {
    "positional": lambda ckpt: ckpt(mix)(ROOT, SCALE),
    "keyword": lambda ckpt: ckpt(mix)(ROOT, y=SCALE),
    "only keywords": lambda ckpt: ckpt(mix)(x=ROOT, y=SCALE),
    "dict": lambda ckpt: ckpt(lambda d: mix(d["a"], d["b"][0]))(
        {"a": ROOT, "b": [SCALE]}
    ),
    "namedtuple": lambda ckpt: ckpt(lambda p: mix(*p))(Pair(ROOT, SCALE)),
    # No factor: autograd would keep it, and eight bytes are not asked for from hooks.
    "statics": lambda ckpt: ckpt(lambda x, k, flag, none: mix(x, x).pow(k))(
        ROOT, 3, True, None
    ),
    "closure": lambda ckpt: ckpt(closure_of(SCALE))(ROOT),
    "default": lambda ckpt: ckpt(lambda x, y=SCALE: mix(x, y))(ROOT),
    "global": lambda ckpt: ckpt(global_tensor)(ROOT),
    "partial": lambda ckpt: ckpt(functools.partial(mix, y=SCALE))(ROOT),
    "module": lambda ckpt: ckpt(MODULE)(ROOT),
    "bound method": lambda ckpt: ckpt(MODULE.method)(ROOT),
    "module in a closure": lambda ckpt: ckpt(lambda x: MODULE(x))(ROOT),
    "functional_call": lambda ckpt: functional_call(
        _Inside(ckpt), {"inner.scale": ROOT}, (SCALE,)
    ),
    "vmap": lambda ckpt: vmap(ckpt(mix), (0, None))(ROOT.view(4, -1), SCALE[:4096]),
    "drawing dropout": lambda ckpt: ckpt(
        lambda x: mix(nn.functional.dropout(x, 0.5), x)
    )(ROOT),
}


class _Inside(nn.Module):
    def __init__(self, ckpt):
        super().__init__()
        self.inner = MODULE
        self.ckpt = ckpt

    def forward(self, x):
        return self.ckpt(self.inner)(x)


@rows("call", SIGNATURES)
def test_after_the_forward_only_the_inputs_are_alive(call):
    call(remat)  # what is kept for good is kept now
    assert live_bytes(lambda: call(remat)) == UNIT
    assert live_bytes(lambda: call(plain)) > 2 * UNIT


def test_an_input_that_nothing_else_holds_is_kept_and_nothing_besides():
    step = lambda ckpt: ckpt(mix)(ROOT * 2, SCALE * 2)
    # Multiplying by 2 keeps the 2: eight bytes.
    assert live_bytes(lambda: step(remat)) == 3 * UNIT + 8
    assert live_bytes(lambda: step(plain)) == 4 * UNIT + 8


def test_several_outputs_are_all_that_several_outputs_add():
    def both(x):
        y = x.sin().exp().sin()
        return {"a": y, "b": [y.cos(), y.exp().detach()]}

    assert live_bytes(lambda: remat(both)(ROOT)) == 3 * UNIT
    assert live_bytes(lambda: both(ROOT)) > 3 * UNIT


def test_updated_buffers_add_their_values_from_before():
    norm = nn.BatchNorm1d(8)
    x = torch.randn(64, 8, requires_grad=True)
    remat(norm)(x)
    before = norm.running_mean.nbytes * 2 + norm.num_batches_tracked.nbytes
    assert live_bytes(lambda: remat(norm)(x)) == x.nbytes + before
    assert norm.num_batches_tracked == 2
