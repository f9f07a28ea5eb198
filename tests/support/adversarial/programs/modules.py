"""Modules: buffers, caches, shared layers, what they keep and what is replaced."""

import copy

import torch
from support.adversarial.program import (
    State,
    back,
    family,
    leaf,
    loop,
    observed,
    program,
    ran,
    reversed_loop,
    trained,
    work,
)
from support.zoo import Calling
from torch import nn
from torch.nn.utils import parametrizations, parametrize


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
    "batch norm by averages": lambda: nn.BatchNorm1d(4, momentum=None),
    "instance norm": lambda: nn.InstanceNorm1d(4, track_running_stats=True),
    "two batch norms": lambda: nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)),
    "dropout": lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
    "two dropouts": lambda: nn.Sequential(nn.Dropout(0.2), nn.Dropout(0.5)),
    "random leaky relu": lambda: nn.RReLU(),
    "random leaky relu in place": lambda: nn.Sequential(
        nn.Linear(4, 4), nn.RReLU(inplace=True)
    ),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "old weight norm": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(4, 4)),
    "in-place relu": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
    "GRU cell": lambda: nn.GRUCell(4, 4),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2),
}


@family(**LAYERS)
def a_layer_that_is_trained(make):
    return trained(seeded(lambda: Body(make(), nn.Linear(4, 4))))


def attention(**how):
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    return Calling(layer, lambda layer, x: layer(x, x, x, **how)[0])


def embedded(layer, x):
    return layer(torch.tensor([[1, 2, 3, 1], [4, 0, 1, 1]])) * x[..., None]


SHAPED = {
    "Bilinear": (lambda: Calling(nn.Bilinear(4, 4, 3), lambda f, x: f(x, x)), (2, 4)),
    "Conv1d": (lambda: nn.Conv1d(4, 3, 2), (2, 4, 5)),
    "Conv2d": (lambda: nn.Conv2d(2, 3, 2), (2, 2, 4, 4)),
    "ConvTranspose2d": (lambda: nn.ConvTranspose2d(2, 3, 2), (2, 2, 4, 4)),
    "LayerNorm": (lambda: nn.LayerNorm(4), (2, 4)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), (2, 4, 3)),
    "RMSNorm": (lambda: nn.RMSNorm(4), (2, 4)),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4, affine=True), (2, 4, 5)),
    "PReLU": (nn.PReLU, (2, 4)),
    "Dropout in place": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5, True)),
        (8, 4),
    ),
    "AlphaDropout": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(0.5)),
        (8, 4),
    ),
    "Dropout2d": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Dropout2d(0.5)),
        (2, 2, 6, 6),
    ),
    "GRU": (lambda: Calling(nn.GRU(4, 3, 2), lambda f, x: f(x)[0]), (5, 2, 4)),
    "LSTM": (
        lambda: Calling(nn.LSTM(4, 3, 2, dropout=0.5), lambda f, x: f(x)[0]),
        (5, 2, 4),
    ),
    "Embedding": (lambda: Calling(nn.Embedding(5, 4), embedded), (2, 4)),
}


ATTENDING = {
    "MultiheadAttention": (attention, (2, 3, 4)),
    "MultiheadAttention, fused": (lambda: attention(need_weights=False), (2, 3, 4)),
}


@family(**ATTENDING, is_close=True)
@family(**SHAPED)
def a_layer_of_another_shape(case):
    make, shape = case
    return trained(seeded(lambda: Body(make())), shape=shape, count=2)


@family(**{k: LAYERS[k] for k in ("batch norm", "dropout", "old spectral norm")})
def a_layer_called_twice(make):
    layer = seeded(lambda: Body(make()))
    return trained(layer, call=None, count=2, between=lambda: layer(leaf(4, 4)))


@family(**{k: LAYERS[k] for k in ("batch norm", "dropout", "spectral norm")})
def a_layer_in_eval_between(make):
    layer = seeded(lambda: Body(make()))
    return trained(layer, between=layer.eval, state=lambda: layer.training)


@family(**{k: LAYERS[k] for k in ("batch norm", "dropout", "linear")})
def a_layer_that_is_deleted_before_the_backward(make):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Body(make())

        def forward(self, x):
            return self.layer(x)

    model = seeded(Model)

    def step(wrap):
        x = leaf(4, 4)
        out = wrap(model)(x)
        del model.layer
        back(out)
        return observed((out, x.grad))

    return step


@program
def a_layer_replaced_between():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            return work(self.act(x))

    model = Model()
    return loop(model, between=lambda: setattr(model, "act", nn.Sigmoid()))


@program
def a_layer_replaced_by_the_function():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x):
            y = work(self.act(x))
            self.act = nn.Sigmoid()
            return y

    model = Model()
    return reversed_loop(model, state=lambda: type(model.act).__name__)


