"""Buffers that a function updates in place are updated once, as in plain."""

import operator

import pytest
import torch
from support.changes import Wrapped
from support.runs import assert_replayed, configurations, leaf, replayed
from support.tables import crossed, rows
from support.zoo import ops_of
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.func import functional_call, grad, vmap
from torch.nn.utils import parametrizations, spectral_norm

from remat import remat
from remat.testing import assert_same, count_ops, peak_bytes


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


def with_sines(make):
    return nn.Sequential(make(), Sines())


def buffers(module):
    return {name: b.clone() for name, b in module.named_buffers()}


def seen(module):
    """What the buffers hold, and how often they were written."""
    return [(b.clone(), b._version) for b in module.buffers()]


# --- Steps, after each of which the buffers are as in plain ------------------------


def one_backward(call, x):
    call(x).pow(3).sum().backward()


def two_backwards(call, x):
    y = call(x).pow(3).sum()
    y.backward(retain_graph=True)
    y.backward()


def two_calls(call, x):
    y, z = call(x), call(x)
    (2 * y.pow(3).sum() + z.pow(2).sum()).backward()


def second_derivative(call, x):
    (g,) = torch.autograd.grad(call(x).pow(3).sum(), x, create_graph=True)
    g.pow(2).sum().backward()


# A step, and how many sines it takes, plain and rematerialized.
STEPS = {
    "one backward": (one_backward, 2, 3),
    "two backwards": (two_backwards, 2, 4),
    "two calls before a backward": (two_calls, 4, 6),
    "second derivative": (second_derivative, 4, 6),
}


@crossed("name, how", MODULES, STEPS)
def test_buffers_are_updated_once_when_the_forward_runs(name, how):
    make, (step, plain, sines) = MODULES[name], STEPS[how]

    def program(wrap):
        module, states, held = with_sines(make), [], []

        def call(x):
            y = wrap(module)(x)
            states.append(seen(module))
            held[:] = module.buffers()
            return y

        for _ in range(3):
            step(call, x)
            states.append(seen(module))
            assert all(map(operator.is_, held, module.buffers()))
        found = {name: p.grad for name, p in module.named_parameters()}
        of_x, x.grad = x.grad, None
        assert of_x.abs().max() > 0
        return states, found, of_x

    x = leaf(4, 3)
    assert_replayed(program, sin=(3 * plain, 3 * sines))


# --- Other ways to hold buffers ----------------------------------------------------


@replayed(sin=2 * 2)
def test_functional_call_updates_the_buffers_it_was_given(wrap):
    x = torch.randn(4, 3)
    module = Wrapped(with_sines(lambda: nn.BatchNorm1d(3)), wrap)
    params = {k: p.detach() for k, p in module.named_parameters()}
    given = buffers(module)

    def loss(params, given):
        return functional_call(module, {**params, **given}, (x,)).pow(3).sum()

    found = grad(loss)(params, given)
    assert given["module.0.num_batches_tracked"] == 1
    assert module.module[0].num_batches_tracked == 0
    return found, given


@replayed(sin=2)
def test_batched_statistics_are_used_and_not_updated_in_eval(wrap):
    norm, xs = nn.BatchNorm1d(3).eval(), torch.randn(2, 4, 3)
    return vmap(grad(wrap(lambda x: norm(x).sin().sum())))(xs), buffers(norm)


# --- Of kinds that torch does not show as bytes ------------------------------------


def quantized():
    return torch.quantize_per_tensor(torch.arange(1.0, 4), 0.5, 0, torch.qint8)


def quantized_by_channel():
    scales, zeros = torch.tensor([0.25, 0.5, 1.0]), torch.zeros(3, dtype=torch.int64)
    rows = torch.arange(1.0, 10).view(3, 3)
    return torch.quantize_per_channel(rows, scales, zeros, 0, torch.qint8)


def quantized_to_four_bits():
    scales, zeros = torch.tensor([0.25, 0.5]), torch.zeros(2)
    rows = torch.arange(1.0, 5).view(2, 2)
    return torch.quantize_per_channel(rows, scales, zeros, 0, torch.quint4x2)


