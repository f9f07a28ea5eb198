"""Random programs under random policies, through random stacks of transforms.

Values and gradients are those of plain code, bit for bit, in the first call and in
later ones: what is left out of a recomputation is a tensor that cannot be read, so that
a wrong plan is an error and not another number.
"""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.programs import (
    BINARY,
    IN_PLACE,
    POLICIES,
    SEVERAL,
    SIZE,
    UNARY,
    Program,
    Step,
    programs,
    wrappers,
)
from support.zoo import make, scalar
from torch.func import grad, jvp, vmap

from remat import policies, remat
from remat._partial.cache import CACHES
from remat.testing import assert_same, count_ops


# Programs that differ in each call, which no policy can follow.
pytestmark = pytest.mark.filterwarnings("ignore:.* is not followed any more")
X, W = make(SIZE, SIZE, seed=51), make(SIZE, SIZE, seed=52)
XS, WS = make(2, SIZE, SIZE, seed=53), make(2, SIZE, SIZE, seed=54)
V = make(SIZE, SIZE, seed=55)


# --- Transforms: each gives what is computed of a function of two matrices ---


def backward(fn):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    outs = fn(x, w)
    return [outs, *torch.autograd.grad(scalar(outs), (x, w))]


def of_one_result(fn):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    return torch.autograd.grad(scalar(fn(x, w)[0]), (x, w))


def twice(fn):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    loss = scalar(fn(x, w))
    first = torch.autograd.grad(loss, (x, w), retain_graph=True)
    return [first, torch.autograd.grad(loss, (x, w))]


def create_graph(fn):
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    first = torch.autograd.grad(scalar(fn(x, w)), (x, w), create_graph=True)
    return [first, torch.autograd.grad(scalar(first), (x, w))]


def of_func_grad(fn):
    return grad(lambda x, w: scalar(fn(x, w)), (0, 1))(X, W)


def vmap_of_grad(fn):
    return vmap(grad(lambda x, w: scalar(fn(x, w)), (0, 1)))(XS, WS)


def grad_of_vmap(fn):
    return grad(lambda x, w: scalar(vmap(fn)(x, w)), (0, 1))(XS, WS)


def grad_of_grad(fn):
    return grad(lambda x, w: scalar(grad(lambda x: scalar(fn(x, w)))(x)), (0, 1))(X, W)


def jvp_of_grad(fn):
    return jvp(lambda x: grad(lambda x: scalar(fn(x, W)))(x), (X,), (V,))


# Those by base autograd are equal bit for bit. Under torch.func an input may be used in
# several calls, whose contributions are added up in another order.
FIRST = {f.__name__: f for f in (backward, of_one_result, twice, of_func_grad)}
BATCHED = {f.__name__: f for f in (vmap_of_grad, grad_of_vmap)}
HIGHER = {f.__name__: f for f in (create_graph, grad_of_grad, jvp_of_grad)}
AT_BASE = {backward, of_one_result, twice, create_graph}


def check(program, wrap, transforms, *, calls, reassociated=False):
    CACHES.clear()
    ours = wrap(program)
    for transform in transforms * calls:
        want = transform(program)
        got = transform(ours)
        assert_same(got, want, reassociated=reassociated and transform not in AT_BASE)


def some(transforms, size=3):
    """A few of the transforms, in some order, run on the same record."""
    names = st.sampled_from([*transforms])
    chosen = st.lists(names, min_size=1, max_size=size)
    return chosen.map(lambda names: [transforms[name] for name in names])


@settings(max_examples=120)
@given(programs(), wrappers(), some(FIRST))
def test_random_programs(program, wrap, transforms):
    # A nested call adds up its own contributions to a gradient first.
    nested = any(step.nested for step in program.steps)
    check(program, wrap, transforms, calls=3, reassociated=nested)


@settings(max_examples=40)
@given(programs(without=("in_place", "draw")), wrappers(), some(BATCHED, 2))
def test_random_programs_in_batches(program, wrap, transforms):
    check(program, wrap, transforms, calls=2, reassociated=True)


@settings(max_examples=40)
@given(programs(size=5), wrappers(), some(HIGHER, 2))
def test_random_programs_of_higher_order(program, wrap, transforms):
    check(program, wrap, transforms, calls=2, reassociated=True)


@settings(max_examples=40)
@given(st.lists(programs(size=5), min_size=2, max_size=3), wrappers(), some(FIRST, 2))
def test_a_function_that_is_another_program_in_each_call(several, wrap, transforms):
    """Of one signature: the record of the one is not that of the other."""
    CACHES.clear()
    turn = [0]
    nested = any(step.nested for program in several for step in program.steps)

    class Turns:
        def __call__(self, x, w, nested=None):
            return several[turn[0] % len(several)](x, w, nested)

    ours = wrap(Turns())
    for call in range(6):
        turn[0] = call
        for transform in transforms:
            want = transform(several[call % len(several)])
            reassociated = nested and transform not in AT_BASE
            assert_same(transform(ours), want, reassociated=reassociated)


COPIES = {"clone", "copy_", "rand"}  # of cotangents, and what the loss draws
FREE = {"detach", "alias", "empty", "empty_like", "empty_strided", *COPIES}


@settings(max_examples=40)
@given(programs(), POLICIES)
def test_a_recomputation_runs_no_more_than_all_of_it(program, policy):
    def work(fn):
        with count_ops() as ops:
            backward(fn)
        return sum(n for name, n in ops.items() if name not in FREE)

    CACHES.clear()
    ours = remat(lambda x, w: program(x, w), policy=policy, prune=True)
    for _ in range(3):
        backward(ours)
    assert work(ours) <= work(remat(lambda x, w: program(x, w), prune=False))


EACH = [
    *(("unary", name) for name in UNARY),
    *(("binary", name) for name in BINARY),
    *(("in_place", name) for name in IN_PLACE),
    *(("several", name) for name in SEVERAL),
]


@pytest.mark.parametrize("position", ["dead", "alive", "last"])
@pytest.mark.parametrize(("kind", "name"), EACH, ids=[f"{k} {n}" for k, n in EACH])
def test_each_instruction_by_itself(kind, name, position):
    """Dead, alive, and as the result: so that what fails above is easily found."""
    here = Step(kind, name, 2, 1)
    program = {
        "dead": Program((here, Step("unary", "double", 3, 0)), (0,)),
        "alive": Program((here, Step("unary", "tanh", 3, 0)), (-1,)),
        "last": Program((Step("unary", "tanh", 2, 0), here), (-1,)),
    }[position]
    for policy in (None, policies.everything_saveable):
        ours = remat(lambda x, w: program(x, w), policy=policy, prune=True)
        for _ in range(3):
            assert_same(backward(ours), backward(program))


def test_the_programs_are_not_trivial():
    """Most of them compute something, of both inputs, and are pruned."""
    found = []

    @settings(max_examples=50, database=None)
    @given(programs())
    def sample(program):
        found.append(len(program.steps))
        *_, dx, dw = backward(program)
        assert dx.count_nonzero()
        assert dw.count_nonzero()

    sample()
    assert sum(found) / len(found) > 2
