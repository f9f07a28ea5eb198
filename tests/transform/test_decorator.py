"""`remat` on anything that can be called, and what it returns in its place."""

import copy
import functools
import inspect
import pickle
import types

import pytest
import torch
from support.tables import rows
from support.zoo import ops_of
from torch import nn

from remat import remat
from remat.testing import assert_same, assert_same_gradients, count_ops


def wave(x, *, scale=2.0):
    """Return a wave."""
    return (x * scale).sin().exp()


@remat
def decorated(x, *, scale=2.0):
    """Return a decorated wave."""
    return (x * scale).sin().exp()


rematerialized = remat(wave)


class Wave(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x):
        return (x * self.weight).sin().exp()


class Waves:
    """Callable in all the ways that a class can be."""

    def __init__(self):
        self.weight = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)

    def __call__(self, x):
        return self.plain(x)

    def plain(self, x):
        return (x * self.weight).sin().exp()

    @remat
    def method(self, x):
        """Wave by method."""
        return (x * self.weight).sin().exp()

    @remat(prune=False)
    def configured(self, x):
        return (x * self.weight).sin().exp()

    @staticmethod
    @remat
    def static(x):
        return x.exp()

    @classmethod
    @remat
    def of_class(cls, x):
        return x.exp() * len(cls.__name__)

    @remat
    @staticmethod
    def static_below(x):
        return x.exp()

    @remat(prune=False)
    @classmethod
    def of_class_below(cls, x):
        return x.exp() * len(cls.__name__)

    @property
    @remat
    def value(self):
        return self.weight.exp()


class SubWaves(Waves):
    def method(self, x):
        return super().method(x) * 2


class RematModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    @remat
    def forward(self, x):
        return (x * self.weight).exp()


WAVES, SUB_WAVES, MODULE = Waves(), SubWaves(), Wave()

# A callable that remat made, and the same without.
CALLABLES = {
    "function": (remat(wave), wave),
    "decorated function": (decorated, wave),
    "lambda": (remat(lambda x: x.exp()), torch.exp),
    "builtin": (remat(torch.exp), torch.exp),
    "method of a builtin type": (remat(torch.Tensor.exp), torch.exp),
    "partial": (
        remat(functools.partial(wave, scale=3)),
        functools.partial(wave, scale=3),
    ),
    "partial of remat": (
        functools.partial(remat(wave), scale=3),
        functools.partial(wave, scale=3),
    ),
    "bound method": (remat(WAVES.plain), WAVES.plain),
    "unbound method": (functools.partial(remat(Waves.plain), WAVES), WAVES.plain),
    "method decorator": (WAVES.method, WAVES.plain),
    "method decorator with options": (WAVES.configured, WAVES.plain),
    "decorated method, unbound": (functools.partial(Waves.method, WAVES), WAVES.plain),
    "decorated method through super": (
        SUB_WAVES.method,
        lambda x: SUB_WAVES.plain(x) * 2,
    ),
    "static method": (Waves.static, torch.exp),
    "static method of an instance": (WAVES.static, torch.exp),
    "class method": (Waves.of_class, lambda x: x.exp() * 5),
    "class method of a subclass": (SubWaves.of_class, lambda x: x.exp() * 8),
    "below the decorator: static method": (Waves.static_below, torch.exp),
    "below the decorator: static method of an instance": (
        WAVES.static_below,
        torch.exp,
    ),
    "below the decorator: class method of a subclass": (
        SubWaves.of_class_below,
        lambda x: x.exp() * 8,
    ),
    "static method by itself": (remat(staticmethod(wave)), wave),
    "property": (lambda x: WAVES.value * x, lambda x: WAVES.weight.exp() * x),
    "callable object": (remat(WAVES), WAVES),
    "module": (remat(MODULE), MODULE),
    "forward decorated in the class": (RematModule(), torch.exp),
    "remat of remat": (remat(remat(torch.exp)), torch.exp),
}


@rows("fn, plain", CALLABLES)
def test_whatever_is_called_is_rematerialized(fn, plain):
    x = torch.randn(3, requires_grad=True)
    wrt = [WAVES.weight, SUB_WAVES.weight, *MODULE.parameters()]
    assert_same_gradients(fn, plain, x, wrt=wrt)
    with count_ops() as ops:
        y = fn(x)
        forward = ops["exp"]
        torch.autograd.grad(y.sum(), [x, *wrt], allow_unused=True)
    assert forward == 1
    assert ops["exp"] > 1


# --- What wraps what -------------------------------------------------------------


def test_it_carries_what_functools_wraps_would():
    @functools.wraps(wave)
    def wrapper(x): ...

    wave.tag = "kept"
    again = remat(wave)
    assert again.__wrapped__ is wave
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(again, name) == getattr(wave, name)
    assert again.tag == "kept"
    assert inspect.unwrap(again) is wave


def test_its_signature_is_that_of_the_function():
    assert rematerialized is not wave
    assert inspect.signature(rematerialized) == inspect.signature(wave)
    assert str(inspect.signature(WAVES.method)) == "(x)"
    assert str(inspect.signature(Waves.method)) == "(self, x)"


def test_its_annotations_are_those_of_the_function():
    def fn(x: int) -> str: ...

    again = remat(fn)
    assert again is not fn
    assert inspect.get_annotations(again) == {"x": int, "return": str}


