"""Base autograd keeps its own graph: what works in plain code works in a call.

A *program* builds what it needs, wraps a function and returns tensors. It runs twice,
with the function as it is and rematerialized: the tensors have to be the same bit for
bit, and the function has to have been evaluated as often as the test says.
"""

import pytest
import torch
from support.as_plain import Router, assert_as_plain, assert_recomputed, grads, leaf
from support.zoo import Evaluations, make, plainly
from torch import nn
from torch.autograd import Function, grad
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves

from remat import policies, remat
from remat.testing import count_ops


# --- The comparison itself ---


def test_the_comparison_fails_for_a_function_that_is_not_rematerialized():
    def program(wrap, note):
        w = leaf()

        def fn(w):
            note(None)
            return w.sin().exp()

        wrap(fn)(w).sum().backward()
        return w.grad

    assert_as_plain(program)
    with pytest.raises(AssertionError, match="evaluations"):
        assert_as_plain(program, wrap=plainly)


def test_the_comparison_fails_for_another_gradient():
    def program(wrap, note):
        w = leaf()
        note(None)
        y = w.sin().sum() * (2 if wrap is remat else 1)
        y.backward()
        return w.grad

    with pytest.raises(AssertionError, match="differs"):
        assert_as_plain(program, evaluations=1)


@pytest.mark.parametrize(("factor", "again"), [(2, 2), (1, 1)])
def test_the_comparison_of_counts_fails_for_another_value_or_count(factor, again):
    def run(wrap):
        ours = wrap is remat
        return torch.ones(2) * (factor if ours else 1), again if ours else 1

    with pytest.raises(AssertionError, match=r"differ|times"):
        assert_recomputed(run, 1, 2)


# --- The graph ---


def test_the_graph_is_that_of_plain():
    def fn(w, x):
        return (x @ w).tanh().sum(0)

    def nodes(out):
        found = [out.grad_fn]
        for node in found:
            found += [p for p, _ in node.next_functions if p is not None]
        return [node.name() for node in found]

    w, x = leaf(1), leaf(2).sin()
    assert nodes(remat(fn)(w, x)) == nodes(fn(w, x))
    with count_ops() as ops:
        remat(fn)(w, x).sum().backward()
    assert ops["mm"] == 1 + 1 + 2


def test_the_results_in_a_tree_have_the_graph_of_plain():
    def fn(x):
        return {"a": [x.sin(), (x.exp(),)], "n": 3}

    for wrap in (plainly, remat):
        out = tree_leaves(wrap(fn)(leaf()))
        names = [t.grad_fn.name() for t in out if isinstance(t, torch.Tensor)]
        assert names == ["SinBackward0", "ExpBackward0"]


@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_the_recompute_stops_at_the_last_tensor_that_is_read(policy):
    def fn(w):
        return (w.sin().exp() * 2 + 1).sum() * 3

    with count_ops() as ops:
        remat(fn, policy=policy, prune=False)(leaf()).backward()
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
    with count_ops() as ops:
        a.sum().backward()
    # The cosine is that of the derivative.
    assert (ops["exp"], ops["tanh"], ops["cos"]) == (1, 0, 1)
    assert torch.equal(w.grad, w.cos() * w.sin().exp())


def test_a_backward_with_respect_to_one_input_and_then_to_the_other():
    def program(wrap, note):
        w, x = leaf(1), leaf(2)

        def fn(w, x):
            note(None)
            return (x @ w).tanh() * x.sin()

        y = wrap(fn)(w, x).sum()
        y.backward(inputs=[w], retain_graph=True)
        assert x.grad is None
        return w.grad, *grad(y, [x])

    assert_as_plain(program, evaluations=3)


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


def with_compiled_code(x):
    return COMPILED(x).tanh()


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
    "compiled": (with_compiled_code, 2),
}


