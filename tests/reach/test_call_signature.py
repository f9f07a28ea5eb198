"""What is told of the code that a call reaches: its signature, and what is compiled."""

import contextlib
import enum
import functools
import gc
import weakref

import pytest
import torch
from support.holders import Object, Slots, called
from support.tables import rows
from torch import nn

from remat import remat
from remat._reach.reach import Reach


class Layers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, *_args, **_kwargs):
        for layer in self.layers:
            x = layer(x)
        return x


def call_of(fn, *args, **kwargs):
    return Reach(fn, "f", args, kwargs)


def signature_of(fn, *args, **kwargs):
    signature = call_of(fn, *args, **kwargs).signature
    assert {signature: 1}[signature] == 1
    return signature


def of_width(n):
    return Layers(nn.Linear(3, n), nn.Tanh(), nn.Linear(n, 3))


def closes_over(value):
    return lambda x: (x * value).sum()


def sine(x, *_args, **_kwargs):
    return x.sin()


def cosine(x, *_args, **_kwargs):
    return x.cos()


class Choice(enum.Enum):
    ONE = 1
    TWO = 2


X = torch.ones(3)
CONSTANTS = (X, 1, "a", None, Choice.ONE, torch.tanh)
SAME_CODE = {
    "function": (lambda: sine, X, X + 1),
    "closure": (lambda: closes_over(X + 1), X, X),
    "module": (lambda: of_width(4), X, X),
    "constants": (lambda: sine, CONSTANTS, CONSTANTS),
    "tree": (lambda: of_width(2), (X, {"a": [X + 2, 2.0]}), (X, {"a": [X + 1, 2.0]})),
    "object": (lambda: Object(X + 1), X, X),
    "passed": (lambda: sine, (X, Object(X + 2)), (X, Object(X + 1))),
    "generator": (lambda: sine, (X, torch.Generator()), (X, torch.Generator())),
}


@rows("make, first, second", SAME_CODE)
def test_calls_of_the_same_code_have_one_signature(make, first, second):
    a, b = (args if isinstance(args, tuple) else (args,) for args in (first, second))
    assert signature_of(make(), *a) == signature_of(make(), *b)


def in_evaluation(module):
    module.layers[1].eval()
    return module


def with_global():
    return lambda x: _helper(x)


def _helper(x):
    return closes_over(X)(x)


KEPT = remat(sine, rng="error")
OTHER_CODE = {
    "function": ((sine, X), (cosine, X)),
    "arity": ((sine, X), (sine, X, X)),
    "closure": ((closes_over(X), X), (Object(X), X)),
    "captured function": ((closes_over(sine), X), (closes_over(cosine), X)),
    "passed function": ((sine, X, sine), (sine, X, cosine)),
    "passed builtin": ((sine, X, torch.sin), (sine, X, torch.cos)),
    "passed object": ((sine, X, Object(X)), (sine, X, Slots(X))),
    "enumeration": ((sine, X, Choice.ONE), (sine, X, Choice.TWO)),
    "flag": ((sine, X, True), (sine, X, False)),
    "number": ((sine, X, 1), (sine, X, 1.0)),
    "tree": ((sine, [X]), (sine, (X,))),
    "training": ((of_width(2), X), (in_evaluation(of_width(2)), X)),
    "layer": ((Layers(nn.Tanh()), X), (Layers(nn.ReLU()), X)),
    "depth": ((Layers(nn.Tanh()), X), (Layers(nn.Tanh(), nn.Tanh()), X)),
    "global": ((with_global(), X), (_helper, X)),
    "builtin": ((closes_over(torch.sin), X), (closes_over(torch.cos), X)),
    "options": ((closes_over(remat(sine)), X), (closes_over(KEPT), X)),
}


@rows("first, second", OTHER_CODE)
def test_calls_of_other_code_have_other_signatures(first, second):
    assert call_of(*first).signature != call_of(*second).signature


def test_a_keyword_is_part_of_the_signature():
    signatures = {signature_of(sine, X, way=way) for way in ("a", "b", "a")}
    assert len(signatures) == 2
    assert signature_of(sine, X) not in signatures


@contextlib.contextmanager
def without_collection():
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_signature_holds_nothing_of_the_users():
    with without_collection():
        x, w, module = torch.ones(3), torch.ones(3), of_width(2)

        class Local(Object):
            """Made in a notebook's cell, say."""

        held = Local(w)
        fn = closes_over(w)
        refs = [weakref.ref(v) for v in (x, w, module, held, fn)]
        signatures = [
            signature_of(sine, x, held),
            signature_of(fn, x),
            signature_of(held, [x]),
            signature_of(module, x),
        ]
        refs.append(weakref.ref(Local))
        del x, w, module, held, fn, Local
        gc.collect()  # a class is in a cycle
        assert [r() for r in refs] == [None] * len(refs)
    assert len({*signatures}) == 4


COMPILED = {
    "function": lambda: torch.compile(sine, backend="eager"),
    "module": lambda: torch.compile(nn.Linear(3, 3), backend="eager"),
    "closure": lambda: called(torch.compile(sine, backend="eager")),
    "attribute": lambda: Layers(torch.compile(nn.Linear(3, 3), backend="eager")),
    "in place": lambda: Layers(compiled_in_place(nn.Linear(3, 3))),
    "method": lambda: WithCompiledMethod(),
    "global of a method": lambda: WithCompiledGlobal(),
    "script": lambda: called(torch.jit.script(nn.functional.hardswish)),
}


def compiled_in_place(module):
    module.compile(backend="eager")
    return module


class WithCompiledMethod(nn.Module):
    @functools.partial(torch.compile, backend="eager")
    def forward(self, x):
        return x.sin()


compiled_global = torch.compile(sine, backend="eager")


class WithCompiledGlobal(nn.Module):
    def forward(self, x):
        return compiled_global(x)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("case", COMPILED)
def test_compiled_code_is_noticed(case):
    fn = COMPILED[case]()
    assert call_of(fn, X).compiled
    assert call_of(lambda x: fn(x), X).compiled
    assert call_of(sine, X, fn).compiled


@pytest.mark.parametrize("case", SAME_CODE)
def test_other_code_is_not_taken_for_compiled(case):
    make, first, _ = SAME_CODE[case]
    args = first if isinstance(first, tuple) else (first,)
    assert not call_of(make(), *args).compiled
