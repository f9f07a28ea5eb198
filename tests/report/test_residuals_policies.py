"""What a call keeps under a policy: to the byte, by name, before and after a backward.

A first call keeps all of its inputs. Once a recompute has shown which are not read,
later calls drop those: the report says what the call keeps that it reports on.
"""

import functools

import pytest
import torch
from support.kept import fresh, measured, total
from support.tables import crossed
from support.zoo import make, plainly
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap
from torch.nn.functional import dropout
from torch.utils._pytree import tree_leaves

from remat import (
    checkpoint_name,
    policies,
    print_saved_residuals,
    remat,
    saved_residuals,
)
from remat._partial.decide import CACHES
from remat.policies._functions import public
from remat.testing import assert_same_gradients, live_bytes


SIZE = 64  # "auto" does not look at calls of fewer elements

# A policy, and what a call keeps under it besides `w`, `x` and the number 2, which
# torch gives to no hook, once it is known what the backward reads.
DOTS, SMALL, NAMED = ["named 'h'"], ["output of sum"], ["named 't'"]
LARGE = ["named 't'", "output of _softmax"]
POLICIES = {
    "no policy": (None, []),
    "nothing_saveable": (policies.nothing_saveable, []),
    "save_collectives": (policies.save_collectives, []),
    "decisions_saveable": (policies.decisions_saveable, []),
    "every_other": (policies.every_other(policies.save_collectives), []),
    "everything_saveable": (policies.everything_saveable, LARGE + SMALL),
    "dots_saveable": (policies.dots_saveable, DOTS),
    "checkpoint_dots": (policies.checkpoint_dots, DOTS),
    "dots_with_no_batch_dims_saveable": (
        policies.dots_with_no_batch_dims_saveable,
        DOTS,
    ),
    "checkpoint_dots_with_no_batch_dims": (
        policies.checkpoint_dots_with_no_batch_dims,
        DOTS,
    ),
    "offload_dot_with_no_batch_dims": (
        policies.offload_dot_with_no_batch_dims("device", "disk"),
        DOTS,
    ),
    "save_only_these_names": (policies.save_only_these_names("h", "t"), NAMED),
    "save_any_names_but_these": (policies.save_any_names_but_these("h"), NAMED),
    "save_anything_except_these_names": (
        policies.save_anything_except_these_names("h"),
        LARGE + SMALL,
    ),
    "save_and_offload_only_these_names": (
        policies.save_and_offload_only_these_names(
            names_which_can_be_saved=["h"],
            names_which_can_be_offloaded=["t"],
            offload_src="device",
            offload_dst="disk",
        ),
        NAMED,
    ),
    "save_from_both_policies": (
        policies.save_from_both_policies(
            policies.dots_saveable, policies.save_only_these_names("t")
        ),
        NAMED,
    ),
    "save_names_matching": (policies.save_names_matching("h").but_offload(), DOTS),
    "save_ops": (
        policies.save_ops(torch.ops.aten.tanh, torch.ops.aten.bmm.default),
        NAMED,
    ),
    "save_larger_than": (
        policies.save_larger_than(8 * SIZE**2 - 1),
        [*LARGE, "output of mul"],
    ),
    "save_smaller_than": (policies.save_smaller_than(8 * SIZE**2), SMALL),
    "dots but offload": (policies.dots_saveable.but_offload(to="disk"), DOTS),
    "torch's": (torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE, LARGE + SMALL),
}


def network(w, x, bias):
    """Dots with and without a batch, names, a view, a write, an input nobody reads."""
    h = checkpoint_name(x @ w, "h")
    t = checkpoint_name(h.tanh(), "t")
    s = t.view(4, 16, SIZE) @ w.expand(4, SIZE, SIZE)
    s.mul_(2.0)
    return (s.softmax(-1).view(SIZE, SIZE) * t).sum(0).sin() + bias


def inputs():
    w, x = make(SIZE, SIZE, seed=1), make(SIZE, SIZE, seed=2)
    return w.requires_grad_(), x.requires_grad_(), make(2 * SIZE, SIZE, seed=3)


