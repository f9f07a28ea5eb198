"""What functions ask of tensors: who and what they are, and what they hold."""

import copy
import inspect
import io
import math
import operator
import weakref
from collections import Counter, OrderedDict

import numpy as np
import torch
from support.adversarial.program import (
    State,
    family,
    loop,
    reversed_loop,
    taking,
    work,
)
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils import dlpack


# --- Who it is ---


def keys_of_a_dict(x, seen):
    table = seen.setdefault("table", {})
    return x * table.setdefault(x, len(table) + 1.0)


def keys_of_pairs(x, seen):
    table = seen.setdefault("table", {})
    return x * table.setdefault((x, "a"), len(table) + 1.0)


def one_of_a_list(x, seen):
    kept = seen.setdefault("kept", [])
    k = 1.0 + any(x is t for t in kept)
    kept.append(x)
    return x * k


def position_in_a_list(x, seen):
    kept = seen.setdefault("kept", [])
    kept.append(x)
    return x * (1.0 + [id(t) for t in kept].index(id(x)))


def a_weak_reference(x, seen):
    ref = weakref.ref(x)
    return x * (2.0 if ref() is x else 3.0)


def a_weak_value(x, seen):
    table = seen.setdefault("table", weakref.WeakValueDictionary())
    k = 2.0 if table.get("last") is x else 3.0
    table["last"] = x
    return x * k


def its_hash(x, seen):
    return x * (2.0 if hash(x) == id(x) else 3.0)


def twice_in_one_call(x, seen):
    kept = {}
    for t in (x, x, x * 2, x):
        kept.setdefault(id(t), t)
    return sum(kept.values()) * len(kept)


def itself_in_what_is_made(x, seen):
    parts = OrderedDict(a=x, b=x * 2, c=x)
    return x * sum(1.0 for t in parts.values() if t is x)


def equal_by_operator(x, seen):
    return x * (2.0 if operator.is_(x, x.requires_grad_(x.requires_grad)) else 3.0)


def a_result_kept(x, seen):
    z = x * 2
    seen["z"] = z
    return z * (2.0 if seen["z"] is z else 3.0)


def its_detached_self(x, seen):
    y = x.detach()
    return x * (2.0 if y.untyped_storage().data_ptr() == x.data_ptr() else 3.0)


def its_data(x, seen):
    y = x.data
    return x * y * (2.0 if y.data_ptr() == x.data_ptr() else 3.0)


def contiguous_is_itself(x, seen):
    return x * (2.0 if x.contiguous() is x else 3.0)


def conversions_are_itself(x, seen):
    same = x.to(torch.double) is x, x.cpu() is x, x.double() is x, x.expand(16) is x
    return x * (1.0 + sum(same))


# --- What it is ---


def by_isinstance(x, seen):
    z = x * 2
    kinds = torch.Tensor, nn.Parameter, torch.DoubleTensor, np.ndarray
    return z * (1.0 + sum(isinstance(z, kind) for kind in kinds))


def by_exact_class(x, seen):
    z = x.sin()
    return z * (2.0 if type(z) is torch.Tensor else 3.0)


def by_a_table_of_classes(x, seen):
    z = x.sin()
    return z * {torch.Tensor: 2.0, nn.Parameter: 3.0}.get(type(z), 4.0)


def by_its_bases(x, seen):
    z = x.sin()
    return z * len(type(z).__mro__)


def by_match(x, seen):
    z = x.sin()
    match z:
        case nn.Parameter():
            return z * 2
        case torch.Tensor(shape=(n,)):
            return z * n
    return z


def by_inspect(x, seen):
    z = x.sin()
    return z * len(inspect.getmodule(type(z)).__name__)


def by_subclass_hooks(x, seen):
    z = x.sin()
    return z * (
        2.0
        if type(z).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        else 3.0
    )


def by_its_type(x, seen):
    z = x.sin()
    return z * len(z.type())


