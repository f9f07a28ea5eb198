"""Hooks of modules: what they read, what they change, and those that are gone."""

import functools
import gc
from collections import deque
from itertools import product

import torch
from support.adversarial.program import (
    State,
    back,
    family,
    leaf,
    nothing,
    observed,
    program,
    ran,
    trained,
    work,
)
from torch import nn
from torch.nn.modules import module as of_all


def linear():
    torch.manual_seed(5)
    return nn.Linear(4, 4).double()


def model_of_three():
    return nn.Sequential(linear(), Working(), linear())


class Working(nn.Module):
    def forward(self, x, *, scale=1):
        return work(x * scale)


def observed_grads(out, x, model, *state):
    grads = [p.grad for p in model.parameters()]
    return observed((out, x.grad, grads, *state))


# --- How a hook finds what it reads ---


def scaled(other, _module, args):
    return (args[0] * (1 + 0.1 * other.step),)


class Scaler:
    def __init__(self, other):
        self.other = other

    def scale(self, module, args):
        return scaled(self.other, module, args)

    __call__ = scale


def by_default(other):
    return lambda m, args, other=other: scaled(other, m, args)


def by_keyword(other):
    def hook(m, args, *, other=other):
        return scaled(other, m, args)

    return hook


def with_a_step(holder):
    holder.step = 1
    return holder


WAYS = {
    "closure": lambda other: lambda m, args: scaled(other, m, args),
    "default": by_default,
    "method": lambda other: Scaler(other).scale,
    "partial": lambda other: functools.partial(scaled, other),
    "keyword-only": by_keyword,
    "object": Scaler,
}
PLACES = {
    "leaf": lambda model, hook: model[2].register_forward_pre_hook(hook),
    "two on one leaf": lambda model, hook: [
        model[2].register_forward_pre_hook(hook) for _ in range(2)
    ],
    "top": lambda model, hook: model.register_forward_pre_hook(hook),
    "called": lambda model, hook: model.register_forward_pre_hook(hook),
}
OTHERS = {"object": State, "module": nn.Module}
READS = {
    f"{way}, {place}, {other}": (WAYS[way], place, OTHERS[other])
    for way, place, other in product(WAYS, PLACES, OTHERS)
}


@family(**READS)
def reads_a_step(wrap, case):
    way, place, other = case
    model, other = model_of_three(), with_a_step(other())
    PLACES[place](model, way(other))
    call = (lambda x: model(x)) if place == "called" else model

    x = leaf(4, 4)
    y = wrap(call)(x * 1)
    other.step = 100
    back(y)
    return observed_grads(y, x, model, other.step)


# --- Every kind of hook ---


def counting(log):
    """Hooks that read a log, and add to it."""

    def pre(_m, args):
        log.append(1)
        return (args[0] * len(log),)

    def pre_with_keywords(_m, args, kwargs):
        log.append(kwargs.get("scale", 1))
        return (args[0] * len(log),), {**kwargs, "scale": len(log)}

    def after(_m, _args, out):
        log.append(2)
        return out * len(log)

    def after_with_keywords(_m, _args, kwargs, out):
        log.append(len(kwargs))
        return out * len(log)

    def of_gradients(_m, gradients, *_):
        log.append(3)
        return tuple(g * len(log) for g in gradients)

    return pre, pre_with_keywords, after, after_with_keywords, of_gradients


REGISTERED = {
    "pre": lambda m, hooks: m.register_forward_pre_hook(hooks[0]),
    "pre, keywords": lambda m, hooks: m.register_forward_pre_hook(
        hooks[1], with_kwargs=True
    ),
    "after": lambda m, hooks: m.register_forward_hook(hooks[2]),
    "after, keywords": lambda m, hooks: m.register_forward_hook(
        hooks[3], with_kwargs=True
    ),
    "after, always": lambda m, hooks: m.register_forward_hook(
        hooks[2], always_call=True
    ),
    "full backward": lambda m, hooks: m.register_full_backward_hook(hooks[4]),
    "full backward pre": lambda m, hooks: m.register_full_backward_pre_hook(hooks[4]),
    "all modules, pre": lambda _, hooks: of_all.register_module_forward_pre_hook(
        hooks[0]
    ),
    "all modules, after": lambda _, hooks: of_all.register_module_forward_hook(
        hooks[2]
    ),
    "all modules, after, keywords": lambda _, hooks: (
        of_all.register_module_forward_hook(hooks[3], with_kwargs=True)
    ),
    "all modules, full backward": lambda _, hooks: (
        of_all.register_module_full_backward_hook(hooks[4])
    ),
    "all modules, full backward pre": lambda _, hooks: (
        of_all.register_module_full_backward_pre_hook(hooks[4])
    ),
}
WHEN = "stays", "is removed after the forward", "is removed and gone"
KINDS = {
    f"{kind}, {when}": (REGISTERED[kind], when)
    for kind, when in product(REGISTERED, WHEN)
}


@family(**KINDS)
def reads_and_adds_to_a_log(wrap, case):
    register, when = case
    model, log = model_of_three(), []
    hooks = [counting(log)]

    seen = []
    for i in range(2):
        x = leaf(4, 4, seed=i + 1)
        handle = register(model[1], hooks[0])
        try:
            y = wrap(model)(x * 1)
            if when != "stays":
                handle.remove()
            if when == "is removed and gone":
                hooks[0] = counting(log)
                gc.collect()
            seen.append([*log])
            log.append(0)
            back(y)
        finally:
            handle.remove()
        seen.append(observed_grads(y, x, model, log))
    return seen