class Quantized(nn.Module):
    """Reads a quantized buffer, and may write to it."""

    def __init__(self, make, *, writes):
        super().__init__()
        self.register_buffer("table", make())
        self.writes = writes

    def forward(self, x):
        y = (x * self.table.dequantize().sum()).sin().exp()
        if self.writes:
            self.table.copy_(self.table.dequantize() + 1)
        return y


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    ("make", "writes"),
    [
        (quantized, False),
        (quantized, True),
        (quantized_by_channel, False),
        (quantized_by_channel, True),
        (quantized_to_four_bits, False),  # torch can neither copy it nor write to it
    ],
)
@replayed(each=True, sin=2 * 3)
def test_quantized_buffers_are_told_apart_and_updated_once(wrap, make, writes):
    x = leaf(3)
    module = Quantized(make, writes=writes)
    found = []
    for _ in range(3):
        found += torch.autograd.grad(wrap(module)(x).sum(), x)
        found.append(module.table.dequantize())
    return found


# --- Of what forwards leave as it is -------------------------------------------------


class Tables(nn.Module):
    """Reads many tables of 64 KiB each, and writes to one of them when it is told."""

    def __init__(self, count):
        super().__init__()
        self.weight, self.write = nn.Parameter(torch.ones(128)), None
        for i in range(count):
            self.register_buffer(f"table{i}", torch.full((128, 128), 1.0 + i))

    def forward(self, x):
        y = x * self.weight
        for table in self.buffers():
            y = y + table[0]
        if self.write is not None:
            self.write(self.table0)
        return y.sin().exp().sin()


def step(call, x):
    call(x).sum().backward()


@configurations
@pytest.mark.parametrize("count", [20, 4])
def test_tables_that_no_forward_writes_to_are_not_copied(ours, count):
    module, x = Tables(count), torch.ones(8, 128)
    call = ours(module)
    for _ in range(2):
        step(call, x)
    assert peak_bytes(lambda: step(call, x)) <= peak_bytes(lambda: step(module, x))
    ops = ops_of(lambda: step(call, x))
    assert (ops["clone"], ops["exp"]) == (0, 2)


WRITES = {
    "in place": lambda table: table.mul_(2),
    "uncounted": lambda table: table.data.mul_(2),
    "uncounted, of one element": lambda table: table.data[127].fill_(3),
    "uncounted, in another order": lambda table: table.data.copy_(table.t().clone()),
}


@configurations
@rows("write", WRITES)
def test_such_a_table_may_be_written_to_later(write, ours):
    x = torch.ones(8, 128)

    def program(wrap):
        module = Tables(4)
        module.table0[:64] = 5.0
        call = wrap(module)
        step(call, x)
        module.write = write
        step(call, x)
        return module.weight.grad, module.table0.clone()

    assert_replayed(program, wrap=ours, exp=4)


class Summing(nn.Module):
    """Reads what it has written to a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.ones(3))

    def forward(self, x):
        self.total.add_(1)
        return (x * self.total).sin().exp()


@replayed(sin=(1, 1 + 2))
def test_a_second_backward_starts_from_a_buffer_of_a_module_that_is_gone(wrap):
    x = leaf(3)
    y = wrap(Summing())(x).sum()
    first = torch.autograd.grad(y, x, retain_graph=True)
    return first, torch.autograd.grad(y, x)


# --- Many buffers, and hooks around the call ---


@pytest.mark.parametrize("nested", [False, True])
def test_many_statistics_are_left_alone_under_hooks(nested):
    norms = (nn.BatchNorm2d(1024) for _ in range(10))  # 80 KB of statistics
    model = nn.Sequential(*norms, nn.Tanh()).eval()

    def gradient(inner):
        x = torch.ones(1, 1024, 1, 1, requires_grad=True)
        with count_ops() as ops:
            if nested:
                remat(lambda x: inner(x).sin())(x).sum().backward()
            else:
                with save_on_cpu():
                    inner(x).sin().sum().backward()
        return x.grad, ops["tanh"]

    (want, once), (got, again) = gradient(model), gradient(remat(model))
    assert_same(got, want)
    assert again > once
