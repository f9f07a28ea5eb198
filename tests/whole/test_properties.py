"""Random programs under random derivatives: what is evaluated, and how often.

Plain and remat run the very same instructions, so values agree bit for bit; gradients
too, except that under torch.func the contributions to a value with several uses are
added up in another order (promise 1). Fixed examples; `REMAT_EXPLORE=1` looks for new
ones.
"""

import os

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.programs import CAPTURED, SIZE, UNARY
from support.transforms import ALL, some
from support.zoo import Evaluations, leaves_of, plainly
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad

from remat import remat
from remat.testing import assert_same


bounded = settings(
    derandomize="REMAT_EXPLORE" not in os.environ, max_examples=30, print_blob=True
)
generator = torch.Generator().manual_seed(3)
INPUTS = [
    torch.rand(SIZE, SIZE, dtype=torch.double, generator=generator) + 0.1 * k
    for k in range(2)
]
WEIGHTS = torch.linspace(0.3, 1.7, SIZE * SIZE, dtype=torch.double).view(SIZE, SIZE)


# --- What the random programs found ---


@pytest.mark.parametrize("how", ["grad", "vjp", "jacrev", "grad_grad"])
def test_a_nested_call_may_return_a_result_that_is_dropped(how):
    """Its node has edges to what any of its results depends on."""

    def loss(wrap, notes):
        def inner(x, w):
            notes.note("inner")
            return w.sin(), x.sin()

        outer = wrap(lambda x, w: wrap(inner)(x, w)[0])
        return lambda x, w: outer(x, w).square().sum() + x.square().sum()

    ours, plain = Evaluations(), Evaluations()
    got = ALL[how](loss(remat, ours), *INPUTS)
    assert_same(got, ALL[how](loss(plainly, plain), *INPUTS), reassociated=True)
    assert len(ours) > len(plain)


# --- Chains: each value has its uses in one call, so every bit is as in plain ---


links = st.lists(st.sampled_from([*{*UNARY} - {"detach"}]), min_size=1, max_size=3)
chains = st.lists(st.tuples(links, st.integers(0, 3)), min_size=1, max_size=4)
CHAINED = some("backward", "grad", "vjp", "jacrev", "vmap_grad", "grad_vmap")


def chain(wrap, spec, note):
    def link(names, depth):
        def body(x):
            for name in names:
                note(name)
                x = UNARY[name](x)
            return x

        for _ in range(depth):
            body = wrap(body)
        return body

    def loss(x):
        for names, depth in spec:
            x = link(names, depth)(x)
        return (x * WEIGHTS).sum()

    return loss


def last_saving(spec):
    """For each call, the step that is the last to save what the call computed.

    Where base autograd differentiates, a recompute stops there; and it stops where a
    call within begins, which recomputes itself. So nesting costs nothing.
    """
    (x,) = leaves_of(INPUTS[0])
    for names, _ in spec:
        held = [x, CAPTURED]  # or another tensor may get its id
        given, saved = {*map(id, held)}, []
        with saved_tensors_hooks(lambda t, s=saved: s[-1].add(id(t)) or t, lambda t: t):
            for name in names:
                saved.append(set())
                x = UNARY[name](x)
        yield max((k for k, ids in enumerate(saved, 1) if ids - given), default=0)


def expected_steps(spec, transform):
    """How many steps run, recomputes included."""
    count = 0
    for (names, depth), last in zip(spec, last_saving(spec), strict=True):
        if transform == "backward":
            count += len(names) + last * min(depth, 1)
        elif transform in ("vjp", "jacrev"):
            # Base autograd differentiates the recompute of the outermost call.
            count += len(names) * (1 + min(depth, 1)) + last * (depth > 1)
        else:
            # Each level of nesting runs what is in it once more.
            count += len(names) * (1 + depth)
    return count


@bounded
@given(spec=chains, name=st.sampled_from([*CHAINED]))
def test_gradients_of_random_chains_are_the_same_bits(spec, name):
    ours, plain = Evaluations(), Evaluations()
    got = CHAINED[name](chain(remat, spec, ours.note), INPUTS[0])
    want = CHAINED[name](chain(plainly, spec, plain.note), INPUTS[0])
    assert_same(got, want)
    assert len(ours) == expected_steps(spec, name)
    assert len(plain) == sum(len(names) for names, _ in spec)


# Nesting is in parts of the program, in any shape of tree.
trees = st.recursive(
    st.sampled_from(["sin", "cos", "tanh", "captured", "view", "mean"]),
    lambda parts: st.lists(parts, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, list))


def of_tree(wrap, tree, note):
    if isinstance(tree, str):
        return lambda x: (note(tree), UNARY[tree](x))[1]
    parts = [of_tree(wrap, part, note) for part in tree]

    def run(x):
        for part in parts:
            x = part(x)
        return x

    return wrap(run)


def cost(tree, depth=0):
    """A leaf under `depth` remats runs once, and once more for each of them."""
    if isinstance(tree, str):
        return 1 + depth
    return sum(cost(part, depth + 1) for part in tree)


@bounded
@given(tree=trees)
def test_random_nesting_evaluates_a_leaf_once_for_each_remat_around_it(tree):
    notes = Evaluations()

    def gradient(wrap):
        fn = of_tree(wrap, tree, notes.note)
        return grad(lambda x: (fn(x) * WEIGHTS).sum())(INPUTS[0])

    want = gradient(plainly)
    notes.clear()
    assert_same(gradient(remat), want)
    assert len(notes) == cost(tree)
