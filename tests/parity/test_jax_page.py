"""JAX 0.12's page on rematerialization, cell by cell, in our words.

`jax.ad_checkpoint` counts a cosine as a residual of a sine; torch saves the argument of
the sine, and takes the cosine of it in the backward.
"""

import pytest
import torch

from remat import (
    chain,
    checkpoint_name,
    custom_vjp,
    policies,
    remat,
    saved_residuals,
)
from remat.policies import Op
from remat.testing import assert_same, count_ops


SIN = torch.ops.aten.sin.default


def g(w, x):
    return torch.sin(w @ x)


def three(w1, w2, w3, x):
    return g(w3, g(w2, g(w1, x)))


def each(w1, w2, w3, x):
    return remat(g)(w3, remat(g)(w2, remat(g)(w1, x)))


def named(w1, w2, w3, x):
    x = checkpoint_name(g(w1, x), "a")
    x = checkpoint_name(g(w2, x), "b")
    return checkpoint_name(g(w3, x), "c")


ARGS = torch.ones(5, 4), torch.ones(6, 5), torch.ones(7, 6), torch.ones(4)
ARGUMENTS = [f"from the argument {name}" for name in ("w1", "w2", "w3", "x")]


def origins(fn, *args):
    return [r.origin for r in saved_residuals(fn, *args)]


def test_seeing_what_is_saved():
    made = [origin for origin in origins(three, *ARGS) if origin not in ARGUMENTS]
    # Of the sines two, and the argument of each.
    assert sorted(made) == ["output of mv"] * 3 + ["output of sin"] * 2
    assert origins(each, *ARGS) == [*ARGUMENTS, "output of sin", "output of sin"]


def test_names_are_chosen_by_a_policy():
    fn = remat(named, policy=policies.save_only_these_names("a"))
    assert origins(fn, *ARGS) == [*ARGUMENTS, "named 'a'"]
    leaves = [t.clone().requires_grad_() for t in ARGS]
    with count_ops() as ops:
        fn(*leaves).sum().backward()
    # The arguments of all sines are read, and of these the second alone.
    assert (ops["sin"], ops["mv"] - count_of_plain("mv")) == (3 + 1, 3)


def count_of_plain(name):
    with count_ops() as ops:
        named(*[t.clone().requires_grad_() for t in ARGS]).sum().backward()
    return ops[name]


def predict(params, x):
    *inner, last = params
    for i, w in enumerate(inner):
        x = checkpoint_name(g(w, x), f"layer{i}")
    return last @ x


def loss(params, x, y):
    return (predict(params, x) - y).square().sum()


def test_all_names_but_one():
    params, x = [torch.ones(4, 4) / 4 for _ in range(3)], torch.ones(4)
    fn = remat(loss, policy=policies.save_any_names_but_these("layer1"))
    assert "named 'layer0'" in origins(fn, params, x, x)
    assert "named 'layer1'" not in origins(fn, params, x, x)


def test_offloading_in_place_of_recomputing():
    policy = policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["y"],
        names_which_can_be_offloaded=["z"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def waves(x):
        y = checkpoint_name(torch.sin(x), "y")
        z = checkpoint_name(torch.sin(y), "z")
        return checkpoint_name(torch.sin(z), "w").sum()

    x = torch.arange(4.0)
    found = saved_residuals(remat(waves, policy=policy), x)
    assert {r.origin: r.place for r in found} == {
        "from the argument x": "",
        "named 'y'": "",
        "named 'z'": "",  # here it is in the host's memory already
    }
    assert policy(Op(SIN, names=frozenset("z"))) is policies.Decision.OFFLOAD
    fn = torch.func.grad(remat(waves, policy=policy))
    assert_same(fn(x), torch.func.grad(waves)(x))


# --- A function's own rule ---


def sine(fwd=lambda x: (x.sin(), x.cos())):
    fn = custom_vjp(torch.sin)
    fn.defremat(
        fwd,
        lambda cosine, x: (x.sin(), x.cos() if cosine is None else cosine),
        lambda cosine, ct: (cosine * ct,),
    )
    return fn


@pytest.mark.parametrize("keeps", [True, False])
def test_a_sine_that_keeps_its_cosine(keeps):
    sin = sine() if keeps else sine(lambda x: (x.sin(), None))
    fn = remat(lambda x: sin(sin(x)))
    x = torch.tensor(1.0)
    with count_ops() as ops:
        found = torch.func.grad(fn)(x)
    assert ops["cos"] == 2
    assert_same(found, x.sin().cos() * x.cos())
    leaf = x.requires_grad_()
    value = fn(leaf)
    with count_ops() as ops:
        value.backward()
    assert ops["cos"] == (0 if keeps else 2)


# --- Recursive, and in loops ---


def composed(fns):
    def run(x):
        for fn in fns:
            x = fn(x)
        return x

    return run


def recursive(fns):
    if len(fns) <= 2:
        return composed(fns[::-1])
    first, second = recursive(fns[: len(fns) // 2]), recursive(fns[len(fns) // 2 :])
    return lambda x: first(remat(second)(x))


def test_recursion_keeps_a_logarithm():
    x = torch.tensor(3.0)
    for length, kept in ((8, 4), (16, 5)):
        assert len(origins(composed([torch.sin] * length), x)) == length
        assert len(origins(recursive([torch.sin] * length), x)) == kept


def test_layers_in_a_loop_with_a_policy():
    def layer(x, params):
        w, b = params
        before = checkpoint_name(x @ w + b, "before")
        return before.clamp(min=0), None

    policy = policies.save_only_these_names("before")
    weights = torch.rand(2, 2, 2), torch.rand(2, 2)
    x, found = torch.rand(3, 2), []
    for fn in (layer, remat(layer, policy=policy)):

        def net(weights, x, fn=fn):
            for params in zip(*weights, strict=True):
                x, _ = fn(x, params)
            return x.sum()

        found.append(torch.func.grad(net)(weights, x))

    def scanned(weights, x):
        return chain.scan(layer, x, weights, policy=policy)[0].sum()

    found.append(torch.func.grad(scanned)(weights, x))
    assert_same(found[1], found[0])
    torch.testing.assert_close(found[2], found[0])