def assert_exact(fn, *args):
    """The list adds up to what is measured, but for what the caller holds."""
    found = saved_residuals(fn, *fresh(args))
    mine = [r for r in found if "captured" not in r.origin]
    assert total(mine) == measured(fn, *args) > 0
    return mine


def warmed(fn, args):
    """Have `fn` recomputed: it may know then which of its inputs it reads."""
    for _ in range(2):
        sum(t.sum() for t in tree_leaves(fn(*fresh(args)))).backward()


def steady(fn, *args):
    """What `fn` keeps once it has been recomputed."""
    needed = any(t.requires_grad for t in args)
    warmed(fn, args if needed else [t.clone().requires_grad_() for t in args])
    return saved_residuals(fn, *fresh(args))


# --- To the byte ---


@crossed(
    "policy, prune, when", sorted(POLICIES), [True, "auto", False], ["warm", "cold"]
)
def test_the_total_under_a_policy_is_what_the_graph_keeps_alive(policy, prune, when):
    policy, _ = POLICIES[policy]
    fn, args = remat(network, policy=policy, prune=prune), inputs()
    if when == "warm":
        warmed(fn, args)
    found = saved_residuals(fn, *fresh(args))
    if when == "cold":
        CACHES.clear()  # the report was a first call, and so is what is measured
    assert total(found) == measured_once(fn, args) > 0
    readers = {r.origin: r.readers for r in found}
    # The graph is plain's, whose nodes hold inputs, and the call holds them besides.
    assert readers["from the argument w"] == ("mm", "remat(network)")
    dropped = "from the argument bias" not in readers
    assert dropped == (when == "warm" and prune is True)


def measured_once(fn, args):
    """As `measured`, of one call: one more would be another than the first."""
    live_bytes(lambda: torch.ones(1))
    return live_bytes(lambda: fn(*fresh(args)).grad_fn)


def test_every_policy_is_reported_on():
    assert set(public()) <= set(POLICIES)


NUMBER = "from a constant"


def arguments(*names):
    return [f"from the argument {name}" for name in names]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_is_kept(policy):
    policy, kept = POLICIES[policy]
    fn = remat(network, policy=policy, prune=True)
    found = [r.origin for r in steady(fn, *inputs())]
    assert found == [NUMBER, *arguments("w", "x"), *kept]


@pytest.mark.parametrize("prune", [True, False], ids=str)
def test_buffers_and_streams_beside_residuals(prune):
    norm = nn.BatchNorm1d(SIZE).double()

    @remat(policy=policies.save_only_these_names("n"), prune=prune)
    def f(x):
        n = checkpoint_name(norm(x.sin()).tanh(), "n")
        return dropout(n.exp(), 0.5).cos()

    x = make(SIZE, SIZE, seed=1).requires_grad_()
    warmed(f, [x])
    mine = assert_exact(f, x)
    labels = [r.origin for r in mine if not r.origin.startswith("from")]
    assert (labels[0], labels[-1]) == ("named 'n'", "state of the stream: cpu")
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    copies = {f"copy of `norm.{s}` as it was before the call" for s in statistics}
    assert copies >= {*labels[1:-1]}
    assert copies == {*labels[1:-1]} or prune


dots = remat(network, policy=policies.dots_saveable, prune=True)


def test_names_under_vmap_name_the_batch():
    """JAX's, item 42: value and gradient are right as well."""

    def f(x):
        return checkpoint_name(x.sin(), "y").sin()

    policy = policies.save_only_these_names("y")
    ours, x = remat(f, policy=policy, prune=True), make(3, 4, seed=1)
    assert_same_gradients(vmap(ours), vmap(f), x.clone().requires_grad_())
    assert torch.equal(vmap(grad(lambda x: ours(x).sum()))(x), x.sin().cos() * x.cos())
    found = saved_residuals(lambda x: vmap(ours)(x), x)
    assert [(r.origin, r.shape) for r in found] == [
        ("from the argument x", (3, 4)),
        ("named 'y'", (3, 4)),
    ]


# --- Printed ---


