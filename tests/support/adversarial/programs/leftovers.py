"""What issue 43 left: large constants that are written, and what is seen late."""

import sys
import types
from pathlib import Path

import torch
from support.adversarial.program import (
    State,
    around,
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    reversed_loop,
    texts,
    within,
    work,
)
from torch import nn
from torch._higher_order_ops.map import map as map_of_torch
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks


ROWS = 2000  # of 16 numbers: more elements than what is copied in each call


def large():
    return torch.zeros(ROWS, 16, dtype=torch.double)


# --- Large constants that are written ---


def attended(x, cache, i):
    """Write a row of a cache, and attend over all of it, with later rows masked."""
    cache.index_copy_(0, torch.tensor([i]), work(x).detach()[None])
    cache = cache.clone()  # as one repeated for each group of heads
    scores = (cache @ x).masked_fill(torch.arange(ROWS) > i, -torch.inf)
    return work(scores.softmax(0) @ cache)


@program
def a_static_cache_read_as_a_whole_by_several_calls():
    cache, at = large(), State(i=0)

    def fn(x):
        at.i += 1
        return attended(x, cache, at.i)

    return reversed_loop(fn, state=lambda: (cache, at.i))


@program
def a_static_cache_passed_as_an_argument(wrap):
    cache = large()
    fn = lambda x, cache, i: attended(x, cache, i)

    run, xs = wrap(fn), [leaf(seed=i) for i in range(3)]
    outs = [run(x, cache, i) for i, x in enumerate(xs)]
    torch.stack(outs).sin().sum().backward()
    return outs, [x.grad for x in xs], cache


def of_the_user():
    return saved_tensors_hooks(lambda t: t.numpy(force=True), torch.from_numpy)


@family(**{"on cpu": save_on_cpu, "of the user": of_the_user})
def a_large_constant_written_under_hooks(hooks):
    cache, at = large(), State(i=0)

    def fn(x):
        cache[at.i] = work(x).detach()
        at.i += 1
        return work(x * cache[: at.i].mean(0))

    return around(fn, within(hooks), state=lambda: (cache, at.i))


@family(attended=True, rows=False)
def a_large_constant_written_in_a_call_within(wrap, whole):
    cache, at = large(), State(i=0)

    def inner(x):
        at.i += 1
        if whole:
            return attended(x, cache, at.i)
        cache[at.i] = work(x).detach()
        return work(x * cache[1 : at.i + 1].mean(0))

    outer = lambda run: wrap(lambda x: run(x.sin()).tanh() * x)
    state = lambda: (cache, at.i)
    return around(inner, outer, by=reversed_loop, state=state)(wrap)


@program
def a_workspace_made_in_a_call_around(wrap):
    def inner(x, space):
        space.copy_(work(x).detach().expand(ROWS, 16))
        return work(x * space[3].clone())

    run = wrap(inner)

    def outer(x):
        space = large()
        return run(run(x, space).tanh(), space) * x

    return loop(wrap(outer))(lambda f: f)


# --- Code of packages ---


PACKAGE = """
def boxed(box):
    class Boxed(nn.Module):
        def forward(self, x):
            return work(x, box[0])

    return Boxed()


def counted(counts):
    class Counted:
        def __call__(self, x):
            counts["calls"] += 1
            return work(x, counts["calls"])

    return Counted()
"""


def package():
    """A module that is where torch is, so that its code is a package's."""
    module = types.ModuleType("package_of_leftovers")
    module.__file__ = str(Path(torch.__file__).parent / "package_of_leftovers.py")
    sys.modules[module.__name__] = module
    vars(module).update(work=work, nn=nn)
    exec(compile(PACKAGE, module.__file__, "exec"), vars(module))
    return module


texts(globals())


# --- Higher-order operators ---


def branched(y, other):
    return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))


def mapped(y, other):
    return map_of_torch(
        lambda row, s: row.sin() * s, y.reshape(4, 4), y.sum()
    ).flatten()


def scanned(y, other):
    carry, rows = scan(lambda c, r: (c + r, (c * r).sin()), y[:4] * 0, y.reshape(4, 4))
    return rows.flatten() + carry.sum()


def looped(y, other):
    one = torch.zeros((), dtype=torch.int)
    step = lambda i, a: (i + 1, a.cos())
    return y * while_loop(lambda i, a: i < 3, step, (one, y.detach()))[1]


def branched_on_it(y, other):
    return y * torch.cond(y.sum() > 0, torch.sin, torch.cos, (other,))


def branched_around_it(y, other):
    flag, two = y.sum() > 0, torch.full((), 2.0, dtype=torch.double)
    return y * torch.cond(flag, lambda k: k * other, lambda k: k + other, (two,))


def looped_with_it(y, other):
    one = torch.zeros((), dtype=torch.int)
    step = lambda i, a: (i + 1, a.cos())
    return y * while_loop(lambda i, a: i < 3, step, (one, other))[1]


@family(
    branched=branched,
    mapped=mapped,
    scanned=scanned,
    looped=looped,
    branched_on_it=branched_on_it,
    branched_around_it=branched_around_it,
    looped_with_it=looped_with_it,
)
def a_higher_order_operator_where_an_input_changes(operator):
    """Some of these read that input, as it is by then: this is an error."""
    other = torch.full((16,), 1.5, dtype=torch.double)

    def fn(x):
        return operator(work(x), other).exp() + other

    return loop(fn, between=lambda: other.add_(1), state=lambda: other, count=1)


@program
def a_higher_order_operator_that_reads_a_cache():
    cache, at = large(), State(i=0)

    def fn(x):
        at.i += 1
        cache[at.i] = work(x).detach()
        row = torch.cond(x.sum() > 0, torch.sin, torch.cos, (cache[at.i],))
        return work(x * row)

    return loop(fn, state=lambda: cache, count=2)


# --- Casts ---


def in_regions(fn_of, *, steps, casts):
    """A forward in one region of autocast, and its backward in another one."""

    def step(wrap):
        w = leaf(4, 4).detach().float().requires_grad_()
        x = leaf(4, 4, seed=2).detach().float().requires_grad_()
        run, seen = wrap(fn_of(w)), []
        with torch.autocast("cpu", torch.bfloat16):
            out = run(x)
        if steps:
            with torch.no_grad():
                w.add_(0.5)
        with torch.autocast("cpu", torch.bfloat16):
            if casts:
                seen.append(x @ w)
            back(out)
            seen.append(x @ w)
            back(seen[-1])
        return observed((out, seen, w.grad, x.grad))

    return step


def without_a_region(w):
    return lambda x: work((x @ w).sin() @ w)


def with_a_region_inside(w):
    def fn(x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            return work((x @ w).sin() @ w)

    return fn


def with_a_part_in_a_region(w):
    def fn(x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
            y = (x @ w).sin()
        return work(y @ w)

    return fn


HOW = {
    "stepped and cast": {"steps": True, "casts": True},
    "stepped": {"steps": True, "casts": False},
    "cast": {"steps": False, "casts": True},
    "neither": {"steps": False, "casts": False},
}


@family(**HOW)
def a_backward_in_another_region(how):
    return in_regions(without_a_region, **how)


@family(**HOW)
def a_region_inside_and_a_backward_in_another(how):
    return in_regions(with_a_region_inside, **how)


@family(**HOW)
def a_part_in_a_region_and_a_backward_in_another(how):
    return in_regions(with_a_part_in_a_region, **how)
