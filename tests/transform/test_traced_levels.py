"""Transforms of torch.func inside of compiled functions, and operators with branches.

Dynamo writes the levels of torch.func that a function opens into its body as numbers,
and remat runs the body at another depth than Dynamo traced it at. Each test compares
with compiled plain code.
"""

import subprocess
import sys

import pytest
import torch
from support.tables import rows
from support.traced import TRANSFORMS, begins_again, block, differentiated
from support.zoo import assert_not_vanishing, plainly
from torch import fx
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from remat import CaptureError, remat
from remat._torch.autograd import is_forward_ad_enabled
from remat._torch.levels import current_layer
from remat._torch.nodes import UnknownLevelError, run_body
from remat.testing import assert_same


def score(w, x):
    return torch.tanh(torch.tanh(x @ w) @ w).sum()


def pulled(w, x):
    out, pull = vjp(lambda x: torch.tanh(x @ w), x)
    return pull(out.cos())[0]


INSIDE = {
    "grad": lambda w, x: grad(lambda x: score(w, x))(x),
    "vjp": pulled,
    "jacrev": lambda w, x: jacrev(lambda x: torch.tanh(x @ w))(x).sum((0, 1)),
    "vmap_grad": lambda w, x: vmap(grad(lambda row: score(w, row)))(x),
    "jvp": lambda w, x: jvp(lambda x: torch.tanh(x @ w), (x,), (x.cos(),))[1],
    "vmap": lambda w, x: vmap(lambda row: torch.tanh(row @ w))(x),
    "jacfwd": lambda w, x: jacfwd(lambda x: torch.tanh(x @ w))(x).sum((0, 1)),
    "hessian": lambda w, x: hessian(lambda x: score(w, x))(x).exp().sum((0, 1)),
}
OUTSIDE = ("backward", "grad", "vmap_grad", "grad_grad", "jvp_grad", "jvp", "jacrev")
# Plain code does not compile.
PLAIN_FAILS = {
    ("hessian", outside) for outside in ("vmap_grad", "grad_grad", "jvp_grad")
}
FEW = {("grad", "grad"), ("vjp", "vmap_grad")}


def twice(inside):
    """A loss of two calls, of which the second differentiates through the first."""

    def program(wrap):
        fn = wrap(inside)

        def loss(w, x):
            y = fn(w, x).sin()
            return fn(w, y.reshape(-1, y.shape[-1])[: len(x)].cos()).square().sum()

        return loss

    return program


def crossed():
    for inside in INSIDE:
        for outside in OUTSIDE:
            if (inside, outside) not in PLAIN_FAILS:
                mark = () if (inside, outside) in FEW else pytest.mark.slow
                yield pytest.param(inside, outside, marks=mark)


def assert_equals_plain(program, transform, backend="aot_eager"):
    want, _ = differentiated(program(plainly), transform, backend)
    got, ops = differentiated(program(remat), transform, backend)
    assert_same(got, want, reassociated=True)
    assert_not_vanishing(want)
    return ops


@pytest.mark.parametrize(("inside", "outside"), [*crossed()])
def test_a_transform_inside_of_a_call(inside, outside):
    ops = assert_equals_plain(twice(INSIDE[inside]), TRANSFORMS[outside])
    assert begins_again(ops) == (outside != "jvp")  # which stores nothing
    assert current_layer() is None
    assert is_forward_ad_enabled()


@rows("inside", {k: k for k in ("vmap_grad", "jvp", "hessian")}, fast=["vmap_grad"])
def test_a_transform_inside_without_aot_autograd(inside):
    assert_equals_plain(twice(INSIDE[inside]), TRANSFORMS["backward"], "eager")


# --- Operators with branches and bodies ---


def in_branches(wrap):
    fn = wrap(block)
    branches = (lambda w, x: fn(w, x)), (lambda w, x: fn(w, x.sin()))
    return lambda w, x: torch.cond(x.sum() > 0, *branches, (w, x)).sum()


def around_branches(of):
    """Branches within a call."""

    def program(wrap):
        branches = (lambda w, x: of(w, x)), (lambda w, x: of(w, x.sin()))
        fn = wrap(lambda w, x: torch.cond(x.sum() > 0, *branches, (w, x)).sin())
        return lambda w, x: fn(w, fn(w, x)).sum()

    return program


def in_a_map(wrap):
    fn = wrap(block)
    return lambda w, x: mapped(lambda row, w: fn(w, row[None]), x, w).sum()


def in_a_scan(wrap):
    fn = wrap(block)

    def loss(w, x):
        step = lambda carry, row: (fn(w, carry).clone(), (row + carry[0]).sin())
        return scan(step, x.sin(), x)[1].sum()

    return loss


