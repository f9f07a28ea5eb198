"""What was found in the calls before is used again only while it is still so."""

import copy
import gc
import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from remat import _outlines, _trees, remat
from remat._capture import Search
from remat.testing import assert_same, count_ops


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.sizes = [1, 2]
        self.shape = (3, 3)
        self.factor = 1.0

    def forward(self, x):
        return self.linear(x) * self.scale * self.factor


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Inner(), Inner()
        self.norm = nn.LayerNorm(3)
        self.drop = nn.Dropout(0.5)
        self.other = None

    def forward(self, x):
        h = self.drop(self.norm(self.second(self.first(x).sin())))
        return h if self.other is None else h * self.other


def found(module):
    search = Search()
    node = search.visit(module, None)
    return node, search


def gradients(fn, module, x):
    torch.manual_seed(1)
    params = [p for p in module.parameters() if p.requires_grad]
    y = fn(x)
    return [y, *torch.autograd.grad(y.sum(), params, allow_unused=True)]


def used(module):
    """Call until the outline is learnt; say whether it is used."""
    for _ in range(3):
        found(module)
    return type(found(module)[0]) is _trees.OutlinedNode


def test_a_tree_that_was_searched_twice_is_not_searched_again():
    module = Outer()
    kinds = [type(found(module)[0]) is _trees.OutlinedNode for _ in range(4)]
    assert kinds == [False, False, True, True]


def test_what_is_found_is_the_same():
    module = Outer()
    module.second.linear.bias.requires_grad_(False)
    _, walked = found(module)
    assert used(module)
    node, outlined = found(module)
    assert type(node) is _trees.OutlinedNode
    a, b = walked.found, outlined.found
    assert [*map(id, a.tensors)] == [*map(id, b.tensors)]
    assert a.buffers == b.buffers
    assert set(b.buffers.values()) == {True, False}
    assert walked.signature == outlined.signature
    assert [*map(written, a.origins)] == [*map(written, b.origins)]
    assert ".first.linear.weight" in map(written, b.origins)


def written(path):
    return written(path[0]) + path[1] if isinstance(path, tuple) else ""


def replace(module, x):
    module.first.linear.weight = nn.Parameter(torch.randn(3, 3))


def replace_by_tensor(module, x):
    del module.first.linear.weight
    module.first.linear.weight = torch.randn(3, 3, requires_grad=True) * 1


def remove(module, x):
    module.first.linear.register_parameter("bias", None)


def tie(module, x):
    module.first.linear.weight = module.second.linear.weight


def swap(module, x):
    module.first = nn.Linear(3, 3)


def exchange(module, x):
    module.first, module.second = module.second, module.first


def share(module, x):
    module.first = module.second


def append(module, x):
    module.first.add_module("extra", nn.Linear(3, 3))
    module.first.register_forward_hook(lambda m, args, out: m.extra(out))


def hook(module, x):
    module.first.register_forward_hook(lambda m, args, out: out * 3)


def hook_with_tensor(module, x):
    w = nn.Parameter(torch.randn(3))
    module.register_parameter("w", w)
    module.first.register_forward_hook(lambda m, args, out: out * w)


def evaluate(module, x):
    module.drop.eval()


def rebind(module, x):
    module.second.factor = 0.5


def rebind_to_tensor(module, x):
    module.other = module.second.linear.weight[0]


def freeze(module, x):
    module.first.linear.weight.requires_grad_(False)


def add_buffer(module, x):
    module.second.register_buffer("scale", torch.full((3,), 3.0))


def mutate_list(module, x):
    module.first.sizes.append(module.second.linear.weight)
    module.first.register_forward_hook(lambda m, args, out: out @ m.sizes[-1])


def to_double(module, x):
    module.double()
    x.data = x.data.double()


def rename(module, x):
    weight = module.second.linear._parameters.pop("weight")
    bias = module.second.linear._parameters.pop("bias")
    module.second.linear._parameters |= {"bias": bias, "weight": weight}


def assign_forward(module, x):
    factor = module.second.linear.bias
    module.first.forward = lambda x: x.exp() * factor


