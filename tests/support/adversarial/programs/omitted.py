"""What a recompute leaves out: looked up, given other memory, by other functions."""

import weakref

import torch
from support.adversarial.observed import observed
from support.adversarial.program import (
    back,
    family,
    leaf,
    loop,
    program,
    ran,
    trained,
    work,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode


# --- An input that no operation reads ---


LOOKUPS = {
    "by id": lambda t: {id(t): 3.0},
    "by a weak key": lambda t: weakref.WeakKeyDictionary({Key(t): 3.0}),
    "in a dict": lambda t: {t: 3.0},
}


class Key:
    """A key that is as alive as a tensor is, which it is stored on."""

    def __init__(self, t):
        t.key = self


def looked_up(table, t):
    key = id(t) if isinstance(next(iter(table), None), int) else t
    return table.get(getattr(t, "key", key), 1.0)


@family(**LOOKUPS)
def an_input_looked_up(make):
    mask = torch.linspace(0, 1, 16, dtype=torch.double)
    table = make(mask)
    fn = lambda x, mask: work(x, looked_up(table, mask)) + mask
    return loop(fn, args=(mask,))


@family(kept=True, gone=False)
def a_computed_input_looked_up(wrap, kept):
    """Of one that is gone nobody can ask for the identity, but for attributes."""
    table = {}

    def fn(x, h):
        return work(x, table.get(id(h) if kept else h.k, 1.0)) + h

    run, seen = wrap(fn), []
    for i in range(3):
        x = leaf(seed=i + 1)
        h = x * 2
        table.clear()
        if not kept:
            h.k = i
        table[id(h) if kept else i] = 3.0 + i
        out = run(x, h)
        if not kept:
            del h
        back(out)
        seen.append(observed((out, x.grad)))
    return seen


@program
def an_input_written_to_and_looked_up(wrap):
    table = {}

    def fn(x, h):
        h.mul_(2)
        return work(x, table.get(id(h), 1.0)) + h

    run, seen = wrap(fn), []
    for i in range(3):
        x, h = leaf(seed=i + 1), leaf(seed=7).detach()
        table.clear()
        table[id(h)] = 3.0
        out = run(x, h)
        back(out)
        seen.append(observed((out, x.grad, h)))
    return seen


# --- Kernels that read, and memory that is exchanged ---


@program
def an_embedding_with_a_norm_called_twice():
    layer = nn.Embedding(10, 2, max_norm=1.0, dtype=torch.double)
    with torch.no_grad():
        layer.weight.copy_(torch.arange(20.0).view(10, 2))
    first, second = torch.tensor([0, 2, 3, 9]), torch.tensor([2, 2, 5, 1])

    def fn(x):
        a, b = layer(first), layer(second)
        return work(x, 2.0) * a.sin() + b

    return trained(layer, call=fn, shape=(4, 2))


DATA = {
    "a double": lambda h: h.data * 2,
    "a copy of another": lambda h: torch.ones_like(h.data) * 3,
    "a transposed view": lambda h: h.data.t(),
    "a view of another": lambda h: (h.detach() * 3).t(),
}


@family(**DATA)
def data_of_a_product_assigned(make):
    weight = leaf(4, 4, seed=9)

    def fn(x):
        h = x @ weight
        h.data = make(h)
        return work(h.cos()) @ weight

    return loop(fn, shape=(4, 4))


# --- A library's function that is replaced over the forward ---


def replaced(owner, name, new, fn):
    """A step whose forward runs with another function, which is put back by then."""

    def step(wrap):
        run, seen = wrap(fn), []
        for i in range(3):
            x = leaf(seed=i + 1)
            old = getattr(owner, name)
            setattr(owner, name, new)
            try:
                out = run(x)
            finally:
                setattr(owner, name, old)
            back(out)
            seen.append(observed((out, x.grad)))
        return seen

    return step


@program
def a_function_of_torch_replaced_over_the_forward():
    return replaced(
        functional, "gelu", torch.tanh, lambda x: functional.gelu(work(x)).sin()
    )


@program
def a_function_of_torch_replaced_by_one_of_as_many_operations():
    return replaced(
        functional, "gelu", torch.sigmoid, lambda x: work(x) + functional.gelu(x * 2)
    )


@program
def a_method_of_a_class_of_torch_replaced_over_the_forward():
    layer = nn.GELU()
    new = lambda self, x: x.tanh()
    return replaced(nn.GELU, "forward", new, lambda x: layer(work(x)).sin())


# --- The user's modes ---


class Reads(TorchDispatchMode):
    """Reads the storages of all that operations take and return."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in (*args, out):
            if isinstance(t, Tensor):
                self.seen += t.untyped_storage().nbytes() >= 0
        return out


@family(inside=True, around=False)
def storages_read_by_a_mode_in_the_second_step(wrap, inside):
    on = [False]

    def fn(x):
        if not (inside and on[0]):
            return work(x) + x * 3
        with Reads():
            return work(x) + x * 3

    run, seen = wrap(fn), []
    for i in range(3):
        x = leaf(seed=i + 1)
        on[0] = i > 0
        if inside or not i:
            out = run(x)
            back(out)
        else:
            with Reads():
                out = run(x)
                back(out)
        seen.append(observed((out, x.grad)))
    return seen


# --- Libraries, made small ---


@program
def parameters_that_a_closure_holds(wrap):
    """As `higher`'s: a copy of a module, whose parameters are set before each call."""
    block = nn.Linear(4, 4, dtype=torch.double)

    def patched(parameters):
        def forward(x):
            weight, bias = parameters
            return functional.linear(x, weight, bias)

        return forward

    def fn(x, fast):
        ran()
        inner = patched(fast)
        h = inner(x).tanh()
        steps = [p - 0.1 * p.sin() for p in fast]
        return patched(steps)(h).sin() + h

    run, seen = wrap(fn), []
    for i in range(3):
        x = leaf(4, 4, seed=i + 1)
        fast = [p * 1.0 for p in block.parameters()]
        out = run(x, fast)
        back(run(out, fast))
        grads = [p.grad for p in block.parameters()]
        seen.append(observed((out, x.grad, grads)))
    return seen


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x * 1.01)


@program
def seventy_calls_in_one_another(wrap):
    run, x = work, leaf()
    for _ in range(70):
        run = wrap(Around(run))
    out = run(x)
    back(out)
    return out, x.grad


BRANCHES = {"cond": lambda x, flag: torch.cond(flag, torch.sin, torch.cos, (x,))}


@family(**BRANCHES)
def a_higher_order_operator_after_an_input_changed(branch):
    other = torch.ones(16, dtype=torch.double)

    def fn(x, other):
        flag = x.sum() > 0
        return branch(work(x), flag) + other

    return loop(fn, args=(other,), between=lambda: other.add_(1))
