"""A tree of modules, as it is at each call and as it was in each recomputation."""

import copy
import gc
import pickle
import types
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call

from remat import remat
from remat.testing import assert_same, count_ops


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


def gradients(fn, module, x):
    torch.manual_seed(1)
    params = [p for p in module.parameters() if p.requires_grad]
    y = fn(x)
    return [y, *torch.autograd.grad(y.sum(), params, allow_unused=True)]


def check_rematerialized(plain, fn, module, x):
    """The same gradients of both, and one layer norm that is recomputed."""
    with count_ops() as ops:
        expected = gradients(plain, module, x)
    with count_ops() as more:
        assert_same(gradients(fn, module, x), expected)
    assert more["native_layer_norm"] - ops["native_layer_norm"] == 1


def call_twice(module, x):
    for _ in range(2):
        check_rematerialized(module, remat(module), module, x)


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
    call_twice(module, x)
    change(module, x)
    call_twice(module, x)


# What changes the values of the parameters, or what a gradient is asked of, is another
# matter.
REVERSIBLE = [change for change in CHANGES if change not in (freeze, to_double)]


@pytest.mark.parametrize("change", REVERSIBLE, ids=lambda change: change.__name__)
def test_what_changes_after_the_forward_is_not_seen(change):
    module, x = Outer(), torch.randn(2, 3)
    params = [*module.parameters()]
    torch.manual_seed(1)
    expected = torch.autograd.grad(module(x).sum(), params)
    torch.manual_seed(1)
    with count_ops() as ops:
        y = remat(module)(x).sum()
        change(module, x)
        found = torch.autograd.grad(y, params)
    assert_same(found, expected)
    assert ops["native_layer_norm"] == 2


@pytest.mark.parametrize("change", REVERSIBLE, ids=lambda change: change.__name__)
def test_a_recomputation_leaves_the_tree_as_it_is(change):
    module, x = Outer(), torch.randn(2, 3)
    with count_ops() as ops:
        y = remat(module)(x).sum()
        change(module, x)
        before = state_of(module)
        y.backward()
    assert state_of(module) == before
    assert ops["native_layer_norm"] == 2


def state_of(module):
    """Which objects each module holds, by name."""
    return [
        (id(m), {n: identities(v) for n, v in vars(m).items()})
        for m in module.modules()
    ]


def identities(value):
    return (
        {k: id(v) for k, v in value.items()} if isinstance(value, dict) else id(value)
    )


def test_other_tensors_are_found_by_functional_call():
    module, x = Outer(), torch.randn(2, 3)
    call_twice(module, x)
    params = {
        n: (p.detach() + 1).requires_grad_() for n, p in module.named_parameters()
    }
    results, counts = [], []
    for wrap in (lambda fn: fn, remat):
        torch.manual_seed(1)
        with count_ops() as ops:
            y = functional_call(
                Holder(module, wrap), {f"inner.{n}": p for n, p in params.items()}, (x,)
            )
            results.append([y, *torch.autograd.grad(y.sum(), [*params.values()])])
        counts.append(ops["native_layer_norm"])
    assert_same(*results)
    assert counts == [1, 2]


class Holder(nn.Module):
    def __init__(self, inner, wrap):
        super().__init__()
        self.inner, self.wrap = inner, wrap

    def forward(self, x):
        return self.wrap(self.inner)(x)


def test_an_argument_that_is_a_parameter_is_one_input():
    module = Outer()
    check_rematerialized(module, remat(module), module, module.second.linear.weight)


def test_a_module_and_its_submodule_are_one():
    module, x = Outer(), torch.randn(2, 3)
    pair = [module, module.second]

    def fn(x):
        assert pair[0].second is pair[1]
        return pair[1](x) + pair[0](x)

    def reached(x):
        assert module.second is pair[1]
        return pair[1](x) + module(x)

    for function in fn, reached, fn:
        check_rematerialized(function, remat(function), module, x)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.last = 0, None
        self.inner, self.norm = Inner(), nn.LayerNorm(3)

    def forward(self, x):
        self.count += 1
        self.inner.factor = 1.0 * self.count
        self.inner._buffers["scale"] = self.inner.scale + 1
        self.last = self.inner(x)
        return self.norm(self.last)


