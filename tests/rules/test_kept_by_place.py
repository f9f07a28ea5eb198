"""Places of a policy with the value "save": the calls that they keep, and when not."""

import threading

import pytest
import torch
from support.kernels import Launch, launches, pointers
from support.ruled import ran, runs
from support.traced import Graphs
from support.zoo import X, leaves_of, make
from torch import nn
from torch.func import grad
from torch.fx.experimental.proxy_tensor import make_fx

import remat
from remat import chain, checkpoint_name, policies
from remat.policies import within
from remat.testing import assert_same, count_ops


class Inner(nn.Module):
    """A module of code that is no operation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(make(4, 4, seed=3))

    def forward(self, x):
        ran("fn")
        return checkpoint_name(x @ self.weight, "inner").sin()


class Other(Inner):
    """The same with a state."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Block(nn.Module):
    def __init__(self, kind=Inner):
        super().__init__()
        self.attn, self.mlp = kind(), nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.double()

    def forward(self, x):
        return x + self.mlp(self.attn(x.exp()).cos())


def gradients(fn, block):
    """Of the input and the parameters; how often `Inner` was entered."""
    block.zero_grad()
    (x,) = leaves_of(X)
    runs()
    fn(x).sum().backward()
    return [x.grad, *(p.grad for p in block.parameters())], runs().get("fn", 0)


def entered(block, policy, transform=remat.remat):
    """How often `Inner` is entered in each of three steps; they are those of plain."""
    want, _ = gradients(block, block)
    fn, counts = transform(block, policy=policy), []
    for _ in range(3):
        found, count = gradients(fn, block)
        assert_same(found, want)
        counts.append(count)
    return counts


KEPT = {
    "a path": {"attn": "save"},
    "a star": {"at*": "save"},
    "a class": {Inner: "save"},
    "a decision": {"attn": policies.Decision.SAVE},
    "some more": {"attn": "save", "mlp.0": "save", None: "dots_saveable"},
    "another place": {"attn": "save", "mlp": "recompute", "aten.cos": "recompute"},
    "joined": policies.dots_saveable | {"attn": "save"},
    "a budget": within(10**6) | {"attn": "save"},
}
NOT_KEPT = {
    "recompute": {"attn": "recompute", "mlp": "save"},
    "offload": {"attn": "offload"},
    "what is in it": {"attn": "save", "inner": "recompute"},
    "an operator": {"aten.mm": "save"},
    "without it": policies.everything_saveable - policies.as_policy({"attn": "save"}),
}


@pytest.mark.parametrize("case", KEPT)
def test_a_saved_module_is_not_entered_again(case):
    assert entered(Block(), KEPT[case]) == [1, 1, 1]


@pytest.mark.parametrize("case", NOT_KEPT)
def test_what_may_be_recomputed_is_entered_again(case):
    assert entered(Block(), NOT_KEPT[case]) == [2, 2, 2]


# As torch defines it: what answers calls from the first such policy on is not there.
PLAIN_CALL = nn.Module._wrapped_call_impl


def test_a_first_call_within_a_trace_does_not_end_with_it(monkeypatch):
    monkeypatch.setattr(nn.Module, "__call__", PLAIN_CALL)
    fn = remat.remat(Block(), policy={"attn": "save"})
    make_fx(lambda x: grad(lambda x: fn(x).sum())(x))(X.clone())
    assert nn.Module.__call__ is PLAIN_CALL  # the trace put back what it found
    assert entered(Block(), {"attn": "save"}) == [1, 1, 1]


def test_what_it_saved_stays():
    block = Block()
    fn = remat.remat(block, policy={"attn": "save"})
    for _ in range(2):
        with count_ops() as ops:
            gradients(fn, block)
        assert ops["sin"] == 2  # and that of the cosine's backward
        assert ops["mm"] == 3 + 2


def kernels(x):
    return Launch.apply(x * 2, pointers).cos()


@pytest.mark.parametrize("options", [{}, {"higher_order": True}, {"prune": True}])
def test_the_kernels_of_a_saved_function_are_launched_once(options):
    want, _ = gradients(kernels, nn.Module())
    fn = remat.remat(kernels, policy={Launch: "save"}, **options)
    found = []
    for _ in range(3):
        run = lambda: found.append(gradients(fn, nn.Module())[0])
        assert launches(run) == 2  # one of them in its own backward
        assert_same(found.pop(), want)
    again = remat.remat(kernels, policy={Launch: "recompute", None: "save"}, **options)
    assert launches(lambda: gradients(again, nn.Module())) >= 3


