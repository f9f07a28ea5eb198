"""What is remembered of a module: used only where nothing in it has changed.

Each change is made in three places: before a call, between its forward and its
backward, and by the forward. The results have to be those of plain code bit for bit.
"""

import gc
import os
import subprocess
import sys
import weakref
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from support.as_plain import assert_as_plain, leaf
from support.zoo import Evaluations, plainly
from torch import nn

from remat import RecomputeError, remat
from remat._capture import trees as _trees
from remat.testing import count_ops


remembers = pytest.mark.skipif(not _trees.IS_ON, reason="REMAT_NO_CACHE=1")


class Part:
    """An object without tensors."""

    def __init__(self):
        self.scale, self.sizes = 2, [1, 2]
        self.options = {"a": {"b": [3]}}


class Block(nn.Module):
    """Modules, objects, containers, a buffer and numbers."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.part, self.parts = Part(), [Part(), Part()]
        self.named, self.pair, self.factor = {"x": Part()}, (1, 2), 1000
        self.weight = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))

    def number(self):
        parts = [self.part, *self.parts, self.named["x"]]
        found = [p.scale + sum(p.sizes) + p.options["a"]["b"][0] for p in parts]
        return sum(found) + self.factor / 1000 + sum(self.pair)

    def forward(self, x):
        h = self.inner(x) * self.weight + self.shift
        h = h * (0.1 * self.number() + len(self.parts) + len(self.named))
        return (h * (1 if self.training else 2)).sin().exp()


def replace_inner(m):
    m.inner[1] = nn.Sigmoid()


def drop_inner(m):
    del m.inner[1]


def add_inner(m):
    m.inner.append(nn.Sigmoid())


def replace_weight(m):
    m.weight = nn.Parameter(torch.full((4,), 0.5).double())


def replace_shift(m):
    m.shift = torch.full((4,), 0.5).double()


def add_attribute(m):
    m.part.extra = 1
    m.factor = 3000


def rename(m):
    m.named["y"] = m.named["x"]


def append(m):
    m.parts.append(Part())


def nested_list(m):
    m.parts[1].options["a"]["b"][0] = 7


def nested_dict(m):
    m.named["x"].options = {"a": {"b": [9]}}


def list_of_object(m):
    m.part.sizes.append(5)


def number(m):
    m.factor += 1000


def pair(m):
    m.pair = (3, 4)


def train(m):
    m.train(not m.training)


def hook(m):
    m.inner[0].register_forward_hook(lambda mod, args, out: out * 2)


def pre_hook(m):
    m.register_forward_pre_hook(lambda mod, args: (args[0].cos(),))


def patched_forward(m):
    m.inner.forward = lambda x: x.sin()


CHANGES = [replace_inner, drop_inner, add_inner, replace_weight, replace_shift]
CHANGES += [add_attribute, rename, append, nested_list, nested_dict, list_of_object]
CHANGES += [number, pair, train, hook, pre_hook, patched_forward]


@pytest.mark.parametrize("style", ["module", "forward", "closure"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_before_a_call_and_before_its_backward(change, style):
    def program(wrap, note):
        model, x = Block().double(), leaf(2)
        fn = {"module": model, "forward": model.forward, "closure": None}[style]
        call = wrap((lambda x: model(x)) if fn is None else fn)
        for _ in range(2):
            call(x).sum().backward()
        trees = len([k for k in _trees._KNOWN.values() if k.tree is not None])
        assert wrap is plainly or trees or not _trees.IS_ON
        first = call(x).sum()
        change(model)
        first.backward()  # as it was
        call(x).sum().backward()  # as it is
        with count_ops() as ops:
            y = call(x).sum()
            y.backward()
        for _ in range(ops["exp"]):
            note(None)
        return x.grad, [p.grad for p in model.parameters() if p.grad is not None], y

    # `exp` saves its result, so that all of it is run again.
    assert_as_plain(program)


class Changing(Block):
    """Changes itself in each forward."""

    def __init__(self, change):
        super().__init__()
        self.change = change

    def forward(self, x):
        y = super().forward(x)
        self.change(self)
        return (y * self.number()).sin().exp()


@pytest.mark.parametrize("change", [number, append, nested_list, list_of_object, pair])
def test_a_change_by_the_forward_is_made_once(change):
    def program(wrap, note):
        model, x = Changing(change).double(), leaf(2)
        call = wrap(model)
        with count_ops() as ops:
            for _ in range(5):
                call(x).sum().backward()
        for _ in range(ops["exp"]):
            note(None)
        return x.grad, torch.tensor(float(model.number()))

    assert_as_plain(program, evaluations=20, plain=10)


def test_a_flag_that_an_early_stop_leaves_set_is_put_back():
    class Flagged(Block):
        busy = 0

        def forward(self, x):
            self.busy = self.busy + 1
            y = super().forward(x)
            self.busy = self.busy - 1
            return y

    model, x = Flagged().double(), leaf(2)
    model.busy = 0
    with count_ops() as ops:
        for _ in range(3):
            remat(model)(x).sum().backward()
    assert ops["exp"] == 6
    assert model.busy == 0


def test_blocks_that_share_an_object_and_a_weight():
    def program(wrap, note):
        first, second, x = Block().double(), Block().double(), leaf(2)
        second.part, second.weight = first.part, first.weight
        call = wrap(lambda x: second(first(x)))
        for _ in range(3):
            y = call(x).sum()
            first.part.sizes.append(1)
            y.backward()
        with count_ops() as ops:
            call(x).sum().backward()
        for _ in range(ops["exp"]):
            note(None)
        return x.grad, first.weight.grad, second.inner[0].weight.grad

    assert_as_plain(program, evaluations=4, plain=2)


@remembers
@pytest.mark.parametrize("is_used", [False, True])
def test_what_is_remembered_keeps_no_model_alive(is_used):
    gc.collect()
    gc.disable()
    try:
        model, x = Block().double(), leaf(2)
        with count_ops() as ops:
            for _ in range(3):
                y = remat(model)(x)
                y.sum().backward()
        assert ops["exp"] == 6
        assert _trees._KNOWN[id(model)].tree is not None
        refs = [weakref.ref(model), weakref.ref(model.part)]
        if not is_used:
            del y  # whose graph leads to the parameters, as in plain code
            refs.append(weakref.ref(model.weight))
        key = id(model)
        del model
        assert [ref() is None for ref in refs] == [True] * len(refs)
        assert key not in _trees._KNOWN
    finally:
        gc.enable()


def not_remembered():
    class Slotted:
        __slots__ = ("scale",)

    with_slots, with_hook = Block(), Block()
    with_slots.slotted = Slotted()
    with_hook.inner[0].register_forward_hook(lambda *_: None)
    with_ordered = Block()
    with_ordered.many = [*range(2000)]
    return {"slots": with_slots, "hook": with_hook, "large": with_ordered}


@remembers
@pytest.mark.parametrize("case", ["slots", "hook", "large"])
def test_what_a_fingerprint_would_not_tell_of_is_not_remembered(case):
    model = not_remembered()[case]
    with count_ops() as ops:
        remat(model)(torch.ones(4, 4, requires_grad=True)).sum().backward()
    assert ops["exp"] == 2
    assert _trees._KNOWN[id(model)].tree is None


@remembers
def test_a_module_that_changes_in_each_call_is_not_remembered_for_long():
    model, x = Changing(number).double(), leaf(2)
    with count_ops() as ops:
        for _ in range(6):
            remat(model)(x).sum().backward()
    assert ops["exp"] == 24
    assert _trees._KNOWN[id(model)].tree is None


def test_ordered_containers_are_compared_in_order():
    model, x = Block().double(), leaf(2)
    model.table = OrderedDict(a=1, b=2)
    notes = Evaluations()

    def fn(x):
        notes.note([*model.table])
        return model(x) * next(iter(model.table.values()))

    for _ in range(2):
        remat(fn)(x).sum().backward()
    y = remat(fn)(x).sum()
    model.table.move_to_end("a")
    y.backward()
    assert [*notes] == [["a", "b"]] * 6


SCRIPT = """
import torch
from torch import nn
from remat import remat
from remat._capture import trees as _trees
from remat.testing import count_ops
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
with count_ops() as ops:
    remat(model)(torch.ones(4, requires_grad=True)).sum().backward()
