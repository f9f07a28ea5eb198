"""Random small programs under random derivatives, with and without remat.

A program is a list of steps on a growing list of values; `segments` says which runs of
steps are rematerialized, and how deep. Plain and remat run the very same steps, so
values agree bit for bit; gradients too, except that under torch.func the contributions
to a value with several uses are added up in another order (promise 1). Fixed examples;
`REMAT_EXPLORE=1` looks for new ones.
"""

import os
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.zoo import Evaluations
from torch.autograd.graph import saved_tensors_hooks
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves

from remat import remat
from remat.testing import assert_same


SIZE = 3
bounded = settings(
    deadline=None,
    derandomize="REMAT_EXPLORE" not in os.environ,
    max_examples=150,
    print_blob=True,
)

# A tensor that every program may refer to without being passed it.
CAPTURED = torch.linspace(0.5, 1.5, SIZE * SIZE, dtype=torch.float64).view(SIZE, SIZE)

# --- Programs: every step takes one or two square matrices and gives one ---


def scaled_in_place(a):
    own = a * 1.0
    own.mul_(0.7).add_(0.1)
    return own


def row_written_in_place(a, b):
    own = a + 0.1 * b
    own[1] = b[0]
    own[:, 2] += b[:, 1]
    return own


def in_place_through_a_view(a):
    own = a.sin().contiguous()
    own.view(-1)[::2].mul_(2.0)
    return own


def without_derivative(a, b):
    with torch.no_grad():
        scale = a.sigmoid()
    return b * scale + a.detach().cos()


UNARY = {
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "exp": lambda a: a.tanh().exp(),
    "square": lambda a: a.tanh().square(),
    "softmax": lambda a: a.softmax(-1),
    "transpose": lambda a: a.mT,
    "flip": lambda a: a.flip(0),
    "view": lambda a: a.reshape(-1).view(SIZE, SIZE),
    "slices": lambda a: torch.cat([a[1:], a[:1]]),
    "diagonal": lambda a: a + a.diagonal(dim1=-2, dim2=-1).sin(),
    "row sums": lambda a: a - a.sum(-1, keepdim=True).tanh(),
    "mean": lambda a: a * a.mean().cos(),
    "largest": lambda a: a * a.amax(-1, keepdim=True),
    "cumsum": lambda a: a.cumsum(0) / SIZE,
    "captured": lambda a: (a * CAPTURED).sin(),
    "captured matmul": lambda a: a @ CAPTURED / SIZE,
    "scaled in place": scaled_in_place,
    "through a view": in_place_through_a_view,
    "relu": lambda a: torch.relu(a) + 0.1 * a,
    "branch": lambda a: torch.where(a > 0.5, a.sin(), a.cos()),
}
BINARY = {
    "add": torch.add,
    "mul": lambda a, b: a * b.tanh(),
    "matmul": lambda a, b: (a @ b) / SIZE,
    "div": lambda a, b: a / (b.square() + 1),
    "outer": lambda a, b: torch.outer(a[0], b[:, 0]),
    "einsum": lambda a, b: torch.einsum("ij,kj->ik", a, b.sin()),
    "row written": row_written_in_place,
    "no_grad": without_derivative,
    "max": torch.maximum,
}


@dataclass(frozen=True)
class Step:
    name: str
    operands: tuple[int, ...]

    def run(self, values, log):
        log.note(self.name)
        fn = UNARY.get(self.name) or BINARY[self.name]
        return fn(*(values[k % len(values)] for k in self.operands))


@dataclass(frozen=True)
class Segment:
    """Consecutive steps, evaluated as one function; nested `depth` times in remat."""

    steps: tuple[Step, ...]
    depth: int
    outputs: int
    closure: bool

    def run(self, ckpt, values, log):
        def body(*args):
            known = list(values) if self.closure else list(args)
            first = len(known)
            for step in self.steps:
                known.append(step.run(known, log))
            made = known[first:]
            return {"last": made[-1], "rest": made[-self.outputs : -1], "n": first}

        for _ in range(self.depth):
            body = ckpt(body)
        out = body() if self.closure else body(*values)
        assert out["n"] == len(values)
        return [*out["rest"], out["last"]]


