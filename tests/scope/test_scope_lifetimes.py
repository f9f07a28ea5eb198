"""What is alive after the forward, in the backward and after it: RETURNN's contract.

Also each limit of RETURNN's `gradient_checkpoint_scope`, lifted.
"""

import weakref

import pytest
import torch
from support.scopes import assert_scoped, grads, leaf, plainly
from support.zoo import make
from torch import nn

import remat
from remat import policies
from remat._torch.autograd import hooks_here
from remat.testing import (
    assert_same,
    count_ops,
    live_bytes,
    peak_bytes,
)


pytestmark = pytest.mark.usefixtures("_no_collector")

SIZE = 1000
BYTES = 4 * SIZE
A, B, C = leaf(SIZE), leaf(SIZE, seed=2), leaf(SIZE, seed=3)


def consumed(block, policy=None, consumers=1):
    """A value that several consumers multiply."""
    with block(policy) if policy else block():
        x = A + B
    return sum((x * C).sum() for _ in range(consumers))


def alive(fn):
    return live_bytes(fn) // BYTES


# --- After the forward ---


def test_no_consumer_stores_the_value():
    assert alive(lambda: consumed(plainly, consumers=3)) == 1
    assert alive(lambda: consumed(remat.scope, consumers=3)) == 0


def test_what_was_given_is_stored_instead():
    def forward(block):
        given = A * 2.0
        with block():
            x = given.sin()
            y = given.cos()
        del given
        return (x * C).sum() + (y * C).sum()

    # The cosine and the sine need it, too; the products save both results.
    assert alive(lambda: forward(plainly)) == 3
    assert alive(lambda: forward(remat.scope)) == 1


def test_a_policy_stores_what_it_names():
    assert alive(lambda: consumed(remat.scope, policies.everything_saveable)) == 1


def test_a_detached_result_that_is_kept_holds_nothing():
    log = []

    def step():
        given = A * 2.0
        with remat.scope():
            loss = given.sin().sum()
        log.append(loss.detach())

    assert alive(step) == 0
    assert len(log) == 1


def test_a_metric_that_is_kept_holds_nothing_after_the_backward():
    log = []

    def step():
        given = A * 2.0
        with remat.scope():
            x = given.sin()
            log.append((x > 0).float().mean())
        (x * C).sum().backward()
        A.grad = C.grad = None

    assert alive(step) == 0


# --- In the backward ---


def test_values_are_freed_as_the_backward_goes():
    def run(block):
        y = consumed(block, consumers=4)
        return lambda: grads(y, C)

    # A gradient and what is added to it, beside the value.
    assert peak_bytes(run(plainly)) // BYTES == 2
    assert peak_bytes(run(remat.scope)) // BYTES == 3


def test_nothing_is_alive_between_the_uses_of_different_values():
    with remat.scope():
        one = A + B
        two = A * B
    refs = []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, c):
            ctx.save_for_backward(x)
            return x * c

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            assert all(ref() is None for ref in refs), "the other value is alive"
            refs.append(weakref.ref(x.untyped_storage()))
            return None, g * x

    y = Noting.apply(one, C).sum() + Noting.apply(two, C).sum()
    wanted = (one + two).detach()
    del one, two
    with count_ops() as ops:
        (g,) = grads(y, C)
    assert torch.allclose(g, wanted)
    assert len(refs) == 2
    assert all(ref() is None for ref in refs)
    assert ops["mul"] == 3


def test_what_was_not_read_is_freed_when_the_backward_ends():
    with remat.scope():
        x = A + B
        y = x.tanh()
    one, two = (x * C).sum(), (y * C).sum()
    del x, y

    def run():
        grads(two, C)

    assert alive(run) == 0
    (g,) = grads(one, C)
    assert_same(g, (A + B).detach())


def test_an_error_in_a_backward_frees_what_was_computed():
    def fail(_):
        raise ValueError("mine")

    def run(block):
        with block():
            x = A + B
            y = x.tanh()
        product = C * 1.0
        product.register_hook(fail)
        loss = ((y * product).sin() * x).sum()

        def backward():
            with pytest.raises(ValueError, match="mine"):
                grads(loss, A, C, retain_graph=True)

        return backward

    def left(block):
        found = alive(run(block))
        grads(C.sum(), C)  # the engine keeps a gradient until the next backward
        return found

    assert left(remat.scope) == left(plainly)


# --- After it ---


@pytest.mark.parametrize("backward", [True, False], ids=["done", "dropped"])
def test_a_graph_leaves_nothing(backward):
    def step():
        loss = consumed(remat.scope, consumers=3)
        if backward:
            loss.backward()
        A.grad = B.grad = C.grad = None

    assert live_bytes(step) == 0
    assert not hooks_here()


# --- RETURNN's limits ---


def test_three_blocks_each_free_their_own():
    def forward(block):
        with block():
            x = A + B
            with block():
                y = x * B
        with block():
            z = y.tanh()
        return (x * C).sum() + (y * C).sum() + (z * C).sum()

    assert alive(lambda: forward(plainly)) == 3
    assert alive(lambda: forward(remat.scope)) == 0
    y = forward(remat.scope)
    with count_ops() as ops:
        found = grads(y, A, B, C)
    assert ops["tanh"] == 1
    assert_same(found, grads(forward(plainly), A, B, C))


def test_a_long_chain_does_not_recurse():
    with remat.scope():
        x = A
        for _ in range(1500):
            x = x + 1.0
    y = (x * C).sum()
    del x
    with count_ops() as ops:
        grads(y, C)
    assert ops["add"] == 1500


def test_what_a_value_was_made_of_is_freed_after_its_last_use():
    weights = [leaf(SIZE, seed=k) for k in range(20)]

    def step():
        with remat.scope(policies.save_ops(torch.ops.aten.mul)):
            y = A
            for w in weights:
                y = (y * w).sin()
        return torch.autograd.grad(y.sum(), weights)

    # A saved product is freed when the gradient of its weight is made.
    assert peak_bytes(step) // BYTES <= 20 + 6


# --- Writes inside of blocks ---


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