# --- A submodule that two blocks share ---


def adding(value, n):
    value.append(n)
    return sum(value)


def drawn(generator):
    return torch.rand((), dtype=torch.double, generator=generator)


class Count:
    def __init__(self):
        self.n = 1

    def next(self):
        self.n += 1
        return self.n


SHARED = {
    "a number": lambda: (state := Count(), lambda _: 1 + state.n),
    "a log": lambda: (log := [], lambda _: adding(log, 1.5)),
    "a generator": lambda: (
        generator := torch.Generator().manual_seed(5),
        lambda _: drawn(generator) + generator.initial_seed(),
    ),
    "a counter": lambda: (counter := Count(), lambda _: counter.next()),
    "activations kept": lambda: (
        kept := [],
        lambda y: nothing(kept.append(y)) or kept[len(kept) // 2].sin(),
    ),
    "a deque": lambda: (
        last := deque([1.0], maxlen=3),
        lambda _: adding(last, len(last)),
    ),
}


@family(**SHARED)
def of_a_shared_submodule(wrap, make):
    state, factor = make()
    shared = linear()
    shared.register_forward_hook(lambda _m, _x, y: y * factor(y))
    blocks = [nn.Sequential(linear(), shared, Working()) for _ in range(2)]

    seen = []
    for i in range(3):
        x = leaf(4, 4, seed=i + 1)
        y = x * 1
        for block in blocks:
            y = wrap(block)(y)
        if type(state) is Count:
            state.n += 5
        back(y)
        seen.append(observed_grads(y, x, nn.ModuleList(blocks)))
        if isinstance(state, list):
            seen.append(len(state))
            state.clear()
    return seen


# --- Hooks that are gone by the backward ---


class Keeping:
    """Keeps what a layer gives, and scales it."""

    def __init__(self, outs, k=3):
        self.outs, self.k = outs, k

    def keep(self, _m, _args, out):
        self.outs.append(out)
        return out * self.k

    __call__ = keep


def of_captum(original, outs):
    """As its gradients of layers: a closure of a closure fills a dict."""
    saved = {}

    def hook(_m, _args, out):
        saved.setdefault(original, {})[str(out.device)] = out
        return out * (1 + len(saved))

    return hook


# What makes a hook of a layer and a list.
GONE = {
    "method": lambda layer, outs: Keeping(outs).keep,
    "lambda": lambda layer, outs: lambda m, args, out: outs.append(out) or out * 2,
    "partial": lambda layer, outs: functools.partial(Keeping.keep, Keeping(outs)),
    "object": lambda layer, outs: Keeping(outs),
    "closure of a closure": of_captum,
}


@family(**GONE)
def gone_after_the_forward(wrap, make):
    model = model_of_three()

    seen = []
    for i in range(2):
        x = leaf(4, 4, seed=i + 1)
        handle = model[0].register_forward_hook(make(model[0], []))
        y = wrap(model)(x * 1)
        handle.remove()
        gc.collect()
        back(y)
        seen.append(observed_grads(y, x, model))
    return seen


@program
def a_map_of_activations_and_their_gradients(wrap):
    """As Grad-CAM: the output of a layer, and the gradient at it."""
    model = model_of_three()

    found = {}
    keep = lambda g: nothing(found.update(gradient=g))

    def hook(_m, _args, out):
        found["out"] = out
        out.register_hook(keep)

    x = leaf(4, 4)
    handle = model[1].register_forward_hook(hook)
    y = wrap(model)(x * 1)
    handle.remove()
    del hook
    y.sum().backward()
    weights = found["gradient"].mean(0)
    return observed_grads(y, x, model, found["out"] * weights)


@program
def a_list_that_inner_hooks_fill_and_outer_ones_read():
    """As wandb's: each layer notes its output, and the last hook reads all."""
    model, noted, written = model_of_three(), [], []
    for layer in model:
        layer.register_forward_hook(lambda _m, _x, y: noted.append(y.detach().sum()))

    def write(_m, _x, y):
        written.append(float(sum(noted)))
        return y * written[0]

    model[0].register_forward_pre_hook(lambda *_: noted.clear())
    model[2].register_forward_hook(write)
    return trained(model, state=lambda: (noted, written))


@program
def a_hook_that_is_registered_and_removed_by_the_function():
    layer, log = linear(), []

    def fn(x):
        handle = layer.register_forward_hook(lambda _m, _x, y: y * (1 + len(log)))
        ran()
        y = layer(x).sin()
        handle.remove()
        log.append(1)
        return y.exp()

    return trained(layer, call=fn, state=lambda: (log, len(layer._forward_hooks)))


@program
def a_hook_on_all_modules_set_between():
    model, log, handles = model_of_three(), [], []

    def hook(_m, _x, y):
        log.append(1)
        return y * 2

    def between():
        handles.append(of_all.register_module_forward_hook(hook))

    def state():
        while handles:
            handles.pop().remove()
        return log

    return trained(model, between=between, state=state)
