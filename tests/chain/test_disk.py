"""Checkpoints on disk: files hold them, nothing is left behind, no room is an error."""

import contextlib
import errno
import signal
import subprocess
import sys

import pytest
import torch
from support.loops import Plain, StopError, stopping
from support.offloading import ON_LINUX, failing, leaving_nothing_open, opened
from support.tables import rows
from torch.func import grad, vmap

from remat import OffloadError, chain
from remat._offload import offload
from remat.testing import assert_same, count_ops


pytestmark = pytest.mark.usefixtures("_no_collector")
LENGTH = 30
X = torch.linspace(0.1, 1, 100, dtype=torch.double)


def loop(x, body=lambda i, h: h.tanh(), loops=chain.fori_loop):
    return loops(0, LENGTH, body, x, checkpoints="all", disk=True)


def of_base(x, **options):
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(loop(x, **options).sum(), x)
    return found


def of_grad(x, **options):
    return grad(lambda x: loop(x, **options).sum())(x)


def of_vmap_grad(x, **options):
    return vmap(lambda x: of_grad(x, **options))(torch.stack([x, x + 1]))


def of_grad_vmap(x, **options):
    return grad(lambda xs: vmap(lambda x: loop(x, **options))(xs).sum())(
        torch.stack([x, x + 1])
    )


WAYS = {"base": of_base, "grad": of_grad, "vmap of grad": of_vmap_grad}


@rows("way", WAYS | {"grad of vmap": of_grad_vmap})
def test_carries_are_in_files_and_gradients_are_those_of_plain(way, folder, sizes):
    want = way(X, loops=Plain.fori_loop)
    with leaving_nothing_open(), count_ops() as ops:
        got = way(X)
    assert_same(got, want)
    assert ops["tanh"] >= 2 * LENGTH
    if way is not of_grad_vmap:  # which stores carries of segments, in memory
        batch = 1 + (way is of_vmap_grad)
        assert sizes == [batch * X.nbytes] * len(sizes)
        assert len(sizes) >= 2


OTHERS = {
    "scan": lambda loops, x, **how: loops.scan(
        lambda h, u: (h.tanh() + u, None), x, torch.arange(6.0).double(), **how
    )[0],
    "while_loop": lambda loops, x, **how: loops.while_loop(
        lambda c: c[0] < 6, lambda c: (c[0] + 1, c[1].tanh()), (0, x), **how
    )[1],
    "sequential": lambda loops, x, **how: loops.sequential([torch.tanh] * 6, x, **how),
}


@rows("run", OTHERS)
def test_each_loop_stores_its_carries_in_files(run, folder, sizes):
    def gradient(loops, **how):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(run(loops, x, **how).sum(), x)[0]

    with leaving_nothing_open():
        found = gradient(chain, checkpoints="all", disk=True)
    assert_same(found, gradient(Plain))
    assert sizes == [X.nbytes] * 5


def test_the_graph_holds_the_files_until_they_are_read(folder, sizes):
    x = X.clone().requires_grad_()
    with leaving_nothing_open():
        y = loop(x)
        written = len(sizes)
        assert written == LENGTH - 1
        y.sum().backward()
        assert len(sizes) == written


@rows("kept", {"dropped": False, "kept": True})
@ON_LINUX
def test_a_graph_without_a_backward_lets_go_of_its_files(kept, folder, sizes):
    before = opened()
    y = loop(X.clone().requires_grad_())
    assert opened()[1] == before[1] + len(sizes) > before[1]
    if kept:
        y.sum().backward(retain_graph=True)
        y.sum().backward(retain_graph=True)
        assert opened() == before
    del y
    assert opened() == before


@rows("way", WAYS)
@pytest.mark.parametrize("at", [1, LENGTH + 3])
def test_an_error_of_the_body_leaves_nothing(at, way, folder):
    step = stopping(at)
    with leaving_nothing_open():
        with count_ops() as ops, pytest.raises(StopError, match="stopped") as caught:
            way(X, body=lambda i, h: step(h))
        caught.value.__traceback__ = caught.value.__context__ = None
        del caught
    assert ops["tanh"] == at
    assert torch._C._functorch.peek_interpreter_stack() is None
    assert_same(way(X), way(X, loops=Plain.fori_loop))


@rows("way", WAYS)
def test_a_full_disk_is_a_clear_error(way, folder, monkeypatch):
    monkeypatch.setattr(offload, "_write", failing(errno.ENOSPC))
    refused = pytest.raises(OffloadError, match=r"float64\[.*could not be .*free \(No")
    with leaving_nothing_open(), count_ops() as ops:
        with refused as caught:
            way(X)
        with contextlib.suppress(AttributeError):
            caught.value.__cause__.__traceback__ = None
        caught.value.__traceback__ = None
        del caught
    # Below a vmap the backward stores: a level of the forward is gone by then.
    assert ops["tanh"] == 1 + LENGTH * (way is of_vmap_grad)


KILLED = """
import os, signal, torch
from remat import chain
from remat._offload import offload
mapped, made = offload._mapped, []
def noting(*args):
    made.append(mapped(*args))
    return made[-1]
offload._mapped = noting
def progress(k):
    if k == 25:
        print(len(made) > 0, os.listdir(os.environ["REMAT_OFFLOAD_DIR"]), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
x = torch.ones(100_000, requires_grad=True)
loop = chain.fori_loop
loop(0, 30, lambda i, h: h.tanh(), x, checkpoints=4, disk=True, progress=progress)
"""


def test_a_process_that_is_killed_leaves_no_file(folder):
    command = [sys.executable, "-c", KILLED]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.stdout, done.returncode) == ("True []\n", -signal.SIGKILL), done.stderr
