"""`remat.register`: classes that hold their tensors where nobody can see."""

import itertools
import threading
from functools import partial

import pytest
import torch
from support.objects import assert_as_plain
from support.runs import leaf
from support.tables import rows
from support.transforms import TRANSFORMS
from support.zoo import ops_of
from torch.func import grad, vjp, vmap
from torch.utils import _pytree

import remat as package
from remat import CaptureError, remat
from remat.testing import assert_same_gradients, count_ops


# Where instances of `Opaque` keep their tensors: as a C extension does.
TENSORS = {}


class Opaque:
    """Holds a number, which only its functions know the tensors of."""

    __slots__ = ("number", "words")
    numbers = itertools.count()

    def __init__(self, tensors, words):
        self.number, self.words = next(self.numbers), words
        TENSORS[self.number] = tensors

    @property
    def tensors(self):
        return TENSORS[self.number]

    def __del__(self):
        TENSORS.pop(self.number, None)


package.register(Opaque, lambda o: (o.tensors, o.words), lambda w, ts: Opaque(ts, w))


@package.register
class WithMethods:
    """As JAX's `register_pytree_node_class` wants it."""

    def __init__(self, value):
        self.value = value

    def tree_flatten(self):
        return (self.value,), None

    @classmethod
    def tree_unflatten(cls, rest, children):
        del rest
        return cls(*children)


def step(held, x):
    """Takes the sine of what an opaque object holds, and returns such an object."""
    y = held.tensors[0].sin().exp() * x
    return Opaque([y, x, None], (*held.words, "after")), y


def loss_of(call):
    def loss(w, x):
        out, y = call(Opaque([w * 2], ("before",)), x)
        assert out.words == ("before", "after")
        assert out.tensors[0] is y
        assert out.tensors[2] is None
        return (out.tensors[0] * out.tensors[1]).square().sum()

    return loss


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("how", TRANSFORMS)
def test_under_every_transform(how):
    assert_as_plain(how, loss_of, step)
    wrap = partial(remat, higher_order=True)
    assert_as_plain(how, loss_of, step, wrap=wrap, calls=True)


def test_a_recompute_at_base_is_given_what_the_argument_held():
    fn = lambda held, x: (held.tensors[0] * x).sin().exp()
    held, x = Opaque([torch.full((3,), 2.0)], ()), leaf(3)
    out = remat(fn)(held, x)
    held.tensors[0] = torch.zeros(3)
    with count_ops() as ops:
        (found,) = torch.autograd.grad(out.sum(), x)
    assert ops["sin"] == 1
    expected = fn(Opaque([torch.full((3,), 2.0)], ()), x)
    assert torch.equal(found, torch.autograd.grad(expected.sum(), x)[0])


def test_an_argument_that_is_returned_is_that_very_object():
    held = Opaque([torch.ones(3)], ())

    def loss(x):
        out, y = remat(lambda held, x: (held, (held.tensors[0] * x).sin().exp()))(
            held, x
        )
        assert out is held
        return y.sum()

    assert ops_of(lambda: grad(loss)(torch.ones(3)))["sin"] == 2


def test_a_class_with_methods_is_registered_as_by_jax():
    fn = lambda held: WithMethods(held.value.sin().exp())
    x = WithMethods(torch.linspace(0, 1, 3))
    expected, pull = vjp(fn, x)
    with count_ops() as ops:
        out, again = vjp(remat(fn), x)
        (got,) = again(out)
    assert ops["sin"] == 2
    assert torch.equal(out.value, expected.value)
    assert torch.equal(got.value, pull(expected)[0].value)


def test_the_dimensions_of_vmap_are_such_a_tree():
    fn = lambda held: WithMethods(held.value.sin().exp())
    batch = WithMethods(torch.linspace(0, 1, 6).view(2, 3))
    out = vmap(remat(fn), in_dims=(WithMethods(1),))(batch)
    assert torch.equal(out.value, fn(batch).value.t())
    gradient = vmap(grad(lambda h: remat(fn)(h).value.sum()), in_dims=(WithMethods(1),))
    assert ops_of(lambda: gradient(batch))["sin"] == 2


# --- What is refused at registration ---


def fresh():
    return type("Fresh", (), {})


def halves(o):
    return [o], None


def whole(rest, children):
    return rest, children


