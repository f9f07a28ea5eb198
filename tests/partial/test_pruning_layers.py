"""Layers under `prune=True`: what torch's own modules do, and how many there may be.

Composite operations decompose otherwise in other modes, parametrizations are cached,
batch norms update buffers, and a record may be thousands of operations long.
"""

import contextlib

import pytest
import torch
from support.pruning import (
    X,
    assert_exact,
    dead_end,
    each_policy,
    of_backward,
    strikes,
)
from support.zoo import make
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from remat import checkpoint_name, policies, remat
from remat.testing import assert_same, count_ops


# --- Composite operations, which decompose otherwise in other modes ---


BACKENDS = {"math": SDPBackend.MATH, "flash": SDPBackend.FLASH_ATTENTION}


@pytest.mark.parametrize("inside", [True, False])
@each_policy
def test_a_backend_of_attention_is_chosen(policy, inside):
    names = ["math", "flash", "flash", "math", "flash", "math", "math"]
    current = [names[0]]

    def backend(where):
        here = where == inside
        return sdpa_kernel(BACKENDS[current[0]]) if here else contextlib.nullcontext()

    def fn(q):
        with backend(True):
            return dead_end(scaled_dot_product_attention(q.sin(), q, q * 2))

    def way(fn, args):
        with backend(False):
            return of_backward(fn, args)

    assert_exact(
        fn,
        make(1, 2, 3, 4, seed=1),
        policy=policy,
        way=way,
        before=lambda call: current.__setitem__(0, names[call]),
        calls=len(names),
    )


# --- Modules with state ---


@pytest.mark.parametrize("prune", [True, False])
@each_policy
@pytest.mark.parametrize("uses", ["a dead result", "its result"])
def test_statistics_are_read_after_their_update(uses, policy, prune):
    def reader(norm):
        def fn(x):
            y = norm(norm(x))
            y = (y.pow(2) if uses == "its result" else x) * norm.running_mean.cos()
            return y * torch.full((4,), 2.0, dtype=torch.double)

        return fn

    plain, norm = nn.BatchNorm1d(4).double(), nn.BatchNorm1d(4).double()
    saves_all = policy is policies.everything_saveable
    kept = saves_all and prune and uses == "a dead result"
    ours = remat(reader(norm), policy=policy, prune=prune)
    for call in range(4):
        x = make(3, 4, seed=call) + 3
        with count_ops() as once:
            want = of_backward(reader(plain), (x,))
        with count_ops() as ops:
            got = of_backward(ours, (x,))
        assert_same(got, want)
        assert_same(norm.running_mean, plain.running_mean)
        if call:  # the first may find that it needs more than was kept
            assert ops["cos"] == once["cos"] + (not saves_all)
            assert ops["native_batch_norm"] == (2 if kept else 4)
        # Even where all is kept, constants are made again.
        assert (ops["full"], once["full"]) == (2, 1)


# --- Names, and long records ---


def test_many_outputs_are_named():
    def fn(x):
        parts = torch.split(x.flatten().repeat(25), 4)
        sines = torch._foreach_sin([*parts])
        torch._foreach_mul_(sines, 2.0)
        return [checkpoint_name(dead_end(p.exp()), "p") for p in sines]

    assert_exact(fn, X, policy=policies.save_only_these_names("p"))
    assert strikes() == [0]


def test_a_record_has_two_thousand_operations():
    def long(x):
        for k in range(1000):
            x = x.sin() if k % 3 else x * 1.5
        return dead_end(x)

    assert_exact(long, X, pruned=True, calls=3)
    assert strikes() == [0]
