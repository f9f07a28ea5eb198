"""A stored carry that is changed in place after the forward, through a result."""

import pytest
import torch
from support.loops import Plain, steps_run
from support.tables import rows
from support.zoo import V, leaves_of

from remat import MutationError, chain
from remat.chain import schedules
from remat.testing import assert_same, count_ops


LENGTH = 12


def mask_of(h):
    return (h.detach() > 0).double()


def of_fori_loop(loops, h, *, reads=True, length=LENGTH, **options):
    """A mask that the first step makes, and that all later carries share."""

    def body(i, carry):
        h, mask = carry
        if i == 0:
            mask = mask_of(h)
        h = torch.tanh(h * mask if reads else h) + h
        return h, mask

    return loops.fori_loop(0, length, body, (h, torch.zeros_like(V)), **options)


def of_scan(loops, h, *, reads=True, length=LENGTH, **options):
    def step(carry, x):
        h, mask = carry
        if x.item() == 0:
            mask = mask_of(h)
        h = torch.tanh(h * mask if reads else h) + x
        return (h, mask), h.sum()

    xs = torch.arange(length).double()
    return loops.scan(step, (h, torch.zeros_like(V)), xs, **options)[0]


def of_sparse(loops, h, *, reads=True, length=LENGTH, **options):
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
    assert runs == steps_run(LENGTH, **options)


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