@program
def a_layer_made_at_the_first_call():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = None

        def forward(self, x):
            if self.layer is None:
                self.layer = nn.Linear(16, 16).double()
            return work(self.layer(x))

    model = Model()
    state = lambda: [p.grad for p in model.parameters()]
    return loop(model, state=state)


@program
def a_parameter_made_at_the_first_call():
    class Model(nn.Module):
        def forward(self, x):
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones_like(x) * 2)
            return work(x * self.scale)

    model = Model()
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


@program
def an_output_kept_in_an_attribute():
    class Model(nn.Module):
        def forward(self, x):
            self.last = work(x)
            return self.last.tanh()

    model = Model()
    return loop(model, state=lambda: model.last)


@program
def an_output_kept_and_used_outside():
    class Model(nn.Module):
        def forward(self, x):
            self.loss = work(x).square().sum()
            return x.tanh()

    model = Model()

    def step(wrap):
        run, seen = wrap(model), []
        for i in range(3):
            x = leaf(seed=i)
            out = run(x)
            (out.sum() + model.loss).backward()
            seen.append(observed((out, model.loss, x.grad)))
        return seen

    return step


@program
def an_output_of_the_last_call_is_read():
    class Model(nn.Module):
        last = None

        def forward(self, x):
            y = work(x) if self.last is None else work(x) * self.last
            self.last = y.detach()
            return y.tanh()

    model = Model()
    return reversed_loop(model, state=lambda: model.last)


@program
def a_state_that_is_carried_with_its_graph():
    class Model(nn.Module):
        state = 1.0

        def forward(self, x):
            self.state = work(x * self.state).tanh()
            return self.state

    model = Model()

    def step(wrap):
        run, xs = wrap(model), [leaf(seed=i) for i in range(3)]
        outs = [run(x) for x in xs]
        back(outs)
        return observed((outs, [x.grad for x in xs]))

    return step


class Attention(nn.Module):
    """Attention of one query, with a cache of keys that grows."""

    def __init__(self, join):
        super().__init__()
        self.keys, self.join = [], join

    def forward(self, x):
        self.keys.append(self.join(work(x, 0.5)))
        scores = torch.stack([(x * key).sum() for key in self.keys])
        return scores.softmax(0) @ torch.stack([*self.keys])


@family(detached=torch.detach, with_its_graph=lambda key: key)
def a_cache_of_keys(join):
    model = Attention(join)

    def step(wrap):
        run, xs = wrap(model), [leaf(seed=i) for i in range(4)]
        outs = [run(x) for x in xs]
        back(outs)
        return observed((outs, [x.grad for x in xs], model.keys))

    return step


@program
def a_cache_of_keys_that_is_passed():
    def fn(x, cache):
        cache["k"] = work(x) if "k" not in cache else torch.cat([cache["k"], work(x)])
        return cache["k"].sin() * cache["k"]

    def step(wrap):
        run, cache, xs = wrap(fn), {}, [leaf(seed=i) for i in range(3)]
        outs = [run(x, cache) for x in xs]
        back(outs)
        return observed((outs, [x.grad for x in xs], cache["k"]))

    return step


@program
def a_cache_written_into_a_buffer():
    cache = torch.zeros(4, 16, dtype=torch.double)
    at = State(i=0)

    def fn(x):
        cache[at.i] = work(x).detach()
        at.i += 1
        return work(x * cache[: at.i].mean(0))

    return reversed_loop(fn, state=lambda: (cache, at.i))


@program
def a_large_cache_written_in_place():
    cache = torch.zeros(300, 64, dtype=torch.double)
    at = State(i=0)

    def fn(x):
        cache[at.i, :16] = work(x).detach()
        at.i += 1
        return work(x * cache[: at.i, :16].mean(0))

    return loop(fn, state=lambda: (cache, at.i))


@family(**{"max norm": {"max_norm": 1.0}, "frequencies": {"scale_grad_by_freq": True}})
def an_embedding(options):
    torch.manual_seed(3)
    table = nn.Embedding(8, 4, dtype=torch.double, **options)
    ids = torch.tensor([1, 3, 3, 7])
    fn = lambda x: work(x.reshape(4, 4) * table(ids))
    return loop(fn, state=lambda: (table.weight, table.weight.grad))


@program
def tied_weights():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return work(self.b(self.a(x).tanh()))

    return trained(seeded(Model))


@program
def a_layer_shared_by_two_blocks():
    shared = seeded(lambda: nn.Linear(4, 4))
    first, second = Body(shared, nn.Tanh()), Body(shared, nn.Sigmoid())
    model = nn.ModuleList([first, second])

    def step(wrap):
        a, b = wrap(first), wrap(second)
        return trained(model, call=lambda x: b(a(x)))(lambda fn: fn)

    return step


@program
def a_module_called_twice_by_the_function():
    layer = seeded(lambda: Body(nn.BatchNorm1d(4)))
    return trained(layer, call=lambda x: layer(layer(x)))