def by_its_dict(x, seen):
    z = x.sin()
    z.note = 2.0
    return z * z.note * len(z.__dict__)


def by_flags(x, seen):
    z = x.sin()
    flags = z.is_leaf, z.is_sparse, z.is_quantized, z.is_inference(), z.is_nested
    flags += z.is_meta, z.is_shared(), z.is_pinned(), z.is_conj(), z.is_neg()
    return z * (1.0 + sum(k * f for k, f in enumerate(flags)))


def by_layout(x, seen):
    z = x.view(4, 4).t().sin()
    return x * (1.0 + z.is_contiguous() + z.stride(0) + z.storage_offset())


def by_numpy(x, seen):
    z = x.sin()
    return z * float(np.asarray(z.detach()).sum()) + z.numpy(force=True).mean()


def by_float(x, seen):
    z = x.sin()
    return z * (float(z.sum()) + int(z.sum() > 0) + complex(z[0]).real)


def by_index(x, seen):
    z = x.sin()
    rows = [1.0, 2.0, 3.0]
    return z * rows[(z.argmax() % 3)]


def by_range(x, seen):
    z = x.sin()
    n = (z > 0).sum()
    return z * sum(k for k in range(n))


def by_math(x, seen):
    z = x.sin().sum()
    return x * math.sin(z) * round(z.item(), 2)


def by_branches(x, seen):
    z = x.sin()
    if z.isfinite().all() and (z.abs() < 2).all():
        return z * 2 if z.mean() > 0 else z * 3
    return z


def by_mask(x, seen):
    z = x.sin()
    return z[z > 0].sum() * z + z.masked_select(z < 0).sum()


def by_nonzero(x, seen):
    z = x.sin()
    (where,) = torch.where(z > 0)
    return z * where.numel() + z[where].sum()


def by_unique(x, seen):
    z = (x.sin() * 3).round()
    values, counts = z.unique(return_counts=True)
    return x * values.numel() * counts.max()


def by_sort(x, seen):
    z = x.sin()
    order = z.argsort()
    return z[order] * z.topk(4).values.sum()


def by_repeat(x, seen):
    z = x.sin()
    counts = (z > 0).long() + 1
    return z * torch.repeat_interleave(z, counts).sum()


def by_dlpack(x, seen):
    z = x.sin()
    return z * torch.from_dlpack(z.detach()).sum() + dlpack.from_dlpack(
        dlpack.to_dlpack(z.detach())
    )


def by_saving(x, seen):
    z, to = x.sin(), io.BytesIO()
    torch.save(z.detach(), to)
    to.seek(0)
    return z * torch.load(to)


def by_copying(x, seen):
    z = x.sin().detach()
    return x * copy.copy(z) * copy.deepcopy(z)


def by_as_tensor(x, seen):
    z = x.sin().detach()
    return x * torch.as_tensor(z) * torch.tensor(z.tolist(), dtype=torch.double)


def by_length(x, seen):
    z = x.sin()
    return z * len(z) * z.size(0) * z.nelement()


def by_unpacking(x, seen):
    first, *rest = x.sin()
    return x * first * len(rest)


def by_zip(x, seen):
    z = x.sin()
    return torch.stack([a * b for a, b in zip(z, x, strict=True)])


def by_new(x, seen):
    z = x.sin()
    made = z.new_zeros(16), z.new_ones(16), z.new_full((16,), 2.0), z.new_empty(0)
    return z * sum(type(t) is torch.Tensor for t in made) + made[1]


def by_like(x, seen):
    z = x.sin()
    made = torch.zeros_like(z), torch.ones_like(z), torch.empty_like(z)
    return z * sum(type(t) is type(z) for t in made) + made[1]


def by_result_type(x, seen):
    z = x.sin()
    return z * (2.0 if torch.result_type(z, 1.0) is z.dtype else 3.0)