def test_printed_as_in_jax_with_bytes_and_readers(capsys):
    """Its three reports: a plain function, a rematerialized one, one with a policy."""

    def g(w, x):
        return torch.sin(w @ x)

    def f(wrap, w1, w2, w3, x):
        x = wrap(g)(w1, x)
        x = checkpoint_name(wrap(g)(w2, x), "a")
        return wrap(g)(w3, x)

    sizes = (5, 4), (6, 5), (7, 6), (4,)
    args = [make(*size, seed=i).float() for i, size in enumerate(sizes)]
    print_saved_residuals(functools.partial(f, plainly), *args)
    plain = capsys.readouterr().out.splitlines()
    assert len(plain) == 4 + 2 + 3 + 3
    assert plain[0] == "f32[5,4] from the argument w1: 80 bytes, read by mv"
    print_saved_residuals(functools.partial(f, remat), *args)
    lines = capsys.readouterr().out.splitlines()
    source = f"{__file__}:{g.__code__.co_firstlineno + 1}, in g"
    reader = f"mv, remat({g.__qualname__})"
    where = f.__code__.co_firstlineno + 2
    assert lines == [
        f"f32[5,4] from the argument w1: 80 bytes, read by {reader}",
        f"f32[6,5] from the argument w2: 120 bytes, read by {reader}",
        f"f32[7,6] from the argument w3: 168 bytes, read by {reader}",
        f"f32[4] from the argument x: 16 bytes, read by {reader}",
        f"f32[5] output of sin from {source}: 20 bytes, read by {reader}",
        f"f32[6] named 'a' from {__file__}:{where}, in f: 24 bytes, read by {reader}",
        "activations: 428 bytes in 6 residuals",
        "parameters: 0 bytes in 0 residuals",
        "total: 428 bytes in 6 residuals",
    ]
    policy = policies.save_only_these_names("a")
    whole = remat(functools.partial(f, plainly), policy=policy)
    print_saved_residuals(whole, *args)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines[3:]] == [
        "f32[4] from the argument x",
        f"f32[6] named 'a' from {__file__}:{where}, in f",
        "activations",
        "parameters",
        "total",
    ]


# --- Offloaded ---


def test_what_is_offloaded_to_disk_says_so(capsys):
    fn = remat(network, policy=policies.dots_saveable.but_offload(to="disk"))
    args = inputs()
    (away,) = [r for r in saved_residuals(fn, *args) if r.place]
    assert (away.origin, away.place, away.nbytes) == ("named 'h'", "disk", 8 * SIZE**2)
    assert (away.dtype, away.shape) == (torch.double, (SIZE, SIZE))
    assert away.device == torch.device("cpu")
    print_saved_residuals(fn, *args)
    *lines, last = capsys.readouterr().out.splitlines()
    assert ", offloaded to disk: 32,768 bytes, read by remat(network)" in lines[-3]
    assert last.endswith(" residuals, 32,768 of them offloaded")


@pytest.mark.parametrize("to", ["disk", "pinned_host"])
def test_what_has_no_values_is_listed_as_it_would_be_moved(to):
    fn = remat(network, policy=policies.dots_saveable.but_offload(to=to), prune=True)
    real = saved_residuals(fn, *inputs())
    with FakeTensorMode() as mode:
        assert saved_residuals(fn, *map(mode.from_tensor, inputs())) == real
    meta = saved_residuals(fn, *[t.to("meta").requires_grad_() for t in inputs()])
    assert [r.nbytes for r in meta] == [r.nbytes for r in real]
    assert [r.place for r in meta if r.place] == [to.replace("_", " ")]


def test_what_is_on_the_host_already_is_not_offloaded_there():
    fn = remat(network, policy=policies.dots_saveable.but_offload(to="pinned_host"))
    found = saved_residuals(fn, *inputs())
    assert "named 'h'" in [r.origin for r in found]
    assert [r.place for r in found] == [""] * len(found)


@pytest.mark.gpu
def test_what_is_offloaded_to_the_host_says_so():
    policy = policies.dots_saveable.but_offload(to="pinned_host")
    args = [t.detach().cuda().requires_grad_() for t in inputs()]
    found = saved_residuals(remat(network, policy=policy), *args)
    (away,) = [r for r in found if r.place]
    assert (away.origin, away.place) == ("named 'h'", "pinned host")
    assert away.device == torch.device("cpu")
