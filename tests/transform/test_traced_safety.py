"""Where compiled code is easily wrong without an error.

What is kept may change, what is changed may lose a gradient, and a rule that is missing
may give zero. Each test is of one such number that was met.
"""

import pytest
import torch
from support.tables import rows
from support.traced import (
    TRANSFORMS,
    Graphs,
    W,
    X,
    assert_traced,
    begins_again,
    compiling,
    differentiated,
    operations,
    ran,
)
from support.zoo import leaves_of, plainly
from torch._subclasses import FakeTensorMode
from torch.func import grad, jvp
from torch.fx.experimental.proxy_tensor import make_fx

from remat import OffloadError, policies, random, remat
from remat._partial.tape import TapedOperation
from remat.policies import Decision
from remat.testing import assert_same, count_ops


BOTH = {k: TRANSFORMS[k] for k in ("backward", "grad")}
KEEPING = {
    "dots": policies.dots_saveable,
    "everything": policies.everything_saveable,
    "nothing": policies.nothing_saveable,
}


# --- What is kept, and changed in place later ---


def changed_by_itself(w, x):
    """The product is kept, and then doubled."""
    y = x @ w
    z = torch.tanh(y + 1)
    y.mul_(2)
    return torch.tanh(z * y)


def changed_through_a_view(w, x):
    y = x @ w
    z = torch.tanh(y + 1)
    y[1:].t()[2].mul_(3)
    return torch.tanh(z * y)


def changed_by_the_caller(w, x):
    y = x @ w
    return y, torch.tanh(y + 1)


def view_changed_by_the_caller(w, x):
    y = x @ w
    return y[1:], torch.tanh(y + 1)


def doubled(y, z):
    y.mul_(2)
    return y * z[-len(y) :]


def as_it_is(out):
    return out


# What is wrapped, and what is made of its results.
CHANGES = {
    changed_by_itself: as_it_is,
    changed_through_a_view: as_it_is,
    changed_by_the_caller: lambda out: doubled(*out),
    view_changed_by_the_caller: lambda out: doubled(*out),
}


@rows("transform", BOTH, fast=["backward"])
@rows("policy", KEEPING, fast=["everything"])
@pytest.mark.parametrize("fn", CHANGES)
@pytest.mark.one_in(2)
def test_what_is_kept_may_be_changed_later(fn, policy, transform):
    def run(wrap):
        call, use = wrap(fn), CHANGES[fn]
        loss = lambda w, x: use(call(w, x)).square().sum()
        return differentiated(loss, transform, "aot_eager")

    want, once = run(plainly)
    got, ops = run(lambda fn: remat(fn, policy=policy))
    assert_same(got, want)
    assert begins_again(ops)
    assert (ops["tanh"] > once["tanh"]) == (policy is not KEEPING["everything"])
    assert ops["mm"] >= once["mm"]


# --- Inputs that are changed in place ---


def running_sum(wrap):
    """What is added up is a constant."""

    def fn(w, x, total):
        y = torch.tanh(x @ w)
        total.add_(y.detach().sum(0))
        return y * total.sum()

    fn = wrap(fn)

    def loss(w, x):
        total = torch.zeros(8, dtype=torch.double)
        return fn(w, x, total).square().sum() + total.sum()

    return loss


def differentiable_sum(wrap):
    """What is added up has a gradient, which must not be lost."""

    def fn(w, x, total):
        y = torch.tanh(x @ w)
        total.add_(y.sum(0))
        return torch.tanh(y * total.sum())

    fn = wrap(fn)

    def loss(w, x):
        total = x.new_zeros(8)
        return fn(w, x, total).square().sum() + total.square().sum()

    return loss


def overwritten(wrap):
    """The old value of what is overwritten has a gradient as well."""

    def fn(w, y):
        z = torch.tanh((y * 1) @ w)
        y.copy_(z * 2)
        return z

    fn = wrap(fn)

    def loss(w, x):
        y = x * 1.0
        return fn(w, y).square().sum() + y.square().sum()

    return loss


MUTATIONS = {fn.__name__: fn for fn in (running_sum, differentiable_sum, overwritten)}