def test_a_module_that_changes_something_is_saved_by_its_operations():
    block = Block(Other)
    counts = entered(block, {"attn": "save"})
    assert counts == [2, 2, 2]
    assert block.attn.calls == 1 + 3
    fn = remat.remat(block, policy={"attn": "save"})
    with count_ops() as ops:
        gradients(fn, block)
    assert ops["mm"] == 3 + 2


@pytest.mark.parametrize("options", [{}, {"higher_order": True}, {"prune": True}])
def test_a_module_with_hooks_on_its_gradients(options):
    """The Function that torch puts around its inputs is not kept: it is looked for."""
    block, seen = Block(), []
    block.attn.register_full_backward_hook(lambda _, grads, __: seen.extend(grads))
    want, _ = gradients(block, block)
    fn = remat.remat(block, policy={"attn": "save"}, **options)
    for _ in range(3):
        with count_ops() as ops:
            found, _ = gradients(fn, block)
        assert ops["mm"] == 3 + 2
        assert_same(found, want)
    assert len(seen) == 4
    assert_same(seen[1:], seen[:1] * 3)


def nested(block, policy):
    inner = remat.remat(block, policy={"mlp": "recompute"})
    return remat.remat(lambda x: inner(x), policy=policy)


def in_a_chain(block, policy):
    return lambda x: chain.sequential([block], x, policy=policy)


def checkpointed(block, policy):
    return lambda x: remat.compat.checkpoint(block, x, policy=policy)


def applied(block, policy):
    return remat.nn.apply(nn.Sequential(block), {"0": policy})


WAYS = {
    "nested": (nested, 1),
    "checkpoint": (checkpointed, 1),
    "apply": (applied, 1),
    # The node of a chain is a Function: the operations are saved.
    "chain": (in_a_chain, 2),
}


@pytest.mark.parametrize("way", WAYS)
def test_wherever_a_policy_is_accepted(way):
    transform, count = WAYS[way]
    assert entered(Block(), {"attn": "save"}, transform) == [count] * 3


def test_a_rematerialized_call_in_a_kept_one_saves_all():
    inner = remat.nn.apply(nn.Sequential(Block()), {"0.attn": None})
    fn = remat.remat(inner, policy={"0.attn": "save"})
    for _ in range(3):
        with count_ops() as ops:
            gradients(fn, inner)
        assert ops["mm"] == 3 + 2


def test_under_torch_func_its_operations_are_saved():
    block = Block()
    fn = remat.remat(block, policy={"attn": "save"})
    for _ in range(2):
        with count_ops() as ops:
            found = grad(lambda x: fn(x).sum())(X)
        with count_ops() as plain:
            want = grad(lambda x: block(x).sum())(X)
        assert (ops["mm"], ops["addmm"]) == (plain["mm"], plain["addmm"] + 1)
        assert_same(found, want)


@pytest.mark.parametrize("policy", [{"attn": "save"}, {Inner: "save"}, None])
def test_a_scope_saves_its_operations_and_enters_nothing_again(policy):
    def in_scope(x):
        with remat.scope(policy):
            return block(x)

    block = Block()
    want, _ = gradients(block, block)
    for _ in range(2):
        with count_ops() as ops:
            found, count = gradients(in_scope, block)
        assert count == 1
        assert ops["mm"] == 3 + 2 + (policy is None)
        assert_same(found, want)


def test_compiled_code_saves_its_operations():
    block = Block(nn.Identity)
    block.attn = nn.Linear(4, 4).double()
    want, _ = gradients(block, block)
    fn = remat.remat(block, policy={"attn": "save"})
    gradients(fn, block)
    torch._dynamo.reset()
    for each, more in ((fn, 1), (block, 0)):
        graphs = Graphs()
        compiled = torch.compile(each, backend=graphs, fullgraph=True)
        assert_same(gradients(compiled, block)[0], want)
        assert (graphs.forward + graphs.backward)["addmm"] == 2 + more


def test_other_threads_and_other_calls_see_nothing_of_it():
    block, counts = Block(), []
    remat.remat(block, policy={"attn": "save"})(X.clone())

    def run():
        counts.append(entered(block, None))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert counts == [[2, 2, 2]]
