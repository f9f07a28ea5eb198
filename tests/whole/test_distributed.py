"""Two gloo processes on the CPU: FSDP2, DDP, tensor parallel and DTensors.

Each arrangement is trained for three steps plain, with remat and with torch's
checkpoint. Gradients and parameters have to be plain's bit for bit; a fourth step is
counted: sines have run again, and collectives no more often than with the checkpoint.
All arrangements of a test share their processes, for these take seconds to start.
"""

import os
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from remat import policies, remat
from remat.testing import assert_same, count_ops


pytestmark = pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)
STEPS, BLOCKS, WIDTH = 3, 3, 8


def as_it_is(fn):
    return fn


# --- What is trained ---


class Sine(nn.Module):
    def forward(self, x):
        return x.sin()


class Block(nn.Module):
    """A residual block; `call` is what its forward does with its feed-forward part."""

    def __init__(self, call=lambda self, x: self.mlp(x), dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        layers = nn.Linear(WIDTH, 16), Sine(), nn.Linear(16, WIDTH)
        self.mlp = nn.Sequential(*layers, nn.Dropout(dropout))
        self.call = call

    def forward(self, x):
        return x + self.call(self, self.norm(x))

    def branch(self, x):
        return self.mlp(x)


class Model(nn.Module):
    """Blocks between two layers; `call` is what its forward does with each block."""

    def __init__(self, blocks, call=lambda block, x: block(x)):
        super().__init__()
        self.embed = nn.Linear(4, WIDTH)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(WIDTH, 1)
        self.call = call

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x)


def inside(wrap, **options):
    """`forward` calls `remat(self.mlp)`."""
    return Model(
        [Block(lambda self, x: wrap(self.mlp)(x), **options) for _ in range(BLOCKS)]
    )


def method(wrap):
    """`forward` calls `remat(self.branch)`."""
    return Model([Block(lambda self, x: wrap(self.branch)(x)) for _ in range(BLOCKS)])


def decorated(wrap):
    """`forward` itself is decorated, in the class."""

    class Decorated(Block):
        forward = wrap(Block.forward)

    return Model([Decorated() for _ in range(BLOCKS)])


def replaced(wrap):
    """`block.forward = remat(block.forward)`."""
    model = Model([Block() for _ in range(BLOCKS)])
    for block in model.blocks:
        block.forward = wrap(block.forward)
    return model


def called(wrap):
    """The parent calls `remat(block)`."""
    call = lambda block, x: wrap(block)(x)
    return Model([Block() for _ in range(BLOCKS)], call)


# --- One training ---


def inputs(rank, step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator).roll(3 * rank, 0)[:4]


def local(t):
    """The numbers that this process has of a tensor."""
    if t is None:
        return "no gradient"
    return (t.to_local() if isinstance(t, DTensor) else t).detach().clone()


def one_batch(model, rank, step):
    model(inputs(rank, step)).square().mean().backward()


