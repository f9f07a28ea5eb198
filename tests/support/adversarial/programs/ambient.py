"""What surrounds a call: regions of autocast, streams that move, modes, settings."""

import contextlib
import random
from contextvars import ContextVar
from queue import SimpleQueue

import numpy as np
import torch
from support.adversarial.program import (
    around,
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    within,
    work,
)
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils._python_dispatch import TorchDispatchMode


# --- The casts of a region of autocast ---


def stepped(p):
    with torch.no_grad():
        p.add_(0.5)


def in_a_region(body):
    """A step that gives `body` a wrapped function of `x`, a weight, in one region."""

    def step(wrap):
        w = leaf(4, 4).detach().float().requires_grad_()
        seen = []
        x = leaf(4, 4, seed=2).detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            body(wrap(lambda x: work((x @ w).sin() @ w)), x, w, seen)
        return observed((seen, w.grad, x.grad))

    return step


@program
def trained_in_one_region():
    def body(run, x, w, seen):
        for _ in range(3):
            out = run(x)
            back(out)
            seen.append(observed((out, w.grad, x.grad)))
            stepped(w)

    return in_a_region(body)


@program
def a_step_in_the_region_before_the_backward():
    def body(run, x, w, seen):
        for _ in range(3):
            out = run(x)
            stepped(w)
            back(out)
            seen.append(observed((out, w.grad, x.grad)))

    return in_a_region(body)


@program
def plain_code_after_a_backward_in_the_region():
    def body(run, x, w, seen):
        back(run(x))
        stepped(w)
        out = x @ w
        back(out)
        seen.append(observed((out, w.grad)))

    return in_a_region(body)


# --- Streams ---


DRAWS = {
    "torch": lambda: torch.default_generator.manual_seed(3),
    "Python": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "NumPy": np.random.rand,
}


@family(**DRAWS)
def drawn_only_by_a_recompute(wrap, draw):
    again = SimpleQueue()  # which no recompute puts back

    def fn(x):
        if not again.empty():
            draw()  # as a log or a check would
        return work(x, 2.0).tanh()

    run, seen, x = wrap(fn), [], leaf()
    for _ in range(2):
        out = run(x)
        again.put(1)
        back(out)
        again.get()
        seen.append(observed((out, x.grad)))
    return seen


# --- Parameters in other memory ---


def halved(w, _):
    w.data = w.data * 0.5


def from_a_vector(w, b):
    vector = nn.utils.parameters_to_vector([w, b])
    nn.utils.vector_to_parameters(vector * 0.5, [w, b])


def put_back(w, _):
    before = w.data
    w.data = before * 0.5
    w.data = before


@family(data=halved, vector=from_a_vector, put_back=put_back)
def moved_between(change):
    w, b = (nn.Parameter(leaf(seed=s).detach()) for s in (4, 5))
    fn = lambda x: work(x * w.sin() + b).tanh()
    return loop(fn, between=lambda: change(w, b), state=lambda: (w, w.grad, b.grad))


# --- Changed in place once it is saved ---


@family(
    before=lambda y: (y.exp() * y, y.mul_(2)),
    twice=lambda y: (y.exp() * y, y.mul_(2), y.exp() * y, y.mul_(2)),
)
def changed_once_it_is_saved(wrap, change):
    run, x = wrap(lambda x: sum(change(work(x, 2.0))).sin()), leaf()
    with allow_mutation_on_saved_tensors():
        out = run(x)
        back(out)
    return out, x.grad


# --- Context variables that are passed ---


class Held:
    def __init__(self, variable):
        self.variable, self.get = variable, variable.get


PASSED = {
    "itself": (lambda v: v, lambda a: a.get()),
    "in a list": (lambda v: [v], lambda a: a[0].get()),
    "in an object": (Held, lambda a: a.variable.get()),
    "its method": (lambda v: v.get, lambda a: a()),
    "the method in an object": (Held, lambda a: a.get()),
}


@family(**PASSED)
def a_context_variable_passed_and_set_between(wrap, case):
    hold, read = case
    variable = ContextVar("variable")
    variable.set([1.0])

    seen, argument = [], hold(variable)
    run, x = wrap(lambda x, a: work(x, read(a)[0]).tanh()), leaf()
    for k in (1.5, 2.5):
        variable.set([k])
        out = run(x, argument)
        variable.set([0.5])
        back(out)
        seen.append(observed((out, x.grad, variable.get())))
    return seen


# --- Modes for operations that change results ---


class Scaling(TorchDispatchMode):
    def __init__(self, scale=1.1, growth=0.0):
        super().__init__()
        self.scale, self.growth = scale, growth

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.sin.default:
            self.scale += self.growth
            out = out * self.scale
        return out


class InPlace(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out.mul_(1.5) if func is torch.ops.aten.sin.default else out


class Replacing(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_sin = func is torch.ops.aten.sin.default
        func = torch.ops.aten.cos.default if is_sin else func
        return func(*args, **(kwargs or {}))


@family(
    scaling=Scaling,
    counting=lambda: Scaling(growth=0.1),
    in_place=InPlace,
    replacing=Replacing,
)
def under_a_mode_in_the_forward_alone(mode):
    return around(lambda x: work(work(x, 1.5)), within(mode))


@program
def under_a_mode_that_counts_in_both(wrap):
    run, x = wrap(lambda x: work(work(x, 1.5))), leaf()
    with Scaling(growth=0.1):
        out = run(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x)
    return out, grad


# --- Settings of the processor and of NumPy ---


@contextlib.contextmanager
def flushing():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@program
def denormal_numbers_flushed_in_the_forward_alone():
    def fn(x):
        return work(x, float(torch.full((4,), 1e-39).mul(0.5).sum() > 0) + 1.0).tanh()

    return around(fn, within(flushing), count=1)


# --- Large tensors that are written to ---

LARGE = 2**15


def of_a_permutation(buffer, x):
    torch.randperm(LARGE, out=buffer)
    return buffer[:16] / LARGE


def added_to(buffer, x):
    buffer[:16].add_(x.detach())
    return buffer[:16].clone()


def read_and_then_written(buffer, x):
    before = buffer[:16].clone()
    buffer[:16] = x.detach()
    return before + buffer[:16]


@family(
    of_a_permutation=of_a_permutation, added_to=added_to, read=read_and_then_written
)
def written_to(write):
    dtype = torch.long if write is of_a_permutation else torch.double
    buffer = torch.ones(LARGE, dtype=dtype)
    fn = lambda x: work(x * write(buffer, x)).tanh()
    return loop(fn, state=lambda: (buffer[:32], buffer.sum()))


@program
def rows_of_a_table_filled_once(wrap):
    """As rotary embeddings keep them: a block fills rows, and the others read them."""
    table, filled = torch.zeros(LARGE // 8, 8, dtype=torch.double), torch.tensor(0)

    def rows(n):
        if filled.item() < n:
            found = torch.arange(n * 8, dtype=torch.double).reshape(n, 8).sin()
            table[:n] = found
            filled.copy_(n)
            return found
        return table[:n]

    blocks = [wrap(lambda x: work(x.reshape(2, 8) * rows(2)).tanh())] * 3
    seen = []
    for seed in range(2):
        out = x = leaf(seed=seed)
        for block in blocks:
            out = block(out)
        back(out)
        seen.append(observed((out, x.grad, table[:4], filled)))
    return seen
