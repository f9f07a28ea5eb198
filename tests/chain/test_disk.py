"""Stored carries: on disk, and changed in place after the forward."""

import contextlib
import errno
import signal
import subprocess
import sys

import pytest
import torch
from support.loops import Plain, StopError, steps_run, stopping
from support.offloading import ON_LINUX, failing, leaving_nothing_open, opened
from support.tables import rows
from support.zoo import V, leaves_of
from torch.func import grad, vmap

from remat import MutationError, OffloadError, chain
from remat._offload import offload
from remat.chain import schedules
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


# --- A stored carry that is changed in place after the forward, through a result ---


STEPS = 12


def mask_of(h):
    return (h.detach() > 0).double()


def of_fori_loop(loops, h, *, reads=True, length=STEPS, **options):
    """A mask that the first step makes, and that all later carries share."""

    def body(i, carry):
        h, mask = carry
        if i == 0:
            mask = mask_of(h)
        h = torch.tanh(h * mask if reads else h) + h
        return h, mask

    return loops.fori_loop(0, length, body, (h, torch.zeros_like(V)), **options)


def of_scan(loops, h, *, reads=True, length=STEPS, **options):
    def step(carry, x):
        h, mask = carry
        if x.item() == 0:
            mask = mask_of(h)
        h = torch.tanh(h * mask if reads else h) + x
        return (h, mask), h.sum()

    xs = torch.arange(length).double()
    return loops.scan(step, (h, torch.zeros_like(V)), xs, **options)[0]


def of_sparse(loops, h, *, reads=True, length=STEPS, **options):
    """A sparse mask, which has no storage of its own."""

    def body(i, carry):
        h, mask = carry
        if i == 0:
            mask = (2 * torch.eye(len(h), dtype=h.dtype)).to_sparse()
        h = torch.tanh(mask @ h if reads else h) + h
        return h, mask

    init = (h, torch.eye(len(h), dtype=h.dtype).to_sparse())
    return loops.fori_loop(0, length, body, init, **options)


LOOPS = {"scan": of_scan, "fori_loop": of_fori_loop}
CHECKPOINTS = {
    "segments": {},
    "every step": {"checkpoints": "all"},
    "units": {"checkpoints": 3, "unroll": 2},
    "uniform": {"checkpoints": schedules.Uniform(2)},
    "online": {"checkpoints": schedules.Online(3)},
}


def gradient(loop, loops, change, **options):
    h = leaves_of(V)[0]
    out, mask = loop(loops, h, **options)
    if change:
        mask.zero_()
    return torch.autograd.grad(out.sum(), h)[0]


@rows("options", CHECKPOINTS)
@rows("loop", LOOPS)
def test_a_changed_carry_that_is_read_is_refused(loop, options):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(loop, Plain, change=True)
    says = r"remat: the carry of step \d+ of `\w+ of .*` \(.*\) was changed in place"
    with pytest.raises(MutationError, match=says):
        gradient(loop, chain, change=True, **options)


@rows("loop", LOOPS)
def test_a_carry_on_disk_is_what_it_was(loop, folder):
    found = gradient(loop, chain, change=True, checkpoints=3, disk=True)
    assert_same(found, gradient(loop, Plain, change=False))


def counted(loop, *, change, **options):
    with count_ops() as ops:
        found = gradient(loop, chain, change, reads=False, **options)
    return found, ops["tanh"]


@rows("options", CHECKPOINTS)
@rows("loop", LOOPS)
def test_a_changed_carry_that_nobody_reads_is_no_error(loop, options):
    found, runs = counted(loop, change=True, **options)
    assert_same(found, gradient(loop, Plain, change=True, reads=False))
    assert runs == counted(loop, change=False, **options)[1]
    assert runs == steps_run(STEPS, **options)


def test_many_changed_carries_that_nobody_reads():
    """One mode looks for all of them: hundreds of nested ones are too deep."""
    options = {"reads": False, "length": 150}
    found = gradient(of_fori_loop, chain, change=True, checkpoints="all", **options)
    assert_same(found, gradient(of_fori_loop, Plain, change=True, **options))


def test_the_initial_carry_alone_recomputes_what_was_changed():
    """Plain code raises here. The chain makes the mask again, from `h`."""
    found = gradient(of_fori_loop, chain, change=True, checkpoints=1)
    assert_same(found, gradient(of_fori_loop, Plain, change=False))


def test_a_result_of_vjp_that_is_changed_before_the_pullback():
    def changed(reads):
        def run(h):
            return of_fori_loop(chain, h, reads=reads, checkpoints=3)

        (out, mask), pull = torch.func.vjp(run, V)
        mask.zero_()
        return pull((torch.ones_like(out), torch.zeros_like(mask)))[0]

    assert_same(changed(reads=False), gradient(of_fori_loop, Plain, False, reads=False))
    with pytest.raises(MutationError, match="the carry of step"):
        changed(reads=True)


@pytest.mark.parametrize("checkpoints", [None, 3])
def test_a_changed_sparse_carry(checkpoints):
    found = gradient(of_sparse, chain, True, reads=False, checkpoints=checkpoints)
    assert_same(found, gradient(of_sparse, Plain, True, reads=False))
    with pytest.raises(MutationError, match="the carry of step"):
        gradient(of_sparse, chain, True, checkpoints=checkpoints)
