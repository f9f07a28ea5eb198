"""Writes inside of blocks: through aliases, to what was given, by layers of torch."""

import pytest
import torch
from support.scopes import assert_scoped, grads, leaf, plainly
from support.zoo import make
from torch import nn

import remat
from remat.testing import assert_same, count_ops, live_bytes


def parted(a, block):
    with block():
        p, q = (a * 2).unsafe_chunk(2)
        p.sigmoid_()
        q.tanh_()
        s = p * q
    return (s * s).sum()


def flattened(a, block):
    with block():
        h = a * 2
        u = torch.ops.aten._unsafe_view(h, [a.numel()])
        u.add_(1)
        h.mul_(2)
        s = u.sin() * 3
    return (s * s).sum()


def by_data(a, block):
    with block():
        h = (a * 2).detach()
        h.data.add_(1)
        h.mul_(2)
    return (h * a).sum() + (h.sin() * a).sum()


def given_and_written(a, block):
    r = torch.ones(4, dtype=a.dtype)
    with block():
        n = r.clone()
        r.add_(1)
        u = a * n + r
        r.mul_(3)
        v = u * n + r
    return (u * u).sum() + (v * v).sum()


def by_data_and_after(a, block):
    with block():
        h = (a * 2).detach()
        h.data.add_(1)
    h.mul_(2)
    return (h * a * 2).sum()


def flattened_and_after(a, block):
    with block():
        h = (a * 2).detach()
        u = torch.ops.aten._unsafe_view(h, [a.numel()])
    u.add_(1)
    return (h * a * 2).sum()


def statistics(a, block):
    mean, var = torch.ones(4, dtype=a.dtype), torch.ones(4, dtype=a.dtype)
    x = torch.stack([a, a.sin()])
    with block():
        n = mean * 2
        y = nn.functional.batch_norm(x, mean, var, training=True)
    return (y.exp() * n * x).sum() * mean.sum()


AGAIN = {
    parted: {"mul": 1},
    flattened: {"mul": 1, "sin": 1},
    by_data: {},
    given_and_written: {"mul": 2, "add": 2},
    by_data_and_after: {},
    flattened_and_after: {},
    statistics: {"mul": 1, "native_batch_norm": 1},
}


@pytest.mark.parametrize("write", AGAIN)
def test_writes_give_the_gradients_of_plain_code(write):
    a = leaf(4, dtype=torch.double)

    def program(block):
        with block():
            scale = a.exp()
        return grads(write(a, block) * scale.sum() + scale.square().sum(), a)

    # What cannot be run again is stored; what else a block makes is not.
    assert_scoped(program, exp=1, **AGAIN[write])


def gru():
    return nn.GRU(4, 4).double(), make(5, 2, 4, seed=2)


def lstm():
    return nn.LSTM(4, 4), make(5, 2, 4, seed=2).float()


def cell():
    return nn.GRUCell(4, 4).double(), make(2, 4, seed=2)


def instance_norm():
    module = nn.InstanceNorm2d(2, affine=True, track_running_stats=True).double()
    return module, make(3, 2, 4, 4, seed=2)


CELL = {"add_": 1, "mul_": 1, "add": 1, "tanh_": 1, "sub": 1}
LAYERS = {
    gru: {op: 5 * n for op, n in CELL.items()} | {"zeros": 1, "stack": 1},
    lstm: {"zeros": 2, "mkldnn_rnn_layer": 1},
    cell: CELL | {"zeros": 1},
    instance_norm: {"repeat": 4, "native_batch_norm": 1},
}


@pytest.mark.parametrize("layer", LAYERS)
def test_layers_that_write_in_place(layer):
    def program(block):
        torch.manual_seed(0)
        module, x = layer()
        gain = leaf(1, dtype=x.dtype)
        with block():
            y, scale = module(x), gain.exp()
        y = y[0] if isinstance(y, tuple) else y
        found = grads((y * y * scale).sum(), gain, *module.parameters())
        return [*found, *module.buffers()]

    assert_scoped(program, exp=1, **LAYERS[layer])


def test_a_running_value_lets_go_of_what_it_saw():
    w = leaf(64, dtype=torch.double)

    def steps(block, count):
        ema = torch.zeros(64, dtype=torch.double)
        for k in range(count):
            batch = make(64, seed=k)
            with block():
                ema = ema * 0.9 + batch * 0.1
            (w * batch).sin().sum().backward()
        return ema

    assert_same(steps(remat.scope, 5), steps(plainly, 5))
    # The last value, and what it was made of.
    assert live_bytes(lambda: steps(remat.scope, 30)) <= 3 * 64 * 8
    with count_ops() as ops:
        with remat.scope():
            noise = torch.randn(64) * 2
        (w.float() * noise).sum().backward()
    assert ops["randn"] == 2


def test_statistics_that_a_block_made_are_read_after_their_update():
    w = leaf(4, 4, dtype=torch.double)

    def program(block):
        with block():
            mean = torch.zeros(4, dtype=w.dtype) + 1
            var = torch.ones(4, dtype=w.dtype) * 2
            y = nn.functional.batch_norm(w, mean, var, training=True)
            n = mean.sin()
        return [*grads((y * n * w).sum(), w), mean, var]

    # The batch norm reads what it updates. The sine reads the update, which is stored.
    before = {"zeros": 1, "add": 1, "ones": 1, "mul": 1}
    assert_scoped(program, sin=1, native_batch_norm=1, **before)


def test_an_error_says_what_to_do_where_memory_was_freed():
    a, gathered = leaf(3, 3), torch.randn(3, 3)
    with remat.scope():
        x = a @ gathered
    loss = (x * x).sum()
    del x
    gathered.untyped_storage().resize_(0)
    with pytest.raises(remat.MutationError, match=r"freed .* FSDP frees .*remat\.nn"):
        loss.backward()
