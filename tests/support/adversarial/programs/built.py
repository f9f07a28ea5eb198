"""Modules of many makes, trained while something else differs at the backward."""

import copy
import functools
import types

import torch
from support.adversarial.program import (
    State,
    family,
    leaf,
    observed,
    ran,
    taking,
)
from torch import nn
from torch.autograd.graph import register_multi_grad_hook, save_on_cpu
from torch.nn.utils import parametrizations, parametrize, prune, skip_init, stateless
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence


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


class Of(nn.Module):
    """A module of functions."""

    def __init__(self, forward, **attributes):
        super().__init__()
        self.fn = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.fn(self, x)


def linear():
    torch.manual_seed(6)
    return nn.Linear(8, 8)


def batch_norm():
    return nn.BatchNorm1d(8)


def batch_norm_without_momentum():
    return nn.BatchNorm1d(8, momentum=None)


def batch_norm_in_eval():
    return nn.Sequential(nn.BatchNorm1d(8).eval(), nn.LayerNorm(8))


def instance_norm():
    norm = nn.InstanceNorm1d(4, track_running_stats=True, affine=True)
    return Of(lambda m, x: norm(x.view(1, 4, 8)).view(4, 8), norm=norm)


def spectral_norm():
    return parametrizations.spectral_norm(linear())


def weight_norm():
    return parametrizations.weight_norm(linear())


def orthogonal():
    return parametrizations.orthogonal(linear())


def old_spectral_norm():
    return nn.utils.spectral_norm(linear())


def parametrized_by_the_user():
    class Symmetric(nn.Module):
        count = 0

        def forward(self, w):
            Symmetric.count += 1
            return w.triu() + w.triu(1).T * (1 + Symmetric.count / 10)

    layer = linear()
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


def parametrized_and_cached():
    layer = parametrizations.weight_norm(linear())

    def forward(m, x):
        with parametrize.cached():
            return layer(layer(x))

    return Of(forward, layer=layer)


def pruned():
    layer = linear()
    prune.l1_unstructured(layer, "weight", 0.3)
    return layer


def dropout():
    return nn.Sequential(
        nn.Dropout(0.3), nn.AlphaDropout(0.2), nn.FeatureAlphaDropout()
    )


def dropout_in_place():
    return nn.Sequential(linear(), nn.Dropout(0.3, inplace=True))


def relu_in_place():
    return nn.Sequential(linear(), nn.ReLU(inplace=True), nn.Softsign())


def rrelu():
    return nn.RReLU()


def embedding():
    table = nn.Embedding(10, 8, padding_idx=0)
    return Of(lambda m, x: x + m.table(torch.arange(4)), table=table)


def embedding_scaled():
    torch.manual_seed(6)
    table = nn.Embedding(10, 8, max_norm=1.0)
    return Of(lambda m, x: x + m.table(torch.arange(4)), table=table)


def embedding_bag():
    table = nn.EmbeddingBag(10, 8, mode="mean")
    return Of(lambda m, x: x + m.table(torch.arange(8).view(4, 2)), table=table)


def rnn():
    cell = nn.RNN(8, 8, 2, dropout=0.1)
    return Of(lambda m, x: m.cell(x)[0], cell=cell)


def gru():
    cell = nn.GRU(8, 4, bidirectional=True)
    return Of(lambda m, x: m.cell(x)[0], cell=cell)


def lstm_with_state():
    def forward(m, x):
        out, m.state = m.cell(x, m.state)
        m.state = tuple(s.detach() for s in m.state)
        return out

    return Of(forward, cell=nn.LSTM(8, 8), state=None)


def lstm_cell():
    def forward(m, x):
        h, m.c = m.cell(x, (x.detach(), m.c))
        m.c = m.c.detach()
        return h

    return Of(forward, cell=nn.LSTMCell(8, 8), c=torch.zeros(4, 8).double())


def packed():
    def forward(m, x):
        rows = pack_sequence([x[:3], x[3:]], enforce_sorted=False)
        return pad_packed_sequence(m.cell(rows)[0])[0].sum(1).repeat(2, 1)[:4]

    return Of(forward, cell=nn.GRU(8, 8))


