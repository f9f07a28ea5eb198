"""`checkpoint_name`: what it returns, and which values a policy finds by the names."""

import threading
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import optree
import pytest
import torch
from support.pruning import forget_calls, written
from support.transforms import some
from support.zoo import ops_of
from torch import nn

from remat import checkpoint_name, remat, saved_residuals
from remat._base.context import is_recomputing
from remat.policies import (
    nothing_saveable,
    save_any_names_but_these,
    save_names_matching,
    save_only_these_names,
)
from remat.testing import assert_same, count_ops


def points(*shape):
    size = torch.Size(shape).numel()
    return torch.linspace(0.2, 1.3, size, dtype=torch.double).reshape(shape)


X = points(2, 6)
save = save_only_these_names


def named(fn, *args, policy=None):
    """The names and shapes of what a call keeps besides its arguments and numbers."""
    fn = remat(fn, policy=policy or save("name"))
    found = []
    for _ in range(2):
        rest = [r for r in saved_residuals(fn, *args) if "argument" not in r.origin]
        kept = [(r.origin, r.shape) for r in rest]
        found.append([k for k in kept if k != ("from a constant", ())])
    assert found[0] == found[1], "the first call keeps what later ones do"
    return found[0]


def assert_equal_and_recomputed(fn, x, policy, **recomputed):
    """What runs in the backward beyond what runs in that of the plain function."""

    def run(fn):
        leaf = x.clone().requires_grad_()
        out = fn(leaf).sum()
        with count_ops() as ops:
            (result,) = torch.autograd.grad(out, leaf)
        return result, ops

    expected, plain = run(fn)
    rematerialized = remat(fn, policy=policy, prune=True)
    for _ in range(3):
        actual, ops = run(rematerialized)
        assert_same(actual, expected)
        assert {name: ops[name] - plain[name] for name in recomputed} == recomputed


# --- What it returns ---


Pair = namedtuple("Pair", ["left", "right"])


@optree.dataclasses.dataclass(namespace="remat")
class State:
    value: torch.Tensor


PYTREES = {
    "tensor": X,
    "dict": {"a": X, "b": [X.sin(), None]},
    "namedtuple": Pair(X, 3),
    "empty": {},
    "none": None,
    "number": 2.5,
    "string": "text",
    "parameter": nn.Parameter(X),
    "integers": torch.arange(3),
}


@pytest.mark.parametrize("kind", PYTREES)
def test_it_is_the_identity(kind):
    """The very objects, inside a call and outside."""
    tree, seen = PYTREES[kind], []

    def fn(x):
        seen.append(checkpoint_name(tree, "name"))
        return x.sin()

    assert checkpoint_name(tree, "name") is tree
    run = remat(fn, policy=save("name"))
    run(X.clone().requires_grad_()).sum().backward()
    assert type(seen[0]) is type(tree)
    assert_same(seen[0], tree)


# --- Which value is named ---


