"""A policy and `prune=True` where a recompute looks different from its forward.

Under transforms of torch.func, composite operations become other operations; hooks of a
FLOP counter and subclasses add some; torch compiles parts of a function by itself. None
of this may be an error, and a policy is followed wherever it can be.
"""

import subprocess
import sys
import warnings

import pytest
import torch
from support.pruning import given_up
from support.zoo import counted, ops_of
from torch import nn
from torch.func import functional_call, grad, hessian, jacrev, vjp, vmap
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from remat import policies, remat
from remat.testing import assert_same, count_ops


DOUBLE = {"dtype": torch.double}
X = torch.linspace(-1, 1, 32, **DOUBLE).reshape(2, 4, 4)
V = torch.linspace(0, 1, 4, **DOUBLE)
OPTIONS = {
    "dots": {"policy": policies.dots_saveable},
    "everything": {"policy": policies.everything_saveable},
    "prune": {"prune": True},
}
each_option = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


# --- Transforms ---


def entropy(x):
    return (
        nn.functional.binary_cross_entropy_with_logits(x.sin(), torch.ones_like(x))
        * x.tanh()
    )


ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True, **DOUBLE)


def attention(x):
    x = x.sin()
    return ATTENTION(x, x, x)[0].tanh()


def linear(x):
    return nn.functional.linear(x.sin(), X[0], V).tanh()


TRANSFORMS = {
    "grad": lambda f: grad(lambda x: f(x).sum())(X),
    "jacrev": lambda f: jacrev(f)(X),
    "hessian": lambda f: hessian(lambda x: f(x).sum())(X),
    "twice": lambda f: jacrev(jacrev(f))(X),
    "of_batch": lambda f: jacrev(vmap(f))(torch.stack([X, X + 1])),
    "of_each": lambda f: vmap(jacrev(grad(lambda x: f(x).sum())))(torch.stack([X, X])),
}


def _is_usual(how, program, turn):
    """Each program under each transform, with the options in turn; but the slowest."""
    return turn % 3 == 0 and not (how == "twice" and program is attention)


COMPOSITE = [
    pytest.param(
        *(transform, program, options),
        id=f"{program.__name__}-{how}-{kept}",
        marks=() if _is_usual(how, program, i + j + k) else pytest.mark.slow,
    )
    for i, (how, transform) in enumerate(TRANSFORMS.items())
    for j, program in enumerate((entropy, attention, linear))
    for k, (kept, options) in enumerate(OPTIONS.items())
]


@pytest.mark.parametrize(("transform", "program", "options"), COMPOSITE)
def test_composite_operations_may_become_others(transform, program, options):
    """At second order, `linear` is other operations than in the forward."""
    wrapped, expected = remat(program, **options), transform(program)
    plain = ops_of(lambda: transform(program))
    for _ in range(3):
        with count_ops() as ops:
            torch.testing.assert_close(transform(wrapped), expected)
        if "prune" in options:
            assert ops["sin"] > plain["sin"]  # it was computed again


def affine(x, b):
    """Of which no backward reads an input but the matrix."""
    return nn.functional.linear(x, X[0], b)


@pytest.mark.parametrize("outer", [jacrev, grad, vmap], ids=["jacrev", "grad", "vmap"])
def test_inputs_are_not_dropped_where_several_levels_differentiate(outer):
    """The first backward in a vmap of second order may be other operations."""

    def second(f):
        inner = jacrev(f)
        if outer is grad:
            return grad(lambda x, b: inner(x, b).exp().sum())(X, V)
        if outer is vmap:
            return vmap(jacrev(inner, argnums=1), (0, None))(X, V)
        return jacrev(inner)(X, V)

    wrapped = remat(affine, prune=True)
    for _ in range(4):  # until inputs are dropped
        with count_ops() as ops:
            first = grad(lambda x: wrapped(x, V).sum())(X)
        assert_same(first, grad(lambda x: affine(x, V).sum())(X))
    assert ops["addmm"] == 1  # the other is left out
    for _ in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            torch.testing.assert_close(second(wrapped), second(affine))


@each_option
def test_a_call_inside_takes_a_snapshot_in_one_run_only(options):
    """Of a vector that it is passed, which it may update, as batch norm does."""
    inner = lambda x, v: (x.sin() * v).tanh()
    outer = lambda x, v, of=inner: (of(of(x, v) @ x, v * 1)).exp()
    wrapped = remat(lambda x, v: outer(x, v, remat(inner)), **options)
    cotangent = torch.ones(2, 4, 4, **DOUBLE)
    pulled = lambda f: vjp(lambda x: f(x, V), X)[1](cotangent)[0]
    for _ in range(3):
        with warnings.catch_warnings(), count_ops() as ops:
            warnings.simplefilter("error")
            assert_same(pulled(wrapped), pulled(outer))
        if options != OPTIONS["everything"]:
            assert ops["sin"] > 4  # beside two of each forward
        assert_same(jacrev(wrapped)(X, V), jacrev(outer)(X, V))


