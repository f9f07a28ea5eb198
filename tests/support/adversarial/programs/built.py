"""Modules of many makes, trained while something else differs at the backward.

A row makes a module. `of` makes one of an expression of the module and its input, and
of what it holds; what a forward changes in it is a function of its own below.
"""

import copy
import functools
import types

import torch
from support.adversarial.program import Of, State, family, leaf, observed, ran
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, stateless


class Wrapped(nn.Module):
    """What is built, between two layers."""

    def __init__(self, inner):
        super().__init__()
        torch.manual_seed(5)
        self.a, self.b, self.inner = nn.Linear(8, 8), nn.Linear(8, 8), inner
        self.double()

    def forward(self, x):
        ran()
        return self.b(self.inner(self.a(x).sin())).tanh()


def of(forward, **makes):
    """Return what makes a module of a function, and of what it holds."""
    return lambda: Of(forward, **{name: make() for name, make in makes.items()})


def linear():
    torch.manual_seed(6)
    return nn.Linear(8, 8)


def batch_norm():
    return nn.BatchNorm1d(8)


# --- What forwards change ---


def parametrized_by_the_user():
    class Symmetric(nn.Module):
        count = 0

        def forward(self, w):
            Symmetric.count += 1
            return w.triu() + w.triu(1).T * (1 + Symmetric.count / 10)

    layer = linear()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def cached_parametrization(m, x):
    with parametrize.cached():
        return m.layer(m.layer(x))


def with_state(m, x):
    out, m.state = m.cell(x, m.state)
    m.state = tuple(s.detach() for s in m.state)
    return out


def tied():
    made = Of(lambda m, x: functional.linear(m.layer(x), m.other.weight))
    made.layer, made.other = linear(), nn.Linear(8, 8)
    made.other.weight = made.layer.weight
    return made


def shared():
    layer = nn.Sequential(linear(), batch_norm())
    return nn.Sequential(layer, nn.Tanh(), layer)


def in_turn(m, x):
    m.turn += 1
    return m.layers["ab"[m.turn % 2]](x)


def modules_in_a_plain_list():
    layers = [linear().double()]
    return Of(lambda m, x: layers[0](x))


def made_at_the_first_call(m, x):
    if not hasattr(m, "late"):
        torch.manual_seed(8)
        m.late = nn.Linear(8, 8).double()
    return m.late(x)


def buffer_made_at_the_first_call(m, x):
    if "mask" not in m._buffers:
        m.register_buffer("mask", torch.ones(8, dtype=x.dtype) * 2)
    m.mask += 0.1
    return x * m.mask.clone()  # which the next call does not change


def moving_average(m, x):
    m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
    return x - m.mean


def moving_average_in_place(m, x):
    m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x - m.mean


def schedule(m, x):
    m.step += 1
    return x * (1 - 0.1 * int(m.step))


def teacher(m, x):
    with torch.no_grad():
        for p, q in zip(m.target.parameters(), m.student.parameters(), strict=True):
            p.lerp_(q, 0.1)
    return m.student(x) - m.target(x).detach()


def with_parameters_of(m, x, call):
    held = {name: p.sin() for name, p in m.layer.named_parameters()}
    return call(m.layer, held, (x,))


def switched_inside(m, x):
    m.norm.eval()
    y = m.norm(x)
    m.norm.train()
    return y + m.norm(x)


def frozen_inside(m, x):
    m.layer.requires_grad_(False)
    y = m.layer(x)
    m.layer.requires_grad_(True)
    return y


def with_a_forward_of_its_own():
    layer = linear()
    forward = lambda m, x: functional.linear(x, m.weight).sin()
    layer.forward = types.MethodType(forward, layer)
    return layer


def forward_by_a_partial():
    layer = linear()
    layer.forward = functools.partial(functional.linear, weight=layer.weight)
    return layer


def hook_that_scales():
    layer = linear()
    layer.register_forward_hook(lambda m, args, out: out * 2)
    layer.register_forward_pre_hook(lambda m, args: (args[0] * 3,))
    return layer


def hook_that_keeps():
    layer, kept = linear(), []
    layer.register_forward_hook(lambda m, args, out: kept.append(out))
    return Of(lambda m, x: m.layer(x) + len(kept), layer=layer)


def hook_that_is_removed_inside(m, x):
    handle = m.layer.register_forward_hook(lambda m, args, out: out * 2)
    y = m.layer(x)
    handle.remove()
    return y


def hooks_on_many_gradients(m, x):
    y, z = x.sin(), x.cos()
    register_multi_grad_hook((y, z), lambda grads: m.seen.append(len(grads)))
    return y * z