def attention():
    heads = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
    return Of(lambda m, x: m.heads(*[x[None]] * 3)[0][0], heads=heads)


def transformer():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return Of(lambda m, x: m.layer(x[None])[0], layer=layer)


def transformer_of_layers():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0, batch_first=True)
    stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Of(lambda m, x: m.stack(x[None])[0], stack=stack)


def convolution():
    layers = nn.Sequential(
        nn.Conv1d(1, 3, 3, padding=1), nn.BatchNorm1d(3), nn.Conv1d(3, 1, 1)
    )
    return Of(lambda m, x: m.layers(x[:, None])[:, 0], layers=layers)


def tied():
    layer = linear()

    def forward(m, x):
        return nn.functional.linear(m.layer(x), m.other.weight)

    made = Of(forward, layer=layer, other=nn.Linear(8, 8))
    made.other.weight = layer.weight
    return made


def shared():
    layer = nn.Sequential(linear(), nn.BatchNorm1d(8))
    return nn.Sequential(layer, nn.Tanh(), layer)


def list_of_modules():
    return Of(
        lambda m, x: sum(layer(x) for layer in m.layers),
        layers=nn.ModuleList([linear(), nn.Tanh(), nn.BatchNorm1d(8)]),
    )


def dict_of_modules():
    def forward(m, x):
        m.turn += 1
        return m.layers["ab"[m.turn % 2]](x)

    layers = nn.ModuleDict({"a": linear(), "b": nn.BatchNorm1d(8)})
    return Of(forward, layers=layers, turn=0)


def parameters_in_a_list():
    held = nn.ParameterList([nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))])
    return Of(lambda m, x: x * m.held[0] + m.held[1], held=held)


def modules_in_a_plain_list():
    layers = [linear().double()]
    return Of(lambda m, x: layers[0](x))


def module_made_at_the_first_call():
    def forward(m, x):
        if not hasattr(m, "late"):
            torch.manual_seed(8)
            m.late = nn.Linear(8, 8).double()
        return m.late(x)

    return Of(forward)


def buffer_made_at_the_first_call():
    def forward(m, x):
        if "mask" not in m._buffers:
            m.register_buffer("mask", torch.ones(8, dtype=x.dtype) * 2)
        m.mask += 0.1
        return x * m.mask.clone()  # which the next call does not change

    return Of(forward)


def moving_average():
    def forward(m, x):
        m.mean = 0.9 * m.mean + 0.1 * x.detach().mean(0)
        return x - m.mean

    return Of(forward, mean=torch.zeros(8).double())


def moving_average_in_place():
    def forward(m, x):
        m.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x - m.mean

    made = Of(forward)
    made.register_buffer("mean", torch.zeros(8))
    return made


def schedule():
    def forward(m, x):
        m.step += 1
        return x * (1 - 0.1 * int(m.step))

    made = Of(forward)
    made.register_buffer("step", torch.zeros((), dtype=torch.long))
    return made