def by_set(x, seen):
    z = x.sin()
    y = torch.empty(0, dtype=torch.double).set_(z.detach())
    return z * y * (2.0 if y.is_set_to(z) else 3.0)


def by_out(x, seen):
    z, out = x.sin().detach(), torch.empty(16, dtype=torch.double)
    torch.mul(z, 2.0, out=out)
    return x * out


def by_vmap(x, seen):
    return torch.vmap(lambda a, b: a.sin() * b)(x, x.cos())


def by_grad(x, seen):
    return x * torch.func.grad(lambda a: a.sin().sum())(x.detach())


def by_jacobian(x, seen):
    return x @ torch.autograd.functional.jacobian(torch.sin, x.detach())


def by_counting(x, seen):
    z = (x.sin() > 0).tolist()
    return x * Counter(z)[True]


def by_random(x, seen):
    z = x.sin()
    return z * torch.bernoulli(z.detach().sigmoid()) + torch.randn_like(z)


def by_multinomial(x, seen):
    z = x.sin().softmax(0)
    return z * torch.multinomial(z.detach(), 3).sum()


def by_cumulative(x, seen):
    return x.cumsum(0) * x.sigmoid().cumprod(0).flip(0).roll(1)


def by_statistics(x, seen):
    z = x.sin()
    return (z - z.mean()) / z.std() * z.median() + z.quantile(0.5) + z.logsumexp(0)


def by_decomposition(x, seen):
    z = x.view(4, 4)
    q, r = torch.linalg.qr(z)
    return (q @ r).view(16) * torch.linalg.svdvals(z).sum() + torch.linalg.det(z)


def by_transform(x, seen):
    return torch.fft.irfft(torch.fft.rfft(x) * 2) * x


def by_scatter(x, seen):
    z = x.sin()
    to = torch.zeros(16, dtype=torch.double)
    return to.scatter_add(0, torch.arange(16) % 4, z)


ASKS = taking(globals(), "x", "seen")
SUMS = {name: ASKS.pop(name) for name in ("by cumulative", "by decomposition")}


@family(**SUMS, is_close=True)
@family(**ASKS)
def of_a_leaf(ask):
    seen = {}
    return loop(lambda x: work(ask(x, seen)).tanh())


@family(**SUMS, is_close=True)
@family(**ASKS)
def of_what_was_computed_and_is_gone(ask):
    def step(wrap):
        seen = {}
        run = wrap(lambda x: work(ask(x, seen)).tanh())
        return reversed_loop(lambda x: run(x * 1.5))(lambda f: f)

    return step


@family(**SUMS, is_close=True)
@family(**ASKS)
def of_a_product(ask):
    """A policy may save it, and leave out what it is of."""

    def step(wrap):
        seen, w = {}, torch.eye(16, dtype=torch.double) * 2
        run = wrap(lambda x: work(ask(w @ x.sin(), seen)).tanh() @ w)
        return loop(lambda x: run(x * 1.5))(lambda f: f)

    return step


@family(**SUMS, is_close=True)
@family(**ASKS)
def beside_an_attribute_of_a_parameter(ask):
    module = nn.Linear(16, 16).double()
    nn.init.eye_(module.weight)

    def step(wrap):
        seen = {}

        def fn(x):
            module.weight.is_ours = True
            return work(module(ask(x, seen))).tanh()

        run = wrap(fn)

        def call(x):
            with save_on_cpu():
                return run(x * 1.5)

        return loop(call, state=lambda: module.weight.grad)(lambda f: f)

    return step


@family(**SUMS, is_close=True)
@family(**ASKS)
def of_the_second_input(ask):
    def step(wrap):
        seen, held = {}, State(y=None)
        run = wrap(lambda x, y: (work(ask(y, seen)) * x).tanh())

        def call(x):
            held.y = x.cos()
            return run(x, held.y)

        return loop(call)(lambda f: f)

    return step
