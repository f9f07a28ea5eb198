"""What a value is, and not what it holds: `is`, `id`, keys, leaves, nodes."""

import torch
from support.adversarial.program import (
    family,
    leaf,
    loop,
    nothing,
    program,
    texts,
    work,
)
from torch import nn
from torch.autograd.graph import get_gradient_edge


# Makes an input from a leaf. What is in the list is alive until the backward.
MADE = {
    "computed": lambda x, alive: x * 2,
    "a view": lambda x, alive: _view(x * 2, alive),
    "a view of a leaf": lambda x, alive: x[4:12],
    "a view of constants": lambda x, alive: _view(torch.arange(16.0), alive),
    "one of several": lambda x, alive: (x * 2).chunk(2)[1],
    "with a hook": lambda x, alive: _after(x * 2, lambda y: y.register_hook(nothing)),
    "retaining": lambda x, alive: _after(x * 2, torch.Tensor.retain_grad),
    "written to": lambda x, alive: _after(x * 2, lambda y: y.mul_(2)),
}
# Answers with a text or a number.
QUESTIONS = {
    "name": lambda v: v.grad_fn is not None and v.grad_fn.name(),
    "kind of node": lambda v: type(v.grad_fn).__name__,
    "text of node": lambda v: str(v.grad_fn).partition(" ")[0],
    "attribute by name": lambda v: type(getattr(v, "grad_fn")).__name__,  # noqa: B009
    "next nodes": lambda v: (
        v.grad_fn and [str(n)[:9] for n, _ in v.grad_fn.next_functions]
    ),
    "edge": lambda v: v.requires_grad and get_gradient_edge(v).node.name(),
    "is a view": lambda v: v._is_view(),
    "base": lambda v: None if v._base is None else [*v._base.shape],
    "version": lambda v: v._version,
    "output number": lambda v: v.output_nr,
    "hooks": lambda v: len(v._backward_hooks or ()),
    "retains": lambda v: v.retains_grad,
}


def _view(base, alive):
    alive.append(base)
    return base[4:12]


def _after(value, change):
    change(value)
    return value


TOLD = {
    **dict.fromkeys(["computed", "a view"], QUESTIONS),
    "a view of a leaf": ["is a view", "base", "name"],
    "a view of constants": ["is a view", "base"],
    "one of several": ["output number", "next nodes"],
    "with a hook": ["hooks"],
    "retaining": ["retains"],
    "written to": ["version"],
}


@family(
    **{
        f"{question} of {made}": (MADE[made], QUESTIONS[question])
        for made, questions in TOLD.items()
        for question in questions
    }
)
def told(wrap, case):
    """What is asked of an input that is gone by the backward."""
    make, ask = case
    factor = lambda v: sum(f"{ask(v)}".encode()) / 1000

    run = wrap(lambda x, v: work(x, factor(v)).sum() * work(v, factor(v)).sum())
    x, alive = leaf(), []
    run(x, make(x, alive)).backward()
    return x.grad.tolist()


@family(
    **{
        f"{kind} of {made}": (make, is_alive)
        for made, make in MADE.items()
        if "view" in made and "leaf" not in made
        for kind, is_alive in (("a base", True), ("a base that is gone", False))
    }
)
def known_by(wrap, case):
    """A view that is gone by the backward knows its base."""
    make, is_alive = case

    run = wrap(lambda x, a, v: work(x, 2 if v._base is a else 3) * v.sum())
    x, alive = leaf(), []
    v = make(x, alive)
    out = run(x, alive[0], v)
    del v
    if not is_alive:
        alive.clear()
    out.sum().backward()
    return x.grad.tolist()


@program
def the_text_of_an_input_that_is_gone(wrap):
    run = wrap(lambda x: work(x, len(repr(x))))
    x = leaf()
    run(x * 2).sum().backward()
    return x.grad.tolist()


@family(whole=slice(None), part=slice(4, 12))
def the_base_of_a_view_that_is_gone(wrap, elements):
    run = wrap(lambda x, a, v: work(x, 2 if v._base is a else 3))
    x, a = leaf(), torch.arange(16.0)
    run(x, a, a[elements]).sum().backward()
    return x.grad.tolist()


@program
def an_argument_compared_with_an_attribute():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(leaf(seed=5).detach())

        def forward(self, x, w):
            return work(x * w, 2 if w is self.weight else 3)

    model = Model()
    return loop(model, args=(model.weight,), state=lambda: model.weight.grad)


@program
def two_arguments_that_are_one(wrap):
    fn = lambda x, y: work(x + y, 2 if x is y else 3)

    run = wrap(fn)
    return loop(lambda x: run(x, x))(lambda f: f)


@program
def two_arguments_that_share_memory(wrap):
    fn = lambda x, y: work(x[:8] * y, 2 if x.data_ptr() == y.data_ptr() else 3)

    run = wrap(fn)
    return loop(lambda x: run(x, x[:8]))(lambda f: f)


@program
def a_passed_list_in_a_closure():
    shared = [2]

    def fn(x, given):
        given.append(3)
        return work(x, shared[-1] if shared is given else 5)

    return loop(fn, args=(shared,), state=lambda: shared)


@program
def a_passed_dict_that_is_an_attribute():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.cache = {"k": 1}

        def forward(self, x, cache):
            cache["k"] += 1
            return work(x, self.cache["k"])

    model = Model()
    return loop(model, args=(model.cache,), state=lambda: model.cache)


@program
def a_passed_module_that_is_reached():
    model = nn.Linear(16, 16).double()
    fn = lambda x, layer: work(layer(x), 2 if layer is model else 3)
    return loop(fn, args=(model,), state=lambda: model.weight.grad)


@program
def the_order_of_a_set_of_modules():
    class Scale(nn.Module):
        def __init__(self, k):
            super().__init__()
            self.k = k

    layers = [Scale(k / 10) for k in range(1, 200)]
    held = {*layers}
    in_order = [layer.k for layer in held]
    return loop(lambda x: work(x, 2 if [layer.k for layer in held] == in_order else 3))


# What the rows use besides, which are text.
exec("import functools")


class Empty:
    """An object, or a key, by its identity."""


def instance(held):
    """Return the one layer of a list, which is made at the first call."""
    held or held.append(nn.Tanh())
    return held[0]


def gradient_of(y, x):
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


NUMBERS = [k / 10 for k in range(1, 200)]

texts(globals())
