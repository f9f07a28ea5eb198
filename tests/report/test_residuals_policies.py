"""What a call keeps under a policy: to the byte, by name, before and after a backward.

A first call keeps all of its inputs. Once a recomputation has shown which are not read,
later calls drop those: the report says what the call keeps that it reports on.
"""

import functools

import pytest
import torch
from support.zoo import make
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, vmap
from torch.nn.functional import dropout
from torch.utils._pytree import tree_leaves

from remat import (
    Residual,
    checkpoint_name,
    policies,
    print_saved_residuals,
    remat,
    saved_residuals,
)
from remat._partial.cache import CACHES
from remat.policies._functions import PUBLIC
from remat.testing import assert_same_gradients, live_bytes


SIZE = 64  # "auto" does not look at calls of fewer elements

POLICIES = {
    "no policy": None,
    "nothing_saveable": policies.nothing_saveable,
    "everything_saveable": policies.everything_saveable,
    "dots_saveable": policies.dots_saveable,
    "checkpoint_dots": policies.checkpoint_dots,
    "dots_with_no_batch_dims_saveable": policies.dots_with_no_batch_dims_saveable,
    "checkpoint_dots_with_no_batch_dims": policies.checkpoint_dots_with_no_batch_dims,
    "offload_dot_with_no_batch_dims": policies.offload_dot_with_no_batch_dims(
        "device", "disk"
    ),
    "save_only_these_names": policies.save_only_these_names("h", "t"),
    "save_any_names_but_these": policies.save_any_names_but_these("h"),
    "save_anything_except_these_names": policies.save_anything_except_these_names("h"),
    "save_and_offload_only_these_names": policies.save_and_offload_only_these_names(
        names_which_can_be_saved=["h"],
        names_which_can_be_offloaded=["t"],
        offload_src="device",
        offload_dst="disk",
    ),
    "save_from_both_policies": policies.save_from_both_policies(
        policies.dots_saveable, policies.save_only_these_names("t")
    ),
    "save_names_matching": policies.save_names_matching("h").but_offload(),
    "save_ops": policies.save_ops(torch.ops.aten.tanh, torch.ops.aten.bmm.default),
    "save_larger_than": policies.save_larger_than(8 * SIZE**2 - 1),
    "save_smaller_than": policies.save_smaller_than(8 * SIZE**2),
    "dots but offload": policies.dots_saveable.but_offload(to="disk"),
    "torch's": torch.utils.checkpoint.CheckpointPolicy.MUST_SAVE,
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
    # `bias` is large: to drop less, "auto" does not follow a forward.
    return w.requires_grad_(), x.requires_grad_(), make(2 * SIZE, SIZE, seed=3)


def fresh(args):
    """Copies of which the caller holds none, that require grad where the others do."""
    return [t.clone() for t in args]


def measured(fn, args):
    """The bytes that the graph of a call holds, when it alone holds the arguments."""
    live_bytes(lambda: torch.ones(1))
    return live_bytes(lambda: fn(*fresh(args)).grad_fn)


def warmed(fn, args):
    """Have `fn` recomputed: it may know then which of its inputs it reads."""
    for _ in range(2):
        sum(t.sum() for t in tree_leaves(fn(*fresh(args)))).backward()


def of_tensors(residuals):
    """The bytes of all but the states of streams. A mapped file counts as memory."""
    return sum(r.nbytes for r in residuals if r.dtype)


def origins(fn, *args, **kwargs):
    return [r.origin for r in saved_residuals(fn, *args, **kwargs)]


def steady(fn, *args):
    """What `fn` keeps once it has been recomputed."""
    needed = any(t.requires_grad for t in args)
    warmed(fn, args if needed else [t.clone().requires_grad_() for t in args])
    return saved_residuals(fn, *fresh(args))


# --- To the byte ---


@pytest.mark.parametrize("when", ["cold", "warm"])
@pytest.mark.parametrize("prune", [True, "auto", False], ids=str)
@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_the_total_is_what_the_graph_keeps_alive(policy, prune, when):
    fn, args = remat(network, policy=POLICIES[policy], prune=prune), inputs()
    if when == "warm":
        warmed(fn, args)
    found = saved_residuals(fn, *fresh(args))
    if when == "cold":
        CACHES.clear()  # the report was a first call, and so is what is measured
    assert of_tensors(found) == measured(fn, args) > 0
    readers = {r.origin: r.readers for r in found}
    # The graph is plain's, whose nodes hold inputs, and the call holds them besides.
    assert readers["from the argument w"] == ("mm", "remat(network)")
    dropped = "from the argument bias" not in [r.origin for r in found]
    assert dropped == (when == "warm" and fn_prunes(policy, prune))


def fn_prunes(policy, prune):
    """Whether inputs may be let go: "auto" makes no record where nothing is kept."""
    nothing = POLICIES[policy] in (None, policies.nothing_saveable)
    return prune is True or (prune == "auto" and not nothing)


def test_every_policy_is_reported_on():
    assert set(PUBLIC) <= set(POLICIES)


# What a call keeps besides `w`, `x` and the number 2, which torch gives to no hook,
# once it is known what the backward reads.
DOTS, SMALL, NAMED = ["named 'h'"], ["output of sum"], ["named 't'"]
LARGE = ["named 't'", "output of _softmax"]
KEPT = {
    "no policy": [],
    "nothing_saveable": [],
    "everything_saveable": LARGE + SMALL,
    "dots_saveable": DOTS,
    "checkpoint_dots": DOTS,
    "dots_with_no_batch_dims_saveable": DOTS,
    "checkpoint_dots_with_no_batch_dims": DOTS,
    "offload_dot_with_no_batch_dims": DOTS,
    "save_only_these_names": NAMED,
    "save_any_names_but_these": NAMED,
    "save_anything_except_these_names": LARGE + SMALL,
    "save_and_offload_only_these_names": NAMED,
    "save_from_both_policies": NAMED,
    "save_names_matching": DOTS,
    "save_ops": NAMED,
    "save_larger_than": [*LARGE, "output of mul"],
    "save_smaller_than": SMALL,
    "dots but offload": DOTS,
    "torch's": LARGE + SMALL,
}


NUMBER = "from a constant"


def arguments(*names):
    return [f"from the argument {name}" for name in names]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_is_kept(policy):
    fn = remat(network, policy=POLICIES[policy], prune=True)
    found = [r.origin for r in steady(fn, *inputs())]
    assert found == [NUMBER, *arguments("w", "x"), *KEPT[policy]]


def test_with_pruning_off_all_inputs_are_kept():
    fn = remat(network, policy=policies.dots_saveable, prune=False)
    found = [r.origin for r in steady(fn, *inputs())]
    assert found == [NUMBER, *arguments("w", "x", "bias"), *DOTS]


@pytest.mark.parametrize("policy", [None, policies.everything_saveable], ids=repr)
def test_a_module_to_the_byte(policy):
    layers = nn.Linear(SIZE, SIZE), nn.GELU(), nn.LayerNorm(SIZE), nn.Linear(SIZE, 4)
    module = nn.Sequential(*layers).double()
    names = [name for name, _ in module.named_parameters()]
    module.requires_grad_(False)
    fn = remat(functools.partial(functional_call, module), policy=policy, prune=True)

    def call(x, *params):
        return fn(dict(zip(names, params, strict=True)), x)

    args = [make(16, SIZE, seed=3), *module.parameters()]
    args = [t.detach().clone().requires_grad_() for t in args]
    warmed(call, args)
    found = [
        r for r in saved_residuals(call, *fresh(args)) if "captured" not in r.origin
    ]
    assert of_tensors(found) == measured(call, args) > 0
    readers = {r.origin: r.readers for r in found}
    # What is saved of this weight is its transpose, which is made again.
    assert readers["from the argument params[0]"] == ("remat(partial)",)
    assert "native_layer_norm" in readers["from the argument params[2]"]


@pytest.mark.parametrize("prune", [True, False], ids=str)
def test_buffers_and_streams_beside_residuals(prune):
    norm = nn.BatchNorm1d(SIZE).double()

    @remat(policy=policies.save_only_these_names("n"), prune=prune)
    def f(x):
        n = checkpoint_name(norm(x.sin()).tanh(), "n")
        return dropout(n.exp(), 0.5).cos()

    x = make(SIZE, SIZE, seed=1).requires_grad_()
    warmed(f, [x])
    found = saved_residuals(f, *fresh([x]))
    mine = [r for r in found if "captured" not in r.origin]
    assert of_tensors(mine) == measured(f, [x]) > 0
    labels = [r.origin for r in mine if not r.origin.startswith("from")]
    assert labels[0] == "named 'n'"
    assert labels[-1] == "state of the stream: cpu"
    statistics = {"running_mean", "running_var", "num_batches_tracked"}
    copies = {f"copy of `norm.{s}` as it was before the call" for s in statistics}
    assert copies >= {*labels[1:-1]}
    assert copies == {*labels[1:-1]} or prune


def test_under_vmap_and_grad_to_the_byte():
    fn = remat(network, policy=policies.dots_saveable, prune=True)

    def batched(w, x, bias):
        return vmap(fn)(
            w.expand(2, SIZE, SIZE), torch.stack([x, -x]), bias.expand(2, -1, -1)
        )

    def slopes(w, x, bias):
        return grad(lambda x: fn(w, x, bias).sum())(x)

    for call in (batched, slopes):
        args = [t.detach().requires_grad_() for t in inputs()]
        warmed(call, args)
        assert (
            of_tensors(saved_residuals(call, *fresh(args))) == measured(call, args) > 0
        )
    assert "named 'h'" in origins(batched, *inputs())


# --- Names ---


def test_named_values_of_a_plain_function():
    def f(x):
        return checkpoint_name(x.sin(), "y").sin()

    x = make(3, seed=1).float()
    first, second = saved_residuals(f, x)
    assert (first.origin, second.origin) == ("from the argument x", "named 'y'")
    assert second.source == f"{__file__}:{f.__code__.co_firstlineno + 1}, in f"
    assert second.readers == ("sin",)
    where = f"f32[3] named 'y' from {second.source}: 12 bytes, read by sin"
    assert str(second) == where


def test_the_line_is_that_of_the_name_and_not_of_the_operation():
    def f(x):
        y = x.exp()
        y = y * 1.0
        return checkpoint_name(y.sin(), "a") * checkpoint_name(y, "b")

    found = {r.origin: r.source for r in saved_residuals(f, make(3, seed=1))}
    line = f"{__file__}:{f.__code__.co_firstlineno + 3}, in f"
    assert (found["named 'a'"], found["named 'b'"]) == (line, line)


def test_a_value_with_two_names_has_both():
    def f(x):
        y = checkpoint_name(checkpoint_name(x.exp(), "a"), "b")
        return checkpoint_name(y, "a")

    assert origins(f, make(3, seed=1)) == ["named 'a', 'b'"]


def test_a_name_is_of_the_value_and_not_of_what_is_written_over_it():
    def f(x):
        y = checkpoint_name(x.neg(), "y")
        return y.exp_()

    assert origins(f, make(3, seed=1)) == ["output of exp_"]


def test_a_named_view_names_what_it_is_a_view_of_unless_that_was_passed():
    def f(x):
        row = checkpoint_name(x[0], "row").sin()
        return row + checkpoint_name(x.exp()[1], "view")

    assert origins(f, make(2, 3, seed=1)) == ["from the argument x", "named 'view'"]


def test_a_name_given_elsewhere_changes_no_report():
    y = make(3, seed=1)
    assert origins(torch.exp, y) == ["output of exp"]
    checkpoint_name(y, "y")
    assert origins(torch.exp, y) == ["output of exp"]


def test_a_captured_tensor_that_is_named_is_listed_as_captured():
    scale = make(3, seed=2)

    def f(x):
        return x * checkpoint_name(scale, "scale")

    assert origins(f, make(3, seed=1)) == ["from the captured `scale`"]


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


# --- What JAX's tests say of residual lists, by their numbers ---


CONSTANTS = {
    "einsum": (lambda x: torch.einsum("ii->i", x), 0),
    "zeros": (lambda x: torch.zeros(2, 2) * x, 0),
    "zeros_like": (lambda x: torch.zeros_like(x) * x, 0),
    "zeros_like and sin": (lambda x: torch.zeros_like(x) * x.sin(), 1),
}


@pytest.mark.parametrize("case", sorted(CONSTANTS))
def test_constants_are_not_kept(case):
    """Item 37."""
    fn, count = CONSTANTS[case]
    assert len(steady(remat(fn, prune=True), torch.ones(2, 2))) == count


def test_a_named_input_of_an_operation_that_is_saved():
    """Item 38."""

    @remat(policy=policies.save_ops(torch.ops.aten.mul), prune=True)
    def f(x):
        x = checkpoint_name(x * x, "foo")
        return x * x

    found = steady(f, torch.tensor(3.0))
    assert [r.origin for r in found] == ["from the argument x", "named 'foo'"]


def test_a_name_of_a_pytree_names_its_leaves():
    """Item 39."""

    @remat(policy=policies.save_only_these_names("foo"), prune=True)
    def f(x):
        named = checkpoint_name({"a": x.sin(), "b": [x.cos(), 3.0]}, "foo")
        return named["a"].exp().sin() * named["b"][0]

    found = steady(f, torch.tensor(3.0))
    assert [r.origin for r in found] == ["from the argument x", *["named 'foo'"] * 2]


def factors(x):
    y = checkpoint_name(torch.full((), 2.0) * 2.0, "y")
    z = checkpoint_name(torch.full((), 2.0) * 3.0, "z")
    w = checkpoint_name(torch.full((), 2.0) * 4.0, "w")
    u = torch.full((), 2.0) * 5.0
    return x * y * z * w * u


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("by", ["save_any_names_but_these", "save_only_these_names"])
def test_as_many_residuals_as_names_that_may_be_saved(by, count):
    """Items 40 and 41."""
    names = ["y", "z", "w"]
    listed = names[count:] if by == "save_any_names_but_these" else names[:count]
    fn = remat(factors, policy=getattr(policies, by)(*listed), prune=True)
    found = steady(fn, torch.tensor(1.0))
    assert [r.origin for r in found] == [f"named {name!r}" for name in names[:count]]
    assert [r.nbytes for r in found] == [4] * count


def test_the_order_and_the_labels():
    """Item 43: constants, arguments in order, then what was made, in order."""
    table = [[2.0, 3.0]]

    def f(x, y):
        first, second = x
        z = checkpoint_name(torch.sin(torch.full((), 3.0)), "z")
        return z * ((first * second) * y) * torch.tensor(table)

    args = (torch.tensor(2.0), torch.tensor(3.0))
    found = saved_residuals(f, args, y=torch.tensor(4.0))
    assert [(r.origin, r.shape) for r in found] == [
        ("from a constant", (1, 2)),
        ("from the argument x[0]", ()),
        ("from the argument x[1]", ()),
        ("from the argument y", ()),
        ("named 'z'", ()),
        ("output of mul", ()),
    ]


def test_one_named_residual_for_two_nested_calls_that_read_it():
    """Item 54."""

    @remat(prune=True)
    def inner(h, scale):
        return (h * scale).sin() * h

    def f(x):
        h = checkpoint_name(x * 2.0, "h")
        return inner(h, 2.0) + inner(h, 3.0)

    fn = remat(f, policy=policies.save_only_these_names("h"), prune=True)
    x = make(4, seed=1)
    found = [(r.origin, r.nbytes) for r in steady(fn, x)]
    # Each of the three numbers is held by the node that multiplies by it.
    assert found == [*[(NUMBER, 8)] * 3, ("named 'h'", 32)]
    assert_same_gradients(fn, f, x.requires_grad_())


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
    print_saved_residuals(functools.partial(f, lambda g: g), *args)
    plain = capsys.readouterr().out.splitlines()
    assert len(plain) == 4 + 2 + 3 + 1
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
        "total: 428 bytes in 6 residuals",
    ]
    policy = policies.save_only_these_names("a")
    whole = remat(functools.partial(f, lambda g: g), policy=policy)
    print_saved_residuals(whole, *args)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[0] for line in lines[3:]] == [
        "f32[4] from the argument x",
        f"f32[6] named 'a' from {__file__}:{where}, in f",
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
    assert ", offloaded to disk: 32,768 bytes, read by remat(network)" in lines[-1]
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


def test_the_text_of_a_residual_on_another_device():
    made = Residual(torch.half, (2,), torch.device("cpu"), 4, "output of mm", "", ())
    assert str(made) == "f16[2] output of mm: 4 bytes"
    away = Residual(*[getattr(made, n) for n in Residual.__slots__][:-1], "pinned host")
    assert str(away) == "f16[2] output of mm, offloaded to pinned host: 4 bytes"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_offloaded_to_the_host_says_so():
    policy = policies.dots_saveable.but_offload(to="pinned_host")
    args = [t.detach().cuda().requires_grad_() for t in inputs()]
    found = saved_residuals(remat(network, policy=policy), *args)
    (away,) = [r for r in found if r.place]
    assert (away.origin, away.place) == ("named 'h'", "pinned host")
    assert away.device == torch.device("cpu")