def teacher():
    student = linear()
    target = copy.deepcopy(student).requires_grad_(False)

    def forward(m, x):
        with torch.no_grad():
            for p, q in zip(m.target.parameters(), m.student.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return m.student(x) - m.target(x).detach()

    return Of(forward, student=student, target=target)


def functional():
    def forward(m, x):
        held = {name: p * 2 for name, p in m.layer.named_parameters()}
        return torch.func.functional_call(m.layer, held, (x,))

    return Of(forward, layer=linear())


def stateless_call():
    def forward(m, x):
        held = {"weight": m.layer.weight.sin()}
        return stateless.functional_call(m.layer, held, (x,))

    return Of(forward, layer=linear())


def copied_inside():
    def forward(m, x):
        return copy.copy(m.layer)(x) + copy.deepcopy(m.norm)(x)

    return Of(forward, layer=linear(), norm=nn.LayerNorm(8))


def switched_inside():
    def forward(m, x):
        m.norm.eval()
        y = m.norm(x)
        m.norm.train()
        return y + m.norm(x)

    return Of(forward, norm=nn.BatchNorm1d(8))


def frozen_inside():
    def forward(m, x):
        m.layer.requires_grad_(False)
        y = m.layer(x)
        m.layer.requires_grad_(True)
        return y

    return Of(forward, layer=linear())


def forward_of_an_instance():
    layer = linear()
    layer.forward = types.MethodType(
        lambda m, x: nn.functional.linear(x, m.weight).sin(), layer
    )
    return layer


def forward_by_a_partial():
    layer = linear()
    layer.forward = functools.partial(nn.functional.linear, weight=layer.weight)
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


def hook_that_is_removed_inside():
    def forward(m, x):
        handle = m.layer.register_forward_hook(lambda m, args, out: out * 2)
        y = m.layer(x)
        handle.remove()
        return y

    return Of(forward, layer=linear())


def hooks_on_many_gradients():
    def forward(m, x):
        y, z = x.sin(), x.cos()
        register_multi_grad_hook((y, z), lambda grads: m.seen.append(len(grads)))
        return y * z

    return Of(forward, seen=[])


def skipped_layer():
    def forward(m, x):
        return x if torch.rand(()) < 0.5 else m.layer(x)

    return Of(forward, layer=linear())


def routed():
    def forward(m, x):
        scores = m.gate(x).softmax(-1)
        top = scores.topk(2)
        out = torch.zeros_like(x)
        for k, expert in enumerate(m.experts):
            rows, at = (top.indices == k).nonzero(as_tuple=True)
            if rows.numel():
                out = out.index_add(
                    0, rows, expert(x[rows]) * top.values[rows, at, None]
                )
                m.counts[k] += rows.numel()
        return out

    experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    return Of(forward, gate=nn.Linear(8, 3), experts=experts, counts=[0, 0, 0])


def quantized():
    def forward(m, x):
        near = torch.cdist(x.detach(), m.codes.weight).argmin(1)
        m.used[near] += 1
        return x + (m.codes(near) - x).detach()

    return Of(forward, codes=nn.Embedding(5, 8), used=torch.zeros(5))


def cached_by_shape():
    def forward(m, x):
        key = x.shape[0], x.dtype
        if key not in m.tables:
            m.tables[key] = torch.arange(8, dtype=x.dtype).sin()
        return x * m.tables[key]

    return Of(forward, tables={})


def by_a_method():
    class Block(nn.Module):
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

    return Block()


def with_getattr():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def __getattr__(self, name):
            if name == "scale":
                return 2.0
            return super().__getattr__(name)

        def forward(self, x):
            return self.layer(x) * self.scale

    return Block()


def with_setattr():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.log = linear(), []

        def __setattr__(self, name, value):
            if "log" in vars(self):
                self.log.append(name)
            super().__setattr__(name, value)

        def forward(self, x):
            self.k = len(self.log)
            return self.layer(x) * self.k

    return Block()


def with_slots():
    class Block(nn.Module):
        __slots__ = ("count",)

        def forward(self, x):
            self.count = getattr(self, "count", 0) + 1
            return x * self.count

    return Block()


def lazily():
    layer = nn.LazyLinear(8)
    layer(torch.ones(1, 8))
    return layer


def skip_initialized():
    layer = skip_init(nn.Linear, 8, 8)
    nn.init.constant_(layer.weight, 0.1)
    nn.init.constant_(layer.bias, 0.1)
    return layer


def scripted():
    return torch.jit.script(linear().double())


def traced():
    return torch.jit.trace(linear().double(), torch.ones(4, 8).double())


def complex_inside():
    return Of(lambda m, x: torch.view_as_real(torch.fft.fft(x)).sum(-1))


def sparse_inside():
    return Of(lambda m, x: torch.sparse.mm(torch.eye(4).double().to_sparse(), x))


def compiled_nothing():
    return Of(lambda m, x: torch.compiler.disable(lambda y: y.sin())(x))


KINDS = taking(globals())
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