@dataclass(frozen=True)
class Program:
    segments: tuple[Segment, ...]
    halves: bool

    def loss(self, ckpt, log):
        def run(segments, values):
            for segment in segments:
                values = [*values, *segment.run(ckpt, values, log)]
            return values

        def f(x, y):
            values = [x, y]
            half = len(self.segments) // 2
            if self.halves and half:
                first = ckpt(lambda *v: tuple(run(self.segments[:half], v)))
                values = list(first(*values))
                values = run(self.segments[half:], values)
            else:
                values = run(self.segments, values)
            return ckpt(close)(values[-1], x, y)

        def close(last, x, y):
            log.note("close")
            return (last * (x + y).tanh() * weights()).sum() + last[0, 0].square()

        return f


def weights():
    return torch.linspace(0.3, 1.7, SIZE * SIZE, dtype=torch.float64).view(SIZE, SIZE)


operands = st.integers(0, 9)
steps = st.one_of(
    st.builds(Step, st.sampled_from(sorted(UNARY)), st.tuples(operands)),
    st.builds(Step, st.sampled_from(sorted(BINARY)), st.tuples(operands, operands)),
)
segments = st.builds(
    Segment,
    steps=st.lists(steps, min_size=1, max_size=4).map(tuple),
    depth=st.integers(1, 2),
    outputs=st.integers(1, 3),
    closure=st.booleans(),
)
programs = st.builds(
    Program,
    segments=st.lists(segments, min_size=1, max_size=3).map(tuple),
    halves=st.booleans(),
)


def inputs():
    generator = torch.Generator().manual_seed(3)
    return [
        torch.rand(SIZE, SIZE, dtype=torch.float64, generator=generator) + 0.1 * k
        for k in range(2)
    ]


# --- Derivatives ---


def by_backward(f):
    x, y = (t.requires_grad_() for t in inputs())
    out = f(x, y)
    out.backward()
    return out.detach(), x.grad, y.grad


def by_autograd_twice(f):
    x, y = (t.requires_grad_() for t in inputs())
    grads = torch.autograd.grad(f(x, y), (x, y), create_graph=True)
    mixed = sum((g * weights()).sum() for g in grads)
    return torch.autograd.grad(mixed, (x, y), allow_unused=True, materialize_grads=True)


def by_vjp(f):
    out, pull = vjp(f, *inputs())
    return out, pull(torch.full_like(out, 0.7))


def batch(x):
    return torch.stack([x, x * 0.9, x - 0.05])


def by_vmap_of_grad(f):
    x, y = inputs()
    return vmap(grad(f), in_dims=(0, None))(batch(x), y)


def by_grad_of_vmap(f):
    x, y = inputs()
    return grad(lambda x, y: vmap(f, (1, None))(x, y).sum(), argnums=(0, 1))(
        batch(x).movedim(0, 1), y
    )


def by_grad_of_grad(f):
    return grad(lambda x, y: (grad(f)(x, y) * weights()).sum(), argnums=1)(*inputs())


def by_jvp_of_grad(f):
    tangents = tuple(t.cos() for t in inputs())
    return jvp(grad(f, argnums=(0, 1)), tuple(inputs()), tangents)


def by_grad_of_jvp(f):
    x, y = inputs()
    return grad(lambda x: jvp(lambda x: f(x, y), (x,), (weights(),))[1])(x)


def by_vmap_of_hessian(f):
    x, y = inputs()
    return vmap(hessian(f), in_dims=(0, None))(batch(x)[:2], y)


