"""Chains under every transform: plain's values, and steps that run again."""

import pytest
import torch
from support.chains import FORWARD, LENGTH, REVERSE, XS, H, W, loss_of
from support.loops import Plain
from support.tables import rows
from support.traced import ran

from remat import chain
from remat.chain import schedules
from remat.testing import assert_same, count_ops


CHECKPOINTS = {
    "sqrt": None,
    "3": 3,
    "all": "all",
    "disk": schedules.Multilevel(memory=2, disk=2),
}
# At the base each step is reversed alone, in plain's order. So sums are plain's bits.
EXACT = "backward", "autograd.grad", "retain_graph", "grad", "grad of the weight alone"


def counted(transform, loss):
    with count_ops() as ops:
        found = transform(loss)
    return found, ops["tanh"]


@rows("name", {name: name for name in REVERSE})
@rows("checkpoints", CHECKPOINTS)
def test_derivatives_are_plains_and_steps_run_again(name, checkpoints):
    want, plain = counted(REVERSE[name], loss_of(Plain.scan))
    loss = loss_of(chain.scan, checkpoints=checkpoints)
    got, ours = counted(REVERSE[name], loss)
    is_exact = name in EXACT and checkpoints is not None
    assert_same(got, want, reassociated=not is_exact)
    assert ours >= plain + LENGTH


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@rows("name", {name: name for name in FORWARD})
def test_forward_derivatives_are_plains(name):
    transform = FORWARD[name]
    got, _ = counted(transform, loss_of(chain.scan, checkpoints=3))
    assert_same(got, transform(loss_of(Plain.scan)), reassociated=True)


@rows("reverse", {"reverse": True, "forward": False})
@rows("checkpoints", CHECKPOINTS)
def test_a_scan_may_begin_at_the_end(reverse, checkpoints):
    transform = REVERSE["autograd.grad"]
    want = transform(loss_of(Plain.scan, reverse=reverse))
    loss = loss_of(chain.scan, reverse=reverse, checkpoints=checkpoints)
    got, tanhs = counted(transform, loss)
    assert_same(got, want, reassociated=checkpoints is None)
    assert tanhs >= 2 * LENGTH


@pytest.mark.parametrize("length", [1, 2, 3, 7])
@pytest.mark.parametrize("unroll", [1, 2, 5])
@pytest.mark.parametrize("checkpoints", [1, 2, "all"])
def test_units_of_several_steps(length, unroll, checkpoints):
    options = {"checkpoints": checkpoints, "unroll": unroll}
    inputs = W, H, XS[:length]
    want = torch.func.grad(loss_of(Plain.scan), (0, 1, 2))(*inputs)
    gradient = torch.func.grad(loss_of(chain.scan, **options), (0, 1, 2))
    got, tanhs = counted(lambda g: g(*inputs), gradient)
    assert_same(got, want, reassociated=True)
    kind = schedules.EveryStep if checkpoints == "all" else schedules.Binomial
    rest = () if checkpoints == "all" else (checkpoints,)
    assert tanhs == sum(kind(*rest, unroll=unroll).evaluations(length))


def gradient_of(loss):
    return torch.func.grad(loss, (0, 1, 2))(W, H, XS)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_scan_is_compiled(backend):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda w, h, xs: torch.func.grad(loss_of(chain.scan), (0, 1, 2))(w, h, xs),
        backend=backend,
        fullgraph=True,
    )
    compiled(W, H, XS)
    got, ops = ran(lambda: compiled(W, H, XS))
    assert_same(got, gradient_of(loss_of(Plain.scan)), reassociated=True)
    assert ops["tanh"] >= 2 * LENGTH
    torch._dynamo.reset()