def train(model, rank, batch=one_batch):
    """Take steps; return what they did, and what runs in one more."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grads = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch(model, rank, step)
        grads.append([local(p.grad) for p in model.parameters()])
        optimizer.step()
    with count_ops() as ops:
        batch(model, rank, STEPS)
    return {
        "gradients": grads,
        "parameters": [local(p) for p in model.parameters()],
        "buffers": [local(b) for b in model.buffers()],
        "stream": torch.rand(2),
    }, ops


# --- FSDP2 ---


def sharded(build, **options):
    """Shard each block, and what is around them."""

    def make(wrap):
        model = build(wrap)
        for block in model.blocks:
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return make


def sharded_first(wrap):
    """Shard the blocks, and only then replace what they do."""
    model = sharded(called)(as_it_is)
    for block in model.blocks:
        block.forward = wrap(block.forward)
    return model


def only_root(build):
    return lambda wrap: fully_shard(build(wrap))


def sharded_sublayers(wrap):
    """Shard the layers of a block, which is rematerialized as a whole."""
    model = called(wrap)
    for block in model.blocks:
        fully_shard(block.mlp[0])
        fully_shard(block.mlp[2])
    return fully_shard(model)


def accumulated(model, rank, step):
    """Two batches, of which the second sends gradients."""
    for part in range(2):
        model.set_requires_gradient_sync(part == 1)
        one_batch(model, rank, 10 * step + part)


def sharded_and_parallel(build):
    """Tensor parallel in each block, whose shards FSDP2 has."""

    def make(wrap):
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
        model = build(wrap)
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], COLUMNS_AND_ROWS)
            fully_shard(block, mesh=mesh["data"])
        return fully_shard(model, mesh=mesh["data"])

    return make


COLUMNS_AND_ROWS = {"mlp.0": ColwiseParallel(), "mlp.2": RowwiseParallel()}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
STYLES = {
    "inside": inside,
    "method": method,
    "decorated": decorated,
    "replaced": replaced,
    "called": called,
}
FSDP = {
    **{style: (sharded(build), one_batch) for style, build in STYLES.items()},
    "inside, gathered": (sharded(inside, reshard_after_forward=False), one_batch),
    "called, gathered": (sharded(called, reshard_after_forward=False), one_batch),
    "inside, accumulated": (sharded(inside), accumulated),
    "called, accumulated": (sharded(called), accumulated),
    "inside, mixed precision": (sharded(inside, mp_policy=HALF), one_batch),
    "called, mixed precision": (sharded(called, mp_policy=HALF), one_batch),
    "inside, only root": (only_root(inside), one_batch),
    "called, only root": (only_root(called), one_batch),
    "decorated, only root": (only_root(decorated), one_batch),
    "replaced once sharded": (sharded_first, one_batch),
    "sublayers": (sharded_sublayers, one_batch),
    "sublayers, accumulated": (sharded_sublayers, accumulated),
    "dropout": (sharded(lambda wrap: inside(wrap, dropout=0.3)), one_batch),
    "tensor parallel, inside": (sharded_and_parallel(inside), one_batch),
    "tensor parallel, called": (sharded_and_parallel(called), one_batch),
}


# --- DDP ---


def replicated(build, **options):
    # Small buckets: a parameter that gets ready twice or never shows at once.
    options = {"bucket_cap_mb": 1e-5, **options}
    return lambda wrap: DistributedDataParallel(build(wrap), **options)


def shared(wrap):
    """Two blocks with the same layers."""
    model = called(wrap)
    model.blocks[2].mlp = model.blocks[0].mlp
    return model


def normalized(wrap):
    model = called(wrap)
    for block in model.blocks:
        block.norm = nn.BatchNorm1d(WIDTH)
    return model


class Unused(Block):
    """Has a layer that nothing uses, and one that only one process uses."""

    def __init__(self):
        super().__init__()
        self.unused, self.sometimes = nn.Linear(2, 2), nn.Linear(WIDTH, WIDTH)

    def branch(self, x):
        return self.mlp(self.sometimes(x) if dist.get_rank() else x)

    def forward(self, x):
        return x + self.branch(self.norm(x))


def unused(wrap):
    call = lambda block, x: wrap(block)(x)
    return Model([Unused() for _ in range(BLOCKS)], call)


def unsent(model, rank, step):
    """Two batches, of which the second sends gradients."""
    with model.no_sync():
        one_batch(model, rank, 10 * step)
    one_batch(model, rank, 10 * step + 1)


DDP = {
    **{style: (replicated(build), one_batch) for style, build in STYLES.items()},
    "one bucket": (replicated(called, bucket_cap_mb=25), one_batch),
    "static graph": (replicated(called, static_graph=True), one_batch),
    "views of buckets": (replicated(called, gradient_as_bucket_view=True), one_batch),
    "unused": (replicated(unused, find_unused_parameters=True), one_batch),
    "no_sync": (replicated(called), unsent),
    "shared weights": (replicated(shared), one_batch),
    "dropout": (replicated(lambda wrap: inside(wrap, dropout=0.3)), one_batch),
    "batch norm": (replicated(normalized), one_batch),
}


# --- Tensor parallel ---


def parallel(build, plan):
    def make(wrap):
        model, mesh = build(wrap), init_device_mesh("cpu", (2,))
        for block in model.blocks:
            parallelize_module(block, mesh, plan)
        return model

    return make


def whole_batch(model, rank, step):
    one_batch(model, 0, step)  # the processes share each batch


IN_SEQUENCE = {
    "norm": SequenceParallel(sequence_dim=0),
    "mlp.0": ColwiseParallel(input_layouts=Shard(0)),
    "mlp.2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False),
}


class Parts(Model):
    """Each process has a part of the sequence between the blocks."""

    def forward(self, x):
        mesh = init_device_mesh("cpu", (2,))
        x = DTensor.from_local(self.embed(x), mesh, [Replicate()])
        x = x.redistribute(mesh, [Shard(0)])
        for block in self.blocks:
            x = self.call(block, x)
        return self.head(x.full_tensor())


def parts_called(wrap):
    return Parts([Block() for _ in range(BLOCKS)], lambda block, x: wrap(block)(x))


def parts_inside(wrap):
    branch = lambda self, x: wrap(self.mlp)(x)
    return Parts([Block(branch) for _ in range(BLOCKS)])


class Sum(torch.autograd.Function):
    """Adds up over the processes, in the forward or else in the backward."""

    @staticmethod
    def forward(ctx, x, forward):
        ctx.forward = forward
        return total_of(x) if forward else x.clone()

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent if ctx.forward else total_of(cotangent), None


def total_of(x):
    x = x.clone()
    dist.all_reduce(x)
    return x


def by_hand(wrap):
    """Each process has half of the features between two layers."""

    def branch(self, x):
        return Sum.apply(wrap(self.mlp)(Sum.apply(x, False)), True)

    return Model([Block(branch) for _ in range(BLOCKS)])


def by_hand_called(wrap):
    model = by_hand(as_it_is)
    model.call = lambda block, x: wrap(block)(x)
    return model


TENSOR = {
    **{
        style: (parallel(build, COLUMNS_AND_ROWS), whole_batch)
        for style, build in STYLES.items()
    },
    "sequence, called": (parallel(parts_called, IN_SEQUENCE), whole_batch),
    "sequence, inside": (parallel(parts_inside, IN_SEQUENCE), whole_batch),
    "by hand, called": (by_hand_called, whole_batch),
    "by hand, inside": (by_hand, whole_batch),
}


# --- Processes ---


def theirs(fn):
    return lambda *args: checkpoint(fn, *args, use_reentrant=False)


WRAPS = {"plain": as_it_is, "remat": remat, "checkpoint": theirs}


ARRANGEMENTS = {"FSDP2": FSDP, "DDP": DDP, "tensor parallel": TENSOR}


def train_all(kind: str, rank: int) -> dict[Any, Any]:
    """Train each arrangement in each way; of what fails, return where."""
    results: dict[Any, Any] = {}
    for name, (make, batch) in ARRANGEMENTS[kind].items():
        for way, wrap in WRAPS.items():
            torch.manual_seed(0)
            try:
                results[name, way] = train(make(wrap), rank, batch)
            except Exception:  # noqa: BLE001
                results[name, way] = traceback.format_exc()
            dist.barrier()
    return results


def work(rank: int, path: str, task: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(f"{path}/store", 2)
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timeout
    )
    try:
        torch.save(task(*args, rank), f"{path}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def in_two_processes(path: Any, task: Callable[..., Any], *args: Any) -> list[Any]:
    mp.spawn(work, args=(str(path), task, *args), nprocs=2)
    return [torch.load(path / f"{r}.pt", weights_only=False) for r in range(2)]


def collectives(ops):
    """How often the processes talked."""
    names = [name for name in ops if "c10d" in name and "wait" not in name]
    return sum(ops[name] for name in names)


def assert_as_plain(name, ways):
    for way, result in ways.items():
        if isinstance(result, str):
            pytest.fail(f"{way}: {result}", pytrace=False)
    (want, ops), (got, more), (_, of_checkpoint) = ways.values()
    assert_same(got, want)
    zero = [g for g in want["gradients"][-1] if torch.is_tensor(g) and g.numel()]
    assert any(g.any() for g in zero)
    # A linear layer is unused, and so is another in one process.
    assert sum(not g.any() for g in zero) <= 4 * BLOCKS * (name == "unused")
    sines, again = ops["sin"], more["sin"] - ops["sin"]
    assert again == sines > 0, f"{again} of {sines} sines run again"
    talked, allowed = collectives(more), collectives(of_checkpoint)
    assert talked <= allowed, f"{talked} collectives, {allowed} with the checkpoint"


def a_result(sines=2, talks=1, grad=1.0):
    grads = [[torch.tensor([grad])]]
    return {"gradients": grads}, Counter({"sin": sines, "c10d::allreduce_": talks})


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (a_result(sines=1), "0 of 1 sines run again"),
        (a_result(talks=2), "2 collectives, 1 with the checkpoint"),
        (a_result(grad=1.5), "differs in value"),
        ("Traceback", "remat: Traceback"),
    ],
)
def test_the_comparison_fails_on_what_is_wrong(ours, said):
    checkpoint = a_result()
    ways = {"plain": a_result(sines=1), "remat": a_result(), "checkpoint": checkpoint}
    assert_as_plain("right", ways)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=said):
        assert_as_plain("wrong", {**ways, "remat": ours})


# FSDP2 takes about half a minute.
KINDS = [pytest.param("FSDP2", marks=pytest.mark.slow), "DDP", "tensor parallel"]


@pytest.mark.parametrize("kind", KINDS)
def test_trainings_are_those_of_plain(kind, tmp_path, subtests):
    both = in_two_processes(tmp_path, train_all, kind)
    for name in ARRANGEMENTS[kind]:
        for rank, results in enumerate(both):
            with subtests.test(name, rank=rank):
                assert_as_plain(name, {way: results[name, way] for way in WRAPS})


# --- Functions of DTensors ---


def block(w, x):
    return torch.tanh(w @ torch.tanh(w @ x))


def redistributed(w, x):
    h = (w @ x).redistribute(placements=[Replicate()]).sin()
    return h.redistribute(placements=[Shard(0)]).tanh()


def dropped(w, x):
    return nn.functional.dropout(torch.tanh(w @ x), 0.5).tanh()


FUNCTIONS = {"block": block, "redistributed": redistributed, "dropped": dropped}
POLICIES = {
    "nothing": None,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
}
# What a backward runs of a block: products, and tanhs.
BACKWARD = {"plain": (4, 0), "nothing": (6, 2), "dots": (4, 2), "everything": (4, 0)}


def of_dtensors(rank):
    """The gradients of each function under each policy, and what runs for them."""
    mesh = init_device_mesh("cpu", (2,))
    w, x = torch.randn(2, 4, 4).unbind()
    found = {}
    for name, fn in FUNCTIONS.items():
        for policy in BACKWARD:
            wrap = as_it_is if policy == "plain" else remat(policy=POLICIES[policy])
            for captured in False, True:
                found[name, policy, captured] = three_calls(
                    fn, wrap, captured, distribute_tensor(w, mesh, [Shard(0)]), x
                )
    return found


def three_calls(fn, wrap, captured, w, x):
    """Call one remat object three times; count the last."""
    w = w.detach().requires_grad_()
    x = distribute_tensor(x, w.device_mesh, [Replicate()]).requires_grad_()
    ours = wrap((lambda x: fn(w, x)) if captured else fn)
    seen = []
    for number in range(3):
        torch.manual_seed(number)
        with count_ops() as forward:
            out = ours(x) if captured else ours(w, x)
            loss = out.sin().sum()
        with count_ops() as backward:
            grads = torch.autograd.grad(loss, [w, x])
        seen += [local(out), *map(local, grads)]
    return seen, [(ops["mm"], ops["tanh"]) for ops in (forward, backward)]


def test_functions_of_dtensors_follow_policies(tmp_path, subtests):
    for rank, found in enumerate(in_two_processes(tmp_path, of_dtensors)):
        for (name, policy, captured), (seen, (forward, backward)) in found.items():
            with subtests.test(name, policy=policy, captured=captured, rank=rank):
                want, (once, _) = found[name, "plain", captured]
                assert_same(seen, want)
                assert all(t.any() for t in want)
                assert forward == once
                if name == "block":
                    # A DTensor's operation is counted as that, and as the local one.
                    levels = once[0] // 2
                    expected = tuple(levels * n for n in BACKWARD[policy])
                    assert backward == expected
                elif policy != "everything":
                    assert (backward[1] > 0) == (policy != "plain")
