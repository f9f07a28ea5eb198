"""Kinds of objects that hold tensors, and a function that takes one and returns one."""

import collections
import dataclasses
import types
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from support.holders import PYTREES
from support.transforms import TRANSFORMS
from support.zoo import counted
from torch import Tensor
from torch.utils import _pytree

from remat import remat
from remat.testing import assert_same


T = TypeVar("T")


@dataclasses.dataclass
class Plain:
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlots:
    left: Any
    right: Any
    none: None = None


@dataclasses.dataclass(kw_only=True)
class OnlyKeywords:
    left: Any
    right: Any
    label: str = dataclasses.field(default="label", metadata={"static": True})


@dataclasses.dataclass
class Checked:
    """Its `__init__` takes other things than its fields, and checks them."""

    both: dataclasses.InitVar[tuple[Any, Any]]
    left: Any = dataclasses.field(init=False)
    right: Any = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self, both):
        self.left, self.right = both
        assert all(isinstance(t, Tensor) for t in both)


@dataclasses.dataclass
class Parametrized(Generic[T]):
    left: T
    right: T


@dataclasses.dataclass
class Child(Plain):
    more: Any = None

    def __post_init__(self):
        self.undeclared = {"right": self.right}


class Attributes:
    def __init__(self, left, right):
        self.left, self.right = left, right

    @property
    def both(self):
        return self.left, self.right


class Slots:
    __slots__ = ("__private", "empty", "left")

    def __init__(self, left, right):
        self.left, self.__private = left, right

    @property
    def right(self):
        return self.__private


class SlotsAndDict(Slots):
    """Its parent has slots, and it has a `__dict__` besides."""

    def __init__(self, left, right):
        super().__init__(left, None)
        self.other = right

    @property
    def right(self):
        return self.other


class Unassignable:
    def __init__(self, left, right):
        self.__dict__.update(left=left, right=right)

    def __setattr__(self, name, value):
        raise AttributeError("frozen")


class OwnMapping(Mapping):
    def __init__(self, left, right):
        self._held = [("a", left), ("b", right)]

    def __getitem__(self, key):
        return dict(self._held)[key]

    def __iter__(self):
        return iter(dict(self._held))

    def __len__(self):
        return len(self._held)


class AttributesAreItems(dict):
    """`d.a` is `d["a"]`: its `__dict__` is itself."""

    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class ItemsAreAttributes(collections.OrderedDict):
    """As `ModelOutput` of transformers: each item is an attribute as well."""

    def __init__(self, **items):
        super().__init__()
        for name, value in items.items():
            self[name] = value

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class Word(str):
    """A string that holds tensors besides."""


def holding_itself(left, right):
    space = types.SimpleNamespace(left=left, tuple=None)
    space.tuple = (space, [right, space])
    return space


def word(left, right):
    w = Word("word")
    w.left, w.right = left, right
    return w


def attributes(o):
    return o.left, o.right


def items(o):
    return o["a"], o["b"]


def mapping(make):
    return lambda a, b: make({"a": a, "b": b})


class KnownToTorch:
    """A pytree for torch.utils._pytree, unknown to optree."""

    def __init__(self, left, right, label):
        self.left, self.right, self.label = left, right, label


_pytree.register_pytree_node(
    KnownToTorch,
    lambda node: ([node.left, node.right], node.label),
    lambda children, label: KnownToTorch(*children, label),
)


# How to put two tensors in, and how to get them out.
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = PYTREES | {
    "known to torch only": (lambda a, b: KnownToTorch(a, b, "hi"), attributes),
    "frozen dataclass with slots": (FrozenSlots, attributes),
    "dataclass of keywords": (lambda a, b: OnlyKeywords(left=a, right=b), attributes),
    "dataclass with an init of its own": (lambda a, b: Checked((a, b)), attributes),
    "generic dataclass": (Parametrized[Any], attributes),
    "child of a dataclass": (
        lambda a, b: Child(a, b),
        lambda o: (o.left, o.undeclared["right"]),
    ),
    "nested dataclasses": (
        lambda a, b: Plain(Frozen(a, None), FrozenSlots({"b": [b]}, "text")),
        lambda o: (o.left.left, o.right.left["b"][0]),
    ),
    "UserDict": (mapping(collections.UserDict), items),
    "ChainMap": (mapping(lambda d: collections.ChainMap(d, {})), items),
    "MappingProxyType": (mapping(types.MappingProxyType), items),
    "mapping of the user's": (OwnMapping, items),
    "dict whose items are attributes": (
        mapping(lambda d: AttributesAreItems(**d)),
        lambda o: (o.a, o["b"]),
    ),
    "dict whose attributes are items": (
        mapping(lambda d: ItemsAreAttributes(**d)),
        lambda o: (o["a"], o.b),
    ),
    "attributes": (Attributes, lambda o: o.both),
    "slots": (Slots, attributes),
    "slots and a dict": (SlotsAndDict, attributes),
    "object that refuses assignment": (Unassignable, attributes),
    "namespace": (lambda a, b: types.SimpleNamespace(left=a, right=b), attributes),
    "object that holds itself": (
        holding_itself,
        lambda o: (o.tuple[1][1].left, o.tuple[0].tuple[1][0]),
    ),
    "string with attributes": (word, attributes),
    "set of one": (lambda a, b: ({a}, frozenset([b])), lambda o: (*o[0], *o[1])),
    "tensor as a key": (
        lambda a, b: {"a": a, b: "key"},
        lambda o: (o["a"], next(k for k in o if isinstance(k, Tensor))),
    ),
}


def scalar_of(kind: str, call: Callable[..., Any]) -> Callable[..., Tensor]:
    """A loss of what `call` returns for an object of a kind."""
    put, get = KINDS[kind]

    def loss(w, x):
        out = call(put(w * 1, x * 1))
        assert type(out) is type(put(w, x))
        a, b = get(out)
        return (a * b).square().sum()

    return loss


def assert_as_plain(
    how: str,
    loss_of: Callable[..., Callable[..., Tensor]],
    fn: Callable[..., Any],
    *,
    wrap: Callable[..., Any] = remat,
    calls: bool = False,
) -> None:
    """Assert that a transform of a loss is as plain, and is recomputed as often.

    `calls` says whether each backward is a call, as with `higher_order=True`.
    """
    transform, (counting, evaluations) = TRANSFORMS[how], counted(fn)
    w, x = torch.linspace(0.1, 1, 3), torch.linspace(0.4, 0.8, 3)
    expected = transform(loss_of(counting), w, x)
    evaluations.clear()
    found = transform(loss_of(wrap(counting)), w, x)
    one_node = calls or not transform.at_base
    at_base = transform.plain + transform.backwards
    wanted = transform.evaluations if one_node else at_base
    assert len(evaluations) == wanted, f"{len(evaluations)} evaluations, not {wanted}"
    assert_same(found, expected, reassociated=one_node)
