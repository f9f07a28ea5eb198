"""What `torch.compile` made runs compiled in an open block, and is no part of it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.scopes import BOOKKEEPING, grads, leaf, plainly
from torch._dynamo.testing import CompileCounterWithBackend

import remat
from remat.testing import assert_same, count_ops, live_bytes


A, B, C = leaf(3, 3), leaf(3, 3, seed=2), leaf(3, 3, seed=3)
HAS_COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def whole(x):
    return (x @ B).sin().relu() @ C


def broken(x):
    y = (x @ B).sin()
    torch._dynamo.graph_break()
    return y.relu() @ C


def loss_of(consume, block):
    """Consume a value of a block in the block, and what comes of it too."""
    with block():
        z = consume(A.exp()).cos()
    return (z * C).sum()


def again(consume, block):
    """Return gradients, and how often each operation runs for them."""
    loss = loss_of(consume, block)
    with count_ops() as ops:
        found = grads(loss, A, B, C)
    return found, ops


def code_in_a_block():
    """Run compiled code in blocks and outside; it comes to rest."""
    backend = CompileCounterWithBackend("aot_eager")
    eagerly = []

    def watched(x):
        if not torch.compiler.is_compiling():
            eagerly.append(x)
        return whole(x)

    compiled = torch.compile(watched, backend=backend, fullgraph=True)
    found = [again(compiled, remat.scope)[0] for _ in range(2)]
    assert not eagerly
    assert_same(found, [again(compiled, plainly)[0]] * 2)
    # Outside of blocks it is another graph: which modes are open is guarded.
    assert backend.frame_count >= 2
    graphs = backend.frame_count
    again(compiled, plainly)
    again(compiled, remat.scope)
    assert backend.frame_count == graphs


@pytest.mark.slow
def test_code_is_compiled_and_runs_compiled_in_a_block():
    # In a process of its own: Dynamo guards what other tests leave behind.
    program = f"import {__name__} as here; here.code_in_a_block()"
    run = [sys.executable, "-W", "ignore", "-c", program]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    around = os.environ | {"PYTHONPATH": paths}
    result = subprocess.run(
        run, capture_output=True, text=True, env=around, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(("fn", "graphs"), [(whole, 1), (broken, 2)])
def test_a_backward_computes_the_block_again_and_nothing_compiled(fn, graphs):
    torch._dynamo.reset()
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fn, backend=backend)
    found, ops = again(compiled, remat.scope)
    assert backend.frame_count == graphs, "the hooks of a block are not compiled"
    wanted, plain_ops = again(compiled, plainly)
    assert_same(found, wanted)
    extra = {op: n - plain_ops[op] for op, n in ops.items() if op not in BOOKKEEPING}
    # `exp` for its own backward and the compiled one's, `cos` for the product's.
    assert {op: n for op, n in extra.items() if n} == {"exp": 1, "cos": 1}


def test_a_compiled_consumer_stores_no_value_of_the_block():
    torch._dynamo.reset()
    a, b = leaf(64, 64), leaf(64, 64, seed=2)
    compiled = torch.compile(lambda x: (x * b).sum(), backend="aot_eager")

    def forward(block):
        with block():
            return compiled(a + 1.0)

    stored = []
    for block in (plainly, remat.scope):
        forward(block)
        stored.append(live_bytes(lambda block=block: forward(block)))
    assert stored[0] - stored[1] == a.nbytes


def test_what_compiled_code_changes_in_place_is_stored():
    torch._dynamo.reset()

    def change(x):
        x.mul_(2.0)
        return x.sin()

    compiled = torch.compile(change, backend="aot_eager")

    def program(block):
        with block():
            x = A.detach() + 1.0
            y = compiled(x)
            z = (x * B).cos()
        return [*grads((z * y * C).sum(), B, C), x]

    assert_same(program(remat.scope), program(plainly))


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="inductor compiles C++")
@pytest.mark.filterwarnings("default")  # inductor warns of slow numerics
def test_kernels_that_write_where_no_mode_sees_it():
    # The second product lies where the first was, and a kernel writes to it.
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: ((x @ B).relu().exp() @ C).sin() + 1.0)
    found, ops = again(compiled, remat.scope)
    wanted, plain_ops = again(compiled, plainly)
    assert_same(found, wanted)
    assert ops["mm"] == plain_ops["mm"]
    assert ops["exp"] == plain_ops["exp"] + 1