CHANGES = [
    replace,
    replace_by_tensor,
    remove,
    tie,
    swap,
    exchange,
    share,
    append,
    hook,
    hook_with_tensor,
    evaluate,
    rebind,
    rebind_to_tensor,
    freeze,
    add_buffer,
    mutate_list,
    to_double,
    rename,
    assign_forward,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_between_calls_is_seen(change):
    module, x = Outer(), torch.randn(2, 3)
    assert used(module)
    change(module, x)
    for _ in range(3):
        expected = gradients(module, module, x)
        with count_ops() as ops:
            assert_same(gradients(remat(module), module, x), expected)
        # An identity remat would run it once.
        assert ops["native_layer_norm"] == 2


REBOUND = [replace, remove, tie, swap, exchange, share, rebind, rename, assign_forward]


@pytest.mark.parametrize("change", REBOUND, ids=lambda change: change.__name__)
def test_what_is_rebound_after_the_forward_is_not_seen(change):
    module, x = Outer(), torch.randn(2, 3)
    module.drop.eval()
    assert used(module)
    params = [*module.parameters()]
    expected = torch.autograd.grad(module(x).sum(), params)
    y = remat(module)(x).sum()
    change(module, x)
    assert_same(torch.autograd.grad(y, params), expected)


def test_other_tensors_are_found_by_functional_call():
    module, x = Outer(), torch.randn(2, 3)
    assert used(module)
    params = {
        n: (p.detach() + 1).requires_grad_() for n, p in module.named_parameters()
    }
    results = []
    for wrap in (lambda fn: fn, remat):
        torch.manual_seed(1)
        y = functional_call(
            Holder(module, wrap), {f"inner.{n}": p for n, p in params.items()}, (x,)
        )
        results.append([y, *torch.autograd.grad(y.sum(), [*params.values()])])
    assert_same(*results)


class Holder(nn.Module):
    def __init__(self, inner, wrap):
        super().__init__()
        self.inner, self.wrap = inner, wrap

    def forward(self, x):
        return self.wrap(self.inner)(x)


def test_an_argument_that_is_a_parameter_is_one_input():
    module = Outer()
    assert used(module)
    w = module.second.linear.weight
    expected = gradients(module, module, w)
    assert_same(gradients(remat(module), module, w), expected)


def test_a_module_and_its_submodule_are_one():
    module, x = Outer(), torch.randn(2, 3)
    pair = [module, module.second]

    def fn(x):
        return pair[0](x) + pair[1](x)

    def seen(x):
        assert pair[0].second is pair[1]
        return fn(x)

    expected = gradients(fn, module, x)
    for _ in range(3):
        assert_same(gradients(remat(seen), module, x), expected)

    reached = (lambda x: module(x) + pair[1](x)) if used(module) else None
    for _ in range(3):
        assert_same(gradients(remat(reached), module, x), expected)


def test_what_is_assigned_in_an_outlined_tree_is_assigned_once():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.count, self.last = 0, None
            self.inner = Inner()

        def forward(self, x):
            self.count += 1
            self.inner.factor = 1.0 * self.count
            self.inner._buffers["scale"] = self.inner.scale + 1
            return self.inner(x)

    plain, module, x = Counting(), Counting(), torch.randn(2, 3)
    module.load_state_dict(plain.state_dict())
    for _ in range(12):
        expected = gradients(plain, plain, x)
        assert_same(gradients(remat(module), module, x), expected)
        assert (module.count, module.inner.factor) == (plain.count, plain.inner.factor)
        assert_same(module.inner.scale, plain.inner.scale)


def test_a_module_that_changes_with_each_call_is_learnt_ever_more_rarely(monkeypatch):
    module, learnt = Outer(), []
    original = _outlines.Outline
    monkeypatch.setattr(
        _outlines, "Outline", lambda *args: learnt.append(1) or original(*args)
    )
    for k in range(64):
        module.second.factor = k + 0.5
        found(module)
    assert len(learnt) == 6
    found(module)
    assert not used(module) or len(learnt) <= 7


def test_training_and_evaluating_in_turn():
    module, x = Outer(), torch.randn(2, 3)
    for k in range(10):
        module.train(k % 2 == 0)
        assert_same(gradients(remat(module), module, x), gradients(module, module, x))


def odd(module, x):
    """Things that an outline cannot describe, in place of a plain tree."""
    holder = types.SimpleNamespace(module=module)
    module.first.owner = holder


def recursive(module, x):
    module.first.sizes = [module]


def with_slots(module, x):
    class Slotted(Inner):
        __slots__ = ("slot",)

    module.first = Slotted()
    module.first.slot = torch.ones(3, requires_grad=True)


def with_getattribute(module, x):
    class Asked(Inner):
        def __getattribute__(self, name):
            return super().__getattribute__(name)

    module.first = Asked()


def with_list(module, x):
    module.first.sizes = [module.second]


@pytest.mark.parametrize(
    "change",
    [odd, recursive, with_slots, with_getattribute, with_list, tie],
    ids=["odd", "recursive", "slots", "getattribute", "list", "tied"],
)
def test_other_trees_are_walked(change):
    module, x = Outer(), torch.randn(2, 3)
    change(module, x)
    for _ in range(3):
        assert_same(gradients(remat(module), module, x), gradients(module, module, x))
    assert type(found(module)[0]) is not _trees.OutlinedNode


# --- What it holds ---------------------------------------------------------------


@pytest.fixture
def _no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def registered_hook(module, x):
    module.first.register_forward_hook(lambda m, args, out: module and out)


@pytest.mark.usefixtures("_no_collector")
def test_a_module_and_its_tensors_are_freed():
    module = Outer()
    assert used(module)
    before = len(_outlines._KNOWN)
    refs = [weakref.ref(v) for v in (*module.modules(), *module.parameters())]
    del module
    assert [ref() for ref in refs] == [None] * len(refs)
    assert len(_outlines._KNOWN) == before - 1


@pytest.mark.usefixtures("_no_collector")
def test_what_was_replaced_is_freed():
    module = Outer()
    assert used(module)
    refs = [weakref.ref(module.first), weakref.ref(module.second.linear.weight)]
    module.first = Inner()
    module.second.linear.weight = nn.Parameter(torch.ones(3, 3))
    assert [ref() for ref in refs] == [None, None]
    assert used(module)


@pytest.mark.parametrize("change", [registered_hook, recursive, odd])
def test_a_module_in_a_cycle_is_collected(change):
    module = Outer()
    assert used(module)
    change(module, None)
    ref = weakref.ref(module)
    del module
    gc.collect()
    assert ref() is None


def test_copies_and_pickles_hold_nothing_of_it():
    module = Outer()
    plain = set(vars(module))
    assert used(module)
    assert set(vars(module)) == plain
    assert set(vars(copy.deepcopy(module))) == plain
    assert set(vars(pickle.loads(pickle.dumps(module)))) == plain


# --- The code of its classes -----------------------------------------------------

SOURCE = None


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        return self.linear(x).sin() * noise(x)


def noise(x):
    return 1.0 if SOURCE is None else torch.rand(x.shape, generator=SOURCE)


def drawing(x):
    return torch.rand(x.shape, generator=GENERATOR)


def draw_in_forward(self, x):
    return self.linear(x).sin() * torch.rand(x.shape, generator=GENERATOR)


GENERATOR = torch.Generator()


def rebind_global(monkeypatch):
    monkeypatch.setitem(globals(), "SOURCE", GENERATOR)


def rebind_function(monkeypatch):
    monkeypatch.setitem(globals(), "noise", drawing)


def rebind_method(monkeypatch):
    monkeypatch.setattr(Noisy, "forward", draw_in_forward)


def rebind_code(monkeypatch):
    monkeypatch.setattr(noise, "__code__", drawing.__code__)


@pytest.mark.parametrize(
    "change", [rebind_global, rebind_function, rebind_method, rebind_code]
)
def test_streams_that_code_comes_to_reach_are_replayed(change, monkeypatch):
    module, x = Noisy(), torch.randn(2, 3)
    assert used(module)
    outline = _outlines._KNOWN[id(module)].outline
    assert outline.open_classes() == []
    assert_same(gradients(remat(module), module, x), gradients(module, module, x))
    change(monkeypatch)
    results = []
    for fn in module, remat(module):
        GENERATOR.manual_seed(1)
        results.append(gradients(fn, module, x))
    assert_same(*results)
    assert outline.open_classes() == [Noisy]


def test_code_that_draws_is_looked_at_each_time(monkeypatch):
    rebind_global(monkeypatch)
    module, x = Noisy(), torch.randn(2, 3)
    assert used(module)
    assert _outlines._KNOWN[id(module)].outline.open_classes() == [Noisy]
    GENERATOR.manual_seed(1)
    expected = gradients(module, module, x)
    GENERATOR.manual_seed(1)
    assert_same(gradients(remat(module), module, x), expected)


def test_a_class_is_freed():
    class Local(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3)

        def forward(self, x):
            return self.linear(x) * noise(x)

    module = Local()
    assert used(module)
    ref = weakref.ref(Local)
    del Local, module
    gc.collect()
    assert ref() is None


def test_the_class_of_a_module_that_lives_lets_others_go(monkeypatch):
    class Other:
        """What a global refers to for a while."""

    monkeypatch.setitem(globals(), "noise", Other)
    module = Noisy()
    assert used(module)
    ref = weakref.ref(Other)
    monkeypatch.undo()
    del Other
    gc.collect()
    assert ref() is None
    assert used(module)
