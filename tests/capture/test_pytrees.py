"""Arguments and results are pytrees; what is no tensor passes through."""

import dataclasses
from collections import OrderedDict, defaultdict
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from support.zoo import Evaluations
from torch.utils import _pytree

from remat import MutationError, remat
from remat.testing import assert_same, assert_same_gradients, count_ops


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Pair:
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenPair:
    left: Any
    right: Any


@dataclasses.dataclass
class Checked:
    """Its `__init__` takes other things than its fields, and checks them."""

    both: dataclasses.InitVar[tuple]
    left: Any = dataclasses.field(init=False)
    right: Any = dataclasses.field(init=False)

    def __post_init__(self, both):
        self.left, self.right = both
        assert isinstance(self.left, torch.Tensor)


class KnownToTorch:
    """A pytree for torch.utils._pytree, unknown to optree."""

    def __init__(self, left, right, label):
        self.left, self.right, self.label = left, right, label


_pytree.register_pytree_node(
    KnownToTorch,
    lambda node: ([node.left, node.right], node.label),
    lambda children, label: KnownToTorch(*children, label),
)


def attributes(tree):
    return tree.left, tree.right


# How to put two tensors in, and how to get them out.
CONTAINERS = {
    "dict": (lambda a, b: {"a": a, "b": b}, lambda t: (t["a"], t["b"])),
    "dict in unsorted order": (lambda a, b: {"z": a, "b": b}, lambda t: t.values()),
    "dict with mixed keys": (lambda a, b: {1: a, "b": b}, lambda t: (t[1], t["b"])),
    "list": (lambda a, b: [a, b], tuple),
    "tuple": (lambda a, b: (a, b), tuple),
    "namedtuple": (Point, tuple),
    "OrderedDict": (lambda a, b: OrderedDict(z=a, b=b), lambda t: t.values()),
    "defaultdict": (lambda a, b: defaultdict(list, z=a, b=b), lambda t: t.values()),
    "dataclass": (Pair, attributes),
    "frozen dataclass": (FrozenPair, attributes),
    "dataclass with its own init": (lambda a, b: Checked((a, b)), attributes),
    "known to torch only": (lambda a, b: KnownToTorch(a, b, "hi"), attributes),
    "nested": (
        lambda a, b: {"p": [Point((a,), None), ()], "q": Pair({"r": b}, "text")},
        lambda t: (t["p"][0].x[0], t["q"].left["r"]),
    ),
}
containers = pytest.mark.parametrize(
    ("put", "get"), CONTAINERS.values(), ids=CONTAINERS.keys()
)


def check(fn, *args, **kwargs):
    """Assert that remat equals `fn`, and takes its one sine again in the backward.

    Which the backward has to read: an exponential function of it is recomputed with it.
    """
    with count_ops() as ops:
        assert_same_gradients(remat(fn), fn, *args, **kwargs)
    assert ops["sin"] == 1 + 2


def leaf(*shape, **options):
    return torch.randn(*shape, requires_grad=True, **options)


# --- Arguments -------------------------------------------------------------------


@containers
def test_a_container_is_an_argument(put, get):
    def fn(tree):
        a, b = get(tree)
        return a.sin().exp() * b

    check(fn, put(leaf(3), leaf(3)))


@containers
def test_a_container_is_a_keyword_argument(put, get):
    def fn(x, *, tree):
        a, b = get(tree)
        return a.sin().exp() * b + x

    check(fn, leaf(3), tree=put(leaf(3), leaf(3)))


@containers
def test_the_function_sees_containers_of_the_same_type(put, get):
    seen = Evaluations()
    note = seen.note

    def fn(tree):
        note(type(tree))
        return get(tree).__class__, sum(get(tree)).sin().exp()

    tree = put(leaf(3), leaf(3))
    remat(fn)(tree)[1].sum().backward()
    assert [*seen] == [type(tree)] * 2


def test_the_order_of_a_dict_is_kept():
    orders = Evaluations()
    note = orders.note

    def fn(tree):
        note(list(tree))
        return (tree["z"] * tree["a"]).sin().exp()

    check(fn, {"z": leaf(3), "a": leaf(3)})
    assert [*orders] == [["z", "a"]] * 3


def test_what_is_no_tensor_passes_through_in_both_runs():
    seen = Evaluations()
    note = seen.note

    def fn(x, none, text, number, flag, dtype, *rest, axis, **options):
        note((none, text, number, flag, dtype, rest, axis, options))
        return (x.to(dtype) ** number).sin().exp().sum(axis)

    check(fn, leaf(2, 3), None, "mean", 2, True, torch.float64, (), [1j], axis=1, k=...)
    static = (None, "mean", 2, True, torch.float64, ((), [1j]), 1, {"k": ...})
    seen = [*seen]
    assert seen == [static] * 3
    assert all(s[3] is True for s in seen)