FIRST_ORDER = {
    "backward": by_backward,
    "grad": lambda f: grad(f, argnums=(0, 1))(*inputs()),
    "vjp": by_vjp,
    "jacrev": lambda f: jacrev(f, argnums=1)(*inputs()),
    "vmap(grad)": by_vmap_of_grad,
    "grad(vmap)": by_grad_of_vmap,
}
SECOND_ORDER = {
    "autograd.grad twice": by_autograd_twice,
    "grad(grad)": by_grad_of_grad,
    "hessian": lambda f: hessian(f)(*inputs()),
    "jacrev(jacrev)": lambda f: jacrev(jacrev(f))(*inputs()),
    "jacrev(jacfwd)": lambda f: jacrev(jacfwd(f))(*inputs()),
    "jacfwd(jacrev)": lambda f: jacfwd(jacrev(f), argnums=1)(*inputs()),
    "jvp(grad)": by_jvp_of_grad,
    "grad(jvp)": by_grad_of_jvp,
    "vmap(hessian)": by_vmap_of_hessian,
}


def plain(fn):
    return fn


def evaluate(derivative, program, ckpt):
    """Return the derivative of the program's loss, and the steps that it ran."""
    log = Evaluations()
    result = derivative(program.loss(ckpt, log))
    # With a one beside them, differences are judged on the scale of the inputs.
    flat = [t.reshape(-1) for t in tree_leaves(result)]
    return torch.cat([*flat, torch.ones(1, dtype=torch.float64)]), log


@bounded
@given(program=programs)
def test_values_of_random_programs(program):
    logs = Evaluations(), Evaluations()
    leaves = [t.requires_grad_() for t in inputs()]
    got = program.loss(remat, logs[0])(*leaves)
    want = program.loss(plain, logs[1])(*leaves)
    assert_same(got, want)
    assert [*logs[0]] == [*logs[1]]
    got.backward()
    assert len(logs[0]) > 0


@bounded
@given(program=programs, derivative=st.sampled_from(sorted(FIRST_ORDER)))
def test_first_derivatives_of_random_programs(program, derivative):
    got, log = evaluate(FIRST_ORDER[derivative], program, remat)
    want, plain_log = evaluate(FIRST_ORDER[derivative], program, plain)
    # Under torch.func, values have uses in several segments (promise 1).
    assert_same(got, want, reassociated=derivative != "backward")
    assert len(log) > len(plain_log)


@settings(bounded, max_examples=100)
@given(program=programs, derivative=st.sampled_from(sorted(SECOND_ORDER)))
def test_second_derivatives_of_random_programs(program, derivative):
    got, log = evaluate(SECOND_ORDER[derivative], program, remat)
    want, plain_log = evaluate(SECOND_ORDER[derivative], program, plain)
    # Under torch.func, values have uses in several segments, and in the first
    # derivative (promise 1).
    assert_same(got, want, reassociated=derivative != "autograd.grad twice")
    assert len(log) > len(plain_log)


# --- What the random programs found ---


@pytest.mark.parametrize(
    "f",
    [lambda a: a.mT, lambda a: (a[1:], a.sin())[0], lambda a: (a.view(-1), a)[0]],
    ids=["transpose", "slice", "view"],
)
def test_forward_over_reverse_of_views(f):
    log = Evaluations()

    def loss(ckpt):
        g = ckpt(lambda a: (f(a), log.note(1))[0])
        return lambda x: g(x).sin().sum()

    x = inputs()[0]
    got = grad(lambda x: jvp(loss(remat), (x,), (weights(),))[1])(x)
    count = len(log)
    want = grad(lambda x: jvp(loss(plain), (x,), (weights(),))[1])(x)
    assert_same(got, want)
    assert count > len(log) - count


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_forward_over_reverse_of_a_nested_call(depth):
    log = Evaluations()

    def loss(ckpt):
        def f(x, y):
            log.note(1)
            return x.sin()

        for _ in range(depth):
            f = ckpt(f)
        return lambda x, y: f(x, y).square().sum()

    got = jvp(grad(loss(remat)), tuple(inputs()), (weights(), weights()))
    assert len(log) > 1 + depth
    want = jvp(grad(loss(plain)), tuple(inputs()), (weights(), weights()))
    assert_same(got, want, reassociated=True)  # x in value and tangent (promise 1)


# --- Chains: each value has its uses in one call, so every bit is as in plain ---