@program
def a_module_wrapped_twice():
    layer = seeded(lambda: Body(nn.Linear(4, 4), nn.Dropout(0.3)))

    def step(wrap):
        a, b = wrap(layer), wrap(layer)
        return trained(layer, call=lambda x: a(b(x)))(lambda fn: fn)

    return step


@program
def a_copied_module():
    layer = seeded(lambda: Body(nn.Linear(4, 4)))

    def step(wrap):
        run = wrap(layer)
        twin = wrap(copy.deepcopy(layer))
        return trained(layer, call=lambda x: run(x) + twin(x))(lambda fn: fn)

    return step


@program
def weights_swapped_for_an_average():
    layer = seeded(lambda: nn.Linear(4, 4))
    average = {n: p.detach() * 0.5 for n, p in layer.named_parameters()}
    fn = lambda x: work(torch.func.functional_call(layer, average, (x,)))
    return loop(
        lambda x: fn(x.reshape(4, 4)), between=lambda: average.clear() or None, count=1
    )


@program
def a_parametrization_that_is_cached():
    class Doubled(nn.Module):
        count = 0

        def forward(self, w):
            Doubled.count += 1
            return w * 2

    layer = seeded(lambda: nn.Linear(4, 4))
    parametrize.register_parametrization(layer, "weight", Doubled())
    Doubled.count = 0

    def fn(x):
        with parametrize.cached():
            return work(layer(layer(x)))

    return trained(layer, call=fn)


@program
def a_counter_in_the_forward():
    class Model(nn.Module):
        steps = 0

        def forward(self, x):
            self.steps += 1
            return work(x, 1 / self.steps)

    model = Model()
    return reversed_loop(model, state=lambda: model.steps)


@program
def a_schedule_by_a_buffer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("step", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.step += 1
            return work(x, 2 if self.step % 2 else 3)

    model = Model()
    return reversed_loop(model, state=lambda: model.step)


@program
def a_moving_average_in_a_buffer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(16, dtype=torch.double))

        def forward(self, x):
            self.mean.lerp_(x.detach(), 0.1)
            return work(x - self.mean)

    model = Model()
    return reversed_loop(model, state=lambda: model.mean)


@program
def a_moving_average_in_a_new_buffer():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(16, dtype=torch.double))

        def forward(self, x):
            self.mean = self.mean * 0.9 + x.detach() * 0.1
            return work(x - self.mean)

    model = Model()
    return reversed_loop(model, state=lambda: model.mean)


@program
def a_moving_average_in_eval_mode_of_a_frozen_layer():
    layer = seeded(lambda: Body(nn.BatchNorm1d(4), nn.Linear(4, 4)))
    layer.requires_grad_(requires_grad=False).train()
    return loop(lambda x: layer(x.reshape(4, 4)), state=layer.state_dict)


@program
def a_codebook_updated_by_the_forward():
    codes = torch.randn(4, 4, dtype=torch.double, generator=torch.Generator())

    def fn(x):
        rows = work(x).reshape(4, 4)
        ids = torch.cdist(rows.detach(), codes).argmin(1)
        quantized = rows + (codes[ids] - rows).detach()
        codes.index_add_(0, ids, 0.1 * (rows.detach() - codes[ids]))
        return (quantized * rows).sin()

    return reversed_loop(fn, state=lambda: codes)


@program
def modules_in_a_plain_list():
    layers = [seeded(lambda: nn.Linear(4, 4)) for _ in range(3)]

    def fn(x):
        for layer in layers:
            x = work(layer(x.reshape(4, 4)), 0.5)
        return x

    return loop(
        fn, between=layers.reverse, state=lambda: [p.weight.grad for p in layers]
    )


@program
def a_module_that_returns_itself_in_a_dict():
    class Model(nn.Module):
        def forward(self, x):
            return {"out": work(x), "by": self}

    model = Model()

    def step(wrap):
        x = leaf()
        found = wrap(model)(x)
        back(found["out"])
        return observed((found["out"], x.grad)), found["by"] is model

    return step


@program
def an_auxiliary_loss_in_a_list_of_the_user():
    losses = []

    def fn(x):
        y = work(x)
        losses.append(y.square().mean())
        return y.tanh()

    def step(wrap):
        run, seen = wrap(fn), []
        for i in range(3):
            losses.clear()
            x = leaf(seed=i)
            out = run(run(x))
            (out.sum() + sum(losses)).backward()
            seen.append(observed((out, losses, x.grad)))
        return seen

    return step


@program
def a_forward_replaced_on_the_instance():
    layer = nn.Tanh()
    layer.forward = lambda x: work(x, 3)
    return loop(layer, between=lambda: vars(layer).pop("forward", None), count=1)


@program
def experts_chosen_by_a_count():
    experts = nn.ModuleList([nn.Tanh(), nn.Sigmoid(), nn.SiLU()])
    load = [3, 1, 2]

    def fn(x):
        least = load.index(min(load))
        load[least] += 2
        return work(experts[least](x))

    return reversed_loop(fn, state=lambda: load)
