"""The hooks of blocks: they stay while a value is alive, and go however blocks end."""

import contextlib
import gc
import threading

import pytest
import torch
from support.scopes import grads, leaf
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import remat
from remat._torch.autograd import hooks_here
from remat.testing import assert_same, count_ops


A, B, C = leaf(3, 3), leaf(3, 3, seed=2), leaf(3, 3, seed=3)


class Noting:
    """Hooks of a user, which note what they are given."""

    def __init__(self):
        self.packed = self.unpacked = 0
        self.context = saved_tensors_hooks(self.pack, self.unpack)

    def pack(self, tensor):
        self.packed += 1
        return "mine", tensor.detach()

    def unpack(self, packed):
        mine, tensor = packed
        assert mine == "mine"
        self.unpacked += 1
        return tensor


@contextlib.contextmanager
def recomputed(**wanted):
    with count_ops() as ops:
        yield
    assert {op: ops[op] for op in wanted} == wanted


def test_hooks_go_with_the_last_value():
    with remat.scope():
        x = A + B
        y = A * B
    assert len(hooks_here()) == 1
    view = x[1:]
    del x
    assert len(hooks_here()) == 1
    del y, view
    assert not hooks_here()


def test_a_block_without_values_leaves_no_hooks():
    with remat.scope():
        assert len(hooks_here()) == 1
    assert not hooks_here()


@pytest.mark.parametrize("fails", [False, True])
def test_hooks_go_after_a_backward_that_frees_the_last_value(fails):
    with remat.scope():
        held = [A + B]
    y = held[0] * C

    def drop(_):
        held.clear()
        assert hooks_here(), "a backward puts the stack back as it was"
        if fails:
            raise ValueError("mine")

    y.register_hook(drop)
    mine = pytest.raises(ValueError, match="mine")
    with mine if fails else contextlib.nullcontext():
        y.sum().backward()
    A.grad = B.grad = C.grad = None
    assert not hooks_here()


def test_values_that_die_within_a_hook():
    # Torch crashes if the stack changes while it calls a hook (pytorch issue 130734).
    with remat.scope():
        held = [(A + B).tanh()]
    y = held[0] * C

    def pack(tensor):
        held.clear()
        gc.collect()
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda t: t), remat.scope():
        z = C.sin()
    assert not held
    with recomputed(tanh=1):
        grads((y + z).sum(), C)
    del z
    with remat.scope():
        pass
    assert not hooks_here()


@pytest.mark.parametrize("ours_ends_first", [False, True])
@pytest.mark.parametrize("ours_begins_first", [False, True])
def test_hooks_of_a_user_around_a_block(ours_begins_first, ours_ends_first):
    noting, block = Noting(), remat.scope()
    contexts = [block, noting.context]
    for context in contexts if ours_begins_first else contexts[::-1]:
        context.__enter__()
    x = A + B
    for context in contexts if ours_ends_first else contexts[::-1]:
        context.__exit__(None, None, None)
    assert len(hooks_here()) == 1
    y = (x * C).sum()
    assert noting.packed == 0
    with recomputed(add=1):
        (g,) = grads(y, C)
    assert_same(g, x.detach())
    del x, y
    assert not hooks_here()


def test_hooks_around_are_asked_for_what_is_no_value():
    noting = Noting()
    with noting.context:
        with remat.scope():
            x = A + B
        y = (x * C).sin()
        assert noting.packed == 2  # C, and the product
    with recomputed(add=1):
        g = grads(y.sum(), A, C)
    assert noting.unpacked == 2
    assert_same(g, grads(((A + B) * C).sin().sum(), A, C))


def test_values_are_not_offloaded_by_hooks_around():
    moved = []

    class Noted(save_on_cpu):
        def __init__(self):
            super().__init__()
            pack = self.pack_hook
            self.pack_hook = lambda t: moved.append(t.shape) or pack(t)

    with Noted(), remat.scope():
        x = A + B
        y = x * C
    with recomputed(add=1):
        g = grads(y.sum(), A, C)
    assert moved == [C.shape]
    assert_same(g, grads(((A + B) * C).sum(), A, C))


@pytest.mark.parametrize("order", ["012", "021", "102", "120", "201", "210"])
def test_blocks_end_in_any_order(order):
    blocks, values = [remat.scope() for _ in range(3)], []
    for k, block in enumerate(blocks):
        block.__enter__()
        values.append((A + (k + 1) * B).tanh())
    for k in order:
        blocks[int(k)].__exit__(None, None, None)
    y = sum((x * C).sum() for x in values)
    total = sum(values).detach()
    values.clear()
    with recomputed(tanh=3):
        (g,) = grads(y, C)
    assert torch.allclose(g, total)
    del y
    assert not hooks_here()


def test_torch_func_works_while_values_are_alive_and_after():
    with remat.scope():
        x = A + B
    square = lambda c: (c * c).sum()
    assert len(hooks_here()) == 1
    assert_same(torch.func.grad(square)(C.detach()), 2 * C.detach())
    del x
    assert not hooks_here()
    assert_same(torch.func.grad(square)(C.detach()), 2 * C.detach())


def test_threads_have_hooks_of_their_own():
    with remat.scope():
        x = A + B
    seen = []

    def other():
        seen.append(len(hooks_here()))
        with remat.scope():
            z = A * B
        seen.append(len(hooks_here()))
        with count_ops() as ops:
            grads((z * C).sum() + (x * C).sum(), C)
        seen.append(ops["mul"])
        del z
        seen.append(len(hooks_here()))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    # The two products, and one that is computed again.
    assert seen == [0, 1, 5, 0]
    assert len(hooks_here()) == 1


def test_a_value_that_another_thread_lets_go_of():
    with remat.scope():
        held = [A + B]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    assert len(hooks_here()) == 1  # a thread cannot change the stack of another
    with remat.scope():
        pass
    assert not hooks_here()
