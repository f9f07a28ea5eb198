"""What functions ask of tensors: who and what they are, and what they hold.

A row is an expression of `x`, which is asked, of `z`, its sine, and of `seen`, a dict
that lives as long as the program. What it gives is computed with.
"""

import functools
import io

import torch
from support.adversarial.program import (
    State,
    around,
    family,
    loop,
    reversed_loop,
    within,
    work,
)
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu


# What the rows use besides, which are text.
exec(
    """
import copy, inspect, math, operator, pickle, weakref
from collections import OrderedDict
import numpy as np
from torch.overrides import has_torch_function
from torch.utils import dlpack
"""
)


def last_of(held, key, value):
    """Put a value in a dict, and return what was there."""
    before = held.get(key)
    held[key] = value
    return before


def setting(value, **attributes):
    vars(value).update(attributes)
    return value


@functools.singledispatch
def factor(value):
    return 1.0


@factor.register
def _(value: nn.Parameter):
    return 2.0


def matched(z):
    match z:
        case nn.Parameter():
            return z * 2
        case Tensor(shape=(n,)):
            return z * n
    return z


def memo_by_id(x, seen):
    last_of(seen, len(seen), x)  # else another one may get its identity
    return x * seen.setdefault(id(x), len(seen) + 1.0)


def saved(z):
    torch.save(z.detach(), to := io.BytesIO())
    to.seek(0)
    return torch.load(to)


ASKS = {
    # Who it is.
    "keys of a dict": "x * seen.setdefault(x, len(seen) + 1.0)",
    "keys of pairs": "x * seen.setdefault((x, 1), len(seen) + 1.0)",
    "memo by id": "memo_by_id(x, seen)",
    "one of a list": (
        "x * (1.0 + any((x is t for t in seen.values())) + bool(last_of(seen, x, x)"
        " is None))"
    ),
    "position in a list": (
        "(last_of(seen, len(seen), x), x * (1.0 + [*map(id, "
        "seen.values())].index(id(x))))[1]"
    ),
    "a weak reference": "x * (2.0 if weakref.ref(x)() is x else 3.0)",
    "a weak value": (
        'x * (2.0 if last_of(seen.setdefault("table", '
        'weakref.WeakValueDictionary()), "last", x) is x else 3.0)'
    ),
    "its hash": "x * (2.0 if hash(x) == id(x) else 3.0)",
    "itself in what is made": (
        "x * sum((1.0 for t in OrderedDict(a=x, b=x * 2, c=x).values() if t is x))"
    ),
    "equal by operator": (
        "x * (2.0 if operator.is_(x, x.requires_grad_(x.requires_grad)) else 3.0)"
    ),
    "last of the calls": 'x * (2.0 if last_of(seen, "last", x) is x else 3.0)',
    "a result kept": 'z * (2.0 if [last_of(seen, "z", z)] and seen["z"] is z else 3.0)',
    "its detached self": (
        "x * (2.0 if x.detach().untyped_storage().data_ptr() == x.data.data_ptr() "
        "else 3.0)"
    ),
    "contiguous is itself": "x * (2.0 if x.contiguous() is x else 3.0)",
    "conversions are itself": (
        "x * (1.0 + (x.double() is x) + (x.cpu() is x) + (x.expand(16) is x))"
    ),
    # What it is.
    "by isinstance": (
        "z * sum(isinstance(z, k) for k in (Tensor, nn.Parameter, np.ndarray))"
    ),
    "type is": "z * (2.0 if type(z) is Tensor else 3.0)",
    "class is": "z * (2.0 if z.__class__ is Tensor else 3.0)",
    "by a table of classes": "z * {Tensor: 2.0, nn.Parameter: 3.0}.get(type(z), 4.0)",
    "by its bases": "z * len(type(z).__mro__)",
    "by match": "matched(z)",
    "by inspect": "z * len(inspect.getmodule(type(z)).__name__)",
    "module of its type": 'z * {"torch": 3.0}.get(type(z).__module__, 1.0)',
    "by subclass hooks": (
        "z * (1.0 + (type(z).__torch_dispatch__ is Tensor.__torch_dispatch__))"
    ),
    "by its type": "z * len(z.type())",
    "by its dict": "z * setting(z, k=2.0).k * len(z.__dict__)",
    "attribute of it": 'x * setting(x, k=getattr(x, "k", 0) + 1.0).k',
    "dispatch by type": "z * factor(z)",
    "torch function": "z * (2.0 if has_torch_function((z,)) else 3.0)",
    "version": "z * (3.0 + z._version)",
    "by flags": (
        "z * (1.0 + z.is_leaf + 2 * z.requires_grad + 4 * z.retains_grad + 8 * "
        "x.is_leaf) * (1 + len(z.grad_fn.next_functions))"
    ),
    "by its base": "x * (2.0 if x.view(4, 4)._base is x else 3.0)",
    "by layout": (
        "x * (1.0 + x.view(4, 4).t().is_contiguous() + z.stride(0) + "
        "z.storage_offset())"
    ),
    "by its memory": "z * (z.untyped_storage().nbytes() + z.nbytes)",
    "by its text": "x * len(repr(z.detach()))",
    "by like": "z * (type(torch.zeros_like(z)) is type(z)) + z.new_ones(16)",
    "by result type": "z * (2.0 if torch.result_type(z, 1.0) is z.dtype else 3.0)",
    # What it holds.
    "by NumPy": "z * float(np.asarray(z.detach()).sum()) + z.numpy(force=True).mean()",
    "by a buffer": "x * memoryview(z.detach().numpy())[3]",
    "by float": "z * (float(z.sum()) + complex(z[0]).real)",
    "by index": "z * [1.0, 2.0, 3.0][z.argmax() % 3]",
    "by range": "z * sum(range((z > 0).sum()))",
    "by math": "x * math.sin(z.sum()) * round(z.sum().item(), 2)",
    "by branches": "z * 2 if z.mean() > 0 else z * 3",
    "by membership": "x * (2.0 if 0.5 in z.detach().sign() else 3.0)",
    "by comparing": "x * (2.0 if torch.equal(z, z.clone()) else 3.0)",
    "by mask": "z[z > 0].sum() * z + z.masked_select(z < 0).sum()",
    "by nonzero": "z * (z > 0).nonzero().numel()",
    "by unique": "x * (z * 3).round().unique().numel()",
    "by sort": "z[z.argsort()] * z.topk(4).values.sum()",
    "by repeat": "z * torch.repeat_interleave(z, (z > 0).long() + 1).sum()",
    "by dlpack": "z * dlpack.from_dlpack(dlpack.to_dlpack(z.detach()))",
    "by saving": "z * saved(z)",
    "by a pickle": "x * pickle.loads(pickle.dumps(z.detach())).sum()",
    "by copying": "x * copy.copy(z.detach()) * copy.deepcopy(z.detach())",
    "by as tensor": (
        "x * torch.as_tensor(z.detach()) * torch.tensor(z.tolist(), dtype=torch.double)"
    ),
    "by unpacking": "x * next(iter(z)) * len([*z])",
    "by set": "z * torch.empty(0, dtype=torch.double).set_(z.detach())",
    "by out": "x * torch.mul(z.detach(), 2.0, out=torch.empty(16, dtype=torch.double))",
    "by vmap": "torch.vmap(lambda a, b: a.sin() * b)(x, z)",
    "by grad": "x * torch.func.grad(lambda a: a.sin().sum())(x.detach())",
    "by jacobian": "x @ torch.autograd.functional.jacobian(torch.sin, x.detach())",
    "by random": "z * torch.bernoulli(z.detach().sigmoid()) + torch.randn_like(z)",
    "by statistics": "(z - z.mean()) / z.std() * z.median()",
    "by transform": "torch.fft.irfft(torch.fft.rfft(x) * 2) * x",
    "by scatter": (
        "torch.zeros(16, dtype=torch.double).scatter_add(0, torch.arange(16) % 4, z)"
    ),
}
# Of these a level of torch.func has other kernels.
SUMS = {
    "by cumulative": "x.cumsum(0) * x.sigmoid().cumprod(0).flip(0).roll(1)",
    "by decomposition": (
        "torch.linalg.qr(x.view(4, 4))[0].reshape(16) * torch.linalg.det(x.view(4, 4))"
    ),
}


