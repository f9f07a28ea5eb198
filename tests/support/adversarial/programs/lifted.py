"""What is differentiated, wherever it is found: below torch.func others stand in."""

import gc
import weakref

import torch
from support.adversarial.holders import ANYTHING
from support.adversarial.observed import observed
from support.adversarial.program import (
    State,
    back,
    family,
    leaf,
    loop,
    program,
    texts,
    work,
)
from torch import nn


def computed(seed=4):
    """A leaf, and a tensor that is none, whose node saves nothing."""
    w = leaf(seed=seed)
    return w, -w


@family(**ANYTHING)
def a_computed_tensor(hold):
    read, write, dump = hold()
    w, value = computed()
    write(value)
    return loop(lambda x: work(x, read()).tanh(), state=lambda: (w.grad, dump()))


@family(**ANYTHING)
def a_computed_tensor_replaced_between(hold):
    read, write, dump = hold()
    (w, value), (v, other) = computed(), computed(5)
    write(value)
    turns = iter([other, value, other])
    return loop(
        lambda x: work(x, read()).tanh(),
        between=lambda: write(next(turns)),
        state=lambda: (w.grad, v.grad, dump()),
    )


@family(**ANYTHING)
def a_computed_tensor_exchanged_by_the_function(hold):
    read, write, dump = hold()
    (w, value), (v, other) = computed(), computed(5)
    write(value)

    def fn(x):
        y = work(x, read())
        write(other if read() is value else value)
        return y.tanh()

    return loop(fn, state=lambda: (w.grad, v.grad, dump()))


@family(**ANYTHING)
def an_input_that_is_left(hold):
    """It is the user's own there, and what was beside it is as it was."""
    read, write, _ = hold()
    write(torch.ones(16, dtype=torch.double))

    def fn(x):
        y = work(x, read().detach())
        write(x)
        return y.tanh()

    return loop(fn, state=lambda: observed(read().detach()))


@family(
    list=lambda a, b: [a, [b]],
    tuple=lambda a, b: (a, (b, 1)),
    dict=lambda a, b: {"a": a, "more": {"b": b}},
    object=lambda a, b: State(a=a, b=(b,)),
    function=lambda a, b: lambda: a + b,
)
def an_input_in_something_new_that_is_left(wrap, make):
    """A list, say, that the function makes around an input."""
    kept, w = State(last=None), leaf(seed=4)

    def fn(x):
        kept.last = make(x, w)
        return work(x * w).tanh()

    run, x = wrap(fn), leaf()
    out = run(x)
    back(out)
    found = kept.last
    if callable(found):
        return observed((out, x.grad, found().detach()))
    held = vars(found) if isinstance(found, State) else found
    inside = [*held.values()] if isinstance(held, dict) else [*held]
    return observed((out, x.grad, inside[0].detach())), any(v is w for v in inside)


class Meta(type):
    scale = None


class OfMeta(metaclass=Meta):
    k = 1.0


@program
def a_tensor_of_a_metaclass():
    w, Meta.scale = computed()
    return loop(lambda x: work(x, OfMeta.scale).tanh(), state=lambda: w.grad)


# --- Hooks in the graph, which run after the run has ended ---


class Scaled(torch.autograd.Function):
    """Its backward reads what the user's object holds then."""

    held = State(k=2.0)

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        del ctx, inputs, output

    @staticmethod
    def backward(ctx, g):
        return g * Scaled.held.k


# --- Hooks of modules ---


def hooked(how, hook):
    layer = nn.Tanh()
    getattr(layer, how)(hook)
    return layer


@family(before="register_forward_pre_hook", after="register_forward_hook")
def a_computed_tensor_of_a_hook(how):
    w, value = computed()
    held = State(value=value)

    def hook(module, args, out=None):
        y = args[0] if out is None else out
        return y * held.value

    layer = hooked(how, hook)
    return loop(lambda x: work(layer(x)), state=lambda: w.grad)


# --- Memory ---


@program
def nothing_stays_alive():
    refs = []

    def fn(x):
        y = work(x)
        refs.append(weakref.ref(y))
        return y.tanh()

    def after():
        gc.collect()

    return loop(fn, after=after, state=lambda: [ref() is None for ref in refs[-1:]])


texts(globals())
