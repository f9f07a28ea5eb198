"""Rules and kept calls under every transform, in every region, in steps of chains."""

import pytest
import torch
from support.ruled import FUNCTIONS, body_of, runs
from support.transforms import ALL, some
from support.zoo import W, X, leaves_of
from torch.func import grad, vmap

from remat import chain, policies, remat


REGIONS = {
    "none": lambda f: f,
    "remat": remat,
    "prune": lambda f: remat(f, prune=True),
    "dots": lambda f: remat(f, policy=policies.dots_saveable),
    "everything": lambda f: remat(f, policy=policies.everything_saveable),
    "nested": lambda f: remat(remat(f)),
    "higher_order": lambda f: remat(f, higher_order=True),
}


# Of torch, in `linearize`.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
@pytest.mark.one_in(3)
@pytest.mark.parametrize("region", REGIONS)
@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("transform", ALL)
def test_derivatives_are_those_of_plain(transform, name, region):
    fn, plain = FUNCTIONS[name]
    run = ALL[transform]
    if region == "nested" and name in {"both", "without rem"}:
        pytest.skip("as defremat, as defvjp")
    want = run(lambda w, x: body_of(plain)(w, x).sum(), W, X)
    body = REGIONS[region](body_of(fn))
    runs()
    for _ in range(2):  # the second follows the record of the first
        got = run(lambda w, x: body(w, x).sum(), W, X)
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-11)
    assert runs() or ALL[transform].forward


# --- How often each part runs, in one call ---


# Reverse mode of the first order, in which rules hold.
FIRST = some("backward", "grad", "vjp", "jacrev", "vmap_grad", "grad_vmap", "of_one")


@pytest.mark.parametrize("region", [r for r in REGIONS if r != "none"])
@pytest.mark.parametrize("transform", FIRST)
def test_fwd_runs_once_and_rem_once(transform, region):
    if transform == "vjp":
        pytest.skip("which pulls back for the value and for the gradient")
    fn, _ = FUNCTIONS["defremat"]
    body = REGIONS[region](body_of(fn))
    for _ in range(2):
        runs()
        FIRST[transform](lambda w, x: body(w, x).sum(), W, X)
        # Each of two nested calls runs again, unless the outer one ends before.
        twice = region == "nested" and not FIRST[transform].at_base
        assert runs() == {"fwd": 1, "rem": 1 + twice, "bwd": 1}


@pytest.mark.parametrize("transform", FIRST)
def test_with_defvjp_alone_fwd_runs_again(transform):
    fn, _ = FUNCTIONS["defvjp"]
    runs()
    body = remat(body_of(fn))
    FIRST[transform](lambda w, x: body(w, x).sum(), W, X)
    assert runs() == {"fwd": 2, "bwd": 1}


@pytest.mark.parametrize("name", ["defremat", "both"])
@pytest.mark.parametrize("transform", FIRST)
def test_outside_of_a_region_nothing_runs_again(transform, name):
    fn, _ = FUNCTIONS[name]
    runs()
    FIRST[transform](lambda w, x: body_of(fn)(w, x).sum(), W, X)
    rem = {"rem": 1} if name == "defremat" else {}
    assert runs() == {"fwd": 1, **rem, "bwd": 1}


@pytest.mark.parametrize("region", [r for r in REGIONS if r != "none"])
@pytest.mark.parametrize("name", ["kept", "kept module"])
@pytest.mark.parametrize("transform", FIRST | some("grad_jvp", "two_pulls", "retained"))
def test_a_kept_call_is_entered_once(transform, name, region):
    if name == "kept module" and transform in {"vjp", "two_pulls"}:
        pytest.skip("base autograd differentiates these pulls once more")
    fn, _ = FUNCTIONS[name]
    body, run = REGIONS[region](body_of(fn)), ALL[transform]
    for _ in range(2):
        runs()
        run(lambda w, x: body(w, x).sum(), W, X)
        assert runs() == {"fn": 1}


@pytest.mark.parametrize("transform", some("jvp", "jacfwd", "duals"))
def test_forward_mode_differentiates_the_function_itself(transform):
    fn, _ = FUNCTIONS["both"]
    runs()
    ALL[transform](lambda w, x: remat(body_of(fn))(w, x).sum(), W, X)
    assert runs() == {}


# --- Rules and kept calls in the steps of chains ---


STEPS = 5


def plain(step, x):
    for _ in range(STEPS):
        x = step(x)
    return x


def scan(step, x):
    return chain.scan(lambda c, _: (step(c), None), x, length=STEPS)[0]


CHAINS = {
    "scan": scan,
    "fori_loop": lambda step, x: chain.fori_loop(0, STEPS, lambda _, c: step(c), x),
    "budget": lambda step, x: chain.scan(
        lambda c, _: (step(c), None), x, length=STEPS, checkpoints=2
    )[0],
}


def loss_of(fn, run):
    def loss(w, x):
        def step(carry):
            first, second = fn(w * 1.5, carry)
            return (first + second).sin() * carry

        return run(step, x).sum()

    return loss


@pytest.mark.parametrize("around", [lambda f: f, remat])
@pytest.mark.parametrize("run", CHAINS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_step_finds_what_its_calls_kept(name, run, around):
    fn, expected = FUNCTIONS[name]
    found, want = around(loss_of(fn, CHAINS[run])), loss_of(expected, plain)
    both = 0, 1
    wanted = grad(want, both)(W, X)
    kept = name in {"defremat", "both"}
    part = "fn" if "kept" in name else "fwd"
    runs()
    leaves = leaves_of(W, X)
    got = torch.autograd.grad(found(*leaves), leaves)
    torch.testing.assert_close(got, wanted)
    assert runs()[part] == STEPS or not (kept or part == "fn")
    torch.testing.assert_close(grad(found, both)(W, X), wanted)
    assert runs()[part] == STEPS or not (kept or part == "fn")
    xs = torch.stack([X, X * 2])
    each = vmap(grad(found, 1), (None, 0))(W, xs)
    torch.testing.assert_close(each, vmap(grad(want, 1), (None, 0))(W, xs))
    # Base autograd differentiates by the parameter of a module, too.
    assert name == "kept module" or runs()[part] == STEPS or not (kept or part == "fn")