# --- Hooks on all modules ---


def model(**options):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8, **DOUBLE), nn.Tanh(), nn.Linear(8, 4, **DOUBLE), nn.Tanh()
    plain = nn.Sequential(*layers)
    return plain, remat(plain, **options)


TRACKERS = {"flops": lambda: FlopCounterMode(display=False), "modules": ModuleTracker}
each_tracker = pytest.mark.parametrize("tracker", TRACKERS.values(), ids=TRACKERS)


def gradients(net):
    values = {name: p.detach() for name, p in net.named_parameters()}
    return grad(lambda p: functional_call(net, p, (X,)).sum())(values)


@each_tracker
@pytest.mark.parametrize("options", [{}, *OPTIONS.values()], ids=["none", *OPTIONS])
def test_a_tracker_of_modules_holds_no_graph(tracker, options):
    """Its hooks are on the graph of a forward, which is dropped. It isn't a leak."""
    plain, wrapped = model(**options)
    expected = gradients(plain)
    with tracker() as tracking, count_ops() as ops:
        found = gradients(wrapped)
    assert_same([*found.values()], [*expected.values()])
    assert ops["tanh"] + ops["addmm"] > 4 or "policy" in options
    if isinstance(tracking, FlopCounterMode) and not options:
        with FlopCounterMode(display=False) as once:
            gradients(plain)
        assert tracking.get_total_flops() > once.get_total_flops()


@each_tracker
def test_a_step_recorded_under_a_tracker_keeps_its_policy_later(tracker):
    """The tracker's hooks make views, which no later step makes."""
    _, wrapped = model(policy=policies.dots_saveable)

    def step():
        ops = ops_of(lambda: wrapped(X.clone().requires_grad_()).sum().backward())
        return ops["addmm"], ops["tanh"]

    with tracker():
        step()
    assert [step() for _ in range(5)] == [(2, 4)] * 5
    with tracker():
        step()
    assert step() == (2, 4)


# --- What torch compiles by itself ---