def test_what_is_assigned_in_a_tree_is_assigned_once():
    plain, module, x = Counting(), Counting(), torch.randn(2, 3)
    module.load_state_dict(plain.state_dict())
    for _ in range(4):
        expected = gradients(plain, plain, x)
        with count_ops() as ops:
            assert_same(gradients(remat(module), module, x), expected)
        assert ops["native_layer_norm"] == 2
        assert (module.count, module.inner.factor) == (plain.count, plain.inner.factor)
        assert_same(module.inner.scale, plain.inner.scale)
        assert_same(module.last, plain.last)


def test_training_and_evaluating_in_turn():
    module, x = Outer(), torch.randn(2, 3)
    for k in range(6):
        module.train(k % 2 == 0)
        check_rematerialized(module, remat(module), module, x)


def odd(module, x):
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
def test_odd_trees_are_searched(change):
    module, x = Outer(), torch.randn(2, 3)
    change(module, x)
    call_twice(module, x)


# --- What a call holds -----------------------------------------------------------


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
    module, x = Outer(), torch.randn(2, 3)
    call_twice(module, x)
    refs = [weakref.ref(v) for v in (*module.modules(), *module.parameters())]
    del module
    assert [ref() for ref in refs] == [None] * len(refs)


@pytest.mark.usefixtures("_no_collector")
def test_a_module_is_freed_before_the_backward_and_its_parameters_get_gradients():
    module, x = Outer(), torch.randn(2, 3)
    params = [*module.parameters()]
    expected = gradients(module, module, x)[1:]
    torch.manual_seed(1)
    with count_ops() as ops:
        y = remat(module)(x).sum()
        refs = [weakref.ref(v) for v in module.modules()]
        del module
        assert [ref() for ref in refs] == [None] * len(refs)
        found = torch.autograd.grad(y, params)
    assert_same([*found], expected)
    assert ops["native_layer_norm"] == 2


@pytest.mark.usefixtures("_no_collector")
def test_what_was_replaced_is_freed():
    module, x = Outer(), torch.randn(2, 3)
    call_twice(module, x)
    refs = [weakref.ref(module.first), weakref.ref(module.second.linear.weight)]
    module.first = Inner()
    module.second.linear.weight = nn.Parameter(torch.ones(3, 3))
    assert [ref() for ref in refs] == [None, None]
    call_twice(module, x)


@pytest.mark.parametrize("change", [registered_hook, recursive, odd])
def test_a_module_in_a_cycle_is_collected(change):
    module, x = Outer(), torch.randn(2, 3)
    change(module, None)
    call_twice(module, x)
    ref = weakref.ref(module)
    del module
    gc.collect()
    assert ref() is None


def test_copies_and_pickles_hold_nothing_of_a_call():
    module, x = Outer(), torch.randn(2, 3)
    plain = set(vars(module))
    call_twice(module, x)
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
        return (self.linear(x).sin() * noise(x)).exp()


def noise(x):
    return 1.0 if SOURCE is None else torch.rand(x.shape, generator=SOURCE)


def drawing(x):
    return torch.rand(x.shape, generator=GENERATOR)


def draw_in_forward(self, x):
    return (self.linear(x).sin() * drawing(x)).exp()


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
    check_noise(module, x)
    change(monkeypatch)
    for _ in range(2):
        check_noise(module, x)


def check_noise(module, x):
    results, counts = [], []
    for fn in module, remat(module):
        GENERATOR.manual_seed(1)
        with count_ops() as ops:
            results.append([gradients(fn, module, x), GENERATOR.get_state()])
        counts.append(ops["sin"])
    assert_same(*results)
    assert counts == [1, 2]


def test_a_class_is_freed():
    class Local(Noisy):
        """Made in a notebook's cell, say."""

    module, x = Local(), torch.randn(2, 3)
    check_noise(module, x)
    ref = weakref.ref(Local)
    del Local, module
    gc.collect()
    assert ref() is None


def test_the_class_of_a_module_that_lives_lets_others_go(monkeypatch):
    class Other:
        """What a global refers to for a while."""

        def __new__(cls, x):
            return 1.0

    monkeypatch.setitem(globals(), "noise", Other)
    module, x = Noisy(), torch.randn(2, 3)
    check_noise(module, x)
    ref = weakref.ref(Other)
    monkeypatch.undo()
    del Other
    gc.collect()
    assert ref() is None
    check_noise(module, x)