def with_regions(wrap):
    region = torch.compiler.nested_compile_region(block)
    fn = wrap(lambda w, x: region(w, region(w, x)).sin())
    return lambda w, x: fn(w, fn(w, x)).sum()


BRANCHES = {
    "a call in branches": in_branches,
    "branches in a call": around_branches(block),
    "a call in branches in a call": lambda wrap: around_branches(wrap(block))(wrap),
    "levels in branches": around_branches(INSIDE["grad"]),
    "a vmap in branches": around_branches(INSIDE["vmap"]),
    "forward mode in branches": around_branches(INSIDE["jvp"]),
    "a call in a map": in_a_map,
    "a call in a scan": in_a_scan,
    "regions that are compiled once": with_regions,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")  # of torch, for a scan
@rows("program", BRANCHES, fast=["a call in branches"])
def test_operators_with_branches_compile_as_in_plain_code(program):
    ops = assert_equals_plain(program, TRANSFORMS["backward"])
    assert begins_again(ops)


# --- Hooks ---


def hook_inside(wrap):
    def fn(w, x):
        y = torch.tanh(x @ w)
        y.register_hook(lambda g: g * 3)
        return torch.tanh(y @ w)

    fn = wrap(fn)
    return lambda w, x: fn(w, fn(w, x)).sum()


def hook_on_a_result(wrap):
    fn = wrap(block)

    def loss(w, x):
        y = fn(w, x)
        y.register_hook(lambda g: g * 3)
        return fn(w, y).sum()

    return loss


@pytest.mark.parametrize("program", [hook_inside, hook_on_a_result])
@rows("transform", {k: k for k in ("backward", "grad", "vmap_grad")}, fast=["grad"])
def test_hooks_change_gradients_as_in_plain_code(program, transform):
    assert begins_again(assert_equals_plain(program, TRANSFORMS[transform]))


# --- Bodies by hand ---


def body_of(*steps):
    """A body that calls functions one after another, and returns what the last did."""
    graph = fx.Graph()
    known = {"x": graph.placeholder("x")}
    for name, function, *args in steps:
        args = tuple(known.get(a, a) if isinstance(a, str) else a for a in args)
        known[name] = graph.call_function(function, args)
    graph.output(known[steps[-1][0]])
    return fx.GraphModule(torch.nn.Module(), graph)


LEVELS = torch._C._functorch


def test_a_body_that_uses_a_level_it_did_not_open_is_refused():
    body = body_of(
        ("level", LEVELS._grad_increment_nesting),
        ("own", LEVELS._wrap_for_grad, "x", 7),
        ("other", LEVELS._unwrap_for_grad, "own", 6),
    )
    with pytest.raises(UnknownLevelError):
        run_body(body, torch.ones(2))
    assert current_layer() is None  # what it opened is closed


def test_the_call_is_named_whose_body_does():
    """No program is known that does; the message is for one that will be found."""
    from remat._transform import traced

    body = body_of(("other", LEVELS._unwrap_for_grad, "x", 6))
    options = remat(block).__remat_options__[1]
    key = traced.key_of("fn", "here.py:1", options)
    with pytest.raises(CaptureError, match=r"(?s)`fn`.*here\.py:1.*level of torch"):
        traced._lower(key, body)(torch.ones(2))


def test_an_error_in_a_body_closes_what_it_opened():
    def fail(x):
        raise ValueError("the user's")

    body = body_of(
        ("level", torch._functorch.predispatch._jvp_increment_nesting),
        ("dual", torch._functorch.predispatch._enter_dual_level),
        ("out", fail, "x"),
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="the user's"):
            run_body(body, torch.ones(2))
        assert current_layer() is None
    assert torch.equal(*jvp(torch.sin, (torch.zeros(2),), (torch.zeros(2),)))


FAILS = """
import torch
from torch.func import jvp
from remat import remat

def broken(x):
    return jvp(lambda y: y.sin() @ torch.ones(9), (x,), (x,))[1]

for _ in range(2):
    try:
        torch.compile(remat(broken), backend="aot_eager", fullgraph=True)(torch.ones(2))
    except Exception as error:
        assert "Nested" not in str(error), error
    torch._dynamo.reset()
print(jvp(torch.sin, (torch.zeros(2),), (torch.ones(2),))[1].tolist())
"""


@pytest.mark.slow
def test_a_failed_compilation_leaves_no_dual_level():
    """In a process of its own: what is left would be so for good."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FAILS],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[1.0, 1.0]\n"