@pytest.mark.parametrize("flag", [True, False], ids=["on", "off"])
def test_a_flag_decides_the_branch(flag):
    check(
        lambda x, square: x.sin().exp() ** 2 if square else x.sin().exp(), leaf(3), flag
    )


def test_an_object_that_is_no_pytree_is_passed_as_it_is():
    class Opaque: ...

    token = Opaque()
    seen = Evaluations()
    note = seen.note

    def fn(x, token):
        note(token)
        return x.sin().exp()

    check(fn, leaf(3), token)
    assert [*seen] == [token] * 3


def test_a_tensor_that_needs_no_grad_gets_none():
    check(lambda x, c: x.sin().exp() * c, leaf(3), torch.randn(3))


def test_only_a_keyword_needs_grad():
    check(lambda c, *, x: x.sin().exp() * c, torch.randn(3), x=leaf(3))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_integer_tensors_are_arguments(dtype):
    index = torch.tensor([2, 0, 0, 1], dtype=dtype)
    check(lambda x, i: x.sin().exp()[i.long()] * i, leaf(3), index)


def test_boolean_tensors_are_arguments():
    mask = torch.tensor([True, False, True])
    check(lambda x, mask: torch.where(mask, x.sin().exp(), x), leaf(3), mask)


def test_complex_tensors_are_differentiated():
    def fn(z, w):
        return z.sin().exp() * z.conj() * w, (z * w).abs()

    check(fn, leaf(3, dtype=torch.complex64), leaf(3, dtype=torch.complex64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_float_dtypes_are_differentiated(dtype):
    check(lambda x: x.sin().exp() * x, leaf(3, dtype=dtype))


def test_zero_size_tensors_are_differentiated():
    check(lambda x, y: (x.sin().exp(), y * 2), leaf(0, 3), leaf(3))


def test_a_scalar_tensor_is_an_argument():
    check(lambda x: x.sin().exp() * 3, leaf(()))


def test_one_tensor_passed_twice_gets_the_sum():
    x = leaf(3)
    check(lambda a, b: a.sin().exp() * b, x, x)
    check(lambda a, *, b: a.sin().exp() * b["k"][0], x, b={"k": [x]})


def test_the_graph_of_an_argument_continues_beyond_the_call():
    x, w = leaf(3), leaf(3)

    def outer(call):
        return call({"h": (x * w).exp()}).cos() * x

    def fn(tree):
        return tree["h"].sin().exp()

    want = torch.autograd.grad(outer(fn).sum(), (x, w))
    with count_ops() as ops:
        got = torch.autograd.grad(outer(remat(fn)).sum(), (x, w))
    assert_same(got, want)
    assert ops["sin"] == 2 + 1  # and the derivative of the cosine


def test_arguments_are_the_same_objects_in_the_forward_and_leaves_in_both_runs():
    calls = Evaluations()
    note = calls.note

    def fn(t):
        note([id(x) for x in t["a"]])
        return (t["a"][0] * t["a"][1]).sin().exp()

    constant, differentiated = torch.randn(3), leaf(3)
    with count_ops() as ops:
        remat(fn)({"a": [constant, differentiated]}).sum().backward()
    forward, again = calls
    assert forward == [id(constant), id(differentiated)]
    assert again[1] == id(differentiated)
    assert ops["sin"] == 2


# --- Results ---------------------------------------------------------------------


@containers
def test_a_container_is_the_result(put, get):
    check(lambda x: put(x.sin().exp(), x * 2), leaf(3))
    assert type(remat(lambda x: put(x.sin().exp(), x))(leaf(3))) is type(
        put(leaf(1), leaf(1))
    )


def test_leaves_that_are_no_tensors_are_returned():
    def fn(x):
        return {
            "y": x.sin().exp(),
            "n": None,
            "s": "text",
            "k": [1, True, 2.5, 1j, ...],
        }

    check(fn, leaf(3))
    out = remat(fn)(leaf(3))
    assert (out["n"], out["s"], out["k"]) == (None, "text", [1, True, 2.5, 1j, ...])
    assert out["k"][1] is True


def test_an_object_that_is_no_pytree_is_returned_as_it_is():
    token = MappingProxyType({})
    x = leaf(3)
    y, out = remat(lambda x: (x.sin().exp(), token))(x)
    assert out is token
    with count_ops() as ops:
        y.sum().backward()
    assert ops["sin"] == 1


def test_a_python_scalar_computed_inside_is_returned():
    check(lambda x: (x.sin().exp(), x.detach().sum().item(), x.shape[0]), leaf(3))


def test_a_result_of_none_is_none():
    calls = Evaluations()
    note, x = calls.note, leaf(3)
    kept = []

    def fn(x):
        note(None)
        kept.append(x.sin().exp())

    assert remat(fn)(x) is None
    assert len(calls) == 1
    kept[0].sum().backward()  # what the function kept has its graph
    assert len(calls) == 2
    assert_same(x.grad, torch.autograd.grad(x.sin().exp().sum(), x)[0])
    assert len(kept) == 1


@pytest.mark.parametrize(
    ("other", "dtype"),
    [
        (lambda x: x.detach() * 2, torch.float32),
        (lambda x: x.argmax(), torch.int64),
        (lambda x: x > 0, torch.bool),
        (lambda x: torch.ones(2), torch.float32),
    ],
    ids=["detached", "integer", "boolean", "constant"],
)
def test_an_output_may_need_no_grad(other, dtype):
    def fn(x):
        return x.sin().exp(), other(x)

    check(fn, leaf(3))
    out = remat(fn)(leaf(3))[1]
    assert (out.dtype, out.requires_grad, out.grad_fn) == (dtype, False, None)


def test_no_output_needs_grad():
    def fn(x):
        dead = x.sin().exp()
        return x.detach().sin(), dead.detach()

    x = leaf(3)
    with count_ops() as ops:
        outs = remat(fn)(x)
    assert not any(out.requires_grad for out in outs)
    assert_same(outs, fn(x))
    assert ops["sin"] == 2  # and none is taken again, for there is no graph


def test_zero_size_outputs_need_grad_as_in_plain():
    check(lambda x: (x.sin().exp(), x[:0] * 2, x.detach()[:0]), leaf(3))


def test_an_input_returned_as_it_is_is_that_tensor():
    x, tree = leaf(3), {"w": torch.randn(3), "h": leaf(3) * 2}

    def fn(x, tree):
        return x, tree["w"], {"y": x.sin().exp(), "h": tree["h"]}

    a, b, rest = remat(fn)(x, tree)
    assert a is x
    assert b is tree["w"]
    assert rest["h"] is tree["h"]
    check(lambda x: (x, x.sin().exp()), x)


def test_a_captured_tensor_returned_as_it_is_is_that_tensor():
    w, x = leaf(3), leaf(3)
    out, y = remat(lambda x: (w, (x * w).sin().exp()))(x)
    assert out is w
    with count_ops() as ops:
        y.sum().backward()
    assert ops["sin"] == 1
    assert_same(w.grad, torch.autograd.grad((x * w).sin().exp().sum(), w)[0])


def test_the_same_tensor_twice_stays_the_same_twice():
    def fn(x):
        y = x.sin().exp()
        return y, {"again": y}, x * 2

    check(fn, leaf(3))
    y, again, _ = remat(fn)(leaf(3))
    assert again["again"] is y


VIEWS = {
    "view": lambda x: x.view(-1),
    "slice": lambda x: x[1:, ::2],
    "transpose": lambda x: x.t(),
    "expand": lambda x: x[:, :1].expand(2, 5),
    "view of a view": lambda x: x[1].view(1, -1)[:, :2],
}
views = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())


@views
def test_a_view_of_an_input_keeps_values_gradients_and_memory(view):
    check(lambda x: (x.sin().exp(), view(x)), leaf(2, 4))
    x = leaf(2, 4)
    _, out = remat(lambda x: (x.sin().exp(), view(x)))(x)
    want = view(x)
    assert out.data_ptr() == want.data_ptr()
    assert out.stride() == want.stride()
    with torch.no_grad():
        x.fill_(7)
    assert torch.equal(out, torch.full_like(want, 7))


@pytest.mark.parametrize("view", [VIEWS[k] for k in VIEWS if k != "expand"])
def test_a_view_of_an_input_may_be_changed_in_place(view):
    """Unless the input is to be recomputed from: plain code would not notice."""

    def changed(fn, alone):
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        h = x.clone()
        out, other = fn(h)
        out.mul_(3)
        loss = h.cos().sum() + (0 if alone else other.sum())
        return torch.autograd.grad(loss, x)

    def fn(x):
        return view(x), x.exp().sin().exp()

    assert_same(changed(remat(fn), alone=True), changed(fn, alone=True))
    with pytest.raises(MutationError, match="`x` was changed in place"):
        changed(remat(fn), alone=False)


def test_a_detached_view_of_an_input_shares_its_memory():
    x = leaf(3)
    y, out = remat(lambda x: (x.sin().exp(), x.detach()[1:]))(x)
    assert out.data_ptr() == x[1:].data_ptr()
    with count_ops() as ops:
        y.sum().backward()
    assert ops["sin"] == 1


def test_two_views_of_one_intermediate_are_two_outputs():
    def fn(x):
        y = x.sin().exp()
        return y[0], y[1:], y.view(-1)

    check(fn, leaf(2, 3))
