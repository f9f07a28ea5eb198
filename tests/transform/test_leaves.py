"""A recompute runs on the leaves of autograd themselves, and leaves nothing on them.

Hooks, gradients and errors are those of plain code.
"""

import sys
from collections import Counter
from functools import partial

import pytest
import torch
from support.runs import assert_replayed, leaf, replayed
from support.tables import rows
from support.zoo import leaves_of, make, ops_of, plainly
from torch import nn

from remat import policies, remat
from remat.testing import assert_same, count_ops


W, X = make(3, 3, seed=1), make(3, 3, seed=2)


def net(w, x):
    return ((x @ w).tanh() @ w).sin().sum()


def detaches(prepare=lambda w, x: (w, x)):
    """How often a forward, and its backward, make a tensor without a graph."""
    w, x = leaves_of(W, X)
    args = prepare(w, x)
    with count_ops() as forward:
        y = remat(net)(*args)
    backward = ops_of(y.backward)
    assert backward["tanh"] == 1
    return forward["detach"], backward["detach"]


def test_leaves_have_no_stand_ins():
    forward, backward = detaches()
    assert detaches(lambda w, x: (w, x * 1)) == (forward + 1, backward + 1)


def test_leaves_with_hooks_have_none_either():
    def hooked(w, x):
        w.register_hook(lambda grad: grad)
        return w, x

    assert detaches(hooked) == detaches()


# --- Functions that do more than compute: it is done once ---


HOOK = "register_prehook(lambda grads: tuple(grad * 2 for grad in grads))"
EDGE = f"torch.autograd.graph.get_gradient_edge(w).node.{HOOK}"
RUN = "torch.autograd.Variable._execution_engine.run_backward"
# What is done to a leaf `w` before `net`, and after it; and how often `net` runs again:
# what runs a backward reads what was saved while the forward still runs.
DONE = {
    "a backward": ("", "y.backward(retain_graph=True)", 2),
    "a backward by the engine": (
        "",
        f"{RUN}((y,), (y,), True, False, (), True, accumulate_grad=True)",
        2,
    ),
    "a penalty": (
        "",
        "y = y + torch.autograd.grad(y, w, create_graph=True)[0].square().sum()",
        2,
    ),
    "a gradient": ("torch.Tensor.__setattr__(w, 'grad', torch.ones_like(w))", "", 1),
    "data of a vector": (
        "nn.utils.vector_to_parameters(x.detach().flatten() * 2, [w])",
        "",
        1,
    ),
    "data": ("w.data = x.detach() * 2", "", 1),
    "a mark": ("w.count = getattr(w, 'count', 0) + 1", "", 1),
    "a hook of the node": (f"w = w * 1; w.grad_fn.next_functions[0][0].{HOOK}", "", 1),
    # Nothing holds the node yet: in plain code it is gone at once, with its hook.
    "a hook of the edge": (EDGE, "", 1),
    "a hook of the edge afterwards": ("", EDGE, 1),
}


@rows("before, after, again", DONE)
def test_what_a_function_does_to_its_leaves_is_done_once(before, after, again):
    source = (
        f"def fn(w, x):\n    {before}\n    y = net(w, x)\n    {after}\n    return y"
    )
    exec(source, globals(), found := {})

    def program(wrap):
        w, x = leaves_of(W, X)
        wrap(found["fn"])(w, x).backward()
        return w, x, w.grad, x.grad, getattr(w, "count", 0)

    assert_replayed(program, tanh=(1, 1 + again))


# --- Casts of leaves ---


@pytest.mark.parametrize("prune", [False, True])
@pytest.mark.parametrize("policy", [None, policies.dots_saveable])
def test_a_cast_that_two_calls_share_is_not_missed_in_the_second(policy, prune):
    """Autocast casts a weight in the first call: in the second it is in the cache."""

    def program(wrap):
        w, x = leaves_of(W.float(), X.float())
        fn = wrap(lambda x: (x @ w).tanh())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            fn(fn(x)).sum().backward()
        return w.grad, x.grad

    again = 2 if policy is None else 0
    wrap = partial(remat, policy=policy, prune=prune)
    assert_replayed(program, wrap=wrap, mm=(6, 6 + again), tanh=(2, 4))


class Subclass(torch.Tensor):
    pass


class Layer(nn.Module):
    def __init__(self, differentiates):
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.differentiates = differentiates

    def forward(self, x):
        if self.differentiates:
            self.linear.weight.sum().backward()
        return self.linear(x.sin()).cos()


@rows(
    "differentiates, frozen",
    {"backward inside": (True, False), "frozen": (False, True)},
)
def test_parameters_beside_a_subclass(differentiates, frozen):
    found = []
    for wrap in (plainly, remat):
        torch.manual_seed(0)
        layer, x = Layer(differentiates), X.clone().requires_grad_()
        with count_ops() as ops:
            out = wrap(layer)((x * 2).as_subclass(Subclass)).sum()
            layer.linear.bias.requires_grad_(not frozen)
            out.backward()
        grads = [t.grad for t in (x, *layer.parameters())]
        found.append(([g for g in grads if g is not None], ops["sin"]))
    (want, once), (got, again) = found
    assert_same(got, want)
    assert again > once


def opcodes_of(fn, *args):
    """Return how many instructions of Python a call takes."""
    counts = Counter()

    def trace(frame, event, _):
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        counts[event] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = fn(*args)
    finally:
        sys.settrace(before)
    return counts["opcode"], result


@pytest.mark.parametrize(("noted", "most"), [(int, 4), (lambda k: [k, "a"], 100)])
def test_flags_and_lists_on_parameters_cost_few_instructions_for_each(noted, most):
    model = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(500))
    run = remat(lambda x: (x * model[0]).sin().sum())

    def cost():
        x = torch.ones(2, requires_grad=True)
        forward, out = opcodes_of(run, x)
        backward, gradient = opcodes_of(torch.autograd.grad, out, x)
        assert torch.equal(gradient[0], torch.ones(2).cos())
        return forward + backward

    cost()  # it finds what the function reaches
    without = cost()
    for k, parameter in enumerate(model):
        parameter.number = noted(k)
    assert cost() - without < most * len(model)
    assert [p.number for p in model] == [*map(noted, range(len(model)))]


LISTED = {
    "added to": lambda w, v, held: w.note.append(2),
    "on two tensors": lambda w, v, held: held.append(v.note[0]),
    "in a variable": lambda w, v, held: held.append(w.note[0]),
}


@pytest.mark.parametrize("how", LISTED)
@replayed(sin=2)
def test_lists_on_tensors_are_as_at_the_call(wrap, how):
    w, v = leaf(3), leaf(3)
    w.note, v.note, held = [1], [3], [5]
    if how == "on two tensors":
        w.note = v.note = held
    if how == "in a variable":
        w.note = held

    def fn(x):
        LISTED[how](w, v, held)
        return (x * w * len(w.note) * sum(held)).sin() * v

    x = leaf(3)
    y = wrap(fn)(x).sum()
    w.note.append(9)
    then = [*w.note], [*v.note], [*held]
    gradient = torch.autograd.grad(y, x)
    assert then == (w.note, v.note, held)
    return gradient, then