REFUSED = {
    "no class": (lambda: (3, halves, whole), "takes a class, and got 3"),
    "a tensor": (lambda: (torch.nn.Parameter, halves, whole), "it is a Tensor"),
    "a module": (lambda: (torch.nn.Linear, halves, whole), "it is a Module"),
    "a dict": (
        lambda: (type("D", (dict,), {}), halves, whole),
        "D cannot be .* it is a dict",
    ),
    "a number": (lambda: (int, halves, whole), "int cannot .* it holds no tensors"),
    "one function": (lambda: (fresh(), halves), r"register\(Fresh\) needs two"),
    "no functions": (lambda: (fresh(),), r"register\(Fresh\) needs two .*tree_flatten"),
    "no function": (lambda: (fresh(), halves, 3), r"register\(Fresh\) needs two"),
    "flatten of nothing": (
        lambda: (fresh(), lambda: None, whole),
        r"register\(Fresh\): flatten\(\) cannot be called as it should",
    ),
    "unflatten of one": (
        lambda: (fresh(), halves, halves),
        r"register\(Fresh\): unflatten\(o\) cannot be called as it should",
    ),
}


@rows("make, message", REFUSED)
def test_what_cannot_be_registered_is_refused(make, message):
    with pytest.raises(TypeError, match=message):
        package.register(*make())


def test_a_class_is_registered_once():
    cls = fresh()
    package.register(cls, halves, whole)
    with pytest.raises(ValueError, match="Fresh is registered already with other fun"):
        package.register(cls, lambda o: ([], o), whole)


def test_a_class_that_torch_knows_is_refused():
    cls = fresh()
    _pytree.register_pytree_node(cls, halves, lambda c, rest: whole(rest, c))
    with pytest.raises(ValueError, match=r"registered already with torch\.utils"):
        package.register(cls, halves, whole)


def test_a_cell_of_a_notebook_runs_twice():
    def cell(cls):
        return package.register(cls, lambda o: ([o.a], None), lambda _, c: whole(_, c))

    cls = fresh()
    assert cell(cls) is cls
    assert cell(cls) is cls
    assert cell(fresh()) is not cls  # the class was defined again


def test_a_function_that_returns_no_pair_is_named():
    cls = package.register(fresh(), lambda o: 3, whole)
    with pytest.raises(CaptureError, match="Fresh is registered with returned a i"):
        torch.func.grad(lambda x: remat(lambda x: (x.sin(), cls()))(x)[0].sum())(
            leaf(3)
        )


# --- What is refused under torch.func if it is not registered ---


def in_an_error(y):
    return ValueError("words", y)


HIDING = {
    "an exception": (in_an_error, r"a ValueError \(`result\['out'\]`\) that ho"),
    "an iterator": (lambda y: iter([y]), r"a list_iterator \(`result\['out'\]`\) that"),
    "a set": (lambda y: {y, y + 1}, r"a set \(`result\['out'\]`\).*Return a list"),
    "a generator": (lambda y: (y for _ in "a"), r"a generator .* computes when"),
    "a function": (lambda y: lambda: y, r"a function .* leads to a tensor"),
    "a default": (lambda y: lambda y=y: y, r"a function .* leads to a tensor"),
    "a module": (
        lambda y: torch.nn.Sequential(torch.nn.Linear(1, 1)),
        "a Sequential .* leads to a tensor",
    ),
    "a thread's variables": (
        lambda y: in_thread_local(y),
        r" _?local .*\(`result\['out'\]`\).*`remat.register",
    ),
}


def in_thread_local(y):
    local = threading.local()
    local.y = y
    return local


@rows("hide, message", HIDING)
def test_what_hides_a_tensor_is_named(hide, message):
    def fn(x):
        y = x.sin().exp()
        return {"out": hide(y), "y": y}

    with pytest.raises(CaptureError, match=message):
        grad(lambda x: remat(fn)(x)["y"].sum())(torch.ones(3))
    assert_same_gradients(remat(lambda x: fn(x)["y"]), lambda x: fn(x)["y"], leaf(3))


class HeldError(Exception):
    """Holds what it is given where no attribute shows it."""


def test_the_line_that_registers_is_in_the_message():
    line = "`remat.register(HeldError, lambda value: ([value.tensor, ...], None), "
    with pytest.raises(CaptureError, match="where remat cannot see it") as caught:
        grad(lambda x: remat(lambda x: HeldError(x.sin()))(x) and x.sum())(leaf(3))
    assert line in str(caught.value)
    with pytest.raises(CaptureError, match=r"a ValueError .* Return a list\."):
        grad(lambda x: remat(lambda x: in_an_error(x.sin()))(x) and x.sum())(leaf(3))


def test_functions_and_modules_without_computed_tensors_are_returned():
    layer = torch.nn.Linear(3, 3)

    def fn(x):
        y = layer(x).sin().exp()
        return y, lambda: 3, layer, partial(max, 1), fn, len, torch.nn.ReLU()

    def loss(x):
        y, three, module, bigger, itself, size, relu = remat(fn)(x)
        assert module is layer
        assert itself is fn
        assert (three(), bigger(2), size("a")) == (3, 2, 1)
        return relu(y).sum()

    assert ops_of(lambda: grad(loss)(torch.ones(3)))["sin"] == 2
