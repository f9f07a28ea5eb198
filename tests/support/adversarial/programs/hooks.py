"""Hooks, handlers and callbacks that change what the function reads."""

import signal
import weakref

import torch
from support.adversarial.program import (
    State,
    back,
    leaf,
    loop,
    nothing,
    observed,
    program,
    ran,
    reversed_loop,
    work,
)
from torch import nn


# How a hook of a layer puts the output of the layer where the function reads it.


@program
def outputs_appended_to_a_list_that_is_cleared():
    layer, held = nn.Tanh(), []
    layer.register_forward_hook(lambda _m, _x, y: held.append(y))

    def fn(x):
        work(layer(x))
        return sum(held[-1:]).exp().sin()

    return loop(fn, between=held.clear, state=lambda: held)


@program
def outputs_collected_from_three_layers():
    model, held = nn.Sequential(nn.Tanh(), nn.Sigmoid(), nn.SiLU()), {}
    for i, layer in enumerate(model):
        layer.register_forward_hook(lambda _m, _x, y, i=i: nothing(held.update({i: y})))

    def fn(x):
        y = work(model(x))
        return sum(held[i] * i for i in sorted(held)) * y

    return loop(fn, state=lambda: [*held])


@program
def a_hook_removed_between():
    layer = nn.Tanh()
    handles = []
    fn = lambda x: work(layer(x))

    def step(wrap):
        handles.append(layer.register_forward_hook(lambda _m, _x, y: y * 3))
        return loop(fn, between=handles.pop().remove, count=1)(wrap)

    return step


@program
def a_hook_added_between():
    layer, count = nn.Tanh(), [0]

    def hook(_m, _x, y):
        count[0] += 1
        return y * 3

    def between():
        layer.register_forward_hook(hook)

    return loop(lambda x: work(layer(x)), between=between, state=lambda: count)


@program
def a_hook_added_once_by_the_function():
    layer = nn.Tanh()

    def fn(x):
        if not layer._forward_hooks:
            layer.register_forward_hook(lambda _m, _x, y: y * 3)
        return work(layer(x))

    return loop(fn, state=lambda: len(layer._forward_hooks))


@program
def a_hook_for_all_modules():
    layer, held = nn.Tanh(), {}

    def step(wrap):
        def hook(_m, _x, y):
            held["y"] = y

        handle = nn.modules.module.register_module_forward_hook(hook)
        try:
            return loop(lambda x: work(layer(x)) * held["y"])(wrap)
        finally:
            handle.remove()

    return step


@program
def a_weak_hook():
    class Collector:
        ys = ()

    layer, collector = nn.Tanh(), Collector()
    ref = weakref.ref(collector)
    layer.register_forward_hook(lambda _m, _x, y: setattr(ref(), "ys", (y,)))
    return loop(lambda x: work(layer(x)) * collector.ys[0])


# --- Signals ---


def signalled(handler):
    """A step in which a signal comes in the function."""

    def signalling(step):
        def run(wrap):
            before = signal.signal(signal.SIGUSR1, handler)
            try:
                return step(wrap)
            finally:
                signal.signal(signal.SIGUSR1, before)

        return run

    return signalling


@program
def a_counter_in_a_handler_of_signals():
    holder = State(count=0)

    def handler(*_):
        holder.count += 1

    def between():
        signal.raise_signal(signal.SIGUSR1)

    fn = lambda x: work(x, 2 + (holder.count > 99))
    return signalled(handler)(loop(fn, between=between, state=lambda: holder.count))


@program
def a_flag_set_by_a_signal_between():
    stop = False

    def handler(*_):
        nonlocal stop
        stop = True

    fn = lambda x: work(x, 3 if stop else 2)

    def between():
        signal.raise_signal(signal.SIGUSR1)

    return signalled(handler)(loop(fn, between=between, state=lambda: stop))


@program
def a_signal_in_the_backward():
    count = [0]

    def handler(*_):
        count[0] += 1

    def fn(x):
        y = work(x, 2)
        y.register_hook(lambda _: signal.raise_signal(signal.SIGUSR1))
        return y.tanh()

    return signalled(handler)(loop(fn, state=lambda: count))


@program
def a_signal_in_the_function_counts_for_the_user():
    count = [0]

    def handler(*_):
        count[0] += 1

    fn = lambda x: work(x, 2 + (len(count) > 5))

    def step(wrap):
        run, x = wrap(fn), leaf()
        out = run(x)
        out.register_hook(lambda _: signal.raise_signal(signal.SIGUSR1))
        back(out)
        return observed((out, x.grad, count))

    return signalled(handler)(step)


# --- Hooks of tensors ---


@program
def a_hook_of_an_intermediate():
    norms = []

    def fn(x):
        y = work(x)
        y.register_hook(lambda g: norms.append(g.norm().item()))
        return y.tanh()

    return loop(fn, state=lambda: norms)


@program
def a_hook_of_the_input_set_inside():
    norms = []

    def fn(x):
        x.register_hook(lambda g: norms.append(g.sum().item()))
        return work(x)

    return loop(fn, state=lambda: norms)


@program
def a_hook_that_closes_over_an_intermediate():
    def fn(x):
        y = work(x)
        z = y.tanh()
        z.register_hook(lambda g: g * y.detach())
        return z.sin()

    return loop(fn)


@program
def a_hook_of_a_node():
    count = [0]

    def fn(x):
        y = work(x)
        y.grad_fn.register_hook(lambda *_: count.append(1))
        return y.tanh()

    return loop(fn, state=lambda: count)


@program
def a_retained_gradient_of_an_intermediate():
    held = []

    def fn(x):
        y = work(x)
        y.retain_grad()
        held.append(y)
        return y.tanh()

    return loop(fn, state=lambda: [y.grad for y in held])


@program
def a_gradient_of_an_intermediate_that_a_hook_appends():
    held = []

    def fn(x):
        for _ in range(3):
            x = work(x).tanh()
            x.register_hook(held.append)
        return x

    return reversed_loop(fn, state=lambda: held)


def hooks_that_note(packed):
    def pack(x):
        packed.append(tuple(x.shape))
        return x

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)


@program
def hooks_on_saved_tensors_around():
    packed = []

    def step(wrap):
        with hooks_that_note(packed):
            return loop(work)(wrap)

    return step


@program
def a_backward_hook_that_reads_a_counter():
    state = State(n=0)

    def fn(x):
        state.n += 1
        ran()
        y = x.sin()
        y.register_hook(lambda g: g * state.n)
        return (y * y).exp()

    return reversed_loop(fn, state=lambda: state.n)