@pytest.fixture
def _no_compiled_code():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_no_compiled_code")
@pytest.mark.parametrize("case", FUNCTIONS)
def test_a_function_of_a_leaf(case):
    fn, evaluations = FUNCTIONS[case]

    def program(wrap, note):
        x = leaf()
        out = wrap(lambda x: (note(None), fn(x))[1])(x)
        first, *others = out if isinstance(out, tuple) else (out,)
        if isinstance(first, Result):
            first = first.logits
        first.sum().backward()
        return x.grad, first.detach(), *grads(*others)

    assert_as_plain(program, evaluations=evaluations)


# --- What leaves the function other than by being returned ---


@pytest.mark.parametrize("fn", [F.rrelu, F.rrelu_])
def test_noise_that_an_operation_writes_after_it_was_saved(fn):
    def program(wrap, note):
        def noisy(x):
            note(None)
            return fn(x * 2, training=True)

        torch.manual_seed(0)
        y = wrap(noisy)(x)
        return torch.autograd.grad(y.sum(), x)

    x = make(3, 4, seed=2).requires_grad_()
    assert_as_plain(program)


def test_a_loss_of_what_a_forward_hook_collected():
    def program(wrap, note):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        model[0].register_forward_pre_hook(lambda *_: note(None))
        found = []
        model[1].register_forward_hook(lambda m, a, out: found.append(out))
        y = wrap(model)(make(3, 4, seed=2))
        (y.sum() + found[0].square().sum()).backward()
        return y, [p.grad for p in model.parameters()]

    assert_as_plain(program)


@pytest.mark.parametrize("style", ["module", "forward"])
def test_a_loss_that_is_left_in_an_attribute(style):
    def program(wrap, note):
        model = Router(note).double()
        if style == "module":
            call = wrap(model)
        else:
            model.forward = wrap(model.forward)
            call = model
        y = call(make(3, 4, seed=2))
        (y.sum() + model.loss).backward()
        return y, model.weights, [p.grad for p in model.inner.parameters()]

    assert_as_plain(program)


def test_attention_that_is_kept_for_plotting_stays_that_of_the_last_forward():
    model = Router(Evaluations().note).double()
    y = remat(model)(make(3, 4, seed=2))
    kept = model.weights
    y.sum().backward()
    assert model.weights is kept
    with count_ops() as ops:
        remat(model)(make(3, 4, seed=3)).sum().backward()
    assert ops["addmm"] == 2
    assert model.weights is not kept


def test_a_function_and_a_module_passed_as_arguments():
    def program(wrap, note):
        model, x = Router(note).double(), leaf(2)
        model.register_forward_hook(lambda m, args, out: out * 2)

        def fn(call, inner, x):
            return call(inner(x).exp())

        y = wrap(fn)(torch.tanh, model, x)
        (y.sum() + model.loss).backward()
        return x.grad, [p.grad for p in model.parameters()]

    assert_as_plain(program)


# --- Results that are views, or are changed ---


def test_results_that_share_memory_with_inputs_and_with_each_other():
    def program(wrap, note):
        x = leaf().sin()
        x.retain_grad()

        def fn(x):
            note(None)
            h = x.exp().cos()
            return x[0], h, h.view(-1)[1:3]

        row, h, part = wrap(fn)(x)
        assert row._base is not None
        assert part.data_ptr() == h.data_ptr() + 8
        (row.sum() + h.sum() + part.square().sum()).backward()
        return x.grad

    assert_as_plain(program)


def test_a_result_that_is_changed_in_place():
    def program(wrap, note):
        x = leaf()

        def fn(x):
            note(None)
            return x.sin().cos() * 2

        y = wrap(fn)(x)
        y.mul_(3)
        y[0] = 1
        y.sum().backward()
        return y, x.grad

    assert_as_plain(program)


def test_a_result_that_the_backward_reads_may_be_changed():
    def changed(wrap):
        y = wrap(lambda x: x.sin().exp())(leaf())
        return y.mul_(2).sum()

    with pytest.raises(RuntimeError, match="modified by an inplace"):
        changed(plainly).backward()
    # With a handle, the value is not that of `y`: it is computed again.
    y = changed(remat)
    with count_ops() as ops:
        y.backward()
    assert ops["exp"] == 1
