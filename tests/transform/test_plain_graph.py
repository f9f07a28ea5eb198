"""Base autograd keeps its own graph: what works in plain code works in a call.

The programs are those of `support.runs`.
"""

import copy

import pytest
import torch
from support.as_plain import Router, grads, leaf, trained
from support.runs import assert_replayed, replayed
from support.tables import rows
from support.zoo import make, ops_of, plainly
from torch import nn
from torch.autograd import Function, grad
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm
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


@replayed(evaluations=(1, 3))
def test_a_backward_with_respect_to_one_input_and_then_to_the_other(wrap):
    w, x = leaf(1), leaf(2)
    y = wrap(lambda w, x: (x @ w).tanh() * x.sin())(w, x).sum()
    y.backward(inputs=[w], retain_graph=True)
    assert x.grad is None
    return w.grad, *grad(y, [x])


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


# --- What leaves the function other than by being returned ---


@pytest.mark.parametrize("fn", [F.rrelu, F.rrelu_])
@replayed(evaluations=(1, 2))
def test_noise_that_an_operation_writes_after_it_was_saved(wrap, fn):
    x = make(3, 4, seed=2).requires_grad_()
    y = wrap(lambda x: fn(x * 2, training=True))(x)
    return torch.autograd.grad(y.sum(), x)


@replayed(tanh=(1, 2))
def test_a_loss_of_what_a_forward_hook_collected(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    found = []
    model[1].register_forward_hook(lambda m, a, out: found.append(out))
    y = wrap(model)(make(3, 4, seed=2))
    (y.sum() + found[0].square().sum()).backward()
    return y, [p.grad for p in model.parameters()]


@pytest.mark.parametrize("style", ["module", "forward"])
@replayed(_softmax=(1, 2))
def test_a_loss_that_is_left_in_an_attribute(wrap, style):
    model = Router().double()
    if style == "module":
        call = wrap(model)
    else:
        model.forward = wrap(model.forward)
        call = model
    y = call(make(3, 4, seed=2))
    (y.sum() + model.loss).backward()
    return y, model.weights, [p.grad for p in model.inner.parameters()]


def test_attention_that_is_kept_for_plotting_stays_that_of_the_last_forward():
    model = Router().double()
    y = remat(model)(make(3, 4, seed=2))
    kept = model.weights
    y.sum().backward()
    assert model.weights is kept
    ops = ops_of(lambda: remat(model)(make(3, 4, seed=3)).sum().backward())
    assert ops["addmm"] == 2
    assert model.weights is not kept


@replayed(_softmax=(1, 2))
def test_a_function_and_a_module_passed_as_arguments(wrap):
    model, x = Router().double(), leaf(2)
    model.register_forward_hook(lambda m, args, out: out * 2)
    y = wrap(lambda call, inner, x: call(inner(x).exp()))(torch.tanh, model, x)
    (y.sum() + model.loss).backward()
    return x.grad, [p.grad for p in model.parameters()]


# --- Results that are views, or are changed ---


@replayed(evaluations=(1, 2))
def test_results_that_share_memory_with_inputs_and_with_each_other(wrap):
    x = leaf().sin()
    x.retain_grad()

    def fn(x):
        h = x.exp().cos()
        return x[0], h, h.view(-1)[1:3]

    row, h, part = wrap(fn)(x)
    assert row._base is not None
    assert part.data_ptr() == h.data_ptr() + 8
    (row.sum() + h.sum() + part.square().sum()).backward()
    return x.grad


@replayed(evaluations=(1, 2))
def test_a_result_that_is_changed_in_place(wrap):
    x = leaf()
    y = wrap(lambda x: x.sin().cos() * 2)(x)
    y.mul_(3)
    y[0] = 1
    y.sum().backward()
    return y, x.grad


def test_a_result_that_the_backward_reads_may_be_changed():
    def changed(wrap):
        y = wrap(lambda x: x.sin().exp())(leaf())
        return y.mul_(2).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace"):
        changed(plainly).backward()
    # With a handle, the value is not that of `y`: it is computed again.
    y = changed(remat)
    assert ops_of(y.backward)["exp"] == 1


# --- Modules whose weights are computed, cached or made late; over steps ---


def normed(norm):
    return lambda: nn.Sequential(norm(nn.Linear(4, 4)), nn.Tanh()).double()


MODULES = {
    "weight_norm": normed(weight_norm),
    "spectral_norm": normed(spectral_norm),
    "parametrization": normed(parametrizations.spectral_norm),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")
@rows("make_model", MODULES)
@replayed(tanh=(3, 6))
def test_norms_of_weights_over_steps(wrap, make_model):
    model = make_model()
    return trained(model, make(3, 4, seed=2), wrap(model))


@replayed(tanh=(2 + 2, 4 + 2))
def test_parameters_are_unfrozen_between_steps_and_before_a_backward(wrap):
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    model[0].requires_grad_(False)
    call, x = wrap(model), make(3, 4, seed=2)
    first = call(x).tanh().sum()
    model[0].requires_grad_(True)
    first.backward()
    frozen = model[0].weight.grad
    call(x).tanh().sum().backward()
    assert frozen is None
    return [p.grad for p in model.parameters()]


class LateParameter(nn.Module):
    """Makes a parameter when it first sees an input."""

    def __init__(self):
        super().__init__()
        self.weight = None

    def forward(self, x):
        if self.weight is None:
            self.weight = nn.Parameter(torch.full((x.shape[-1],), 0.5).double())
        return (x * self.weight).sin().exp()


@replayed(sin=(1, 2))
def test_a_parameter_that_the_forward_makes(wrap):
    model, x = LateParameter(), leaf(2)
    y = wrap(model)(x)
    made = model.weight
    y.sum().backward()
    assert model.weight is made
    return x.grad, made.grad


@replayed(tanh=(1 + 1, 1 + 2))
def test_a_lazy_module(wrap):
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh()).double()
    call, x = wrap(model), leaf(2)
    call(x).sum().backward()  # runs as it is
    call(x).exp().sum().backward()
    return x.grad, [p.grad for p in model.parameters()]


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


@replayed(sin=(1, 2))
def test_a_batch_norm_that_is_passed_as_an_argument(wrap):
    norm, x = nn.BatchNorm1d(4).double(), leaf(2)
    wrap(lambda norm, x: norm(x.sin()).exp())(norm, x).sum().backward()
    return x.grad, norm.weight.grad, norm.running_mean, norm.num_batches_tracked


# --- Parametrizations that are cached ---


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight):
        return weight * self.scale


@replayed(addmm=(2, 2 * 2))
def test_parametrizations_are_cached_in_a_recomputation_as_they_were(wrap):
    """The second call finds what the first computed, which its recompute does."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    parametrize.register_parametrization(layer[0], "weight", Scaled())
    x = torch.randn(2, 4)
    with parametrize.cached():
        y = wrap(layer)(wrap(layer)(x).sin()).sin()
    return torch.autograd.grad(y.sum(), layer[0].parametrizations.weight[0].scale)


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
