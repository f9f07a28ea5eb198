"""Random programs under random policies, nested in one another: they equal plain code.

A program is a list of operations, each on two values made before; one in the middle may
be a rematerialized program itself. It is called several times by one transform and then
by another, so that what one recorded is followed by the other.
"""

import pytest
import torch
from hypothesis import given, settings, strategies as st
from support.zoo import Cubed, make
from torch.func import grad, hessian, jacrev, vmap
from torch.nn import functional

from remat import checkpoint_name, remat
from remat._partial.cache import CACHES
from remat.policies import (
    dots_saveable,
    everything_saveable,
    save_larger_than,
    save_only_these_names,
)
from remat.testing import assert_same


# Programs of which no record fits give up their policy.
pytestmark = pytest.mark.filterwarnings("ignore:.* is not followed any more")


# --- Programs ---


def change_part(a, b):
    c = a.clone()
    c[:2] = b[1:3].sin()
    return c


def change_view(a, b):
    c = a @ b * 0.3
    c.view(-1)[2:9].mul_(3)
    return c.sin()


def change_twice(a, b):
    c = a * b
    return c.mul_(2).add_(b)


def fill(a, b):
    out = torch.empty_like(a)
    out.copy_(b * 2)
    return out * a


# Smooth where the inputs are, so that derivatives can be compared.
OPS = {
    "sin": lambda a, b: a.sin(),
    "exp": lambda a, b: (a * 0.3).exp(),
    "mul": lambda a, b: a * b,
    "mm": lambda a, b: a @ b * 0.3,
    "transpose": lambda a, b: a.mT,
    "reshape": lambda a, b: a.reshape(2, 8).reshape(4, 4),
    "cat": lambda a, b: torch.cat([a[:2], b[2:]]),
    "softmax": lambda a, b: a.softmax(0),
    "topk": lambda a, b: a.topk(4)[0] + b.amax(0),
    "custom": lambda a, b: Cubed.apply(a.sin()),
    "detach": lambda a, b: a.detach() * b,
    "norm": lambda a, b: functional.layer_norm(a + b, (4,)),
    "zeros": lambda a, b: torch.zeros_like(a) + b.cos(),
    "expand": lambda a, b: a[:, :1].expand(4, 4) * b,
    "named": lambda a, b: checkpoint_name(a.sigmoid(), "name"),
    "stack": lambda a, b: torch.stack([row.sin() for row in a.unbind(0)]),
    "index": lambda a, b: a[[3, 1, 0, 0]] * b,
    "linear": lambda a, b: functional.linear(a, b, b[0]) * 0.3,
    "change_part": change_part,
    "change_view": change_view,
    "change_twice": change_twice,
    "fill": fill,
}
DRAWING = {
    "dropout": lambda a, b: functional.dropout(a, 0.5),
    "rand": lambda a, b: a * torch.rand(4, 4, dtype=a.dtype),
    "randn_like": lambda a, b: torch.randn_like(a) * b,
}
ASKING = {
    "item": lambda a, b: a * float(b.detach().sum() > 0) + b,
    "branch": lambda a, b: a.sin() if a.sum() > 0 else b.cos(),
    "count": lambda a, b: a * (b > 0).nonzero().shape[0],
}
ALL = OPS | DRAWING | ASKING
SIZES = save_larger_than(100)
POLICIES = {
    "None": None,
    "everything": everything_saveable,
    "dots": dots_saveable,
    "not_dots": ~dots_saveable,
    "names": save_only_these_names("name"),
    "large": SIZES,
    "disk": everything_saveable.but_offload(to="disk"),
    "some": lambda op: len(str(op.func)) % 3 == 0,
}

places = st.integers(0, 30)


def programs(kinds, length):
    steps = st.lists(st.tuples(kinds, places, places), min_size=1, max_size=length)
    results = st.lists(places, min_size=1, max_size=3)
    return st.tuples(steps, results)


def built(program, inner=None):
    """The function that a program is; `inner` is called in the middle of it."""
    steps, results = program

    def fn(*xs):
        values = [*xs]
        for k, (kind, i, j) in enumerate(steps):
            one, other = values[i % len(values)], values[j % len(values)]
            values.append(ALL[kind](one, other))
            if inner is not None and k == len(steps) // 2:
                values.extend(inner(*values[-2:], xs[0]))
        made = values[len(xs) :]
        return tuple(made[-1 - r % len(made)] for r in results)

    return fn


# --- Transforms ---


WEIGHT = make(4, 4, seed=31)


def scalar(outs):
    return sum((o * WEIGHT).sin().sum() for o in outs)


