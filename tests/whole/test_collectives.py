"""Functions that run collectives, in two processes, with and without policies.

Without a policy a training is plain's bit for bit, and talks no more often than with
torch's checkpoint. With `save_collectives` a backward repeats no collective: it runs
those of plain's backward.
"""

import time
import warnings
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.clients import theirs
from support.processes import (
    WIDTH,
    Block,
    assert_as_plain,
    blocks_of,
    check_each,
    collectives,
    in_each_way,
    in_two_processes,
    local,
    needs_gloo,
    talks,
    train,
)
from support.zoo import plainly
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn import functional as of_nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from remat import checkpoint_name, policies, remat
from remat.testing import assert_same, count_ops


pytestmark = needs_gloo


# --- Functions of tensors: `f` maps rows to rows, of the same width ---


def all_reduced(f, x):
    return f(functional.all_reduce(f(x), "sum", dist.group.WORLD))


def gathered(f, x):
    y = f(functional.all_gather_single_autograd(f(x), 0, dist.group.WORLD))
    return functional.reduce_scatter_single_autograd(y, "sum", 0, dist.group.WORLD)


def scattered(f, x):
    y = functional.reduce_scatter_single_autograd(f(x), "sum", 0, dist.group.WORLD)
    return functional.all_gather_single_autograd(f(y), 0, dist.group.WORLD)


def exchanged(f, x):
    half = len(x) // 2
    sizes = [half, len(x) - half]
    y = functional.all_to_all_single_autograd(f(x), sizes, sizes, dist.group.WORLD)
    return f(y)


def all_reduced_by_nn(f, x):
    return f(of_nn.all_reduce(f(x)))


def gathered_by_nn(f, x):
    return f(torch.stack(of_nn.all_gather(f(x))).sum(0))


def scattered_by_nn(f, x):
    halves = [*f(x).chunk(2)]
    return f(of_nn.reduce_scatter(torch.empty_like(halves[0]), halves)).repeat(2, 1)


class Sum(torch.autograd.Function):
    """Adds up over the processes in the forward: Megatron's g."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent


class SumOfCotangents(torch.autograd.Function):
    """Adds up over the processes in the backward: Megatron's f."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        cotangent = cotangent.clone()
        dist.all_reduce(cotangent)
        return cotangent


def by_hand(f, x):
    return f(Sum.apply(f(SumOfCotangents.apply(x))))


def statistics(f, x):
    """Normalizes by statistics of all processes, of which no gradient flows."""
    mean = f(x).detach().mean(0)
    work = dist.all_reduce(mean, async_op=True)
    y = f(x)
    work.wait()
    return f(y - mean)


def collected(f, x):
    """Writes what the others have into a buffer."""
    rows = torch.empty(2 * len(x), x.shape[1])
    dist.all_gather_into_tensor(rows, f(x).detach())
    return f(x * rows[: len(x)] + rows[len(x) :])


OF_TENSORS = (
    *(all_reduced, gathered, scattered, exchanged),
    *(all_reduced_by_nn, gathered_by_nn, scattered_by_nn),
    *(by_hand, statistics, collected),
)


# --- Trainings ---


def inside(function):
    """`forward` calls remat of the feed-forward part and its collectives."""

    def make(wrap):
        branch = lambda self, x: wrap(lambda x: function(self.mlp, x))(x)
        return blocks_of(lambda: Block(branch))

    return make


def called(function):
    """The parent calls remat of the block."""

    def make(wrap):
        branch = lambda self, x: function(self.mlp, x)
        return blocks_of(lambda: Block(branch), lambda block, x: wrap(block)(x))

    return make


WRAPS = {"plain": plainly, "remat": remat, "checkpoint": theirs}
TRAININGS = {
    f"{function.__name__}, {style.__name__}": style(function)
    for function in OF_TENSORS
    for style in (inside, called)
}


def train_all(rank):
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames collectives
    return in_each_way(TRAININGS, WRAPS, lambda make, wrap: train(make(wrap), rank))


@pytest.mark.slow
def test_trainings_are_those_of_plain(tmp_path, subtests):
    check_each(in_two_processes(tmp_path, train_all), subtests, assert_as_plain)


# --- Policies ---


def on_tensors(function):
    def run(w, x):
        return function(lambda x: (x @ w).sin(), x).sin()

    def arguments():
        return torch.randn(WIDTH, WIDTH), torch.randn(4, WIDTH)

    return run, arguments


def two_layers(w, v, x):
    """Tensor parallel: a layer by columns, one by rows, and a sum over processes."""
    for _ in range(2):
        x = ((x @ w).sin() @ v).redistribute(placements=[Replicate()]).sin()
    return x