def test_arguments_may_have_any_name():
    def fn(self, fn, args, kwargs, *, program, policy):
        return fn.exp() * self + args + kwargs + program + policy

    x = torch.randn(3, requires_grad=True)
    names = ("self", "fn", "args", "kwargs", "program", "policy")
    with count_ops() as ops:
        y = remat(fn)(**dict.fromkeys(names, x))
        y.sum().backward()
    assert ops["exp"] == 2
    assert_same(y, fn(*[x] * 4, program=x, policy=x))


def test_a_wrong_call_is_reported_as_by_the_function():
    x = torch.randn(3, requires_grad=True)
    assert recomputes(rematerialized, x)
    with pytest.raises(
        TypeError, match=r"wave\(\) got an unexpected keyword .*'shift'"
    ):
        rematerialized(x, shift=1)
    with pytest.raises(TypeError, match=r"decorated\(\) missing 1 required positional"):
        decorated()


def test_a_decorated_method_binds():
    assert inspect.ismethod(WAVES.method)
    assert Waves.method is WAVES.method.__func__
    assert not inspect.isfunction(Waves.method)
    assert WAVES.method.__self__ is WAVES
    assert WAVES.method.__doc__ == "Wave by method."
    assert WAVES.method == WAVES.method


def test_a_rematerialized_bound_method_does_not_bind_again():
    class Holder:
        plain = remat(WAVES.plain)

    x = torch.randn(3, requires_grad=True)
    ops = ops_of(lambda: assert_same_gradients(Holder.plain, WAVES.plain, x))
    assert ops["exp"] == 1 + 2


def test_what_binds_no_instance_binds_none_when_rematerialized():
    class Model:
        activation = remat(torch.exp)
        partial = remat(functools.partial(torch.mul, 2.0))

    x = torch.ones(3, requires_grad=True)
    ops = ops_of(lambda: (Model().activation(x) + Model().partial(x)).sum().backward())
    assert_same(x.grad, x.detach().exp() + 2)
    assert ops["exp"] == 2


def test_a_bound_forward_is_like_a_method():
    class Doubled(nn.Module):
        @remat
        def forward(self, x):
            return x.sin().sin() * 2

    module = Doubled()
    forward = module.forward
    assert (forward.__self__, forward.__func__) == (module, Doubled.forward)
    assert forward.__name__ == "forward"
    assert {forward: 1} == {module.forward: 1}
    assert forward != Doubled().forward
    assert str(inspect.signature(forward)) == "(x)"
    x = torch.ones(3, requires_grad=True)
    assert ops_of(lambda: copy.deepcopy(forward)(x).sum().backward())["sin"] == 3


def test_its_repr_shows_what_is_wrapped():
    assert repr(remat(MODULE)) == f"remat {MODULE}" == "remat Wave()"
    assert repr(remat(torch.exp)).startswith("remat(<built-in method exp")


# --- Copies ----------------------------------------------------------------------


def recomputes(fn, *args):
    ops = ops_of(lambda: fn(*args).sum().backward())
    return ops["exp"] > 1


def test_a_decorated_function_is_pickled_by_name():
    loaded = pickle.loads(pickle.dumps(decorated))
    assert loaded is decorated
    assert recomputes(loaded, torch.randn(3, requires_grad=True))


COPIED = {
    "function under another name": rematerialized,
    "partial": remat(functools.partial(wave, scale=3)),
    "module": remat(MODULE),
    "callable object": remat(WAVES),
    "bound method": remat(WAVES.plain),
    "builtin": remat(torch.exp),
    "remat of remat": remat(remat(wave)),
    "other options": remat(wave, rng="error"),
    "decorated method": WAVES.method,
}
DUPLICATES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda fn: pickle.loads(pickle.dumps(fn)),
}


@rows("fn", COPIED)
@rows("duplicate", DUPLICATES)
def test_a_copy_does_the_same(fn, duplicate):
    x = torch.randn(3, requires_grad=True)
    duplicated = duplicate(fn)
    assert_same(duplicated(x), fn(x))
    assert recomputes(duplicated, x)


def test_a_copy_keeps_the_options():
    loaded = pickle.loads(pickle.dumps(remat(noise, rng="error")))
    with pytest.raises(RuntimeError, match="rng='error' refuses"):
        loaded(torch.randn(3, requires_grad=True))


def noise(x):
    return x * torch.rand(3)


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_a_module_with_a_decorated_forward_is_copied_and_pickled(how):
    copied = DUPLICATES[how](RematModule())
    assert recomputes(copied, torch.randn(3))
    assert copied.weight.grad is not None


def test_what_cannot_be_pickled_cannot_be_pickled_rematerialized():
    fn = remat(lambda x: x.exp())
    assert recomputes(fn, torch.randn(3, requires_grad=True))
    with pytest.raises((pickle.PicklingError, AttributeError), match="<lambda>"):
        pickle.dumps(fn)


class Decorated(nn.Module):
    @remat
    def forward(self, x):
        return x.sin()


METHODS = {
    "of a decorated method": Decorated().forward,
    "of a partial": types.MethodType(
        functools.partial(torch.add, alpha=2), torch.ones(2)
    ),
    "of a builtin function": types.MethodType(torch.add, torch.ones(2)),
}


@rows("method", METHODS)
def test_methods_of_callables_are_taken(method):
    x = torch.linspace(0.1, 0.3, 2).requires_grad_()
    ours = remat(method)
    assert ours.__wrapped__ is method
    y = ours(x)
    assert_same(y, method(x))
    y.sum().backward()
    assert x.grad.abs().min() > 0
