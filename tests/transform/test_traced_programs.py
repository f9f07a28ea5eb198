"""Programs in compiled code: right values, and a recompute that is there.

Some programs go through `.backward()`, and one through every transform. All of both
are slow tests.
"""

import subprocess
import sys

import pytest
import torch
from support.tables import rows
from support.traced import (
    STEP,
    TRANSFORMS,
    Transform,
    W,
    X,
    assert_traced,
    begins_again,
    block,
    compiling,
    points,
    ran,
)
from support.traced_programs import PROGRAMS, REASSOCIATED, plain_block
from support.zoo import leaves_of, plainly

from remat import policies, remat
from remat.testing import assert_same


REPRESENTATIVE = "plain_block", "closure", "named"
slow = pytest.mark.slow


def check(name, transform, backend, **options):
    reassociated = REASSOCIATED.get(name, False)
    kind = TRANSFORMS[transform]
    assert_traced(PROGRAMS[name], kind, backend, reassociated=reassociated, **options)


FEW = [
    *((name, "backward") for name in (*REPRESENTATIVE, "pytree", "loop", "in_place")),
    *((name, "backward") for name in ("branches", "captured_tensor", "views")),
    *((name, "backward") for name in ("attention", "autocast_around")),
    ("plain_block", "grad"),
    *(
        ("closure", transform)
        for transform in ("grad", "jvp", "vmap_grad", "grad_grad")
    ),
]
EVERY = [(name, transform) for name in PROGRAMS for transform in TRANSFORMS]
# See the test of results that are views of each other. What fails under jvp leaves
# torch with a dual level.
VIEWS = {
    ("views", how) for how in TRANSFORMS if how not in ("backward", "jvp", "jacfwd")
}


def cases(pairs):
    return [pair for pair in dict.fromkeys(pairs) if pair not in VIEWS]


@pytest.mark.parametrize(("name", "transform"), cases(FEW))
@pytest.mark.one_in(3)
def test_a_program_is_recomputed_in_its_graph(name, transform):
    check(name, transform, "aot_eager")


@rows("transform", {k: k for k in TRANSFORMS}, fast=["grad"])
def test_the_backend_eager_runs_eager_remat(transform):
    check("plain_block", transform, "eager")


VIEW_OF_ANOTHER = """
import torch
from remat import remat

def fn(w, x):
    y = torch.tanh(x @ w)
    return y, y.t()

def loss(w, x):
    y, turned = remat(fn)(w, x)
    return (y @ turned).sum()

gradient = torch.func.grad(loss)
w, x = torch.ones(8, 8), torch.ones(4, 8)
got = torch.compile(gradient, backend="aot_eager", fullgraph=True)(w, x)
assert torch.equal(got, gradient(w, x))
"""