def gradients(out, leaves, **how):
    return torch.autograd.grad(
        out, leaves, allow_unused=True, materialize_grads=True, **how
    )


def leaves_of(xs):
    return [x.clone().requires_grad_() for x in xs]


def backward(fn, xs):
    xs = leaves_of(xs)
    outs = fn(*xs)
    values = [o.detach() for o in outs]
    loss = scalar(outs)
    return values, gradients(loss, xs) if loss.requires_grad else ()


def of_some(fn, xs):
    """One output, of intermediate values, to one input."""
    xs = leaves_of(xs)
    loss = scalar(fn(*(x.cos() for x in xs))[:1])
    return gradients(loss, xs[:1]) if loss.requires_grad else ()


def twice(fn, xs):
    xs = leaves_of(xs)
    loss = scalar(fn(*(x.cos() for x in xs)))
    if not loss.requires_grad:
        return ()
    first = gradients(loss, xs, create_graph=True)
    again = scalar(first)
    second = gradients(again, xs) if again.requires_grad else ()
    return [g.detach() for g in first], second


def of_first(fn, xs):
    return lambda x: scalar(fn(x, *xs[1:]))


def batched(fn, xs):
    batch = [torch.stack([x, -x, 2 * x]) for x in xs]
    return vmap(grad(lambda *xs: scalar(fn(*xs)), (0, 1)))(*batch)


def batched_inside(fn, xs):
    batch = leaves_of(torch.stack([x, -x, 2 * x]) for x in xs)
    loss = vmap(lambda *xs: scalar(fn(*xs)))(*batch).sum()
    return gradients(loss, batch) if loss.requires_grad else ()


TRANSFORMS = {
    "backward": backward,
    "of_some": of_some,
    "twice": twice,
    "grad": lambda fn, xs: grad(of_first(fn, xs))(xs[0]),
    "grad_grad": lambda fn, xs: grad(
        lambda x: scalar([grad(of_first(fn, xs))(x.cos())])
    )(xs[0]),
}
OF_MANY = {
    "jacrev_jacrev": lambda fn, xs: jacrev(jacrev(of_first(fn, xs)))(xs[0]),
    "hessian": lambda fn, xs: hessian(of_first(fn, xs))(xs[0].cos()),
    "batched": batched,
    "batched_inside": batched_inside,
}
AT_BASE = {
    "backward",
    "of_some",
    "twice",
    "batched_inside",
}  # plain's graph, bit for bit
XS = [make(4, 4, seed=s) for s in (32, 33, 34)]
policies = st.sampled_from([*POLICIES])
prunes = st.sampled_from([True, True, "auto", False])


def assert_equals_plain(program, inner, outside, inside, prune, hows):
    """Run both, from the same place of the random stream, and compare."""
    CACHES.clear()
    plain = built(program, built(inner) if inner else None)
    nested = (
        remat(built(inner), policy=POLICIES[inside], prune=prune) if inner else None
    )
    fn = remat(built(program, nested), policy=POLICIES[outside], prune=prune)
    for how in (hows[0], hows[0], *hows):
        transform = (TRANSFORMS | OF_MANY)[how]
        torch.manual_seed(0)
        expected = transform(plain, XS)
        stream = torch.get_rng_state()
        torch.manual_seed(0)
        assert_same(transform(fn, XS), expected, reassociated=how not in AT_BASE)
        assert torch.equal(torch.get_rng_state(), stream)


checkpoint_name(WEIGHT, "name")  # a program without it is not to warn
some_hows = st.lists(st.sampled_from([*TRANSFORMS]), min_size=1, max_size=3)
all_hows = st.lists(st.sampled_from([*TRANSFORMS, *OF_MANY]), min_size=1, max_size=3)
pure = st.sampled_from([*OPS])
anything = st.sampled_from([*OPS, *DRAWING, *DRAWING, *ASKING, *ASKING])


def _given(operations, hows):
    inner = st.none() | programs(operations, 3)
    return given(programs(operations, 6), inner, policies, policies, prunes, hows)


@settings(max_examples=40)
@_given(pure, all_hows)
def test_programs_of_pure_operations(program, inner, outside, inside, prune, hows):
    assert_equals_plain(program, inner, outside, inside, prune, hows)
    if inner is None:
        assert all(trace.misfits == 0 for trace in CACHES._caches.values())


@settings(max_examples=40)
@_given(anything, some_hows)
def test_programs_that_draw_and_ask(program, inner, outside, inside, prune, hows):
    assert_equals_plain(program, inner, outside, inside, prune, hows)
