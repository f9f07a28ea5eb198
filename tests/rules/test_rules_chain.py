"""Rules and kept calls in the steps of chains."""

import pytest
import torch
from support.ruled import FUNCTIONS, runs
from support.zoo import W, X, leaves_of
from torch.func import grad, vmap

from remat import chain, remat


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
