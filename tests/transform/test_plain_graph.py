"""Base autograd keeps its own graph: what works in plain code works in a call.

The programs are those of `support.runs`.
"""

import copy

import pytest
import torch
from support.as_plain import Router, grads, leaf
from support.runs import assert_replayed
from support.tables import rows
from support.zoo import make, ops_of, plainly
from torch import nn
from torch.autograd import Function, grad
from torch.nn.utils import parametrizations, parametrize
from torch.utils._pytree import tree_leaves

from remat import MutationError, policies, remat
from remat.testing import assert_same, count_ops


# --- The graph ---


def test_the_graph_is_that_of_plain():
    fn = lambda w, x: (x @ w).tanh().sum(0)

    def nodes(out):
        found = [out.grad_fn]
        for node in found:
            found += [p for p, _ in node.next_functions if p is not None]
        return [node.name() for node in found]

    w, x = leaf(1), leaf(2).sin()
    assert nodes(remat(fn)(w, x)) == nodes(fn(w, x))
    assert ops_of(lambda: remat(fn)(w, x).sum().backward())["mm"] == 1 + 1 + 2


def test_the_results_in_a_tree_have_the_graph_of_plain():
    fn = lambda x: {"a": [x.sin(), (x.exp(),)], "n": 3}
    for wrap in (plainly, remat):
        out = tree_leaves(wrap(fn)(leaf()))
        names = [t.grad_fn.name() for t in out if isinstance(t, torch.Tensor)]
        assert names == ["SinBackward0", "ExpBackward0"]


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_the_recompute_stops_at_the_last_tensor_that_is_read(policy):
    fn = lambda w: (w.sin().exp() * 2 + 1).sum() * 3
    ops = ops_of(lambda: remat(fn, policy=policy, prune=False)(leaf()).backward())
    # `exp` saves its result. Nothing after it is run again.
    assert (ops["sin"], ops["exp"], ops["add"], ops["sum"]) == (2, 2, 1, 1)


def test_a_backward_of_a_part_recomputes_up_to_what_it_reads():
    """Handles of nodes that are gone need no value."""

    def fn(w):
        a = w.sin().exp()
        return a, a.tanh().cos().sum()

    w = leaf()
    a, b = remat(fn)(w)
    del b
    ops = ops_of(lambda: a.sum().backward())
    # The cosine is that of the derivative.
    assert (ops["exp"], ops["tanh"], ops["cos"]) == (1, 0, 1)
    assert torch.equal(w.grad, w.cos() * w.sin().exp())


# --- Functions of a leaf ---


class Doubled(Function):
    """Saves an input, a result and a tensor of its own, in the old style."""

    @staticmethod
    def forward(ctx, x):
        y, other = x.exp(), x.cos()
        ctx.save_for_backward(x, y)
        ctx.other = other
        return y

    @staticmethod
    def backward(ctx, cotangent):
        x, y = ctx.saved_tensors
        return cotangent * y * x * ctx.other


class Result:
    """No pytree node: it is returned as it is."""

    def __init__(self, logits):
        self.logits = logits


def three_derivatives(x):
    a = grad(x.sin().exp().sum(), x, create_graph=True)[0]
    b = torch.func.grad(lambda x: x.cos().exp().sum())(x)
    made = torch.ones(4).double().requires_grad_()
    (made.sin() ** 2).sum().backward()
    return (a * b).tanh() + made.grad


def with_a_leaf_of_its_own(x):
    made = torch.ones(4).double().requires_grad_()
    return (x * made).sin().exp(), made


def with_cond(x):
    branches = (lambda x: x.sin(), lambda x: x.cos())
    return torch.cond(x.sum() > 0, *branches, (x.exp(),)).tanh()


COMPILED = torch.compile(lambda x: x.sin().exp(), backend="aot_eager")

# Function, evaluations.
FUNCTIONS = {
    "only_inputs_saved": (lambda x: x @ x, 1),
    # Each derivative that autograd takes inside the forward runs the function, too.
    "derivatives": (three_derivatives, 4),
    "custom_function": (lambda x: Doubled.apply(x.sin()).tanh(), 2),
    "opaque_result": (lambda x: Result(x.sin().exp()), 2),
    "leaf_made_inside": (with_a_leaf_of_its_own, 2),
    "cond": (with_cond, 2),
    "compiled": (lambda x: COMPILED(x).tanh(), 2),
}