links = st.lists(st.sampled_from(sorted(UNARY)), min_size=1, max_size=3)
chains = st.lists(st.tuples(links, st.integers(0, 3)), min_size=1, max_size=4)


def chain(ckpt, spec, log):
    def link(names, depth):
        def body(x):
            for name in names:
                log.note(name)
                x = UNARY[name](x)
            return x

        for _ in range(depth):
            body = ckpt(body)
        return body

    def f(x):
        for names, depth in spec:
            x = link(names, depth)(x)
        return (x * weights()).sum()

    return f


CHAIN_DERIVATIVES = {
    "grad": lambda f: grad(f)(inputs()[0]),
    "vjp": lambda f: (lambda out, pull: (out, pull(out)))(*vjp(f, inputs()[0])),
    "jacrev": lambda f: jacrev(f)(inputs()[0]),
    "backward": lambda f: by_backward(lambda x, y: f(x) + y.sum()),
    "vmap(grad)": lambda f: vmap(grad(f))(batch(inputs()[0])),
    "grad(vmap)": lambda f: grad(lambda x: vmap(f)(x).sum())(batch(inputs()[0])),
}


def last_saving(spec):
    """For each call, the step that is the last to save what the call computed.

    Where base autograd differentiates, a recompute stops there; and it stops where a
    call within begins, which recomputes itself. So nesting costs nothing.
    """
    x = inputs()[0].requires_grad_()
    for names, _ in spec:
        given, saved = {id(x), id(CAPTURED)}, []
        with saved_tensors_hooks(lambda t, s=saved: s[-1].add(id(t)) or t, lambda t: t):
            for name in names:
                saved.append(set())
                x = UNARY[name](x)
        yield max((k for k, ids in enumerate(saved, 1) if ids - given), default=0)


def expected_steps(spec, derivative):
    """How many steps run, recomputes included."""
    count = 0
    for (names, depth), last in zip(spec, last_saving(spec), strict=True):
        if derivative == "backward":
            count += len(names) + last * min(depth, 1)
        elif derivative in ("vjp", "jacrev"):
            # Base autograd differentiates the recompute of the outermost call.
            count += len(names) * (1 + min(depth, 1)) + last * (depth > 1)
        else:
            # Each level of nesting runs what is in it once more.
            count += len(names) * (1 + depth)
    return count


@bounded
@given(spec=chains, derivative=st.sampled_from(sorted(CHAIN_DERIVATIVES)))
def test_gradients_of_random_chains_are_the_same_bits(spec, derivative):
    logs = Evaluations(), Evaluations()
    got = CHAIN_DERIVATIVES[derivative](chain(remat, spec, logs[0]))
    want = CHAIN_DERIVATIVES[derivative](chain(plain, spec, logs[1]))
    assert_same(got, want)
    assert len(logs[0]) == expected_steps(spec, derivative)
    assert len(logs[1]) == sum(len(names) for names, _ in spec)


# Nesting is in parts of the program, in any shape of tree.
trees = st.recursive(
    st.sampled_from(["sin", "cos", "tanh", "captured", "through a view", "mean"]),
    lambda parts: st.lists(parts, min_size=1, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, list))


def nested(ckpt, tree, log):
    if isinstance(tree, str):
        return lambda x: (log.note(tree), UNARY[tree](x))[1]
    parts = [nested(ckpt, part, log) for part in tree]

    def run(x):
        for part in parts:
            x = part(x)
        return x

    return ckpt(run)


def cost(tree, depth=0):
    """A leaf under `depth` remats runs once, and once more for each of them."""
    if isinstance(tree, str):
        return 1 + depth
    return sum(cost(part, depth + 1) for part in tree)


@bounded
@given(tree=trees)
def test_random_nesting_evaluates_a_leaf_once_for_each_remat_around_it(tree):
    log = Evaluations()
    (x, _), ignored = inputs(), Evaluations()
    got = grad(lambda x: (nested(remat, tree, log)(x) * weights()).sum())(x)
    want = grad(lambda x: (nested(plain, tree, ignored)(x) * weights()).sum())(x)
    assert_same(got, want)
    assert len(log) == cost(tree)