VIEWS = {
    "view": lambda y: y.view(3, 4),
    "transpose": lambda y: y.view(3, 4).transpose(0, 1),
    "part": lambda y: y[:, 1:3],
    "expand": lambda y: y[None].expand(5, -1, -1),
    "detach": lambda y: y.detach(),
    "alias": lambda y: y.view_as(y),
    "reshape": lambda y: y.reshape(-1),
    "diagonal": lambda y: y.diagonal(),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_name_of_a_view_is_one_of_the_whole_value(kind):
    def fn(x):
        y = x.exp()
        z = checkpoint_name(VIEWS[kind](y), "name")
        return y.sin().sum() + z.sin().sum()

    assert named(fn, X) == [("named 'name'", (2, 6))]
    assert_equal_and_recomputed(fn, X, save("name"), exp=0)


PROGRAMS = """
# In JAX, whoever goes on with `y` itself has it recomputed.
the result is not used: y = x.sin(); checkpoint_name(y, "name"); y.sin()
# As the queries of attention are.
a product that was split and moved: q = (x @ x.mT).view(2, 2, 1).transpose(0, 1)
    checkpoint_name(q, "name").exp().sin()
a copy: y = (x @ x.mT).mT.contiguous(); checkpoint_name(y, "name").exp().sin()
# As attention ends: the heads are moved beside one another, which copies.
a view of a copy that nobody holds: heads = (x + 1).view(2, 3, 2).transpose(0, 1)
    checkpoint_name(heads.flatten(1), "name").exp().sin()
several values: y = checkpoint_name(x.exp(), "name")
    checkpoint_name(y.exp(), "name").exp()
an input: checkpoint_name(x, "name").sin().sin()
changed afterwards: y = checkpoint_name(-x, "name"); y.mul_(2); y.sin()
# Several operations made it: none of them alone can be handed over.
changed before: y = -x; y.mul_(2); checkpoint_name(y, "name").sin()
that no backward reads: checkpoint_name(x + 1, "name") * 2.0
any pytree: tree = {"a": x.sin(), "b": [x.cos(), None, 3], "c": Pair(x.exp(), "text")}
    checkpoint_name(tree, "name"); checkpoint_name(State(x.tanh()), "name")
    (tree["a"] * tree["b"][0] * tree["c"].left).sin()
"""
PROGRAMS = written(PROGRAMS, globals())
# The shapes of what is kept, and what is recomputed.
NAMED = {
    "the result is not used": ([(2, 6)], {"sin": 0}),
    "a product that was split and moved": ([(2, 2)], {"mm": 0, "exp": 1}),
    "a copy": ([(2, 2)], {"mm": 0, "clone": 0}),
    "a view of a copy that nobody holds": ([(3, 2, 2)], {"add": 0, "clone": 0}),
    "several values": ([(2, 6)] * 2, {"exp": 1}),
    "an input": ([], {"sin": 1}),
    "changed afterwards": ([], {"neg": 1, "mul_": 1}),
    "changed before": ([], {"neg": 1, "mul_": 1}),
    "that no backward reads": ([], {}),
    "any pytree": ([(2, 6)] * 3, {}),
}


@pytest.mark.parametrize("name", NAMED)
def test_a_policy_keeps_the_named_value_if_it_can(name):
    fn, (shapes, recomputed) = PROGRAMS[name].fn, NAMED[name]
    assert named(fn, X) == [("named 'name'", shape) for shape in shapes]
    assert_equal_and_recomputed(fn, X, save("name"), **recomputed)


def test_a_name_of_a_value_that_no_call_made_does_nothing():
    outside = X.exp()
    fn = lambda x: (checkpoint_name(outside, "name") * x).sin()
    assert named(fn, X) == [] or all("captured" in o for o, _ in named(fn, X))
    assert_equal_and_recomputed(fn, X, save("name"), mul=1)


def test_one_value_may_have_several_names():
    def fn(x):
        y = checkpoint_name(checkpoint_name(x.exp(), "name"), "other")
        return checkpoint_name(y.view(-1), "third").sin()

    for name in ("name", "other", "third"):
        forget_calls()
        ((origin, shape),) = named(fn, X, policy=save(name))
        assert name in origin
        assert shape == (2, 6)
    for names, count in ((("name", "other", "third"), 0), (("name", "other"), 1)):
        forget_calls()
        assert len(named(fn, X, policy=save_any_names_but_these(*names))) == count


def test_of_several_outputs_one_is_named_and_those_read_are_kept():
    def fn(x):
        values, indices = x.topk(2)
        return checkpoint_name(values, "name").sin() * indices

    assert_equal_and_recomputed(fn, X, save("name"), topk=0)


def test_the_result_of_attention_is_named_and_what_its_backward_reads_is_kept():
    """The kernel returns more than one tensor, and Python sees one."""

    def fn(x):
        q = x.view(1, 1, 4, 3)
        out = nn.functional.scaled_dot_product_attention(q, q, q)
        return checkpoint_name(out.transpose(1, 2).flatten(2), "name").sin()

    def run(fn):
        leaf = X.clone().requires_grad_()
        with count_ops() as forward:
            out = fn(leaf).sum()
        with count_ops() as backward:
            (result,) = torch.autograd.grad(out, leaf)
        kernels = [name for name in forward if "attention" in name]
        return result, kernels, [name for name in kernels if backward[name]]

    expected, kernels, _ = run(fn)
    assert kernels
    for policy, again in ((save("name"), []), (None, kernels)):
        rematerialized = remat(fn, policy=policy, prune=True)
        for call in range(3):
            actual, _, recomputed = run(rematerialized)
            assert_same(actual, expected)
            # The first call has let go of the rest before it hears the name.
            assert recomputed == again or call == 0


# --- Where the name is given ---


def test_a_policy_of_an_outer_call_sees_names_given_in_an_inner_one():
    @partial(remat, prune=True)
    def inner(x):
        return checkpoint_name(x.exp(), "name").sin()

    fn = lambda x: inner(x).sin()
    assert named(fn, X) == [("named 'name'", (2, 6))]
    # As a plain call it recomputes the inner call; with the name saved, nothing.
    assert_equal_and_recomputed(fn, X, save("name"), exp=-1)


def test_threads_name_their_own_values():
    """A name given in one thread is none of a value in another."""
    barrier = threading.Barrier(2)

    def meet():
        if not is_recomputing():  # which one of the threads has no need to
            barrier.wait(10)

    def fn(name, x):
        y = x.exp()
        meet()
        checkpoint_name(y, name)
        meet()
        return y.sin()

    def kept(name):
        run = remat(partial(fn, name), policy=save("mine"), prune=True)
        leaf = X.clone().requires_grad_()
        ops = ops_of(lambda: run(leaf).sum().backward())
        return ops["exp"], leaf.grad

    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(kept, ["mine", "yours"])
    assert (one[0], other[0]) == (1, 2)
    assert_same(one[1], other[1])


# --- Under transforms ---


def loss(x):
    return checkpoint_name(x.exp(), "name").sin().sum()


HOW = some("grad", "vmap_grad", "grad_vmap", "jacrev", "jacrev_jacrev", "hessian")


@pytest.mark.parametrize("how", HOW)
def test_names_are_found_under_transforms(how):
    """With the name saved, nothing is run again that plain code does not run."""
    transform = HOW[how]

    def run(fn):
        with count_ops() as ops:
            result = transform(fn, X[0])
        return result, ops["exp"]

    expected, plain = run(loss)
    counts = []
    for policy in (save("name"), save_names_matching("n.*"), nothing_saveable):
        fn = remat(loss, policy=policy, prune=True)
        for _ in range(3):
            actual, count = run(fn)
            assert_same(actual, expected, reassociated=True)
        counts.append(count)
    saved, matched, nothing = counts
    assert saved == matched <= nothing
    if transform.order == 1:
        assert nothing > saved == plain


def test_an_error_says_that_arguments_are_swapped():
    with pytest.raises(
        TypeError, match=r"write checkpoint_name\(x, name\): .* a Tensor"
    ):
        checkpoint_name("h", torch.ones(2))


def test_it_runs_no_operation_and_changes_no_gradient():
    plain = lambda x: x.sin().exp()
    fn = lambda x: checkpoint_name(checkpoint_name(x, "x").sin(), "y").exp()
    leaf = X.clone().requires_grad_()
    with count_ops() as ops:
        out = fn(leaf)
        (actual,) = torch.autograd.grad(out.sum(), leaf)
    with count_ops() as expected:
        (wanted,) = torch.autograd.grad(plain(leaf).sum(), leaf)
    assert ops == expected
    assert_same(actual, wanted)


@pytest.mark.parametrize("name", ["", "a b", "layers.0/attn[out]", "ü", "name"])
def test_any_string_is_a_name(name):
    found = named(lambda x: checkpoint_name(x.exp(), name).sin(), X, policy=save(name))
    assert found == [(f"named {name!r}", (2, 6))]
