"""Hooks, handlers and callbacks that change what the function reads."""

import signal
import weakref

import torch
from support.adversarial.program import (
    State,
    loop,
    nothing,
    program,
    reversed_loop,
    texts,
    work,
)
from torch import nn


# How a hook of a layer puts the output of the layer where the function reads it.


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
def a_hook_removed_between(wrap):
    layer = nn.Tanh()
    handles = []
    fn = lambda x: work(layer(x))

    handles.append(layer.register_forward_hook(lambda _m, _x, y: y * 3))
    return loop(fn, between=handles.pop().remove, count=1)(wrap)


@program
def a_hook_for_all_modules(wrap):
    layer, held = nn.Tanh(), {}

    def hook(_m, _x, y):
        held["y"] = y

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        return loop(lambda x: work(layer(x)) * held["y"])(wrap)
    finally:
        handle.remove()


@program
def a_weak_hook():
    class Collector:
        ys = ()

    layer, collector = nn.Tanh(), Collector()
    ref = weakref.ref(collector)
    layer.register_forward_hook(lambda _m, _x, y: setattr(ref(), "ys", (y,)))
    return loop(lambda x: work(layer(x)) * collector.ys[0])


def tripled(module, args, out):
    return out * 3


LAYER = "layer, held = nn.Tanh(), []"
KEEPING = f"{LAYER}; layer.register_forward_hook(lambda m, x, y: held.append(y))"

texts(globals())


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


# --- Hooks of tensors ---


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
def hooks_on_saved_tensors_around(wrap):
    packed = []

    with hooks_that_note(packed):
        return loop(work)(wrap)
