"""What needs a GPU to be shown, and the same on the CPU: draws, keys, offloading.

Each test runs on both devices. The others that need a GPU are marked `gpu`, too.
"""

from functools import partial

import pytest
import torch
from torch.func import grad
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from remat import policies, random, remat, saved_residuals
from remat.testing import assert_same, count_ops


on_both = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
)
N = 10_000
KEY = random.key(7)


def leaf(device):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(N, generator=generator).to(device).requires_grad_()


def trained(fn, x):
    """Two calls of a function, their gradient, and what is drawn after them."""
    torch.manual_seed(5)
    with count_ops() as ops:
        (fn(x) + fn(x)).sum().backward()
    found, x.grad = x.grad, None
    return found, torch.rand(4, device=x.device), ops["sin"]


def assert_replayed(make, x, wrap=remat):
    """A recompute draws what the forward drew, and the stream goes on as in plain."""
    want, after, once = trained(make(), x)
    got, after_recompute, twice = trained(wrap(make()), x)
    assert_same((got, after_recompute), (want, after))
    assert twice == 2 * once > 0, f"{twice} sines run, {once} in plain"


def dropped(x):
    """The recompute has to get to the mask, which is behind both sines."""
    return functional.dropout(x.sin().sin(), 0.4)


@on_both
def test_draws_from_the_global_stream_are_replayed(device):
    assert_replayed(lambda: dropped, leaf(device))


@on_both
def test_draws_from_a_generator_are_replayed(device):
    def make():
        generator = torch.Generator(device).manual_seed(11)

        def noisy(x):
            x = x.sin().sin()
            return x * torch.rand(N, generator=generator, device=device)

        return noisy

    assert_replayed(make, leaf(device))


@on_both
def test_draws_are_replayed_under_grad(device):
    x = leaf(device).detach()

    def gradient(fn):
        torch.manual_seed(5)
        with count_ops() as ops:
            return grad(lambda x: fn(x).sum())(x), ops["sin"]

    (want, once), (got, twice) = gradient(dropped), gradient(remat(dropped))
    assert_same(got, want)
    assert twice == 2 * once > 0


def test_a_recompute_that_draws_other_numbers_is_noticed():
    forgetful = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    with pytest.raises(AssertionError, match="differs in value"):
        assert_replayed(lambda: dropped, leaf("cpu"), lambda fn: partial(forgetful, fn))


def test_a_function_that_is_not_recomputed_is_noticed():
    with pytest.raises(AssertionError, match="4 sines run, 4 in plain"):
        assert_replayed(lambda: dropped, leaf("cpu"), lambda fn: fn)


EXACT = {
    "bits": lambda key: random.bits(key, N),
    "uniform": lambda key: random.uniform(key, N),
    "uniform, bfloat16": lambda key: random.uniform(key, N, dtype=torch.bfloat16),
    "bernoulli": lambda key: random.bernoulli(key, 0.3, N),
    "randint": lambda key: random.randint(key, N, 0, 1000),
    "split": lambda key: random.split(key, 5).data,
    "fold_in": lambda key: random.fold_in(key, 2**63 + 1).data,
}


@pytest.mark.parametrize("draw", EXACT.values(), ids=EXACT)
@on_both
def test_a_key_gives_the_numbers_of_the_cpu(draw, device):
    found = draw(KEY.to(device))
    assert found.device.type == device
    assert_same(found.cpu(), draw(KEY))


@on_both
def test_normal_numbers_are_those_of_the_cpu_to_rounding(device):
    found, want = random.normal(KEY.to(device), N), random.normal(KEY, N)
    torch.testing.assert_close(found.cpu(), want, rtol=1e-5, atol=1e-5)


@on_both
def test_offloading_to_the_host_changes_no_gradient(device):
    def layers(w, x):
        return torch.tanh(torch.tanh(x @ w) @ w)

    def gradient(fn):
        with count_ops() as ops:
            found = torch.autograd.grad(fn(w, x).sum(), w)[0]
        return found, ops["mm"], ops["tanh"]

    numbers = leaf(device).detach()
    w, x = numbers.view(100, 100).requires_grad_(), numbers[:500].view(5, 100)
    policy = policies.dots_saveable.but_offload()
    offloading = remat(layers, policy=policy)
    (want, mm, tanh), (got, same, again) = gradient(layers), gradient(offloading)
    assert_same(got, want)
    assert (same, again) == (mm, 2 * tanh)
    places = {r.place for r in saved_residuals(offloading, w, x)}
    assert ("pinned host" in places) == (device == "cuda")
