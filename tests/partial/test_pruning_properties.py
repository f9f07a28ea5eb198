"""Random programs under random policies, through random stacks of transforms.

Values and gradients are those of plain code, bit for bit, in the first call and in
later ones: what is left out of a recompute is a tensor that cannot be read, so that
a wrong plan is an error and not another number.
"""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.programs import (
    KINDS,
    LEAVES,
    POLICIES,
    PURE,
    SMOOTH,
    WRAPPERS,
    Block,
    Program,
    Step,
    programs,
)
from support.pruning import forget_calls, given_up, strikes
from support.transforms import ALL, some
from support.zoo import leaves_of, ops_of, scalar

from remat import policies, remat
from remat.testing import assert_same


pytestmark = given_up  # programs that differ in each call, which no policy can follow
FIRST = some("backward", "of_one", "retained", "grad")
SECOND = some("twice", "grad_grad", "twice_grad", "jvp_grad")
MANY = some("backward_vmap", "vmap_grad", "grad_vmap", "jacrev_jacrev", "hessian")


def chosen(transforms, size=3):
    """A few of the transforms, in some order, run on the same record."""
    names = st.sampled_from([*transforms])
    return st.lists(names, min_size=1, max_size=size).map(
        lambda names: [ALL[name] for name in names]
    )


def seeded(run, *args):
    """What is computed, and where the stream stands then."""
    torch.manual_seed(0)
    return run(*args), torch.get_rng_state()


def assert_derivative(transform, ours, program, used=slice(None)):
    """It is that of plain code.

    Under torch.func an input may be used in several calls, whose contributions are
    added up in another order. A nested call adds up its own first.
    """

    def derivative(fn):
        return seeded(transform, lambda *xs: scalar(fn(*xs)[used]), *LEAVES[:2])

    got, want = derivative(ours), derivative(program)
    sums = program.is_nested() or transform.order > 1 or transform.batched
    assert_same(got, want, reassociated=sums and not transform.at_base)


def assert_equals_plain(program, wrapper, transforms, used):
    forget_calls()
    ours = wrapper(program)
    got, want = (seeded(fn, *leaves_of(*LEAVES)) for fn in (ours, program))
    assert_same(got, want)
    for transform in [transforms[0], *transforms, transforms[0]]:
        assert_derivative(transform, ours, program, used)


used_results = st.sampled_from([slice(None), slice(None), slice(1)])


@settings(max_examples=10)
@given(programs(), WRAPPERS, chosen(FIRST), used_results)
def test_a_random_program_equals_plain_code(program, wrapper, transforms, used):
    assert_equals_plain(program, wrapper, transforms, used)
    assert program.is_nested() or not any(strikes())


@settings(max_examples=5)
@given(
    programs((*PURE, "stream", "stream", "asking", "asking")),
    *(WRAPPERS, chosen(FIRST | some("twice", "grad_grad")), used_results),
)
def test_a_random_program_draws_and_asks(program, wrapper, transforms, used):
    assert_equals_plain(program, wrapper, transforms, used)


@settings(max_examples=5)
@given(programs(SMOOTH), WRAPPERS, chosen(MANY, 2), used_results)
def test_a_random_program_is_batched(program, wrapper, transforms, used):
    assert_equals_plain(program, wrapper, transforms, used)


@settings(max_examples=5)
@given(programs((*SMOOTH, "draw"), 5), WRAPPERS, chosen(SECOND, 2), used_results)
def test_a_random_program_is_differentiated_twice(program, wrapper, transforms, used):
    assert_equals_plain(program, wrapper, transforms, used)


@settings(max_examples=4)
@given(st.lists(programs(size=5), min_size=2, max_size=3), WRAPPERS, chosen(FIRST, 2))
def test_a_function_is_another_program_in_each_call(several, wrapper, transforms):
    """Of one signature: the record of the one is not that of the other."""
    forget_calls()
    turn = [0]

    class Turns:
        def __call__(self, *xs, context=None):
            return several[turn[0] % len(several)](*xs, context=context)

    ours = wrapper(Turns())
    for call in range(6):
        turn[0] = call
        for transform in transforms:
            assert_derivative(transform, ours, several[call % len(several)])


COPIES = {"clone", "copy_", "rand"}  # of cotangents, and what the loss draws
FREE = {"detach", "alias", "empty", "empty_like", "empty_strided", *COPIES}


@settings(max_examples=4)
@given(programs(), POLICIES)
def test_a_recomputation_runs_no_more_than_all_of_it(program, policy):
    def work(fn):
        ops = ops_of(lambda: ALL["backward"](lambda *xs: scalar(fn(*xs)), *LEAVES))
        return sum(n for name, n in ops.items() if name not in FREE)

    forget_calls()
    ours = remat(lambda *xs: program(*xs), policy=policy, prune=True)
    for _ in range(3):
        pruned = work(ours)
    assert pruned <= work(remat(lambda *xs: program(*xs), prune=False))


EACH = [(kind, name) for kind, names in KINDS.items() for name in names]


@pytest.mark.parametrize(("kind", "name"), EACH, ids=[f"{k} {n}" for k, n in EACH])
@pytest.mark.one_in(3)
def test_each_instruction_by_itself(kind, name):
    """Dead, alive, and as the result: so that what fails above is easily found."""
    here, everything = Step(kind, name, 2, 1), policies.everything_saveable
    for policy, body, result in (
        (None, (here, Step("unary", "double", -1)), -1),
        (everything, (here, Step("unary", "tanh", -1)), 0),
        (None, (Step("unary", "tanh", 2), here), 0),
    ):
        program = Program(Block(body, (result,), depth=0))
        ours = remat(lambda *xs: program(*xs), policy=policy, prune=True)  # noqa: B023
        for _ in range(3):
            assert_derivative(ALL["backward"], ours, program)


def test_the_programs_are_not_trivial():
    """Most of them compute something, of both inputs, and are pruned."""
    found = []

    @settings(max_examples=50, database=None)
    @given(programs())
    def sample(program):
        found.append(len(program.block.body))
        loss = lambda *xs: scalar(program(*xs))
        _, grads = ALL["backward"](loss, *LEAVES[:2])
        assert all(g.count_nonzero() for g in grads)

    sample()
    assert sum(found) / len(found) > 2