def routed(m, x):
    scores = m.gate(x).softmax(-1)
    top = scores.topk(2)
    out = torch.zeros_like(x)
    for k, expert in enumerate(m.experts):
        rows, at = (top.indices == k).nonzero(as_tuple=True)
        if rows.numel():
            given = expert(x[rows]) * top.values[rows, at, None]
            out = out.index_add(0, rows, given)
            m.counts[k] += rows.numel()
    return out


def quantized(m, x):
    near = torch.cdist(x.detach(), m.codes.weight).argmin(1)
    m.used[near] += 1
    return x + (m.codes(near) - x).detach()


def cached_by_shape(m, x):
    key = x.shape[0], x.dtype
    if key not in m.tables:
        m.tables[key] = torch.arange(8, dtype=x.dtype).sin()
    return x * m.tables[key]


class Switching(nn.Module):
    """A module that runs another of its methods after the first call."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.run = self.once

    def once(self, x):
        self.run = self.twice
        return self.layer(x)

    def twice(self, x):
        return self.layer(self.layer(x))

    def forward(self, x):
        return self.run(x)


class Dynamic(nn.Module):
    """A module with attributes that nobody set, and a log of those that are set."""

    def __init__(self):
        super().__init__()
        self.layer, self.log = linear(), []

    def __getattr__(self, name):
        return 2.0 if name == "scale" else super().__getattr__(name)

    def __setattr__(self, name, value):
        if "log" in vars(self):
            self.log.append(name)
        super().__setattr__(name, value)

    def forward(self, x):
        self.k = len(self.log)
        return self.layer(x) * self.k * self.scale


class WithSlots(nn.Module):
    __slots__ = ("count",)

    def forward(self, x):
        self.count = getattr(self, "count", 0) + 1
        return x * self.count


KINDS = {
    "linear": linear,
    "batch norm": batch_norm,
    "batch norm without momentum": lambda: nn.BatchNorm1d(8, momentum=None),
    "batch norm in eval": lambda: nn.Sequential(batch_norm().eval(), nn.LayerNorm(8)),
    "instance norm": of(
        lambda m, x: m.norm(x.view(1, 4, 8)).view(4, 8),
        norm=lambda: nn.InstanceNorm1d(4, track_running_stats=True, affine=True),
    ),
    "spectral norm": lambda: parametrizations.spectral_norm(linear()),
    "weight norm": lambda: parametrizations.weight_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "old spectral norm": lambda: nn.utils.spectral_norm(linear()),
    "parametrized by the user": parametrized_by_the_user,
    "parametrized and cached": of(
        cached_parametrization, layer=lambda: parametrizations.weight_norm(linear())
    ),
    "pruned": lambda: prune.l1_unstructured(linear(), "weight", 0.3),
    "dropout": lambda: nn.Sequential(
        nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout()
    ),
    "dropout in place": lambda: nn.Sequential(linear(), nn.Dropout(0.3, inplace=True)),
    "rrelu": nn.RReLU,
    "embedding": of(
        lambda m, x: x + m.table(torch.arange(4)),
        table=lambda: nn.Embedding(10, 8, padding_idx=0),
    ),
    "embedding scaled": of(
        lambda m, x: x + m.table(torch.arange(4)),
        table=lambda: nn.Embedding(10, 8, max_norm=1.0),
    ),
    "rnn": of(lambda m, x: m.cell(x)[0], cell=lambda: nn.RNN(8, 8, 2, dropout=0.1)),
    "gru": of(lambda m, x: m.cell(x)[0], cell=lambda: nn.GRU(8, 4, bidirectional=True)),
    "lstm with state": of(with_state, cell=lambda: nn.LSTM(8, 8), state=lambda: None),
    "attention": of(
        lambda m, x: m.heads(*[x[None]] * 3)[0][0],
        heads=lambda: nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True),
    ),
    "transformer": of(
        lambda m, x: m.layer(x[None])[0],
        layer=lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ),
    "convolution": of(
        lambda m, x: m.layers(x[:, None])[:, 0],
        layers=lambda: nn.Sequential(
            nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Conv1d(3, 1, 1)
        ),
    ),
    "tied": tied,
    "shared": shared,
    "list of modules": of(
        lambda m, x: sum(layer(x) for layer in m.layers),
        layers=lambda: nn.ModuleList([linear(), nn.Tanh(), batch_norm()]),
    ),
    "dict of modules": of(
        in_turn,
        layers=lambda: nn.ModuleDict({"a": linear(), "b": batch_norm()}),
        turn=int,
    ),
    "parameters in a list": of(
        lambda m, x: x * m.held[0] + m.held[1],
        held=lambda: nn.ParameterList([nn.Parameter(torch.ones(8)) for _ in "ab"]),
    ),
    "modules in a plain list": modules_in_a_plain_list,
    "module made at the first call": of(made_at_the_first_call),
    "buffer made at the first call": of(buffer_made_at_the_first_call),
    "moving average": of(moving_average, mean=lambda: torch.zeros(8).double()),
    "moving average in place": of(
        moving_average_in_place, mean=lambda: nn.Buffer(torch.zeros(8))
    ),
    "schedule": of(schedule, step=lambda: nn.Buffer(torch.zeros((), dtype=torch.long))),
    "teacher": of(
        teacher, student=linear, target=lambda: linear().requires_grad_(False)
    ),
    "functional": of(
        functools.partial(with_parameters_of, call=torch.func.functional_call),
        layer=linear,
    ),
    "stateless call": of(
        functools.partial(with_parameters_of, call=stateless.functional_call),
        layer=linear,
    ),
    "copied inside": of(
        lambda m, x: copy.copy(m.layer)(x) + copy.deepcopy(m.norm)(x),
        layer=linear,
        norm=lambda: nn.LayerNorm(8),
    ),
    "switched inside": of(switched_inside, norm=batch_norm),
    "frozen inside": of(frozen_inside, layer=linear),
    "forward of an instance": with_a_forward_of_its_own,
    "forward by a partial": forward_by_a_partial,
    "hook that scales": hook_that_scales,
    "hook that keeps": hook_that_keeps,
    "hook that is removed inside": of(hook_that_is_removed_inside, layer=linear),
    "hooks on many gradients": of(hooks_on_many_gradients, seen=list),
    "skipped layer": of(
        lambda m, x: x if torch.rand(()) < 0.5 else m.layer(x), layer=linear
    ),
    "routed": of(
        routed,
        gate=lambda: nn.Linear(8, 3),
        experts=lambda: nn.ModuleList(nn.Linear(8, 8) for _ in range(3)),
        counts=lambda: [0, 0, 0],
    ),
    "quantized": of(
        quantized, codes=lambda: nn.Embedding(5, 8), used=lambda: torch.zeros(5)
    ),
    "cached by shape": of(cached_by_shape, tables=dict),
    "by a method": Switching,
    "with attributes of its own": Dynamic,
    "with slots": WithSlots,
    "scripted": lambda: torch.jit.script(linear().double()),
    "traced": lambda: torch.jit.trace(linear().double(), torch.ones(4, 8).double()),
    "sparse inside": of(
        lambda m, x: torch.sparse.mm(torch.eye(4).double().to_sparse(), x)
    ),
}
COUNT = State(n=0)


def attributes_of(module):
    kinds = torch.Tensor, int, float, list, tuple, str
    return [
        {
            # Whether one requires grad is not seen below torch.func.
            k: v.detach() if isinstance(v, torch.Tensor) else v
            for k, v in vars(m).items()
            if isinstance(v, kinds) and k[0] != "_"
        }
        for m in module.modules()
        if not isinstance(m, torch.jit.ScriptModule)
    ]


def trained_with(make, call, between):
    def step(wrap):
        COUNT.n = 0
        module = Wrapped(make())
        run, seen = wrap(call(module)), []
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        for i in range(2):
            x = leaf(4, 8, seed=i)
            out = between(module, run, x, i)
            grads = [p.grad for p in module.parameters()]
            state = module.state_dict(), attributes_of(module)
            seen.append(observed((out, x.grad, grads, state)))
            optimizer.step()
            optimizer.zero_grad()
        return seen

    return step


def itself(module):
    return module


def counting(module):
    def fn(x):
        COUNT.n += 1
        return module(x) * COUNT.n**0.5

    return fn


def backward(out):
    out.sin().mean().backward()
    return out


@family(**KINDS)
def as_it_is(make):
    return trained_with(make, itself, lambda m, run, x, i: backward(run(x)))


@family(**KINDS)
def beside_a_counter_on_an_input_that_is_gone(make):
    def between(module, run, x, i):
        out = run(x * 1.5)
        COUNT.n += 5
        return backward(out)

    return trained_with(make, counting, between)


@family(**KINDS)
def called_twice_before_the_backward(make):
    def between(module, run, x, i):
        return backward(run(run(x * 1.5).cos()))

    return trained_with(make, counting, between)


@family(**KINDS)
def switched_to_eval_by_the_backward(make):
    def between(module, run, x, i):
        out = run(x)
        module.eval()
        backward(out)
        module.train()
        return out

    return trained_with(make, itself, between)


@family(**KINDS)
def under_hooks_and_in_a_call(make):
    def between(module, run, x, i):
        with save_on_cpu():
            out = run(x * 1.5)
        module.zero_grad()
        return backward(out)

    return trained_with(make, itself, between)
