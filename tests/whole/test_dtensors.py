"""Functions of DTensors in two processes follow policies."""

import warnings

import pytest
import torch
from support.processes import in_two_processes, local, needs_gloo
from support.tables import rows
from support.zoo import plainly
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from remat import (
    BudgetError,
    fit as remat_fit,
    policies,
    random,
    remat,
    saved_residuals,
)
from remat.nn import remove as nn_remove
from remat.testing import assert_same, count_ops


pytestmark = needs_gloo


def block(w, x):
    return torch.tanh(w @ torch.tanh(w @ x))


def redistributed(w, x):
    h = (w @ x).redistribute(placements=[Replicate()]).sin()
    return h.redistribute(placements=[Shard(0)]).tanh()


def dropped(w, x):
    return nn.functional.dropout(torch.tanh(w @ x), 0.5).tanh()


def keyed(w, x):
    return random.dropout(random.key(0), torch.tanh(w @ x), 0.5).tanh()


FUNCTIONS = {
    "block": block,
    "redistributed": redistributed,
    "dropped": dropped,
    "keyed": keyed,
}

POLICIES = {
    "nothing": None,
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
    "dots, on disk": policies.dots_saveable.but_offload(to="disk"),
    "dots, on the host": policies.dots_saveable.but_offload(),
}

# What a backward runs of a block: products, and tanhs.
BACKWARD = {
    "plain": (4, 0),
    "nothing": (6, 2),
    "everything": (4, 0),
    **dict.fromkeys(("dots", "dots, on disk", "dots, on the host"), (4, 2)),
}


def of_dtensors(others, rank):
    """The gradients of each function under each policy, and what runs for them."""
    mesh = init_device_mesh("cpu", (2,))
    w, x = torch.randn(4, 4), torch.randn(4, 4)
    found = {}
    for name, fn in FUNCTIONS.items():
        for policy in BACKWARD if name == "block" else others:
            wrap = plainly if policy == "plain" else remat(policy=POLICIES[policy])
            for captured in False, True:
                found[name, policy, captured] = three_calls(
                    fn, wrap, captured, distribute_tensor(w, mesh, [Shard(0)]), x
                )
    where = (
        distribute_tensor(w, mesh, [Shard(0)]),
        distribute_tensor(x, mesh, [Replicate()]),
    )
    kept = {
        policy: saved_residuals(remat(block, policy=POLICIES[policy]), *where)
        for policy in POLICIES
    }
    return found, {name: [(r.place, r.nbytes) for r in kept[name]] for name in kept}


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


# The policies of functions of which no products are counted.
OTHERS = {"some": ("plain", "dots, on disk"), "all": tuple(BACKWARD)}


@rows("others", OTHERS, fast=("some",))
def test_functions_of_dtensors_follow_policies(others, tmp_path, subtests):
    results = in_two_processes(tmp_path, of_dtensors, others)
    for rank, (found, kept) in enumerate(results):
        inputs = [("", 2 * 4 * 4), ("", 4 * 4 * 4)]
        assert kept["nothing"] == inputs
        assert kept["dots"] == [*inputs, *[("", 2 * 4 * 4)] * 2]  # of each its half
        assert kept["dots, on disk"] == [*inputs, *[("disk", 2 * 4 * 4)] * 2]
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


def of_a_plan(rank):
    """A model that follows a plan, and whose weights are sharded then."""
    del rank
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 16), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(16, 4, bias=False))
    for block in blocks[1:]:
        block[0] = nn.Linear(16, 16)
    x = torch.randn(64, 4)
    try:
        remat_fit(model, x, budget=1)
    except BudgetError as error:
        plan = remat_fit(model, x, budget=error.least)
    plan.apply(model)
    mesh = init_device_mesh("cpu", (2,))
    for module in model.modules():
        for name, parameter in [*module.named_parameters(recurse=False)]:
            sharded = distribute_tensor(parameter.detach(), mesh, [Replicate()])
            setattr(module, name, nn.Parameter(sharded))
    x = distribute_tensor(x, mesh, [Replicate()])
    with count_ops() as ops, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model(x).square().mean().backward()
    grads = [local(p.grad) for p in model.parameters()]
    nn_remove(model)
    model.zero_grad()
    model(x).square().mean().backward()
    plain = [local(p.grad) for p in model.parameters()]
    says = [str(each.message) for each in told]
    return grads, plain, ops["tanh"], plan.blocks, says


@pytest.mark.slow
def test_a_model_of_dtensors_follows_the_blocks_of_a_plan(tmp_path):
    for grads, plain, tanhs, blocks, says in in_two_processes(tmp_path, of_a_plan):
        assert_same(grads, plain)
        assert tanhs == 3 + len(blocks) > 3
        assert any("with sharded parameters" in each for each in says)
