"""A draw of a DTensor is that of the full tensor: each process draws its own part."""

import itertools
import math
import traceback
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.processes import in_two_processes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import functional

from remat import random, remat
from remat.random import _draw, _ops


# --- Blocks of a draw, in one process ---


KINDS = [
    *((_ops.uniform, torch.float32), (_ops.normal, torch.float64)),
    *((_ops.bits, 64), (_ops.bits, 8)),
]
SHAPES = [(7,), (3, 5), (2, 3, 7), (5, 1, 3), (40, 70)]


def blocks(shape):
    """Some blocks of a shape: their starts and their lengths."""
    cuts = [{(0, n), (0, n - n // 2), (n // 2, n - n // 2), (n, 0)} for n in shape]
    for pairs in itertools.product(*map(sorted, cuts)):
        yield [start for start, _ in pairs], [length for _, length in pairs]


@pytest.mark.parametrize(("op", "kind"), KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("keys", [(), (2,)], ids=str)
def test_a_block_has_the_numbers_of_the_whole(op, kind, shape, keys):
    data = random.key(3).data
    if keys:
        data = random.split(random.key(3), keys[0]).data
    n = math.prod(shape)
    whole = op(data, n, kind).view(*keys, *shape)
    for starts, lengths in blocks(shape):
        part = whole
        for dim, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            part = part.narrow(dim + len(keys), start, length)
        drawn = _draw.shard(op, data, shape, lengths, starts, kind)
        assert torch.equal(drawn, part)


def test_a_key_at_the_end_of_its_stream_goes_on_at_the_start():
    data = torch.tensor([5, 2**64 - 3], dtype=torch.uint64)
    whole = _ops.uniform(data, 40, torch.float32).view(8, 5)
    drawn = _draw.shard(_ops.uniform, data, (8, 5), (8, 2), (0, 3), torch.float32)
    assert torch.equal(drawn, whole[:, 3:])


@pytest.mark.parametrize("shape", [(7, 5), (4, 6), (1, 2)], ids=str)
@pytest.mark.parametrize(
    "placements",
    [(Shard(0), Shard(1)), (Shard(0), Shard(0)), (Replicate(), Shard(1))],
    ids=str,
)
def test_the_parts_of_all_processes_are_the_whole(shape, placements):
    sizes, count = (2, 3), torch.zeros(shape, dtype=torch.int64)
    for here in itertools.product(*map(range, sizes)):
        mesh = SimpleNamespace(get_coordinate=lambda h=here: h, size=sizes.__getitem__)
        part = _draw.local_part(_draw.Sharded(shape, mesh, placements))
        assert part is not None
        rows, columns = (slice(s, s + n) for n, s in zip(*part, strict=True))
        count[rows, columns] += 1
    copies = math.prod(
        n for n, p in zip(sizes, placements, strict=True) if p.is_replicate()
    )
    assert (count == copies).all()


# --- Two processes ---


KEY = random.key(8)


def gradient(key, x):
    x = x.clone().requires_grad_()
    out = remat(lambda x: random.dropout(key, x.sin(), 0.5).sin())(x)
    return torch.autograd.grad(out.sum(), x)[0]


def with_p(key, x):
    return random.dropout(key, x, (x + 2) / 4)


def bound(fn):
    def run(key, x):
        with random.bind(key):
            return fn(x)

    return run


def attended(x):
    q = x[None, None]
    return functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


# Functions of a key and a DTensor.
OF_TENSORS = {
    "dropout": lambda key, x: random.dropout(key, x, 0.5),
    "its gradient": gradient,
    "dropout with tensor p": with_p,
    "keys": lambda key, x: random.dropout(random.split(key, len(x)), x, 0.5),
    "bernoulli": lambda key, x: random.bernoulli(key, (x + 2) / 4),
    "mean": lambda key, x: random.normal(key, None, mean=x),
    "mean of a row": lambda key, x: random.normal(key, x.shape, mean=x[0]),
    "bounds": lambda key, x: random.uniform(key, None, minval=x, maxval=x + 1),
    "categorical": random.categorical,
    "bind: dropout": bound(lambda x: functional.dropout(x, 0.5)),
    "bind: rand_like": bound(torch.rand_like),
    "bind: randn_like": bound(torch.randn_like),
    "bind: randint_like": bound(lambda x: torch.randint_like(x, 10)),
    "bind: normal_": bound(lambda x: x.clone().normal_()),
    "bind: exponential_": bound(lambda x: x.clone().exponential_()),
    "bind: kaiming_uniform_": bound(lambda x: nn.init.kaiming_uniform_(x.clone())),
    "bind: trunc_normal_": bound(lambda x: nn.init.trunc_normal_(x.clone())),
    "bind: bernoulli": bound(lambda x: torch.bernoulli((x + 2) / 4)),
    "bind: alpha_dropout": bound(lambda x: functional.alpha_dropout(x, 0.5, True)),
    "bind: dropout1d": bound(lambda x: functional.dropout1d(x[None], 0.5)[0]),
    "bind: attention": bound(attended),
}
# Functions of a key and a shape: a tuple, or a DTensor.
OF_SHAPES = {
    "normal": random.normal,
    "normal of each key": lambda key, shape: random.normal(random.split(key, 3), shape),
    "float64": lambda key, s: random.normal(key, s, torch.float64, 1.0, 2.0),
    "uniform": lambda key, s: random.uniform(key, s, torch.bfloat16, -2.0, 3.0),
    "bits": random.bits,
    "short bits": lambda key, s: random.bits(key, s, torch.int8),
    "randint": lambda key, s: random.randint(key, s, 0, 10),
    "wide randint": lambda key, s: random.randint(key, s, 0, 2**62 + 1),
    "bernoulli of a number": lambda key, s: random.bernoulli(key, 0.3, s),
    "rademacher": random.rademacher,
    "gumbel": random.gumbel,
    "exponential": random.exponential,
    "laplace": random.laplace,
    "truncated normal": lambda key, s: random.truncated_normal(key, -1.0, 1.0, s),
}
# Shards are summed in another order.
SUMS = {"bind: attention"}
PLACEMENTS = {"replicated": Replicate(), "rows": Shard(0), "columns": Shard(1)}
SIZES = [(6, 5), (7, 8)]


def results(fn, whole, sharded):
    """What a function gives for a full argument, and for a DTensor: what is here."""
    want, got = fn(KEY, whole), fn(KEY, sharded)
    assert isinstance(got, DTensor), type(got)
    if any(p.is_partial() for p in got.placements):
        return want, got.full_tensor()
    mesh, placements = got.device_mesh, got.placements
    part = distribute_tensor(want, mesh, placements, src_data_rank=None)
    return part.to_local(), got.to_local()


def draw_all(rank):
    """Compare each draw with that of the full tensor; of what fails, return where."""
    mesh, found = init_device_mesh("cpu", (2,)), dict[Any, Any]()
    for (name, placement), size in itertools.product(PLACEMENTS.items(), SIZES):
        whole = torch.linspace(-1, 1, math.prod(size)).view(size)
        x = distribute_tensor(whole, mesh, [placement])
        for table, argument in (OF_TENSORS, whole), (OF_SHAPES, size):
            for case, fn in table.items():
                try:
                    found[case, name, size] = results(fn, argument, x)
                except Exception:  # noqa: BLE001
                    found[case, name, size] = traceback.format_exc()
    return found


def everything(rank):
    """What all tests of two processes need: to start them takes longest."""
    return draw_all(rank), by_rank(rank), counted(rank)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("needs gloo")
    return in_two_processes(tmp_path_factory.mktemp("ranks"), everything)


@pytest.mark.slow
def test_draws_of_dtensors_are_those_of_full_tensors(ranks, subtests):
    for rank, (found, _, _) in enumerate(ranks):
        for case, result in found.items():
            with subtests.test(case, rank=rank):
                if isinstance(result, str):
                    pytest.fail(result, pytrace=False)
                want, got = result
                if case[0] in SUMS:
                    torch.testing.assert_close(got, want)
                else:
                    assert torch.equal(got, want)
                assert got.unique().numel() > 1


def counted(rank):
    """How many numbers a draw of two thousand computes in each process."""
    drawn = []

    def counting(op):
        def run(data, n, kind):
            drawn.append(data[..., 0].numel() * n)
            return op(data, n, kind)

        return run

    _ops.uniform, _ops.normal = map(counting, (_ops.uniform, _ops.normal))
    mesh = init_device_mesh("cpu", (2,))
    x = distribute_tensor(torch.ones(20, 100), mesh, [Shard(0)])
    y = distribute_tensor(torch.ones(20, 101), mesh, [Shard(1)])
    random.dropout(KEY, x, 0.5)
    random.normal(KEY, y)
    random.dropout(random.split(KEY, 20), x, 0.5)
    return drawn


@pytest.mark.slow
def test_each_process_draws_its_own_numbers_and_no_others(ranks):
    for _, _, (rows, columns, each) in ranks:
        assert rows == each == 10 * 100
        # A row begins in the middle of a block.
        assert 20 * 50 <= columns <= 20 * (51 + 3)


def by_rank(rank):
    """The same key draws the same on every rank; folding in the rank does not."""
    own = random.fold_in(KEY, dist.get_rank())
    return random.normal(KEY, (4,)), random.normal(own, (4,))


@pytest.mark.slow
def test_a_key_draws_the_same_on_every_rank(ranks):
    (_, (same, first), _), (_, (again, second), _) = ranks
    assert torch.equal(same, again)
    assert torch.equal(first, random.normal(random.fold_in(KEY, 0), (4,)))
    assert not (first == second).any()
