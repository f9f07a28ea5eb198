"""Buffers that a function updates in place are updated once, as in plain."""

import copy

import pytest
import torch
from torch import distributed, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, spectral_norm

from remat import remat
from remat.testing import assert_same, count_ops


class Sines(nn.Module):
    """The first sine is recomputed; what the second makes, nobody needs."""

    def forward(self, x):
        return x.sin().sin()


class Counter(nn.Module):
    """Counts calls, sums inputs and remembers the last one, each in its own way."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("total", torch.zeros(3))
        self.register_buffer("ones", torch.ones(3))
        self.register_buffer("last", torch.zeros(4, 3))
        self.register_buffer("rows", torch.zeros(5, 3), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.total.add_(x.detach().sum(0))
        self.ones.mul_(1)
        self.last = x.detach().clone()
        self.rows[self.calls % 5] = x.detach()[0]
        return (x * self.total.clone()).tanh() * self.calls.item() + self.rows.sum()


MODULES = {
    "batch norm": lambda: nn.BatchNorm1d(3),
    "batch norm, cumulative": lambda: nn.BatchNorm1d(3, momentum=None),
    "batch norm, not affine": lambda: nn.BatchNorm1d(3, affine=False),
    "batch norm without statistics": lambda: nn.BatchNorm1d(
        3, track_running_stats=False
    ),
    "synchronized batch norm, alone": lambda: nn.SyncBatchNorm(3),
    "batch norm in eval": lambda: nn.BatchNorm1d(3).eval(),
    "instance norm": lambda: nn.Sequential(
        nn.Unflatten(1, (3, 1)),
        nn.ConstantPad1d(2, 1.0),
        nn.InstanceNorm1d(3, track_running_stats=True),
        nn.Flatten(),
    ),
    "counter": Counter,
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(3, 3)),
    "spectral norm by hooks": lambda: spectral_norm(nn.Linear(3, 3)),
    "two in a row": lambda: nn.Sequential(
        nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3)
    ),
}
modules = pytest.mark.parametrize("make", MODULES.values(), ids=MODULES.keys())


def twins(make):
    plain = nn.Sequential(make(), Sines())
    return plain, copy.deepcopy(plain)


def buffers(module):
    return {name: b.clone() for name, b in module.named_buffers()}


def gradients(module, x):
    return x.grad, {n: p.grad for n, p in module.named_parameters()}


def check_updates(plain, module, step):
    """Assert that three steps leave the same buffers and gradients, and recompute."""
    x = torch.randn(4, 3)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    sines = []
    for _ in range(3):
        with count_ops() as ops:
            step(plain, a)
        with count_ops() as more:
            step(remat(module), b)
        assert_same(buffers(module), buffers(plain))
        assert_same(gradients(module, b), gradients(plain, a))
        sines.append(more["sin"] - ops["sin"])
    assert min(sines) > 0
    return a.grad


@modules
def test_buffers_are_updated_once(make):
    def step(call, x):
        call(x).pow(3).sum().backward()

    g = check_updates(*twins(make), step)
    assert g.abs().max() > 0


@modules
def test_buffers_are_updated_when_the_forward_has_run(make):
    plain, module = twins(make)
    x = torch.randn(4, 3, requires_grad=True)
    plain(x)
    with count_ops() as ops:
        y = remat(module)(x)
        assert_same(buffers(module), buffers(plain))
        y.sum().backward()
    assert_same(buffers(module), buffers(plain))
    assert ops["sin"] == 2 + 1


@modules
def test_two_backwards_of_one_call(make):
    def step(call, x):
        y = call(x).pow(3).sum()
        y.backward(retain_graph=True)
        y.backward()

    check_updates(*twins(make), step)


@modules
def test_two_calls_before_either_backward(make):
    def step(call, x):
        y, z = call(x), call(x)
        (2 * y.pow(3).sum() + z.pow(2).sum()).backward()

    check_updates(*twins(make), step)


@modules
def test_a_second_derivative(make):
    def step(call, x):
        (g,) = torch.autograd.grad(call(x).pow(3).sum(), x, create_graph=True)
        g.pow(2).sum().backward()

    plain, module = twins(make)
    x = torch.randn(4, 3)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    with count_ops() as ops:
        step(plain, a)
    with count_ops() as more:
        step(remat(module), b)
    assert more["sin"] > ops["sin"]
    assert_same(buffers(module), buffers(plain))
    assert_same(gradients(module, b), gradients(plain, a))


def test_a_recomputation_starts_from_the_buffers_of_its_forward():
    plain, module = twins(Counter)
    x = torch.randn(4, 3, requires_grad=True)
    (want,) = torch.autograd.grad(plain(x).sum(), x)
    y = remat(module)(x)
    remat(module)(2 * x.detach())
    with count_ops() as ops:
        (got,) = torch.autograd.grad(y.sum(), x)
    assert ops["sin"] == 1
    assert_same(got, want)


def test_a_backward_leaves_the_buffers_alone():
    counter = Counter()
    with count_ops() as ops:
        y = remat(counter)(torch.randn(4, 3, requires_grad=True)).sum()
        before = {n: (b, b._version) for n, b in counter.named_buffers()}
        y.backward(retain_graph=True)
        y.backward()
    after = {n: (b, b._version) for n, b in counter.named_buffers()}
    assert ops["tanh"] == 3
    assert after.keys() == before.keys()
    for name, (buffer, version) in before.items():
        assert after[name][0] is buffer
        assert after[name][1] == version, name


def test_a_captured_tensor_that_is_no_buffer_is_updated_once():
    module = nn.BatchNorm1d(3)
    mean, var = torch.zeros(3), torch.ones(3)

    def fn(x):
        return nn.functional.batch_norm(x, mean, var, training=True).sin().sin()

    x = torch.randn(4, 3, requires_grad=True)
    module(x)
    with count_ops() as ops:
        remat(fn)(x).sum().backward()
    assert ops["sin"] == 2 + 1
    assert_same([mean, var], [module.running_mean, module.running_var])


def test_nothing_is_recomputed_and_buffers_are_updated_in_no_grad():
    plain, module = twins(Counter)
    x = torch.randn(4, 3, requires_grad=True)
    with torch.no_grad():
        assert_same(remat(module)(x), plain(x))
    assert_same(buffers(module), buffers(plain))
    with count_ops() as ops:
        remat(module)(x).sum().backward()
    assert ops["sin"] == 2 + 1


def test_functional_call_updates_the_buffers_it_was_given():
    plain, module = twins(lambda: nn.BatchNorm1d(3))
    wrapped = Wrapped(module)
    x = torch.randn(4, 3)

    def run(module):
        params = {k: p.detach() for k, p in module.named_parameters()}
        given = buffers(module)

        def loss(params, given):
            return functional_call(module, {**params, **given}, (x,)).pow(3).sum()

        return list(grad(loss)(params, given).values()), list(given.values())

    want = run(plain)
    with count_ops() as ops:
        got = run(wrapped)
    assert ops["sin"] == 2 * 2
    assert_same(got, want)
    assert got[1][-1] == 1
    assert module[0].num_batches_tracked == 0


class Wrapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return remat(self.module)(x)


def test_batched_statistics_are_used_and_not_updated_in_eval():
    bn = nn.BatchNorm1d(3).eval()
    xs = torch.randn(2, 4, 3)
    want = vmap(grad(lambda x: bn(x).sin().sum()))(xs)
    with count_ops() as ops:
        got = vmap(grad(remat(lambda x: bn(x).sin().sum())))(xs)
    assert_same(got, want)
    assert ops["sin"] == 2


def test_synchronized_batch_norm_is_refused_where_torch_refuses_it():
    x, norm = torch.randn(4, 3, requires_grad=True), nn.SyncBatchNorm(3)
    before = buffers(norm)
    distributed.init_process_group(
        "gloo", store=distributed.HashStore(), rank=0, world_size=1
    )
    try:
        for call in norm, remat(norm):
            with pytest.raises(ValueError, match="expected input tensor to be on"):
                call(x)
    finally:
        distributed.destroy_process_group()
    before["num_batches_tracked"] += 2  # both counted before they looked
    assert_same(buffers(norm), before)
    with count_ops() as ops:
        remat(nn.Sequential(norm, Sines()))(x).sum().backward()
    assert ops["sin"] == 2 + 1