def in_sequence(w, v, x):
    """As `two_layers`, with parts of the sequence between the layers."""
    for _ in range(2):
        x = x.redistribute(placements=[Replicate()])
        x = ((x @ w).sin() @ v).redistribute(placements=[Shard(0)]).sin()
    return x


def out_and_in(w, v, x):
    """Local tensors in the middle."""
    mesh = x.device_mesh
    y = ((x @ w).sin() @ v).to_local(grad_placements=[Replicate()])
    y = functional.all_reduce(y, "sum", mesh.get_group())
    y = functional.wait_tensor(y).sin()
    return x + type(x).from_local(y, mesh, [Replicate()]).sin()


def on_dtensors(function, placement):
    def arguments():
        mesh = init_device_mesh("cpu", (2,))
        where = {"w": [Shard(1)], "v": [Shard(0)], "x": [placement]}
        values = torch.randn(3, WIDTH, WIDTH).unbind()
        pairs = zip(values, where.values(), strict=True)
        return tuple(distribute_tensor(t, mesh, p) for t, p in pairs)

    return function, arguments


FUNCTIONS = {
    **{function.__name__: on_tensors(function) for function in OF_TENSORS},
    "two layers": on_dtensors(two_layers, Replicate()),
    "in sequence": on_dtensors(in_sequence, Shard(0)),
    "out and in": on_dtensors(out_and_in, Replicate()),
}
SAVING = {
    "collectives": policies.save_collectives,
    "and dots": policies.save_collectives | policies.dots_saveable,
    "everything": policies.everything_saveable,
}
POLICIES = {
    "nothing": None,
    **SAVING,
    "what collectives overwrite": policies.save_ops(
        torch.ops.aten.clone, torch.ops.aten.mean, torch.ops.aten.empty
    ),
    "collectives, on disk": policies.save_collectives.but_offload(to="disk"),
}


def three_calls(make, policy):
    """Call one remat object three times; count what the last backward runs."""
    function, arguments = make
    wrap = plainly if policy == "plain" else remat(policy=POLICIES[policy])
    ours, seen = wrap(function), []
    for number in range(3):
        torch.manual_seed(number + 10 * dist.get_rank())
        args = [t.requires_grad_() for t in arguments()]
        out = ours(*args)
        loss = out.sin().sum()
        with count_ops() as ops:
            grads = torch.autograd.grad(loss, args)
        seen += [local(out), *map(local, grads)]
    return seen, talks(ops), (ops["mm"], ops["sin"])


def follow_all(rank):
    warnings.simplefilter("ignore", FutureWarning)
    names = {name: name for name in ("plain", *POLICIES)}
    return in_each_way(FUNCTIONS, names, three_calls)


def assert_follows(policy, ours, plain, without):
    """Check what `three_calls` gives with a policy: values, what is sent and saved."""
    for got in ours, plain, without:
        if isinstance(got, str):
            pytest.fail(got, pytrace=False)
    (values, sent, ran), (want, plainly_sent, once), (_, _, again) = (
        ours,
        plain,
        without,
    )
    assert_same(values, want)
    assert all(t.any() for t in want)
    if policy == "nothing":
        assert ran > once
    if policy in SAVING or policy == "collectives, on disk":
        assert sent == plainly_sent, f"{sent} sent, {plainly_sent} by plain"
    if policy == "collectives":
        assert once < ran <= again, f"{ran} run, {once} by plain, {again} without"


@pytest.mark.slow
def test_policies_save_what_collectives_return(tmp_path, subtests):
    for rank, found in enumerate(in_two_processes(tmp_path, follow_all)):
        repeated = 0
        for name, policy in found:
            with subtests.test(name, policy=policy, rank=rank):
                if policy != "plain":
                    ours, plain = found[name, policy], found[name, "plain"]
                    assert_follows(policy, ours, plain, found[name, "nothing"])
                    repeated += policy == "nothing" and ours[1] != plain[1]
        assert repeated >= len(FUNCTIONS) - 1  # else there is nothing to save


def turning(w, x):
    """Takes a path that depends on what it computes, after a collective."""
    y = functional.wait_tensor(functional.all_reduce((x @ w).sin(), "sum", GROUP))
    return (y.cos() if y.sum() < 0 else y.sin() @ w).sin()


GROUP = list(range(2))


def turn(rank):
    """What is sent in the backward of calls that take one path, and then the other."""
    w, x = torch.ones(2, 2, requires_grad=True), torch.full((2, 2), 0.1)
    ours = remat(turning, policy=policies.save_collectives)
    sent = []
    for factor in (1, 1, -1):
        out, want = (fn(w, factor * x).sum() for fn in (ours, turning))
        with count_ops() as ops:
            grads = torch.autograd.grad(out, w)
        assert_same(grads, torch.autograd.grad(want, w))
        sent.append(collectives(ops))
    return sent