_SLOWER = "each", "looped", "scanned"
FRESH = """
import contextlib, os, sys, warnings
import torch
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from remat import policies, remat, scope

# Not in a list: what a recompute appends to one is dropped.
READ, WRITE = os.pipe()

def first(tree):
    return tree[0] if isinstance(tree, tuple) else tree

def cond(x):
    os.write(WRITE, b"e")
    y = x.exp()
    return torch.cond(y.sum() > 99, lambda x: x.sin() @ x, lambda x: x.cos() @ x, (y,))

def each(x):
    os.write(WRITE, b"e")
    return first(mapped(lambda y: y.sin() * 2, x.exp())).tanh()

def scanned(x):
    os.write(WRITE, b"e")
    multiply = lambda a, b: a * b
    return associative_scan(multiply, x.exp(), dim=0, combine_mode="generic").tanh()

def looped(x):
    os.write(WRITE, b"e")
    step = lambda c, y: (torch.tanh(c * y) + y, c.sin())
    return torch.cat([part.reshape(-1) for part in scan(step, x.exp()[0], x)])

def backward(f, around=contextlib.nullcontext()):
    x = X.clone().requires_grad_()
    with around:
        y = f(x)
    y.sum().backward()
    return x.grad

X = torch.linspace(-1, 1, 16, dtype=torch.double).reshape(4, 4)
f = globals()[sys.argv[1]]
expected = backward(f)
assert os.read(READ, 99) == b"e"
for options in {}, dict(policy=policies.dots_saveable), dict(prune=True):
    wrapped = remat(f, **options)
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.testing.assert_close(backward(wrapped), expected, rtol=0, atol=0)
        evaluations = os.read(READ, 99)
        assert evaluations == b"ee", evaluations
        if options and f in (cond, each) and not _:
            assert any("torch.cond" in str(w.message) for w in caught), caught
    around = scope(policies.dots_saveable)
    torch.testing.assert_close(backward(f, around), expected, rtol=0, atol=0)
    os.read(READ, 99)
if f is scanned:  # torch.func has no rule for the others
    x, summed = X.clone(), lambda f: lambda x: f(x).sum()
    found = torch.func.grad(summed(remat(f, prune=True)))(x)
    torch.testing.assert_close(found, torch.func.grad(summed(f))(x), rtol=0, atol=0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", ["cond", *_SLOWER])
def test_a_higher_order_operator_is_compiled_as_without_remat(program):
    """Outside of remat's modes, under which torch compiles nothing."""
    command = [sys.executable, "-W", "ignore", "-c", FRESH, program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# --- Custom Functions that share a record ---


def function(forward, saved, backward):
    class Custom(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return forward(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(*saved(inputs[0], output))

        @staticmethod
        def backward(ctx, cotangent):
            return cotangent * backward(*ctx.saved_tensors)

    return Custom.apply


FUNCTIONS = [
    function(torch.sin, lambda x, y: [x], torch.cos),
    function(torch.sin, lambda x, y: [y], lambda y: y * 2),
    function(torch.sin, lambda x, y: [x, y], torch.mul),
    function(torch.exp, lambda x, y: [y], lambda y: y),
]
CHOSEN = [FUNCTIONS[0]]


def chosen_by_flag(pair, x, k):
    return (pair[k](x.tanh() @ x) * 2).exp()


def chosen_by_global(pair, x, k):
    CHOSEN[0] = pair[k]
    return (CHOSEN[0](x.tanh() @ x) * 2).exp()


@each_option
@pytest.mark.parametrize("second", FUNCTIONS[1:], ids=["output", "both", "other"])
@pytest.mark.parametrize("program", [chosen_by_flag, chosen_by_global])
def test_two_functions_of_the_same_shapes_share_a_name(program, second, options):
    """They save other tensors of the same shapes, and run the same operations."""
    pair = FUNCTIONS[0], second
    wrapped = remat(lambda x, k: program(pair, x, k), **options)

    def by_backward(f, k):
        x = X[0].clone().requires_grad_()
        f(x, k).sum().backward()
        return x.grad

    by_transform = lambda f, k: grad(lambda x: f(x, k).sum())(X[0])
    for differentiate in by_backward, by_transform:
        for k in (0, 1, 0, 1, 1, 0):
            expected = differentiate(lambda x, k: program(pair, x, k), k)
            with warnings.catch_warnings(), count_ops() as ops:
                warnings.simplefilter("ignore")  # that the record fits no more
                assert_same(differentiate(wrapped, k), expected)
            assert ops["tanh"] + ops["mm"] + ops["exp"] > 3 + 2 or "policy" in options


# --- Subclasses that see what is asked of them ---


class Sized(torch.Tensor):
    """A wrapper whose sizes and strides are asked for by operations."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            dtype=inner.dtype,
            dispatch_sizes_strides_policy="sizes",
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrapped = [a.inner if isinstance(a, Sized) else a for a in args]
        result = func(*unwrapped, **(kwargs or {}))
        return Sized(result) if isinstance(result, torch.Tensor) else result


@each_option
def test_what_a_subclass_is_asked_is_not_compared(options):
    """How often autograd asks for sizes depends on what it differentiates."""
    program = lambda x: torch.mm(x.sin(), x).tanh().reshape(2, 8).cos()

    def differentiated(f, wrap):
        x = wrap(X[0].clone()).requires_grad_()
        f(x).sum().backward()
        return x.grad

    expected = differentiated(program, torch.clone)
    fn, calls = counted(program)
    wrapped = remat(fn, **options)
    for k in range(3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nothing of a subclass is left out
            found = differentiated(wrapped, Sized)
        assert_same(found.inner, expected)
        saves_all = options.get("policy") is policies.everything_saveable
        assert len(calls) == (1 if saves_all else 2) * (k + 1)


COUNTED = {
    "remat": (remat, {"higher_order": True}),
    "torch": (lambda f: lambda x: checkpoint(f, x, use_reentrant=False), {}),
}


@pytest.mark.parametrize(("middle", "inner"), COUNTED.values(), ids=COUNTED)
@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable"])
def test_a_call_that_is_counted_around_saves_the_same_in_each_run(
    middle, inner, policy
):
    """What a call around it knows by number would be another value."""

    def program(within, between, around):
        named = within(lambda x: (x.sin() @ x).tanh())
        counted = between(lambda x: named(x).sin())
        return around(lambda x: counted(x.sin()))

    def gradient(f):
        x = X[0].clone().requires_grad_()
        with count_ops() as ops:
            (found,) = torch.autograd.grad(f(x).sum(), x)
        return found, ops["sin"]

    expected, sines = gradient(program(*[lambda f: f] * 3))
    f = program(
        remat(policy=getattr(policies, policy), **inner),
        middle,
        remat(prune=True, higher_order=True),
    )
    for _ in range(3):
        found, count = gradient(f)
        assert torch.equal(found, expected)
        assert count > sines


@given_up
def test_a_view_that_is_written_in_a_replay_around_is_of_what_it_was_made_of():
    """No storage tells it there: what is saved of a call within is not the base."""

    def made(wrap):
        def innermost(a, b):
            z = a.cos()
            _ = z.unbind(0)  # which has autograd make views again
            z[2].add_(b[0].tanh())
            return a + (z @ X[0]).clone().mul_(2).sin()

        third = wrap(innermost)
        how = {"policy": policies.everything_saveable}
        second = wrap(lambda a, b: third(a, b) * 1.0, **how)
        how = {"policy": policies.dots_saveable}
        return wrap(lambda a, b: second(a, b) + b, **how)

    def gradients(f):
        out, pull = vjp(lambda a, b: f(a, b).sin().sum(), X[0], X[1])
        return [*pull(torch.ones_like(out)), *pull(torch.ones_like(out) * 2)]

    ours, expected = made(remat), gradients(made(lambda f, **_: f))
    for _ in range(3):
        with count_ops() as ops:
            assert_same(gradients(ours), expected)
        assert ops["cos"] > 5  # one of the forward, four of derivatives