@pytest.fixture
def _no_compiled_code():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_no_compiled_code")
@rows("fn, evaluations", FUNCTIONS)
def test_a_function_of_a_leaf(fn, evaluations):
    def program(wrap):
        x = leaf()
        out = wrap(fn)(x)
        first, *others = out if isinstance(out, tuple) else (out,)
        if isinstance(first, Result):
            first = first.logits
        first.sum().backward()
        return x.grad, first.detach(), *grads(*others)

    assert_replayed(program, evaluations=(1, evaluations))


# --- What is kept, and what is changed ---


def test_attention_that_is_kept_for_plotting_stays_that_of_the_last_forward():
    model = Router().double()
    y = remat(model)(make(3, 4, seed=2))
    kept = model.weights
    y.sum().backward()
    assert model.weights is kept
    ops = ops_of(lambda: remat(model)(make(3, 4, seed=3)).sum().backward())
    assert ops["addmm"] == 2
    assert model.weights is not kept


def test_a_result_that_the_backward_reads_may_be_changed():
    def changed(wrap):
        y = wrap(lambda x: x.sin().exp())(leaf())
        return y.mul_(2).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace"):
        changed(plainly).backward()
    # With a handle, the value is not that of `y`: it is computed again.
    y = changed(remat)
    assert ops_of(y.backward)["exp"] == 1


# --- Modules ---


def test_a_lazy_module_runs_as_it_is_until_it_ran():
    module = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.Linear(3, 3))
    for again in (0, 1):
        x = torch.linspace(0.1, 1.0, 3).requires_grad_()
        with count_ops() as ops:
            remat(module)(x).sum().backward()
        assert ops["tanh"] == 1 + again
        assert_same(x.grad, torch.autograd.grad(module(x).sum(), x)[0])


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_statistics_of_many_features_are_updated_once(policy):
    norms = [nn.BatchNorm1d(2**14 + 1, affine=False).double() for _ in range(2)]
    for norm, wrap in zip(norms, (plainly, remat), strict=True):
        options = {"policy": policy} if wrap is remat else {}
        kept = [norm.running_mean]  # found first, and as something else

        def called(x, norm=norm, kept=kept):
            return norm(x.sin()).tanh() + 0 * kept[0].detach()

        fn = wrap(called, **options)
        x = leaf(shape=(3, 2**14 + 1))
        with count_ops() as ops:
            fn(x).square().sum().backward()
        assert ops["native_batch_norm"] == (1 if wrap is plainly else 2)
        assert x.grad.any()
    assert_same(*([*norm.buffers()] for norm in norms))


def test_the_first_update_of_large_statistics_is_refused_and_the_next_is_right():
    """After calls that left them alone, which do not copy them."""
    norm = nn.BatchNorm1d(2**14 + 1).double()
    recomputed, x = remat(norm), leaf(shape=(3, 2**14 + 1))
    norm.eval()
    recomputed(x).sum().backward()
    norm.train()
    again = "Or call again: from now on each call copies `self.running_mean` before"
    with pytest.raises(MutationError, match=again):
        recomputed(x)
    plain = copy.deepcopy(norm)
    with count_ops() as ops:
        recomputed(x).square().sum().backward()
    assert ops["native_batch_norm"] == 2
    plain(x)
    assert_same([*norm.buffers()], [*plain.buffers()])


def test_parametrizations_are_computed_in_a_recomputation_if_they_were():
    """Though the backward runs where others are cached."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    parametrizations.weight_norm(layer[0])
    x, weights = torch.randn(2, 4), [*layer.parameters()]
    want = torch.autograd.grad(layer(x).sum(), weights)
    y = remat(layer)(x).sum()
    with parametrize.cached(), count_ops() as ops:
        layer(x)
        got = torch.autograd.grad(y, weights)
    assert_same(got, want)
    assert ops["_weight_norm_interface"] == 1 + 1