def asking(program, *without):
    """Add a program for each question: it is given what asks, and returns a step."""

    def build(question):
        ask, seen = eval(f"lambda x, z, seen: {question}"), {}
        return program(lambda x: ask(x, x.sin(), seen))

    build.__name__, build.__module__ = program.__name__, program.__module__
    family(**SUMS, is_close=True)(build)
    family(**{name: ask for name, ask in ASKS.items() if name not in without})(build)


@asking
def of_a_leaf(ask):
    return loop(lambda x: work(ask(x)).tanh())


@asking
def of_what_was_computed_and_is_gone(ask):
    fn = lambda x: work(ask(x)).tanh()
    return around(fn, lambda run: lambda x: run(x * 1.5), by=reversed_loop)


@asking
def of_a_product(ask):
    """A policy may save it, and leave out what it is of."""
    w = torch.eye(16, dtype=torch.double) * 2
    fn = lambda x: work(ask(w @ x.sin())).tanh() @ w
    return around(fn, lambda run: lambda x: run(x * 1.5))


@asking
def of_what_nobody_reads(ask):
    def fn(x):
        z = (x * 3).view(4, 4).t().reshape(16)
        return work(x, ask(z).detach().mean()) + z

    return loop(fn)


@asking
def within_a_call(ask):
    def step(wrap):
        run = wrap(lambda x: work(ask(x)).tanh())
        return loop(wrap(lambda x: run(x * 1.5).tanh() + x.sum()))(lambda f: f)

    return step


# Plain code refuses torch.func under hooks.
@lambda program: asking(program, "by grad")
def beside_an_attribute_of_a_parameter(ask):
    module = nn.Linear(16, 16).double()
    nn.init.eye_(module.weight)

    def fn(x):
        module.weight.is_ours = True
        return work(module(ask(x))).tanh()

    outer = within(save_on_cpu, times=1.5)
    return around(fn, outer, state=lambda: module.weight.grad)


@asking
def of_the_second_input(ask):
    held = State(y=None)

    def outer(run):
        def call(x):
            held.y = x.cos()
            return run(x, held.y)

        return call

    return around(lambda x, y: (work(ask(y)) * x).tanh(), outer)
