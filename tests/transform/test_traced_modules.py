"""Modules in compiled code: wrapped in every way, and called in every way."""

import pytest
import torch
from support.tables import rows
from support.traced import Transform, assert_traced, points, ran
from support.zoo import Calling
from torch import nn
from torch.func import functional_call, grad, vmap

import remat as package
from remat import compat, remat


SIZE = 8


class Block(nn.Module):
    """Its derivative reads what both tanh return."""

    def __init__(self, norm=None, dropout=0.0):
        super().__init__()
        self.first = nn.Linear(SIZE, SIZE, dtype=torch.double)
        self.norm = norm or nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(SIZE, SIZE, dtype=torch.double)

    def forward(self, x):
        return self.body(x)

    def body(self, x):
        x = torch.tanh(self.drop(self.norm(self.first(x))))
        return torch.tanh(self.last(x))


def is_plain(wrap):
    return wrap is not remat


def wrapped(wrap, block):
    return wrap(block)


def inside(wrap, block):
    return Calling(block, lambda block, x: wrap(block)(x))


def method(wrap, block):
    return Calling(block, lambda block, x: wrap(block.body)(x))


def forward_outside(wrap, block):
    """`block.forward = remat(block.forward)`."""
    block.forward = wrap(block.forward)
    return block


def attribute(wrap, block):
    """The wrapped module is a submodule."""
    return nn.Sequential(wrap(block))


def decorated(wrap, block):
    block.__class__ = type("Decorated", (Block,), {"forward": wrap(Block.forward)})
    return block


def decorated_method(wrap, block):
    block.__class__ = type("Decorated", (Block,), {"body": wrap(Block.body)})
    return block


def applied(wrap, block):
    """By `remat.nn.apply`."""
    parent = nn.Sequential(block)
    if not is_plain(wrap):
        package.nn.apply(parent, select=Block)
    return parent


def checkpointed(wrap, block):
    """By torch's own name for it."""
    if is_plain(wrap):
        return block
    return Calling(block, lambda block, x: compat.checkpoint(block, x))


def closed_over(wrap, block):
    return Calling(block, lambda block, x: wrap(lambda x: block(x))(x))


STYLES = {
    fn.__name__: fn
    for fn in (
        *(wrapped, inside, method, forward_outside, attribute, decorated),
        *(decorated_method, applied, checkpointed, closed_over),
    )
}


def program_of(style, **options):
    """A program of a module, which is the same one each time that it is made."""

    def program(wrap):
        torch.manual_seed(3)
        block = Block(**options)
        module = style(wrap, block)
        loss = lambda *args: module(*args).square().sum()
        loss.module, loss.block = module, block
        return loss

    return program


def run_backward(compiled, block):
    """Derivatives by the input and by the parameters, and what buffers hold."""
    block.zero_grad()
    x = points(4, SIZE, seed=1).requires_grad_()
    value = compiled(x)
    value.backward()
    gradients = [p.grad.clone() for p in block.parameters()]
    return value.detach(), x.grad, gradients, [b.clone() for b in block.buffers()]


# --- By .backward() ---


def assert_module_traced(program, backend, **options):
    blocks = []

    def of(loss):
        blocks.append(loss.block)
        return lambda x: loss(x)

    kind = Transform(of, lambda compiled: run_backward(compiled, blocks[-1]))
    assert_traced(program, kind, backend, **options)


@rows("style", STYLES, fast=["decorated_method"])
def test_a_module_is_recomputed(style):
    assert_module_traced(program_of(style), "aot_eager")


@pytest.mark.slow
@rows("style", STYLES)
@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.filterwarnings("default")  # inductor warns of slow numerics
def test_a_module_is_recomputed_by_other_backends(style, backend):
    """Inductor fuses tanh into its kernels, and leaves products as they are."""
    if backend == "eager":
        assert_module_traced(program_of(style), backend)
        return
    assert_module_traced(program_of(style), backend, read="addmm", reassociated=True)


def norm():
    return nn.BatchNorm1d(SIZE, dtype=torch.double)


@rows("backend", {k: k for k in ("eager", "aot_eager")}, fast=["aot_eager"])
@rows(
    "style",
    {k: STYLES[k] for k in ("wrapped", "inside", "method", "decorated")},
    fast=["wrapped", "method"],
)
def test_batch_norm_is_updated_once(style, backend):
    assert_module_traced(lambda wrap: program_of(style, norm=norm())(wrap), backend)


def test_weights_may_change_between_calls():
    """A step of an optimizer; the graph reads the parameters that there are."""
    losses = {}
    for wrap in (lambda fn: fn, remat):
        torch._dynamo.reset()
        torch.manual_seed(3)
        block = Block()
        optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
        compiled = torch.compile(wrap(block), backend="aot_eager", fullgraph=True)
        for step in range(3):
            optimizer.zero_grad()
            loss = compiled(points(4, SIZE, seed=step)).square().sum()
            loss.backward()
            optimizer.step()
            losses.setdefault(wrap is remat, []).append(loss.item())
        _, ops = ran(lambda: compiled(points(4, SIZE)).sum().backward())  # noqa: B023
        assert ops["tanh"] == (4 if wrap is remat else 2)
    assert losses[True] == losses[False]
    assert len({*losses[True]}) == 3


# --- By functional_call ---


def by_functional_call(loss, batched):
    parameters = {k: p.detach() for k, p in loss.module.named_parameters()}

    def of_parameters(parameters, x):
        return functional_call(loss.module, parameters, (x,)).square().sum()

    transformed = grad(of_parameters)
    if batched:
        transformed = vmap(transformed, (None, 0))
    return lambda x: transformed(parameters, x)


FUNCTIONAL = ("inside", "method", "decorated", "decorated_method", "applied", "wrapped")


@rows("batched", {"one": False, "batch": True}, fast=["one"])
@rows("style", {k: STYLES[k] for k in FUNCTIONAL}, fast=["applied"])
def test_a_functional_call_is_recomputed(style, batched):
    shape = (3, 4, SIZE) if batched else (4, SIZE)
    kind = Transform(
        lambda loss: by_functional_call(loss, batched),
        lambda compiled: [*compiled(points(*shape, seed=1)).values()],
    )
    assert_traced(program_of(style), kind, "aot_eager")
