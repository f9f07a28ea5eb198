"""Modules: buffers, caches, shared layers, what they keep and what is replaced."""

import torch
from support.adversarial.program import (
    Of,
    around,
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    ran,
    reversed_loop,
    together,
    trained,
    work,
)
from torch import nn
from torch.nn.utils import parametrizations


def seeded(make):
    torch.manual_seed(3)
    return make().double()


class Body(nn.Module):
    """Layers whose evaluations are counted."""

    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        ran()
        return self.layers(x).sin().exp()


LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
}


@family(**{k: LAYERS[k] for k in ("batch norm", "dropout", "old spectral norm")})
def a_layer_called_twice(make):
    layer = seeded(lambda: Body(make()))
    return trained(layer, call=None, count=2, between=lambda: layer(leaf(4, 4)))


@family(**{k: LAYERS[k] for k in ("batch norm", "dropout", "spectral norm")})
def a_layer_in_eval_between(make):
    layer = seeded(lambda: Body(make()))
    return trained(layer, between=layer.eval, state=lambda: layer.training)


@family(**{k: LAYERS[k] for k in ("batch norm", "dropout", "linear")})
def a_layer_that_is_deleted_before_the_backward(wrap, make):
    model = seeded(lambda: Of(lambda m, x: m.layer(x), layer=Body(make())))

    x = leaf(4, 4)
    out = wrap(model)(x)
    del model.layer
    back(out)
    return out, x.grad


def replacing(model, x):
    y = work(model.act(x))
    model.act = nn.Sigmoid()
    return y


@program
def a_layer_replaced_by_the_function():
    model = Of(replacing, act=nn.Tanh())
    return reversed_loop(model, state=lambda: type(model.act).__name__)


def making(model, x):
    if not hasattr(model, "scale"):
        model.scale = nn.Parameter(torch.ones_like(x) * 2)
    return work(x * model.scale)


@program
def a_parameter_made_at_the_first_call():
    model = Of(making)
    return loop(model, state=lambda: model.scale.grad)


@program
def a_lazy_layer():
    model = nn.Sequential(nn.LazyLinear(16, dtype=torch.double), nn.Tanh())
    state = lambda: [p.grad for p in model.parameters()]
    return loop(lambda x: work(model(x)), state=state)


@program
def layers_appended_by_the_function():
    model = nn.ModuleList([nn.Tanh()])

    def fn(x):
        for layer in model:
            x = work(layer(x))
        model.append(nn.Sigmoid())
        return x

    return reversed_loop(fn, state=lambda: len(model))


# --- Outputs that are kept ---


def losing(model, x):
    y = work(x)
    model.losses.append(y.square().mean())
    return y.tanh()


@family(once=lambda run, x: run(x), twice=lambda run, x: run(run(x)))
def losses_that_are_kept_and_used_outside(wrap, call):
    model = Of(losing, losses=[])

    run, seen = wrap(model), []
    for i in range(3):
        model.losses.clear()
        x = leaf(seed=i)
        out = call(run, x)
        (out.sum() + sum(model.losses)).backward()
        seen.append(observed((out, model.losses, x.grad)))
    return seen


def carrying(model, x):
    model.state = work(x * model.state).tanh()
    return model.state


@program
def a_state_that_is_carried_with_its_graph():
    return together(Of(carrying, state=1.0))


def attending(model, x):
    """Attend from one query to a cache of keys that grows."""
    model.keys.append(model.join(work(x, 0.5)))
    scores = torch.stack([(x * key).sum() for key in model.keys])
    return scores.softmax(0) @ torch.stack([*model.keys])


@family(detached=torch.detach, with_its_graph=lambda key: key)
def a_cache_of_keys(join):
    model = Of(attending, keys=[], join=join)
    return together(model, count=4, state=lambda: model.keys)


@program
def a_cache_of_keys_that_is_passed():
    cache = {}

    def fn(x, cache):
        cache["k"] = work(x) if "k" not in cache else torch.cat([cache["k"], work(x)])
        return cache["k"].sin() * cache["k"]

    return together(fn, args=(cache,), state=lambda: cache["k"])


# --- Modules in other ways ---


@program
def a_module_wrapped_twice(wrap):
    layer = seeded(lambda: Body(nn.Linear(4, 4), nn.Dropout(0.3)))

    a, b = wrap(layer), wrap(layer)
    return trained(layer, call=lambda x: a(b(x)))(lambda fn: fn)


@program
def modules_in_a_plain_list():
    layers = [seeded(lambda: nn.Linear(4, 4)) for _ in range(3)]

    def fn(x):
        for layer in layers:
            x = work(layer(x.reshape(4, 4)), 0.5)
        return x

    state = lambda: [p.weight.grad for p in layers]
    return loop(fn, between=layers.reverse, state=state)


@program
def a_module_that_returns_itself_in_a_dict():
    model = Of(lambda m, x: {"out": work(x), "by": m})
    checked = lambda found: found["out"] * (found["by"] is model)
    return around(model, lambda run: lambda x: checked(run(x)))


@program
def a_forward_replaced_on_the_instance():
    layer = nn.Tanh()
    layer.forward = lambda x: work(x, 3)
    return loop(layer, between=lambda: vars(layer).pop("forward", None), count=1)