@pytest.mark.slow
def test_results_may_be_views_of_each_other():
    """In a process of its own: a compilation that fails leaves torch with levels."""
    program = [sys.executable, "-W", "ignore", "-c", VIEW_OF_ANOTHER]
    run = subprocess.run(program, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


@slow
@pytest.mark.parametrize(("name", "transform"), cases(EVERY))
def test_every_program_is_recomputed_under_every_transform(name, transform):
    check(name, transform, "aot_eager")


@slow
@pytest.mark.parametrize(("name", "transform"), EVERY)
def test_every_program_under_every_transform_by_the_backend_eager(name, transform):
    check(name, transform, "eager")


@slow
@pytest.mark.filterwarnings("default")  # inductor warns of slow numerics
@rows(
    "transform, plain, rematerialized",
    {"backward": ("backward", 5, 7), "grad": ("grad", 5, 7)},
)
@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_inductors_code_recomputes(name, transform, plain, rematerialized):
    """It fuses tanh into its kernels, and leaves products: one of six as `addmm`."""
    factor = rematerialized / plain
    check(name, transform, "inductor", factor=factor, read="mm")


# --- The backward in compiled code ---


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@rows("name", {k: k for k in REPRESENTATIVE}, fast=["plain_block"])
@pytest.mark.one_in(2)
def test_a_step_with_its_backward_inside_is_one_graph(name, backend):
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        assert_traced(PROGRAMS[name], STEP, backend)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_step_that_calls_backward_breaks_the_graph(backend):
    """Where Dynamo does not trace a backward: two graphs, or one that it breaks."""

    def step(loss):
        def run(w, x):
            loss(w, x).backward()

        return run

    def call(compiled):
        w, x = leaves_of(W, X)
        compiled(w, x)
        return w.grad, x.grad

    assert_traced(plain_block, Transform(step, call), backend, fullgraph=False)


# --- Shapes ---


def sized(wrap):
    fn = wrap(lambda w, x: block(w, x) * x.shape[0])
    return lambda w, x: fn(w, x).square().sum() / x.shape[0]


def by_sizes(compiled):
    results = []
    for size in (3, 5, 7):
        w, x = leaves_of(W, points(size, 8, seed=size))
        compiled(w, x).backward()
        results.append((w.grad, x.grad))
    return results


def grads_by_sizes(compiled):
    return [compiled(W, points(size, 8, seed=size)) for size in (3, 5, 7)]


@pytest.mark.parametrize("backend", [pytest.param("eager", marks=slow), "aot_eager"])
@pytest.mark.parametrize("dynamic", [pytest.param(None, marks=slow), True])
@pytest.mark.parametrize("transform", ["backward", "grad"])
@pytest.mark.one_in(2)
def test_sizes_may_change(transform, dynamic, backend):
    call = by_sizes if transform == "backward" else grads_by_sizes
    kind = Transform(TRANSFORMS[transform].of, call)
    assert_traced(sized, kind, backend, dynamic=dynamic)


def test_dynamic_sizes_are_compiled_once():
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with compiling():
        compiled = torch.compile(sized(remat), backend="aot_eager", dynamic=True)
        by_sizes(compiled)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"] - before
        assert begins_again(ran(lambda: by_sizes(compiled))[1])
    assert graphs == 1


# What the shape of each result depends on are values.
DEPENDING = {
    "mask": lambda y: y[y > 0],
    "nonzero": lambda y: y[(y.sum(1) > 0).nonzero().squeeze(1)],
    "item": lambda y: y.flatten()[: (y > 0).sum().item()],
}


def depending(name):
    """A call whose result has a shape of its own, and one that is given it."""

    def program(wrap):
        first = wrap(lambda w, x: DEPENDING[name](torch.tanh(x @ w)))
        second = wrap(lambda w, y: torch.tanh(y * w.sum()))
        return lambda w, x: second(w, first(w, x)).square().sum()

    return program


@rows("transform", {k: k for k in ("backward", "grad", "vjp")}, fast=["grad"])
@pytest.mark.parametrize("name", DEPENDING)
@pytest.mark.one_in(3)
def test_shapes_of_results_may_depend_on_values(name, transform):
    assert_traced(depending(name), TRANSFORMS[transform], "aot_eager")


@slow
@pytest.mark.filterwarnings("default")  # inductor warns of slow numerics
@pytest.mark.parametrize(
    ("policy", "factor"), [(None, 3 / 2), (policies.dots_saveable, 1)]
)
def test_shapes_of_results_may_depend_on_values_with_inductor(policy, factor):
    kind, wrap = TRANSFORMS["backward"], remat(policy=policy)
    options = {"wrap": wrap, "read": "mm", "factor": factor}
    assert_traced(depending("mask"), kind, "inductor", **options)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("captures", [False, True])
def test_shapes_that_depend_on_values_need_no_graph_break(captures):
    """Dynamo breaks the graph at them unless it is told to go on."""
    config = torch._dynamo.config
    with config.patch(capture_dynamic_output_shape_ops=captures):
        kind = TRANSFORMS["backward"]
        assert_traced(depending("mask"), kind, "aot_eager", fullgraph=False)


# --- Where nothing is differentiated ---


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_a_gradient_nothing_runs_twice(mode, backend):
    with compiling(), mode():
        compiled = torch.compile(plain_block(remat), backend=backend, fullgraph=True)
        compiled(W, X)
        got, ops = ran(lambda: compiled(W, X))
    assert_same(got, plain_block(plainly)(W, X))
    assert ops["tanh"] == 2


def test_a_compiled_loss_is_called_in_both_grad_modes():
    with compiling():
        compiled = torch.compile(plain_block(remat), backend="aot_eager")
        with torch.no_grad():
            value = compiled(W, X)
        w, x = leaves_of(W, X)
        loss = compiled(w, x)
        _, ops = ran(lambda: loss.backward())
    assert_same(loss.detach(), value)
    assert ops["tanh"] == 2


# --- The helper itself ---


def wrong(fn):
    return remat(lambda *args, **kwargs: fn(*args, **kwargs) * 2)


@rows(
    "wrap, message",
    {
        "no recompute": (plainly, "tanh runs 2 times plain and 2 with remat"),
        "other values": (wrong, "assert_same: .* differs"),
        "kept": (
            lambda fn: remat(fn, policy=policies.everything_saveable),
            "tanh runs 2 times plain and 2 with remat",
        ),
    },
)
@rows("transform", {k: k for k in ("backward", "grad")}, fast=["grad"])
def test_the_comparison_fails_for_what_is_no_remat(wrap, message, transform):
    with pytest.raises(AssertionError, match=message):
        assert_traced(plain_block, TRANSFORMS[transform], "aot_eager", wrap=wrap)


def test_the_comparison_fails_where_nothing_is_compiled():
    with pytest.raises(AssertionError, match="Dynamo compiled nothing"), compiling():
        plain_block(remat)(W, X)
