"""`torch.func.vjp`: its level is gone when the backward runs, any number of times."""

import pytest
import torch
from support.zoo import (
    BIG,
    BLOCKS,
    DEPTH,
    ZOO,
    W,
    X,
    assert_rematerialized,
    block,
    blocks,
    leaves_of,
    make,
    outputs,
    plainly,
)
from torch.func import jvp, vjp, vmap
from torch.utils._pytree import tree_map

from remat import remat
from remat.testing import live_bytes, peak_bytes


def tensors_only(tree):
    """`vjp` wants nothing but tensors that have derivatives."""
    if isinstance(tree, dict):
        return {k: tensors_only(v) for k, v in tree.items() if k != "i"}
    if isinstance(tree, list | tuple):
        return [tensors_only(t) for t in tree if isinstance(t, torch.Tensor)]
    return tree


def cotangents_of(out, *, batch=()):
    return tree_map(lambda t: make(*batch, *t.shape, seed=t.numel()), out)


def pulled(fn, w, x):
    out, pull = vjp(fn, w, x)
    return out, pull(cotangents_of(out))


def pulled_twice(fn, w, x):
    out, pull = vjp(fn, w, x)
    cts = cotangents_of(out)
    return pull(cts), pull(tree_map(torch.neg, cts))


def pulled_back_a_batch(fn, w, x):
    out, pull = vjp(fn, w, x)
    return vmap(pull)(cotangents_of(out, batch=(3,)))


def pulled_without_grad_mode(fn, w, x):
    with torch.no_grad():
        return pulled(fn, w, x)


def pulled_at_a_dual(fn, w, x):
    out, pull = vjp(fn, w, x)
    cts = cotangents_of(out)
    return jvp(pull, (cts,), (cts,))


def with_aux(fn, w, x):
    def of_both(w, x):
        out = fn(w, x)
        return out, {"aux": w.sin()}

    out, pull, aux = vjp(of_both, w, x, has_aux=True)
    return out, aux, pull(cotangents_of(out))


def to_one_input(fn, w, x):
    out, pull = vjp(lambda x: fn(w, x), x)
    return out, pull(cotangents_of(out))


# Evaluations: the forward and one recomputation for each pull, a batch being one.
VJPS = {
    "pull": (pulled, 2),
    "twice": (pulled_twice, 3),
    "batch": (pulled_back_a_batch, 2),
    "no_grad": (pulled_without_grad_mode, 2),
    "dual_cotangent": (pulled_at_a_dual, 2),
    "has_aux": (with_aux, 2),
    "one_input": (to_one_input, 2),
}


@pytest.mark.parametrize("case", ZOO)
@pytest.mark.parametrize("how", VJPS)
def test_vjps_are_those_of_the_function(how, case):
    transform, evaluations = VJPS[how]
    fn, call = ZOO[case]
    assert_rematerialized(
        lambda f: transform(lambda w, x: tensors_only(call(f, w, x)), W, X),
        fn,
        evaluations=evaluations,
    )


def test_after_the_forward_only_the_inputs_are_alive():
    one = BIG.nbytes
    assert live_bytes(lambda: vjp(block, BIG)) == DEPTH * one
    assert live_bytes(lambda: vjp(remat(block), BIG)) == one


def test_at_the_peak_one_block_is_alive():
    def step(wrap):
        one = torch.ones(())
        return peak_bytes(lambda: vjp(blocks(wrap), BIG)[1](one)) // BIG.nbytes

    assert step(plainly) >= BLOCKS * DEPTH
    assert step(remat) <= BLOCKS + 2 * DEPTH


def test_a_pull_that_is_kept_keeps_no_more():
    def keep():
        _, pull = vjp(lambda x: remat(block)(x).sin(), BIG)
        return pull, pull(BIG), pull(BIG)

    # Both gradients, the output, and the input of the sine outside.
    assert live_bytes(keep) <= 4 * BIG.nbytes


def test_outputs_that_depend_on_no_input():
    def transform(f):
        out, pull = vjp(f, W)
        return out, pull(cotangents_of(out))

    def fn(w):
        return w.sin(), w.detach().exp(), torch.ones(3, dtype=torch.double)

    assert_rematerialized(transform, fn, evaluations=2)


def test_outputs_that_have_no_derivatives():
    def transform(f):
        out, pull, aux = vjp(pairs(f), W, X, has_aux=True)
        return out, aux, pull(cotangents_of(out))

    def pairs(f):
        def out_and_aux(w, x):
            tree = f(w, x)
            index = tree["i"][1]
            return tensors_only(tree), index

        return out_and_aux

    assert_rematerialized(transform, outputs, evaluations=2)


def test_an_input_returned_as_it_is():
    def transform(f):
        out, pull = vjp(f, W, X)
        return out, pull(cotangents_of(out))

    assert_rematerialized(transform, lambda w, x: (w, w.sin() * x, x), evaluations=2)


def test_a_pull_recorded_by_plain_autograd():
    def transform(f):
        (w,) = leaves_of(W)
        out, pull = vjp(f, w)
        (pulled,) = pull(cotangents_of(out))
        pulled.sin().sum().backward()
        return pulled, w.grad

    # Forward, vjp; then the vjp of the vjp. The value of the forward is not used again.
    assert_rematerialized(transform, lambda w: w.sin() @ w, evaluations=3)


def test_a_pull_within_a_level_opened_later():
    def transform(f):
        out, pull = vjp(f, W)

        def loss(cts):
            return pull(cts)[0].sin().sum()

        return vjp(loss, cotangents_of(out))[1](torch.ones((), dtype=torch.double))

    assert_rematerialized(transform, lambda w: w.sin() @ w, evaluations=3)