@pytest.mark.slow
def test_a_call_that_does_not_fit_its_record_repeats_collectives(tmp_path):
    assert in_two_processes(tmp_path, turn) == [[1, 1, 2]] * 2


# --- Which policies are the same on all ranks ---


SYMMETRIC = {
    "everything": policies.everything_saveable,
    "a name": {"reduced": "save"},
    "a path": {"inner": "save"},
    "an operator": {"_c10d_functional.all_reduce": "save"},
    "collectives": policies.save_collectives,
}
# They look at sizes, which ranks may have others of.
NOT_SYMMETRIC = {
    "large": policies.save_larger_than(1),
    "small": policies.save_smaller_than(2**20),
    "a budget": policies.within(2**20),
}


class Reduces(torch.nn.Module):
    """A block with a collective, on as many rows as the rank has."""

    def __init__(self):
        super().__init__()
        self.inner = Reducing()

    def forward(self, x):
        return self.inner(x.sin()).sin() * x.cos()


class Reducing(torch.nn.Module):
    def forward(self, x):
        total = functional.all_reduce(x.sum(0), "sum", GROUP)
        return x * checkpoint_name(functional.wait_tensor(total), "reduced").sin()


def reduce_unevenly(rank):
    """How many collectives a backward runs again, under each policy."""
    found = {}
    for name, policy in (SYMMETRIC | NOT_SYMMETRIC | {"none": None}).items():
        fn = remat(Reduces(), policy=policy)
        for _ in range(2):
            x = torch.ones(3 + 40 * rank, 2, requires_grad=True)
            out = fn(x).sum()
            with count_ops() as ops:
                out.backward()
        found[name] = collectives(ops)
    return found


@pytest.mark.slow
def test_a_collective_is_saved_on_all_ranks_or_on_none(tmp_path):
    """Else the others would wait for it in their recompute (as xtuner says, 1980)."""
    # The derivative of an all_reduce is another one.
    repeated = dict.fromkeys(SYMMETRIC, 1) | dict.fromkeys([*NOT_SYMMETRIC, "none"], 2)
    assert in_two_processes(tmp_path, reduce_unevenly) == [repeated] * 2


# --- Memory ---


def still_alive(rank):
    """What is alive, after backwards, of what collectives wrote to, by policy."""
    alive: dict[str, list[Any]] = {name: [] for name in POLICIES}
    held = []  # with their records
    for name, policy in POLICIES.items():

        def fn(x, made=alive[name]):
            y = x.sin()
            made.append(weakref.ref(y))
            dist.all_reduce(y)
            return y.sin() * y

        held.append(remat(fn, policy=policy, prune=True))
        for _ in range(2):
            x = torch.ones(3, requires_grad=True)
            held[-1](x).sum().backward()
    await_gloo(alive)
    return {name: [ref() is not None for ref in refs] for name, refs in alive.items()}


def await_gloo(alive):
    """Waits, a minute at most, until gloo's threads have let go of their collectives.

    A thread lets go after it has told the caller that the collective is done. The sum
    is over processes, so all stop in the same turn.
    """
    for _ in range(600):
        held = sum(ref() is not None for refs in alive.values() for ref in refs)
        everywhere = torch.tensor(held)
        dist.all_reduce(everywhere)
        if not everywhere:
            return
        time.sleep(0.1)


@pytest.mark.slow
def test_no_record_holds_what_a_collective_wrote_to(tmp_path):
    for alive in in_two_processes(tmp_path, still_alive):
        assert alive.keys() == POLICIES.keys()
        assert not any(any(seen) for seen in alive.values())
        assert all(alive.values())


# --- The checks themselves ---


ONE = [torch.ones(1)]


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ((ONE, Counter(a=2), (3, 3)), "2.* sent"),
        ((ONE, Counter(a=1), (2, 2)), "2.* run, .*2.* by plain"),
        (([torch.zeros(1)], Counter(a=1), (3, 3)), "differs in value"),
        ("Traceback", "Traceback"),
    ],
)
def test_the_check_of_policies_fails_on_what_is_wrong(ours, said):
    plain, without = (ONE, Counter(a=1), (2, 2)), (ONE, Counter(a=2), (3, 3))
    right = (ONE, Counter(a=1), (3, 3))
    assert_follows("collectives", right, plain, without)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=said):
        assert_follows("collectives", ours, plain, without)