print(_trees.IS_ON, len(_trees._KNOWN), ops["tanh"])
"""


@pytest.mark.parametrize("value", ["", "1"])
def test_one_switch_turns_it_off(value):
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "REMAT_NO_CACHE": value},
    )
    assert result.stdout.split() == (
        ["False", "0", "2"] if value else ["True", "1", "2"]
    )


class Sharing(nn.Module):
    """Counts in an object and a list that others may hold, too."""

    def __init__(self, part, listed):
        super().__init__()
        self.inner, self.part, self.listed = nn.Linear(4, 4), part, listed

    def forward(self, x):
        self.part.scale += 1
        self.listed[0] += 1
        h = self.inner(x).tanh() * self.part.scale * self.listed[0]
        self.listed.append(h)
        return h.sin()


def two(first, second, listed):
    return lambda x: second(first(x)) * len(listed)


def beside(first, second, listed):
    return lambda x: first(x) * listed[0] + listed[-1]


def in_order(first, second, listed):
    return lambda x: nn.Sequential(first, second)(x) * listed[0]


@pytest.mark.parametrize("make", [two, beside, in_order])
def test_modules_and_closures_that_share_what_the_forward_changes(make):
    def program(wrap, note):
        part, listed = Part(), [1.0]
        first, second = (Sharing(part, listed).double() for _ in range(2))
        call, x = wrap(make(first, second, listed)), leaf(2)
        states = []
        with count_ops() as ops:
            for _ in range(3):
                call(x).sum().backward()
                states += [part.scale, listed[0], len(listed)]
                assert first.part is second.part is part
                assert first.listed is second.listed is listed
        for _ in range(ops["tanh"]):
            note(None)
        return x.grad, torch.tensor(states), first.inner.weight.grad

    count = 3 if make is beside else 6
    assert_as_plain(program, evaluations=2 * count, plain=count)


class Other(Block):
    """The same with another forward."""

    def forward(self, x):
        return super().forward(x) * 3


def test_another_class_is_an_error_before_the_backward_and_used_after():
    def program(wrap, note):
        model, x = Block().double(), leaf(2)
        call = wrap(model)
        with count_ops() as ops:
            for _ in range(3):
                call(x).sum().backward()
            model.__class__ = Other
            call(x).sum().backward()
        for _ in range(ops["exp"]):
            note(None)
        return x.grad

    assert_as_plain(program, evaluations=8, plain=4)
    model = Block().double()
    y = remat(model)(leaf(2))
    model.__class__ = Other
    with pytest.raises(RecomputeError, match="was a Block at the call is a Other now"):
        y.sum().backward()


TABLE = weakref.WeakKeyDictionary()


class ByIdentity(nn.Module):
    """Finds what belongs to it by itself, which a copy of it would not."""

    def forward(self, x):
        return (x * TABLE[self]).sin().exp()


class Around(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.last = inner, nn.Tanh()

    def forward(self, x):
        return self.last(self.inner(x))


def test_a_module_that_is_gone_leaves_other_threads_as_they_were():
    child = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    found = ByIdentity()
    TABLE[found] = 2.0

    def of_a_module_that_is_gone():
        return remat(Around(child))(leaf(1)).sum()

    with count_ops() as ops:
        of_a_module_that_is_gone().backward()
    assert ops["addmm"] == 2
    x = leaf(2)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: remat(found)(x).sum().backward()).result()
    plain = leaf(2)
    (plain * 2.0).sin().exp().sum().backward()
    assert torch.equal(x.grad, plain.grad)