@rows("backend", {k: k for k in ("eager", "aot_eager")}, fast=["aot_eager"])
@rows("program", MUTATIONS)
@pytest.mark.one_in(3)
def test_an_input_may_be_changed_in_place(program, backend):
    assert_traced(program, TRANSFORMS["backward"], backend)


# --- Derivatives of custom Functions, and of the barrier ---


class Tripled(torch.autograd.Function):
    """Its forward doubles, and its backward triples: what a wrong derivative gives."""

    @staticmethod
    def forward(x):
        return x * 2

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, cotangent):
        return cotangent * 3


def tripled(w, x):
    return torch.tanh(Tripled.apply(w) * x.sum()).sum()


# Of Dynamo, about how it calls them itself.
functions = pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)


@functions
@pytest.mark.parametrize("wrap", [plainly, remat], ids=["plain", "remat"])
def test_a_custom_function_is_right_by_backward(wrap):
    w, x = leaves_of(W, X)
    with compiling():
        compiled = torch.compile(wrap(tripled), backend="aot_eager", fullgraph=True)
        _, ops = ran(compiled(w, x).backward)
    assert ops["tanh"] == (1 if wrap is remat else 0)
    got = w.grad
    w, _ = leaves_of(W, X)
    tripled(w, X).backward()
    assert_same(got, w.grad)


def test_nodes_of_ours_are_right_under_two_levels_of_forward_mode():
    """The barrier's and the dropout's rules of forward mode are linear."""
    key = random.key(3)
    fn = lambda w, x: torch.tanh(random.dropout(key, torch.tanh(x @ w), 0.5) @ w)

    def twice(fn):
        def along(w):
            first = grad(lambda w: fn(w, X).square().sum())
            return jvp(first, (w,), (w.cos(),))[1]

        return lambda w: jvp(along, (w,), (w.sin(),))

    with count_ops() as ops:
        want = twice(fn)(W)
    assert all(t.any() for t in want)
    with count_ops() as again:
        got = twice(remat(fn))(W)
    assert again["tanh"] == 2 * ops["tanh"]
    assert_same(got, want, reassociated=True)
    graph = make_fx(twice(remat(fn)))(W)
    assert begins_again(operations(graph))
    assert_same(graph(W), want, reassociated=True)


# --- Policies ---


def layers(w, x):
    return torch.tanh(torch.tanh(x @ w) @ w)


def loss_under(policy):
    fn = remat(layers, policy=policy)
    return lambda w, x: fn(w, x).sum()


def test_offloading_to_disk_is_refused():
    message = r"a policy of .* offloads to disk.*Offload to 'pinned_host' there"
    with pytest.raises(OffloadError, match=message):
        make_fx(grad(loss_under(lambda op: Decision.OFFLOAD_TO_DISK)))(W, X)


def test_what_is_offloaded_is_on_the_host_until_it_is_given_back():
    entry = TapedOperation(torch.ops.aten.mm.default)
    with FakeTensorMode():
        entry.keep(torch.empty(4, 4, device="cuda"), Decision.OFFLOAD, "f")
        assert entry.results.device.type == "cpu"
        assert entry.result().device.type == "cuda"


@pytest.mark.gpu
def test_a_graph_moves_to_the_host_and_back():
    policy = policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    w, x = (torch.ones(8, 8, device="cuda") for _ in range(2))
    graph = make_fx(grad(loss_under(policy)))(w, x)
    graph.graph.eliminate_dead_code()
    copy = torch.ops.aten._to_copy.default
    moves = graph.graph.find_nodes(op="call_function", target=copy)
    devices = [node.kwargs["device"].type for node in moves]
    assert sorted(devices) == ["cpu", "cpu", "cuda", "cuda"]
    assert operations(graph)["mm"] == 5  # none again


@pytest.mark.parametrize("transform", ["backward", "grad"])
def test_what_policies_keep_passes_the_barrier(transform):
    """Else the recompute around it is merged with the forward, and all is held."""
    graphs = Graphs()
    kind = TRANSFORMS[transform]
    with compiling():
        loss = loss_under(policies.dots_saveable)
        kind.call(torch.compile(kind.of(loss), backend=graphs, fullgraph=True))
    held = graphs.forward + graphs.backward
    assert held["remat::barrier"] == 3  # `x`, and both products
    assert held["tanh"] == 4
